"""How an operator is declared: its torch schemas, and what follows where the declaration says nothing."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest

from vllm_fl.dispatch import OPERATORS
from vllm_fl.dispatch import operator
from vllm_fl.dispatch.declaration import Operator
from vllm_fl.dispatch.declaration import TorchForm
from vllm_fl.dispatch.declaration import declaration_of

# The vocabulary of annotations is text: nothing here is imported.
Tensor = Any


class _Declared:
    @operator()
    def one_result(self, x: Tensor, scale: float, size: int = 1, flag: bool = False, how: str = "") -> Tensor:
        """One."""

    @operator()
    def two_results(self, x: Tensor, extra: Tensor | None) -> tuple[Tensor, Tensor]:
        """Two."""

    @operator(
        mutates=("a",),
        hints=("fast",),
        selector="b",
        native_prepares=True,
        forms=(
            TorchForm("in_place", fixed={"fast": False}, in_place=("b", "a"), result=("a",)),
            TorchForm("with_c", present=("c",)),
        ),
    )
    def everything(self, a: Tensor, b: Tensor, c: Tensor | None = None, fast: bool = False) -> Tensor:
        """All."""

    @operator()
    def nothing(self) -> Tensor:
        """None."""

    @operator()
    def by_name(self, x: Tensor, scale: float = 2.0, *, size: int = 3, fast: bool = False) -> Tensor:
        """Some by name only."""


def _of(name: str) -> Operator:
    found = declaration_of(getattr(_Declared, name))
    assert found is not None
    return found


def _schemas(name: str) -> dict[str, str]:
    declared = _of(name)
    return {form.name: form.schema(declared.signature) for form in declared.forms}


def test_the_schema_of_what_declares_no_form() -> None:
    assert _schemas("one_result") == {
        "one_result": "(Tensor x, float scale, int size, bool flag, str how) -> Tensor"
    }
    assert _schemas("two_results") == {"two_results": "(Tensor x, Tensor? extra) -> (Tensor, Tensor)"}


def test_the_schemas_of_declared_forms() -> None:
    assert _schemas("everything") == {
        # Letters are those of the declaration's order, and what is fixed is no argument.
        "in_place": "(Tensor(b!) a, Tensor(a!) b, Tensor? c) -> ()",
        "with_c": "(Tensor a, Tensor b, Tensor c, bool fast) -> Tensor",
    }


def test_every_operator_has_a_schema_that_torch_takes() -> None:
    torch = pytest.importorskip("torch")
    for declared in OPERATORS.values():
        for form in declared.forms:
            parsed = torch._C.parse_schema(f"vllm_fl::{form.name}{form.schema(declared.signature)}")
            assert [one.name for one in parsed.arguments] == [
                one.name for one in form.parameters(declared.signature)
            ]


def test_what_a_declaration_says() -> None:
    declared = _of("everything")
    assert (declared.name, declared.doc) == ("everything", "All.")
    assert list(declared.signature.parameters) == ["a", "b", "c", "fast"]
    assert (declared.mutates, declared.hints, declared.selector) == (("a",), ("fast",), "b")
    assert declared.native_prepares


def test_what_follows_where_it_says_nothing() -> None:
    declared = _of("one_result")
    assert (declared.mutates, declared.hints, declared.fake) == ((), (), None)
    assert declared.selector == "x"
    assert not declared.native_prepares
    assert _of("nothing").selector is None
    by_hand = Operator("by_hand", inspect.Signature(), "")
    assert not by_hand.native_prepares
    assert by_hand.selector is None


@pytest.mark.parametrize(
    ("args", "kwargs", "values"),
    [
        ((1,), {}, {"x": 1, "scale": 2.0, "size": 3, "fast": False}),
        ((1, 5.0), {"fast": True}, {"x": 1, "scale": 5.0, "size": 3, "fast": True}),
        ((), {"size": 7, "x": 1}, {"x": 1, "scale": 2.0, "size": 7, "fast": False}),
    ],
)
def test_a_call_that_leaves_something_out_has_the_defaults(
    args: tuple[Any, ...], kwargs: dict[str, Any], values: dict[str, Any]
) -> None:
    bound = _of("by_name").bind(args, kwargs)
    assert list(bound.items()) == list(values.items())


def test_what_is_passed_by_position_and_what_by_name() -> None:
    declared = _of("by_name")
    every = {"fast": True, "size": 7, "scale": 5.0, "x": 1}
    assert declared.call_of(every) == ([1, 5.0], {"size": 7, "fast": True})
    # A default has its place; by name, what is not given is left out.
    assert declared.call_of({"x": 1}) == ([1, 2.0], {})


def test_a_method_that_declares_nothing() -> None:
    assert declaration_of(test_what_follows_where_it_says_nothing) is None
    assert declaration_of(object()) is None


@pytest.mark.parametrize("value", [TorchForm("f"), _of("nothing")], ids=lambda value: type(value).__name__)
def test_a_declaration_is_fixed(value: Any) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        value.name = "other"

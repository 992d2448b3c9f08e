"""What the answer of a predicate means: a bool of any library, a sentence, or a fault of the plug-in."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING
from typing import Any

import pytest

from vllm_fl.dispatch import OPERATORS
from vllm_fl.dispatch import BackendImplKind
from vllm_fl.dispatch import OpImpl
from vllm_fl.dispatch import OpManager
from vllm_fl.dispatch import OpRegistry
from vllm_fl.dispatch import RefusedBeforeWriting
from vllm_fl.dispatch import call_op
from vllm_fl.dispatch import manager as manager_module
from vllm_fl.dispatch import resolve_op
from vllm_fl.dispatch.calling.predicate import shown
from vllm_fl.dispatch.types import Origin

if TYPE_CHECKING:
    from collections.abc import Callable

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> OpRegistry:
    registry = OpRegistry()
    monkeypatch.setattr(manager_module, "_default", OpManager(registry))
    return registry


def impl(vendor: str, supports: Callable[..., Any] | None = None) -> OpImpl:
    priority = 400 - ord(vendor)
    origin = Origin("acme-kernels", "1.2", "acme") if supports else None
    return OpImpl(
        "silu_and_mul",
        f"vendor.{vendor}",
        BackendImplKind.VENDOR,
        lambda x: vendor,
        vendor,
        priority,
        supports=supports,
        origin=origin,
    )


def chosen(registry: OpRegistry, answer: Any) -> str:
    registry.register_many([impl("a", lambda x: answer), impl("b")])
    first = call_op("silu_and_mul", 1)
    assert [resolve_op("silu_and_mul")(1), call_op("silu_and_mul", 1)] == [first] * 2
    return str(first)


class Loud:
    """What a plug-in may return by mistake, with a text that nobody wants."""

    def __repr__(self) -> str:
        raise RuntimeError

    def __bool__(self) -> bool:
        raise RuntimeError

    def __eq__(self, other: object) -> bool:
        raise RuntimeError

    __hash__ = None  # type: ignore[assignment]


async def asynchronous() -> bool:
    return True


@pytest.mark.parametrize(
    "answer", [True, 1, np.bool_(True), np.array(True), np.all([True, True])], ids=lambda a: type(a).__name__
)
def test_yes(registry: OpRegistry, answer: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert chosen(registry, answer) == "a"
    assert not caplog.records


@pytest.mark.parametrize(
    "answer", [False, 0, np.bool_(False), np.array(False), "a sentence"], ids=lambda a: type(a).__name__
)
def test_no(registry: OpRegistry, answer: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert chosen(registry, answer) == "b"
    assert not caplog.records


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        (None, "returned None."),
        ("", "returned ''."),
        (2, "returned 2."),
        (1.0, "returned 1.0."),
        ((True, "why"), "returned an object of type tuple."),
        ([], "returned an object of type list."),
        (torch.tensor(True), "returned an object of type Tensor."),
        (torch.ones(3), "returned an object of type Tensor."),
        (np.array([True]), "returned an object of type ndarray."),
        (np.float32(1), "returned an object of type float32."),
        (Loud(), "returned an object of type Loud."),
        (b"x" * 10_000, "xxx... "),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_what_is_neither_is_said_once_and_counts_as_a_refusal(
    registry: OpRegistry, answer: Any, shown: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert chosen(registry, answer) == "b"
    (record,) = caplog.records
    message = record.getMessage()
    assert message.startswith(
        "the predicate of vendor.a (acme-kernels 1.2 (entry point 'acme')) for silu_and_mul"
    )
    assert shown.rstrip(". ") in message
    assert "It must return True, or a sentence that says why not" in message
    assert len(message) < 400


def test_a_long_answer_is_shortened() -> None:
    assert shown(b"x" * 57) == repr(b"x" * 57)
    assert shown(b"x" * 58) == f"b'{'x' * 58}..."


def test_a_coroutine_is_one_of_them(registry: OpRegistry, caplog: pytest.LogCaptureFixture) -> None:
    answer = asynchronous()
    with caplog.at_level(logging.WARNING):
        assert chosen(registry, answer) == "b"
    assert "an object of type coroutine" in caplog.text
    answer.close()


def test_the_reasons_where_nothing_is_left(registry: OpRegistry) -> None:
    asked: list[int] = []

    def raises_later(x: Any) -> Any:
        asked.append(x)
        if len(asked) > 1:
            raise ValueError("at the second time")
        return False

    registry.register_many(
        [
            impl("a", lambda x: False),
            impl("b", lambda x: None),
            impl("c", lambda x: np.bool_(False)),
            impl("d", lambda x: "wants float16"),
            impl("e", raises_later),
        ]
    )
    with pytest.raises(RefusedBeforeWriting) as caught:
        call_op("silu_and_mul", 1)
    assert str(caught.value) == (
        "no implementation of silu_and_mul takes these arguments: "
        "vendor.a: its predicate returned False, and no reason; "
        "vendor.b: its predicate returned None, which is neither a bool nor a sentence; "
        "vendor.c: its predicate returned False, and no reason; "
        "vendor.d: wants float16; "
        "vendor.e: its predicate raised ValueError: at the second time"
    )


@pytest.mark.parametrize("answer", [True, 1, np.bool_(True)])
def test_the_kit_takes_the_same_answers(answer: Any) -> None:
    from vllm_fl.conformance.dispatched import Dispatched

    dispatched = Dispatched(impl("a", lambda x: answer), OPERATORS["silu_and_mul"])
    assert dispatched.refusal({"x": torch.ones(2, 4)}) is True


class TestTracing:
    """What Dynamo makes of an answer; `fullgraph=True`, so that a break is an error."""

    @pytest.fixture(autouse=True)
    def _fresh(self) -> Any:
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()

    @pytest.mark.parametrize(
        ("supports", "wanted"),
        [
            (lambda x: True, 1),
            (lambda x: x.shape[-1] % 2 == 0, 1),
            (lambda x: x.shape[-1] % 2 == 0 or "odd", 1),
            (lambda x: x.shape[-1] % 2 == 1 or "even", 2),
            (lambda x: x.dtype == torch.float32 and x.shape[-1] > 2, 1),
            (lambda x: 1, 1),
            (lambda x: 0, 2),
            (lambda x: 2, 2),
            (lambda x: None, 2),
            (lambda x: "", 2),
            (lambda x: (True,), 2),
        ],
    )
    def test_an_answer_about_symbolic_shapes(
        self,
        registry: OpRegistry,
        supports: Callable[..., Any],
        wanted: int,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        for vendor, number in (("a", 1), ("b", 2)):
            one = OpImpl(
                "silu_and_mul",
                f"vendor.{vendor}",
                BackendImplKind.VENDOR,
                lambda x, number=number: x + number,
                vendor,
                400 - number,
                supports=supports if vendor == "a" else None,
            )
            registry.register_impl(one)
        op = resolve_op("silu_and_mul")
        compiled = torch.compile(lambda x: op(x), backend="eager", fullgraph=True, dynamic=True)
        for columns in (4, 6):
            assert compiled(torch.zeros(3, columns))[0, 0] == wanted
            assert op(torch.zeros(3, columns))[0, 0] == wanted

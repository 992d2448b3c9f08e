"""What counts as "not for these inputs" of an operator that writes: nobody computes on changed arguments."""

from __future__ import annotations

import functools
import types
from typing import TYPE_CHECKING
from typing import Any

import pytest

from vllm_fl.dispatch import OPERATORS
from vllm_fl.dispatch import BackendImplKind
from vllm_fl.dispatch import OpImpl
from vllm_fl.dispatch import OpManager
from vllm_fl.dispatch import OpRegistry
from vllm_fl.dispatch import RefusedBeforeWriting
from vllm_fl.dispatch import SelectionPolicy
from vllm_fl.dispatch import call_op
from vllm_fl.dispatch import get_default_manager
from vllm_fl.dispatch import manager as manager_module
from vllm_fl.dispatch import operator
from vllm_fl.dispatch import resolve_op
from vllm_fl.dispatch import set_global_policy

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_fl.dispatch import Operator

torch = pytest.importorskip("torch")

VENDORS = "abc"
WRITERS = sorted(name for name, declared in OPERATORS.items() if declared.mutates)


def implementation(op_name: str, vendor: str, fn: Callable[..., Any], **more: Any) -> OpImpl:
    """`a` is tried before `b`, and so on."""
    priority = 400 - VENDORS.index(vendor)
    return OpImpl(op_name, f"vendor.{vendor}", BackendImplKind.VENDOR, fn, vendor, priority, **more)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> OpRegistry:
    """The registry of the default manager; it finds no plugins."""
    registry = OpRegistry()
    monkeypatch.setattr(manager_module, "_default", OpManager(registry))
    return registry


def set_aside() -> str:
    ids = sorted(i for ids in get_default_manager().get_failed_impls().values() for i in ids)
    return "".join(i.removeprefix("vendor.") for i in ids)


def arguments(declared: Operator) -> dict[str, Any]:
    """A tensor for what may be written, a number for the rest."""
    names = declared.signature.parameters
    return {name: torch.full((3,), 1.0) if name in declared.mutates else 7 for name in names}


def not_implemented_by_torch() -> None:
    """Raise what torch raises for a kernel that it lacks."""
    torch.ones(2, dtype=torch.int8).softmax(0)


class Writing:
    """An implementation that first writes all that the operator lets it write."""

    def __init__(self, declared: Operator, error: Callable[[], Any] | None = None) -> None:
        self.declared = declared
        self.error = error
        self.seen: list[list[float]] = []

    def fn(self) -> Callable[..., Any]:
        """Return it with the operator's own signature, as registration demands."""

        def written(*args: Any, **kwargs: Any) -> Any:
            given = self.declared.signature.bind(*args, **kwargs).arguments
            tensors = [given[name] for name in self.declared.mutates]
            self.seen.append([float(tensor.sum()) for tensor in tensors])
            for tensor in tensors:
                tensor.add_(10)
            if self.error is not None:
                self.error()
            return self

        return written


def raising(error: BaseException | type[BaseException]) -> Callable[[], None]:
    def throw() -> None:
        raise error

    return throw


def two(registry: OpRegistry, op_name: str, error: Callable[[], Any] | None) -> tuple[Writing, Writing]:
    first, second = Writing(OPERATORS[op_name], error), Writing(OPERATORS[op_name])
    registry.register_many(
        [implementation(op_name, "a", first.fn()), implementation(op_name, "b", second.fn())]
    )
    return first, second


def test_there_are_operators_that_write() -> None:
    assert {"rms_norm", "rotary_embedding", "topk_softmax", "moe_sum"} <= set(WRITERS)


ERRORS = {
    "torch's own": not_implemented_by_torch,
    "bare": raising(NotImplementedError),
    "a refusal that lies": raising(RefusedBeforeWriting),
}


@pytest.mark.parametrize("how", ["torch's own", "bare", "ValueError", "a refusal that lies"])
@pytest.mark.parametrize("op_name", WRITERS)
def test_until_the_first_success_the_next_one_gets_what_the_first_got(
    registry: OpRegistry, op_name: str, how: str
) -> None:
    declared = OPERATORS[op_name]
    first, second = two(registry, op_name, ERRORS.get(how) or raising(ValueError("of a")))
    for calls in (1, 2):
        given = arguments(declared)
        assert call_op(op_name, **given) is second
        assert second.seen == [[3.0] * len(declared.mutates)] * calls
        for name in declared.mutates:
            assert given[name].tolist() == [11.0] * 3, "the second one's own"
    # What is said of these inputs is not remembered, and the copies are made anew.
    assert set_aside() == ("a" if how == "ValueError" else "")
    assert len(first.seen) == (1 if how == "ValueError" else 2)


def test_with_an_optional_tensor_it_is_another_kernel(registry: OpRegistry) -> None:
    """That it has run without a residual proves nothing of the one that adds it."""
    fails = True

    def fused(x: Any, residual: Any, weight: Any, epsilon: float) -> str:
        if residual is not None:
            x.add_(residual)
            if fails:
                not_implemented_by_torch()
        return "a"

    registry.register_many(
        [
            implementation("rms_norm", "a", fused),
            implementation("rms_norm", "b", lambda x, residual, weight, epsilon: x.tolist()),
        ]
    )
    op = resolve_op("rms_norm")
    for run in (op, functools.partial(call_op, "rms_norm"), op):
        assert run(torch.ones(2), None, None, 1e-6) == "a"
        assert run(torch.ones(2), torch.ones(2), None, 1e-6) == [1.0, 1.0]
    fails = False
    assert op(torch.ones(2), torch.ones(2), None, 1e-6) == "a"
    fails = True
    with pytest.raises(NotImplementedError):
        op(torch.ones(2), torch.ones(2), None, 1e-6)
    set_global_policy(SelectionPolicy(prefer="vendor"))
    with pytest.raises(NotImplementedError):
        call_op("rms_norm", torch.ones(2), torch.ones(2), None, 1e-6)


@pytest.mark.parametrize("how", ["torch's own", "bare"])
@pytest.mark.parametrize("op_name", WRITERS)
def test_after_the_first_success_it_is_raised_and_the_note_says_how_to_refuse(
    registry: OpRegistry, op_name: str, how: str
) -> None:
    declared = OPERATORS[op_name]
    first, second = two(registry, op_name, None)
    assert call_op(op_name, **arguments(declared)) is first
    first.error = ERRORS[how]
    with pytest.raises(NotImplementedError) as caught:
        call_op(op_name, **arguments(declared))
    (note,) = caught.value.__notes__
    assert f"{op_name}: vendor.a raised NotImplementedError" in note
    assert ", ".join(declared.mutates) in note
    assert "`supports`" in note
    assert "vllm_fl.dispatch.RefusedBeforeWriting" in note
    assert f"VLLM_FL_PER_OP='{op_name}=...'" in note
    assert (second.seen, set_aside()) == ([], "")
    first.error = None
    assert call_op(op_name, **arguments(declared)) is first


@pytest.mark.parametrize("op_name", WRITERS)
def test_the_native_path_of_a_layer_gets_what_the_first_got(registry: OpRegistry, op_name: str) -> None:
    declared = OPERATORS[op_name]
    first = Writing(declared, not_implemented_by_torch)
    registry.register_impl(implementation(op_name, "a", first.fn()))
    native = Writing(declared)
    resolved = get_default_manager().resolve_with_native(op_name, native.fn())
    assert [one.impl_id for one in resolved.candidates] == ["vendor.a", "native"]
    assert resolved.fn(**arguments(declared)) is native
    assert native.seen == [[3.0] * len(declared.mutates)]
    first.error = None
    assert resolved.fn(**arguments(declared)) is first
    first.error = not_implemented_by_torch
    with pytest.raises(NotImplementedError):
        resolved.fn(**arguments(declared))
    assert len(native.seen) == 1


@pytest.mark.parametrize("op_name", [name for name in WRITERS if OPERATORS[name].forms])
def test_in_the_opaque_form_too(registry: OpRegistry, op_name: str) -> None:
    """Its candidates share one copy of what is donated, which the caller never sees."""
    from vllm_fl.integration import opaque

    declared = OPERATORS[op_name]
    first = Adding(declared, not_implemented_by_torch)
    second = Adding(declared)
    registry.register_many(
        [
            implementation(op_name, "a", first.fn, traceable=False),
            implementation(op_name, "b", second.fn, traceable=False),
        ]
    )
    resolved = get_default_manager().resolve_with_native(op_name, None)
    op = opaque.opaque(declared, resolved)
    given = tensors_of_schema(declared)
    op(**given)
    assert first.seen == second.seen == [[3.0] * len(declared.mutates)]
    first.error = None
    op(**tensors_of_schema(declared))
    first.error = not_implemented_by_torch
    with pytest.raises(NotImplementedError):
        op(**tensors_of_schema(declared))
    assert len(second.seen) == 1


def tensors_of_schema(declared: Operator) -> dict[str, Any]:
    """Arguments that a torch schema takes."""
    values = {"float": 1e-6, "int": 1, "bool": True, "str": "silu"}
    return {
        name: values[str(p.annotation)] if str(p.annotation) in values else torch.full((3,), 1.0)
        for name, p in declared.signature.parameters.items()
    }


class Adding:
    """As `Writing`, with results that a torch schema takes."""

    def __init__(self, declared: Operator, error: Callable[[], Any] | None = None) -> None:
        self.writing = Writing(declared, error)
        self.seen = self.writing.seen
        self.declared = declared

    @property
    def error(self) -> Callable[[], Any] | None:
        return self.writing.error

    @error.setter
    def error(self, error: Callable[[], Any] | None) -> None:
        self.writing.error = error

    def fn(self, *args: Any, **kwargs: Any) -> Any:
        self.writing.fn()(*args, **kwargs)
        given = self.declared.signature.bind(*args, **kwargs).arguments
        results = tuple(given[name].clone() for name in self.declared.mutates)
        return results if len(results) > 1 else results[0]


# -- a refusal that promises ---------------------------------------------------------


@pytest.mark.parametrize("op_name", WRITERS)
def test_the_refusal_type_moves_on_for_ever(registry: OpRegistry, op_name: str) -> None:
    declared = OPERATORS[op_name]
    refuses = False

    def fn(*args: Any, **kwargs: Any) -> str:
        if refuses:
            raise RefusedBeforeWriting("not for these")
        return "a"

    second = Writing(declared)
    registry.register_many([implementation(op_name, "a", fn), implementation(op_name, "b", second.fn())])
    assert call_op(op_name, **arguments(declared)) == "a"
    refuses = True
    assert [call_op(op_name, **arguments(declared)) for _ in range(3)] == [second] * 3
    refuses = False
    assert call_op(op_name, **arguments(declared)) == "a"
    assert set_aside() == ""


def test_one_object_that_is_raised_again_and_again(registry: OpRegistry) -> None:
    """Its traceback would grow with every call, and look as if another operator had been called."""
    refusal = RefusedBeforeWriting("not for these")
    refuses = False

    def fn(inp: Any, out: Any) -> str:
        if refuses:
            raise refusal
        return "a"

    registry.register_many(
        [implementation("moe_sum", "a", fn), implementation("moe_sum", "b", lambda inp, out: "b")]
    )
    op = resolve_op("moe_sum")
    assert op(1, torch.ones(2)) == "a"
    refuses = True
    assert [op(1, torch.ones(2)) for _ in range(5)] == ["b"] * 5
    assert [call_op("moe_sum", 1, torch.ones(2)) for _ in range(5)] == ["b"] * 5


@pytest.mark.parametrize("wrap", ["function", "method", "partial", "wraps", "object", "adapted"])
def test_it_is_ones_own_whatever_the_callable(registry: OpRegistry, wrap: str) -> None:
    refuses = False

    def helper() -> None:
        if refuses:
            raise RefusedBeforeWriting("not for these")

    def plain(inp: Any, out: Any) -> str:
        helper()
        return "a"

    def shuffled(inp: Any, *, out: Any) -> str:
        return plain(inp, out)

    class Kernels:
        def method(self, inp: Any, out: Any) -> str:
            return plain(inp, out)

        def __call__(self, inp: Any, out: Any) -> str:
            return plain(inp, out)

    def bound(scale: int, inp: Any, out: Any) -> str:
        return plain(inp, out)

    @functools.wraps(plain)
    def wrapper(*args: Any, **kwargs: Any) -> str:
        return plain(*args, **kwargs)

    fn: Callable[..., Any] = {
        "function": plain,
        "method": Kernels().method,
        "partial": functools.partial(bound, 2),
        "wraps": wrapper,
        "object": Kernels(),
        "adapted": shuffled,
    }[wrap]
    registry.register_many(
        [implementation("moe_sum", "a", fn), implementation("moe_sum", "b", lambda inp, out: "b")]
    )
    assert call_op("moe_sum", 1, torch.ones(2)) == "a"
    refuses = True
    assert call_op("moe_sum", 1, torch.ones(2)) == "b"


@pytest.mark.parametrize("strict", [False, True])
def test_a_parameter_that_an_older_implementation_lacks_is_refused_before_it_runs(
    registry: OpRegistry, strict: bool
) -> None:
    """By the dispatch itself, so that it holds after a first success too."""
    ran: list[str] = []

    def old(query: Any, key: Any, cos: Any, sin: Any, position_ids: Any) -> Any:
        ran.append("a")
        return query, key

    def new(*args: Any, **kwargs: Any) -> Any:
        ran.append("b")
        return args[0], args[1]

    registry.register_many(
        [
            implementation("rotary_embedding", "a", old, supports=lambda *_: True),
            implementation("rotary_embedding", "b", new),
        ]
    )
    set_global_policy(SelectionPolicy(strict=strict))
    five = (torch.ones(2), torch.ones(2), 1, 1, 1)
    call_op("rotary_embedding", *five)
    call_op("rotary_embedding", *five, inplace=False)
    call_op("rotary_embedding", *five)
    assert ran == ["a", "b", "a"]


def test_what_nothing_takes_is_refused_before_anything_was_written(registry: OpRegistry) -> None:
    registry.register_many(
        [implementation("moe_sum", v, lambda inp, out: "ran", supports=lambda inp, out: "no") for v in "ab"]
    )
    with pytest.raises(
        RefusedBeforeWriting, match=r"moe_sum takes these arguments: vendor\.a: no; vendor\.b: no"
    ):
        call_op("moe_sum", 1, torch.ones(2))


# -- a refusal that comes out of another operator ----------------------------------------


@operator()
def inner(self: Any, x: Any) -> Any:
    """An operator that another one's implementation calls."""


def refuse(x: Any) -> Any:
    raise RefusedBeforeWriting("of the inner operator")


def says_no(x: Any) -> Any:
    return "of the inner operator"


@pytest.mark.parametrize("is_proven", [False, True])
@pytest.mark.parametrize("way", ["call_op", "manager", "guard", "plain", "predicate"])
def test_another_operators_refusal_is_no_promise_of_ones_own(
    registry: OpRegistry, way: str, is_proven: bool
) -> None:
    registry.declare(inner)
    supports = says_no if way == "predicate" else None
    inners = "ab" if way == "guard" else "a"
    registry.register_many([implementation("inner", v, refuse, supports=supports) for v in inners])
    kept = resolve_op("inner")
    ways: dict[str, Callable[..., Any]] = {
        "call_op": lambda x: call_op("inner", x),
        "manager": lambda x: get_default_manager().call("inner", x),
    }
    calls, seen = False, []

    def outer(inp: Any, out: Any) -> str:
        out.add_(10)
        if calls:
            ways.get(way, kept)(inp)
        return "a"

    def after(inp: Any, out: Any) -> str:
        seen.append(out.tolist())
        return "b"

    registry.register_many([implementation("moe_sum", "a", outer), implementation("moe_sum", "b", after)])
    if is_proven:
        assert call_op("moe_sum", 1, torch.ones(2)) == "a"
    calls = True
    if not is_proven:
        assert call_op("moe_sum", 1, torch.ones(2)) == "b"
        assert seen == [[1.0, 1.0]]
        return
    with pytest.raises(RefusedBeforeWriting, match="of the inner operator") as caught:
        call_op("moe_sum", 1, torch.ones(2))
    assert "does not promise that out is unchanged" in "\n".join(caught.value.__notes__)
    assert seen == []


def test_who_calls_another_operator_first_may_refuse_in_its_own_name(registry: OpRegistry) -> None:
    registry.declare(inner)
    registry.register_impl(implementation("inner", "a", refuse))
    calls = False

    def outer(inp: Any, out: Any) -> str:
        if calls:
            try:
                call_op("inner", inp)
            except NotImplementedError as error:
                raise RefusedBeforeWriting("nothing was written yet") from error
        out.add_(10)
        return "a"

    registry.register_many(
        [implementation("moe_sum", "a", outer), implementation("moe_sum", "b", lambda inp, out: out.tolist())]
    )
    assert call_op("moe_sum", 1, torch.ones(2)) == "a"
    calls = True
    assert call_op("moe_sum", 1, torch.ones(2)) == [1.0, 1.0]


# -- what is raised where the rest fails ---------------------------------------------------


@pytest.mark.parametrize(
    ("first", "then", "raised"),
    [
        (RefusedBeforeWriting, ValueError, ValueError),
        (RefusedBeforeWriting, NotImplementedError, NotImplementedError),
        (RefusedBeforeWriting, RefusedBeforeWriting, RefusedBeforeWriting),
        (NotImplementedError, ValueError, ValueError),
        (NotImplementedError, RefusedBeforeWriting, NotImplementedError),
        (ValueError, KeyError, ValueError),
        (ValueError, NotImplementedError, ValueError),
        (ValueError, RefusedBeforeWriting, ValueError),
    ],
)
def test_a_refusal_is_not_what_is_raised_after_another_one_has_written(
    registry: OpRegistry, first: type[Exception], then: type[Exception], raised: type[Exception]
) -> None:
    """Whoever gets RefusedBeforeWriting may rely on it."""
    one, other = first("of a"), then("of b")

    def raises(error: Exception) -> Callable[..., Any]:
        def fn(inp: Any, out: Any) -> Any:
            raise error

        return fn

    registry.register_many(
        [implementation("moe_sum", "a", raises(one)), implementation("moe_sum", "b", raises(other))]
    )
    with pytest.raises(raised) as caught:
        call_op("moe_sum", 1, torch.ones(2))
    assert type(caught.value) is raised
    assert caught.value is (other if raised is then and first is not then else one)
    notes = "\n".join(caught.value.__notes__)
    assert "moe_sum: vendor.a raised" in notes
    if caught.value is one:
        assert "of b" in notes


# -- where nothing can be put back ------------------------------------------------------------


def test_while_a_graph_is_captured_no_copy_is_made_and_it_is_raised(
    registry: OpRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = types.SimpleNamespace(is_initialized=lambda: True, is_current_stream_capturing=lambda: True)
    first, second = two(registry, "moe_sum", not_implemented_by_torch)
    monkeypatch.setattr(torch, "get_device_module", lambda: device)
    with pytest.raises(NotImplementedError) as caught:
        call_op("moe_sum", 1, torch.ones(2))
    assert "does not promise that out is unchanged" in caught.value.__notes__[0]
    assert (len(first.seen), second.seen) == (1, [])


def test_while_a_graph_is_captured_a_promise_holds(
    registry: OpRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = types.SimpleNamespace(is_initialized=lambda: True, is_current_stream_capturing=lambda: True)

    def refuses(inp: Any, out: Any) -> Any:
        raise RefusedBeforeWriting

    registry.register_many(
        [implementation("moe_sum", "a", refuses), implementation("moe_sum", "b", lambda inp, out: "b")]
    )
    monkeypatch.setattr(torch, "get_device_module", lambda: device)
    assert call_op("moe_sum", 1, torch.ones(2)) == "b"


def test_with_strict_and_a_predicate_it_is_raised(registry: OpRegistry) -> None:
    """With strict no copies are made."""
    first, second = Writing(OPERATORS["moe_sum"], not_implemented_by_torch), Writing(OPERATORS["moe_sum"])
    registry.register_many(
        [
            implementation("moe_sum", "a", first.fn(), supports=lambda inp, out: True),
            implementation("moe_sum", "b", second.fn()),
        ]
    )
    set_global_policy(SelectionPolicy(strict=True))
    with pytest.raises(NotImplementedError):
        call_op("moe_sum", 1, torch.ones(2))
    assert second.seen == []


def test_of_an_undeclared_operator_nothing_can_be_put_back(registry: OpRegistry) -> None:
    ran = []

    def fails(x: Any) -> Any:
        x.add_(10)
        raise NotImplementedError

    registry.register_many(
        [
            implementation("my_op", "a", fails, writes=("x",)),
            implementation("my_op", "b", lambda x: ran.append(x), writes=("x",)),
        ]
    )
    with pytest.raises(NotImplementedError):
        call_op("my_op", torch.ones(2))
    assert ran == []


def test_one_that_writes_nothing_refuses_by_the_plain_exception(registry: OpRegistry) -> None:
    """Of any operator, one that writes by its contract too."""
    raises = False

    def fn(inp: Any, out: Any) -> str:
        if raises:
            raise NotImplementedError
        return "a"

    registry.register_many(
        [implementation("moe_sum", "a", fn, writes=()), implementation("moe_sum", "b", lambda inp, out: "b")]
    )
    assert call_op("moe_sum", 1, torch.ones(2)) == "a"
    raises = True
    assert [call_op("moe_sum", 1, torch.ones(2)) for _ in range(3)] == ["b"] * 3

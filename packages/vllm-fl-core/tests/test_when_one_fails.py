"""The list "When one fails" of `vllm_fl.dispatch.manager`: as a table, and where a table is too small."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import textwrap
import threading
import types
import weakref
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any

import pytest

import vllm_fl
from vllm_fl.dispatch import BackendImplKind
from vllm_fl.dispatch import OpImpl
from vllm_fl.dispatch import OpManager
from vllm_fl.dispatch import OpRegistry
from vllm_fl.dispatch import RefusedBeforeWriting
from vllm_fl.dispatch import SelectionPolicy
from vllm_fl.dispatch import UnknownOperatorError
from vllm_fl.dispatch import call_op
from vllm_fl.dispatch import get_default_manager
from vllm_fl.dispatch import manager as manager_module
from vllm_fl.dispatch import operator
from vllm_fl.dispatch import policy_context
from vllm_fl.dispatch import reset_global_policy
from vllm_fl.dispatch import resolve_op
from vllm_fl.dispatch import set_global_policy
from vllm_fl.dispatch import with_strict_mode

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Iterator

VENDORS = "abcd"
STRICT = SelectionPolicy(strict=True)


def implementation(op_name: str, vendor: str, fn: Callable[..., Any] | str, **more: Any) -> OpImpl:
    """`a` is tried before `b`, and so on."""
    priority = 400 - VENDORS.index(vendor)
    return OpImpl(op_name, f"vendor.{vendor}", BackendImplKind.VENDOR, fn, vendor, priority, **more)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> OpRegistry:
    """The registry of the default manager; it finds no plugins."""
    registry = OpRegistry()
    monkeypatch.setattr(manager_module, "_default", OpManager(registry))
    return registry


@pytest.fixture(params=["call_op", "kept"])
def run(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Call an operator by `call_op`, or by a callable that is resolved once and kept."""
    if request.param == "call_op":
        return call_op
    kept: dict[str, Callable[..., Any]] = {}

    def call(op_name: str, *args: Any, **kwargs: Any) -> Any:
        if op_name not in kept:
            kept[op_name] = resolve_op(op_name)
        return kept[op_name](*args, **kwargs)

    return call


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


def set_aside() -> str:
    ids = sorted(i for ids in get_default_manager().get_failed_impls().values() for i in ids)
    return "".join(i.removeprefix("vendor.") for i in ids)


def warned(caplog: pytest.LogCaptureFixture) -> str:
    found = [r.getMessage() for r in caplog.records if "set aside" in r.getMessage()]
    assert all(r.name.startswith("vllm_fl") for r in caplog.records if "set aside" in r.getMessage())
    return "".join(sorted(message.split()[0].removeprefix("vendor.") for message in found))


# -- the table ------------------------------------------------------------------

#: What an implementation of the table does.
#:   ok      returns its name
#:   no      its predicate says no
#:   yes     its predicate says yes, and it returns its name
#:   later   it raises NotImplementedError
#:   yes+later, yes+fails   its predicate says yes, and it raises
#:   fails   it raises ValueError
#:   breaks  its predicate raises ValueError
#:   memory  it raises MemoryError
#:
#: Three behaviours; which ran; what came out: a name, or an exception and the
#: implementation whose exception it is; which are set aside.
TABLE = [
    # 1. "Not for these inputs"
    ("ok ok ok", "a", "a", ""),
    ("yes ok ok", "a", "a", ""),
    ("no ok ok", "b", "b", ""),
    ("no no ok", "c", "c", ""),
    ("no no yes", "c", "c", ""),
    ("later ok ok", "ab", "b", ""),
    ("later later ok", "abc", "c", ""),
    ("yes+later ok ok", "ab", "b", ""),
    ("no later ok", "bc", "c", ""),
    ("later no ok", "ac", "c", ""),
    # 3. Out of memory
    ("memory ok ok", "a", "MemoryError a", ""),
    ("later memory ok", "ab", "MemoryError b", ""),
    ("no memory ok", "b", "MemoryError b", ""),
    ("fails memory ok", "ab", "MemoryError b", ""),
    ("fails fails memory", "abc", "MemoryError c", ""),
    # 4. Any other exception
    ("fails ok ok", "ab", "b", "a"),
    ("yes+fails ok ok", "ab", "b", "a"),
    ("breaks ok ok", "b", "b", "a"),
    ("fails fails ok", "abc", "c", "ab"),
    ("fails no ok", "ac", "c", "a"),
    ("fails later ok", "abc", "c", "a"),
    ("later fails ok", "abc", "c", "b"),
    ("no fails ok", "bc", "c", "b"),
    ("fails breaks ok", "ac", "c", "ab"),
    # 6. Nothing is left
    ("fails fails fails", "abc", "ValueError a", ""),
    ("fails later fails", "abc", "ValueError a", ""),
    ("fails no later", "ac", "ValueError a", ""),
    ("fails no no", "a", "ValueError a", ""),
    ("later fails fails", "abc", "ValueError b", ""),
    ("later later later", "abc", "NotImplementedError a", ""),
    ("no fails fails", "bc", "ValueError b", ""),
    ("no no fails", "c", "ValueError c", ""),
    ("no no no", "", "RefusedBeforeWriting abc", ""),
    ("breaks breaks breaks", "", "ValueError a", ""),
]

STRICT_TABLE = [
    ("ok ok ok", "a", "a", ""),
    ("no ok ok", "b", "b", ""),
    ("no no yes", "c", "c", ""),
    ("no no no", "", "RefusedBeforeWriting abc", ""),
    ("fails ok ok", "a", "ValueError a", ""),
    ("yes+fails ok ok", "a", "ValueError a", ""),
    ("no fails ok", "b", "ValueError b", ""),
    ("breaks ok ok", "", "ValueError a", ""),
    ("memory ok ok", "a", "MemoryError a", ""),
    # A predicate makes a guard, so that a refusal moves on.
    ("yes+later ok ok", "ab", "b", ""),
    # Without one the callable is the implementation itself.
    ("later ok ok", "a", "NotImplementedError a", ""),
]


class Behaving:
    """An implementation of the table, for the operator `silu_and_mul`."""

    def __init__(self, vendor: str, behaviour: str, ran: list[str]) -> None:
        self.vendor, self.behaviour, self.ran = vendor, behaviour, ran

    def fn(self, x: Any) -> str:
        self.ran.append(self.vendor)
        if "later" in self.behaviour:
            raise NotImplementedError(f"of {self.vendor}")
        if "fails" in self.behaviour:
            raise ValueError(f"of {self.vendor}")
        if self.behaviour == "memory":
            raise MemoryError(f"of {self.vendor}")
        return self.vendor

    def supports(self, x: Any) -> bool | str:
        if self.behaviour == "breaks":
            raise ValueError(f"of {self.vendor}")
        return f"says {self.vendor}" if self.behaviour == "no" else True

    def impl(self) -> OpImpl:
        has_predicate = self.behaviour.startswith(("no", "yes", "breaks"))
        supports = self.supports if has_predicate else None
        return implementation("silu_and_mul", self.vendor, self.fn, supports=supports)


def check_row(
    row: tuple[str, str, str, str],
    registry: OpRegistry,
    run: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    behaviours, ran_wanted, outcome, aside = row
    ran: list[str] = []
    three = zip(VENDORS, behaviours.split(), strict=False)
    registry.register_many([Behaving(v, b, ran).impl() for v, b in three])
    got: Any = None
    try:
        got = run("silu_and_mul", 1)
    except (ValueError, NotImplementedError, MemoryError) as error:
        got = error
    assert "".join(ran) == ran_wanted
    if isinstance(got, str):
        assert got == outcome
    else:
        kind, whose = outcome.split()
        assert type(got).__name__ == kind
        if len(whose) == 1:
            assert got.args == (f"of {whose}",)
        else:
            assert all(f"says {vendor}" in str(got) for vendor in whose)
    assert set_aside() == aside
    assert warned(caplog) == aside

    # The second time, what was set aside does not run, and everything else does.
    ran.clear()
    if isinstance(got, str):
        assert run("silu_and_mul", 1) == outcome
    else:
        with pytest.raises(type(got)):
            run("silu_and_mul", 1)
    assert "".join(ran) == "".join(v for v in ran_wanted if v not in aside)
    assert set_aside() == aside
    assert warned(caplog) == aside


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row[0].replace(" ", "-"))
def test_table(
    row: tuple[str, str, str, str],
    registry: OpRegistry,
    run: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    check_row(row, registry, run, caplog)


@pytest.mark.parametrize("row", STRICT_TABLE, ids=lambda row: row[0].replace(" ", "-"))
def test_table_with_strict(
    row: tuple[str, str, str, str],
    registry: OpRegistry,
    run: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    set_global_policy(STRICT)
    check_row(row, registry, run, caplog)


# -- 1. not for these inputs ------------------------------------------------------


def test_a_refusal_is_for_its_call_only(registry: OpRegistry, run: Callable[..., Any]) -> None:
    def even(x: int) -> str:
        if x % 2:
            raise NotImplementedError
        return "even"

    registry.register_many(
        [
            implementation("silu_and_mul", "a", even),
            implementation("silu_and_mul", "b", lambda x: "small", supports=lambda x: x < 10 or "too large"),
            implementation("silu_and_mul", "c", lambda x: "any"),
        ]
    )
    wanted = {2: "even", 3: "small", 11: "any", 12: "even"}
    for _ in range(2):
        assert {x: run("silu_and_mul", x) for x in wanted} == wanted
    assert set_aside() == ""


def test_the_reasons_of_all_predicates_are_told(registry: OpRegistry, run: Callable[..., Any]) -> None:
    registry.register_many(
        [
            implementation("silu_and_mul", "a", lambda x: "a", supports=lambda x: "wants float16"),
            implementation("silu_and_mul", "b", lambda x: "b", supports=lambda x: "wants a multiple of 8"),
        ]
    )
    with pytest.raises(NotImplementedError) as caught:
        run("silu_and_mul", 1)
    assert str(caught.value) == (
        "no implementation of silu_and_mul takes these arguments: "
        "vendor.a: wants float16; vendor.b: wants a multiple of 8"
    )


# -- 2. a fault of the caller -----------------------------------------------------


def rms(x: Any, residual: Any, weight: Any, epsilon: float) -> Any:
    return "rms"


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((1,), {}),
        ((1, 2, 3, 4, 5), {}),
        ((1, 2, 3), {"eps": 1}),
        ((1, 2, 3, 4), {"x": 1}),
    ],
)
@pytest.mark.parametrize("strict", [False, True])
def test_arguments_that_do_not_bind(
    registry: OpRegistry, run: Callable[..., Any], args: Any, kwargs: Any, strict: bool
) -> None:
    registry.register_many([implementation("rms_norm", v, rms) for v in "ab"])
    set_global_policy(SelectionPolicy(strict=strict))
    with pytest.raises(TypeError, match="rms"):
        run("rms_norm", *args, **kwargs)
    assert set_aside() == ""
    assert run("rms_norm", 1, 2, 3, 4) == "rms"
    assert run("rms_norm", 1, residual=2, weight=3, epsilon=4) == "rms"


def test_undeclared_operator_whose_arguments_do_not_bind(
    registry: OpRegistry, run: Callable[..., Any]
) -> None:
    ran = []

    def one(x: Any) -> str:
        return "one"

    def any_number(*args: Any) -> str:
        ran.append(args)
        return "any"

    registry.register_many(
        [implementation("my_op", "a", one), implementation("my_op", "b", any_number)],
    )
    with pytest.raises(TypeError, match="one\\(\\)"):
        run("my_op", 1, 2)
    assert (ran, set_aside()) == ([], "")


@pytest.mark.parametrize("op_name", ["silu_and_mul", "my_op"])
def test_a_type_error_inside_an_implementation_is_not_the_callers(
    registry: OpRegistry, run: Callable[..., Any], op_name: str
) -> None:
    def bad(x: Any) -> Any:
        return len(x)  # no int has one

    registry.register_many([implementation(op_name, "a", bad), implementation(op_name, "b", lambda x: "b")])
    assert run(op_name, 1) == "b"
    assert set_aside() == "a"


def test_unknown_operator(registry: OpRegistry, run: Callable[..., Any]) -> None:
    for _ in range(2):
        with pytest.raises(UnknownOperatorError, match="Did you mean 'silu_and_mul'"):
            run("silu_and_mull", 1)


# -- 3. what is never retried -------------------------------------------------------


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


class AcceleratorError(RuntimeError):
    """Named as torch's."""


FATAL = [
    MemoryError("no more"),
    OutOfMemoryError("CUDA says so"),
    AcceleratorError("CUDA error: unspecified"),
    RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("NPU out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("CUDA error: unspecified launch failure"),
    KeyboardInterrupt(),
    SystemExit(3),
    GeneratorExit(),
]


@pytest.mark.parametrize("error", FATAL, ids=repr)
@pytest.mark.parametrize("op_name", ["silu_and_mul", "moe_sum", "my_op"])
def test_fatal_exceptions_are_raised_as_they_are(
    registry: OpRegistry,
    run: Callable[..., Any],
    op_name: str,
    error: BaseException,
    caplog: pytest.LogCaptureFixture,
) -> None:
    args = (1, Buffer(1)) if op_name == "moe_sum" else (1,)
    ran = []

    def dies(inp: Any, out: Any = None) -> Any:
        raise error

    def next_one(inp: Any, out: Any = None) -> Any:
        ran.append("b")

    fns: list[Callable[..., Any]] = [dies, next_one]
    if op_name == "silu_and_mul":
        fns = [lambda x: dies(x), lambda x: next_one(x)]
    registry.register_many([implementation(op_name, v, fn) for v, fn in zip("ab", fns, strict=True)])
    for _ in range(2):
        with pytest.raises(type(error)) as caught:
            run(op_name, *args)
        assert caught.value is error
    assert (ran, set_aside(), warned(caplog)) == ([], "", "")
    assert getattr(error, "__notes__", []) == []


def test_what_torch_raises_is_fatal(torch: Any, registry: OpRegistry) -> None:
    def dies(x: Any) -> Any:
        raise torch.OutOfMemoryError("HIP out of memory")

    registry.register_many(
        [implementation("silu_and_mul", "a", dies), implementation("silu_and_mul", "b", lambda x: x)]
    )
    with pytest.raises(torch.OutOfMemoryError):
        call_op("silu_and_mul", 1)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: no kernel image is available for execution on the device"),
        RuntimeError("out of resource: shared memory, Required: 200000, Hardware limit: 101376"),
        ImportError("libfoo.so.1: cannot open shared object file"),
        AssertionError(),
        ValueError("out of memory is only a word here"),
    ],
    ids=repr,
)
def test_a_kernel_that_does_not_run_on_this_chip_is_not_fatal(
    registry: OpRegistry, run: Callable[..., Any], error: Exception
) -> None:
    def dies(x: Any) -> Any:
        raise error

    registry.register_many(
        [implementation("silu_and_mul", "a", dies), implementation("silu_and_mul", "b", lambda x: "b")]
    )
    assert run("silu_and_mul", 1) == "b"
    assert set_aside() == "a"


# -- 4. any other exception ---------------------------------------------------------


def failing_then_good(registry: OpRegistry) -> list[str]:
    ran: list[str] = []

    def fails(x: Any) -> Any:
        ran.append("a")
        raise ValueError("no kernel")

    def good(x: Any) -> str:
        ran.append("b")
        return "b"

    registry.register_many(
        [implementation("silu_and_mul", "a", fails), implementation("silu_and_mul", "b", good)]
    )
    return ran


def test_what_is_set_aside_is_not_tried_until_it_is_cleared(
    registry: OpRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    ran = failing_then_good(registry)
    manager = get_default_manager()

    def ran_of_one_call() -> str:
        ran.clear()
        assert call_op("silu_and_mul", 1) == "b"
        return "".join(ran)

    assert [ran_of_one_call() for _ in range(3)] == ["ab", "b", "b"]
    assert warned(caplog) == "a"
    assert "ValueError: no kernel" in caplog.text
    assert "silu_and_mul" in caplog.text

    policy = SelectionPolicy(prefer="vendor")
    with policy_context(policy):
        assert ran_of_one_call() == "b"
    with with_strict_mode():
        assert ran_of_one_call() == "b"
    assert ran_of_one_call() == "b"

    set_global_policy(policy)
    assert [ran_of_one_call(), ran_of_one_call()] == ["ab", "b"]
    reset_global_policy()
    assert [ran_of_one_call(), ran_of_one_call()] == ["ab", "b"]
    manager.clear_failed_impls("rms_norm")
    assert ran_of_one_call() == "b"
    manager.clear_failed_impls("silu_and_mul")
    assert [ran_of_one_call(), ran_of_one_call()] == ["ab", "b"]
    manager.clear_failed_impls()
    assert [ran_of_one_call(), ran_of_one_call()] == ["ab", "b"]
    assert warned(caplog) == "aaaaa"


def test_what_failed_in_a_context_stays_aside_after_it(registry: OpRegistry) -> None:
    ran = failing_then_good(registry)
    with policy_context(SelectionPolicy()):
        call_op("silu_and_mul", 1)
    ran.clear()
    call_op("silu_and_mul", 1)
    assert ran == ["b"]


def test_the_decision_says_what_was_set_aside(registry: OpRegistry) -> None:
    failing_then_good(registry)
    call_op("silu_and_mul", 1)
    decision = get_default_manager().explain("silu_and_mul")
    assert decision.impl_id == "vendor.b"
    assert "set aside after it raised ValueError: no kernel" in str(decision)
    assert get_default_manager().get_failed_impls() == {"silu_and_mul": {"vendor.a"}}
    assert get_default_manager().get_failed_impls("rms_norm") == {}


def test_setting_aside_is_for_one_operator(registry: OpRegistry) -> None:
    failing_then_good(registry)
    registry.register_impl(implementation("gelu_and_mul", "a", lambda x, approximate="none": "a"))
    call_op("silu_and_mul", 1)
    assert call_op("gelu_and_mul", 1) == "a"


def test_a_kept_callable_and_call_op_warn_once_together(
    registry: OpRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    failing_then_good(registry)
    first, second = resolve_op("silu_and_mul"), OpManager(registry).resolve("silu_and_mul")
    assert first is resolve_op("silu_and_mul")
    assert first(1) == call_op("silu_and_mul", 1) == resolve_op("silu_and_mul")(1) == "b"
    assert warned(caplog) == "a"
    assert second(1) == "b"  # another manager, with failures of its own
    assert warned(caplog) == "aa"


def test_a_failure_after_the_first_was_set_aside_is_raised_once(
    registry: OpRegistry, run: Callable[..., Any]
) -> None:
    """The guard of the rest has tried everything; the outer one must not try it again."""
    ran: list[str] = []

    def good_until_three(vendor: str) -> Callable[[int], str]:
        def fn(x: int) -> str:
            ran.append(vendor)
            if vendor == "a" or x >= 3:
                raise KeyError(vendor)
            return vendor

        return fn

    registry.register_many([implementation("silu_and_mul", v, good_until_three(v)) for v in "abc"])
    assert run("silu_and_mul", 1) == "b"
    ran.clear()
    with pytest.raises(KeyError, match="b"):
        run("silu_and_mul", 3)
    assert ran == ["b", "c"]
    assert set_aside() == "a"


# -- 6. nothing is left ------------------------------------------------------------


def test_the_first_exception_carries_the_others_as_notes(
    registry: OpRegistry, run: Callable[..., Any]
) -> None:
    cause = OSError("the cause of the first")

    def first(x: Any) -> Any:
        raise ValueError("of a") from cause

    def second(x: Any) -> Any:
        raise KeyError("of b")

    def third(x: Any) -> Any:
        raise RuntimeError("of c")

    registry.register_many(
        [implementation("silu_and_mul", v, fn) for v, fn in zip("abc", (first, second, third), strict=True)]
    )
    with pytest.raises(ValueError, match="of a") as caught:
        run("silu_and_mul", 1)
    notes = "\n".join(caught.value.__notes__)
    assert "KeyError: 'of b'" in notes
    assert "RuntimeError: of c" in notes
    assert len(caught.value.__notes__) == 2
    assert caught.value.__cause__ is cause
    assert caught.value.__context__ is None
    assert caught.value.__traceback__ is not None
    assert set_aside() == ""


def test_a_bad_call_poisons_nothing(registry: OpRegistry, run: Callable[..., Any]) -> None:
    def picky(x: int) -> int:
        if x < 0:
            raise ValueError("negative")
        return x

    registry.register_many([implementation("silu_and_mul", v, picky) for v in "abc"])
    with pytest.raises(ValueError, match="negative"):
        run("silu_and_mul", -1)
    assert run("silu_and_mul", 1) == 1
    assert set_aside() == ""


def test_the_same_exception_object_twice(registry: OpRegistry, run: Callable[..., Any]) -> None:
    error = ValueError("a singleton")

    def fails(x: Any) -> Any:
        raise error

    registry.register_many(
        [implementation("silu_and_mul", v, lambda x, fails=fails: fails(x)) for v in "abc"]
    )
    for _ in range(3):
        with pytest.raises(ValueError, match="a singleton"):
            run("silu_and_mul", 1)
    assert len(error.__notes__) < 50


def test_no_exception_is_kept_alive(registry: OpRegistry, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "vllm_fl")  # a record of the log holds it

    class Big:
        pass

    def fails(x: Any) -> Any:
        raise ValueError

    registry.register_many(
        [implementation("silu_and_mul", "a", fails), implementation("silu_and_mul", "b", lambda x: None)]
    )
    big = Big()
    ref = weakref.ref(big)
    call_op("silu_and_mul", big)
    assert set_aside() == "a"
    del big
    gc.collect()
    assert ref() is None


# -- 5. an operator that writes its arguments -----------------------------------------


class Buffer:
    """A tensor by duck typing, which counts its copies."""

    def __init__(self, *values: float) -> None:
        self.values = list(values)
        self.clones = 0

    def clone(self) -> Buffer:
        self.clones += 1
        return Buffer(*self.values)

    def copy_(self, other: Buffer) -> None:
        self.values[:] = other.values


class Summing:
    """`moe_sum` that first writes, then raises where it is told to."""

    def __init__(self, vendor: str, error: BaseException | None = None) -> None:
        self.vendor, self.error, self.seen = vendor, error, []  # type: ignore[var-annotated]

    def __call__(self, inp: Any, out: Any) -> Any:
        self.seen.append(list(out.values) if isinstance(out, Buffer) else out)
        if isinstance(out, Buffer):
            out.values[0] = 99.0
        if self.error is not None:
            raise self.error
        return self.vendor


def three_sums(registry: OpRegistry, *errors: BaseException | None) -> list[Summing]:
    sums = [Summing(v, e) for v, e in zip(VENDORS, errors, strict=False)]
    registry.register_many([implementation("moe_sum", s.vendor, s) for s in sums])
    return sums


def test_arguments_are_put_back_before_the_next_candidate(
    registry: OpRegistry, run: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    a, b, c = three_sums(registry, ValueError(), KeyError(), None)
    out = Buffer(1.0, 2.0)
    assert run("moe_sum", 0, out) == "c"
    assert [s.seen for s in (a, b, c)] == [[[1.0, 2.0]]] * 3
    assert out.values == [99.0, 2.0]
    assert set_aside() == warned(caplog) == "ab"
    assert run("moe_sum", 0, out) == "c"
    assert (len(a.seen), len(b.seen), len(c.seen)) == (1, 1, 2)


def test_arguments_by_name_are_put_back(registry: OpRegistry, run: Callable[..., Any]) -> None:
    _, b = three_sums(registry, ValueError(), None)
    assert run("moe_sum", out=Buffer(1.0), inp=0) == "b"
    assert b.seen == [[1.0]]


def test_no_copies_after_the_first_success(registry: OpRegistry, run: Callable[..., Any]) -> None:
    three_sums(registry, None, None)
    out = Buffer(1.0)
    clones = []
    for _ in range(3):
        assert run("moe_sum", 0, out) == "a"
        clones.append(out.clones)
    assert clones == [1, 1, 1]
    # Nor where it is resolved anew.
    set_global_policy(SelectionPolicy(prefer="vendor"))
    assert call_op("moe_sum", 0, out) == resolve_op("moe_sum")(0, out) == "a"
    assert out.clones == 1


def test_no_copies_where_nothing_could_run_after_it(registry: OpRegistry, run: Callable[..., Any]) -> None:
    three_sums(registry, None)
    out = Buffer(1.0)
    run("moe_sum", 0, out)
    assert out.clones == 0


def test_no_copies_with_strict_or_of_what_promises_to_write_nothing(registry: OpRegistry) -> None:
    out = Buffer(1.0)
    registry.register_many([implementation("moe_sum", v, lambda inp, out: inp, writes=()) for v in "ab"])
    call_op("moe_sum", 0, out)
    with with_strict_mode():
        call_op("moe_sum", 0, out)
    assert out.clones == 0


def test_after_the_first_success_the_exception_is_raised(
    registry: OpRegistry, run: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    a, b = three_sums(registry, None, None)
    out = Buffer(1.0)
    assert run("moe_sum", 0, out) == "a"
    a.error = ValueError("later")
    with pytest.raises(ValueError, match="later") as caught:
        run("moe_sum", 0, out)
    assert caught.value is a.error
    (note,) = caught.value.__notes__
    assert "vendor.a may have written out" in note
    assert "VLLM_FL_PER_OP" in note
    assert (b.seen, set_aside(), warned(caplog)) == ([], "", "")


@pytest.mark.parametrize("proven", [False, True])
def test_a_predicate_that_raises_has_written_nothing(
    registry: OpRegistry, run: Callable[..., Any], proven: bool
) -> None:
    answers: list[Any] = [True] if proven else []

    def supports(inp: Any, out: Any) -> Any:
        if answers:
            return answers.pop()
        raise ValueError("of the predicate")

    a, b = Summing("a"), Summing("b")
    registry.register_many(
        [implementation("moe_sum", "a", a, supports=supports), implementation("moe_sum", "b", b)]
    )
    if proven:
        assert run("moe_sum", 0, Buffer(1.0)) == "a"
    assert run("moe_sum", 0, Buffer(1.0)) == "b"
    assert set_aside() == "a"


@pytest.mark.parametrize("out", [[1.0], 5, "text"], ids=repr)
def test_arguments_that_cannot_be_put_back(registry: OpRegistry, run: Callable[..., Any], out: Any) -> None:
    _, b = three_sums(registry, ValueError("of a"), None)
    with pytest.raises(ValueError, match="of a") as caught:
        run("moe_sum", 0, out)
    assert "may have written out" in caught.value.__notes__[0]
    assert (b.seen, set_aside()) == ([], "")


def test_all_writers_raise(registry: OpRegistry, run: Callable[..., Any]) -> None:
    a, b, c = three_sums(registry, ValueError("of a"), KeyError("of b"), RuntimeError("of c"))
    with pytest.raises(ValueError, match="of a") as caught:
        run("moe_sum", 0, Buffer(1.0))
    assert caught.value is a.error
    assert caught.value.__cause__ is caught.value.__context__ is None
    assert ["of b" in n for n in caught.value.__notes__] == [True, False]
    assert [s.seen for s in (a, b, c)] == [[[1.0]]] * 3
    assert set_aside() == ""


def test_only_what_an_implementation_writes_is_copied(registry: OpRegistry) -> None:
    x, residual = Buffer(1.0), Buffer(2.0)

    def fails(x: Any, residual: Any, weight: Any, epsilon: float) -> Any:
        residual.values[0] = 99.0
        raise ValueError

    registry.register_many(
        [
            implementation("rms_norm", "a", fails, writes=("residual",)),
            implementation("rms_norm", "b", lambda x, residual, weight, epsilon: residual.values[0]),
        ]
    )
    assert call_op("rms_norm", x, residual, None, 1e-6) == 2.0
    assert (x.clones, residual.clones) == (0, 1)


def test_none_needs_no_copy(registry: OpRegistry, run: Callable[..., Any]) -> None:
    x = Buffer(1.0)

    def fails(x: Any, residual: Any, weight: Any, epsilon: float) -> Any:
        x.values[0] = 99.0
        raise ValueError

    registry.register_many(
        [
            implementation("rms_norm", "a", fails),
            implementation("rms_norm", "b", lambda x, residual, weight, epsilon: x.values[0]),
        ]
    )
    assert run("rms_norm", x, None, None, 1e-6) == 1.0
    assert set_aside() == "a"


def test_a_keyword_only_argument_that_is_written(registry: OpRegistry, run: Callable[..., Any]) -> None:
    @operator(mutates=("into",))
    def store(self: Any, first: Any, *, into: Any) -> Any:
        """Write."""

    def fails(first: Any, *, into: Any) -> Any:
        into.values[0] = 99.0
        raise ValueError

    registry.declare(store)
    registry.register_many(
        [
            implementation("store", "a", fails),
            implementation("store", "b", lambda first, *, into: (first, into.values[0])),
        ]
    )
    assert run("store", 7, into=Buffer(1.0)) == (7, 1.0)
    assert set_aside() == "a"


def test_an_undeclared_operator_that_says_what_it_writes(
    registry: OpRegistry, run: Callable[..., Any]
) -> None:
    """Its arguments have no names that anybody knows, so nothing can be put back."""

    def fails(x: Any) -> Any:
        raise ValueError("of a")

    registry.register_many(
        [
            implementation("my_op", "a", fails, writes=("x",)),
            implementation("my_op", "b", lambda x: "b", writes=("x",)),
        ]
    )
    with pytest.raises(ValueError, match="of a"):
        run("my_op", Buffer(1.0))
    assert set_aside() == ""


def test_names_of_parameters_do_not_matter(registry: OpRegistry, run: Callable[..., Any]) -> None:
    """A generated function uses names of its own."""

    @operator(mutates=("rest",))
    def recover(
        self: Any, first: Any, error: Any, rest: Any, supports: Any = 5, *, tried: Any = 6, make: Any = 7
    ) -> Any:
        """Take parameters with unlucky names."""

    def fails(first: Any, error: Any, rest: Any, supports: Any = 5, *, tried: Any = 6, make: Any = 7) -> Any:
        raise ValueError

    def good(first: Any, error: Any, rest: Any, supports: Any = 5, *, tried: Any = 6) -> Any:
        return first, error, rest, supports, tried

    registry.declare(recover)
    registry.register_many(
        [
            implementation("recover", "a", fails, supports=lambda *args, **kwargs: True),
            implementation("recover", "b", good),
        ]
    )
    assert run("recover", 1, 2, None) == (1, 2, None, 5, 6)
    assert run("recover", 1, 2, None, 3, tried=4) == (1, 2, None, 3, 4)


class TestTensors:
    """The same with real tensors: put back to the bit, through every kind of view."""

    @pytest.mark.parametrize("layout", ["contiguous", "split", "transposed", "step", "offset"])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
    def test_bit_for_bit(
        self, torch: Any, registry: OpRegistry, run: Callable[..., Any], layout: str, dtype: str
    ) -> None:
        base = torch.arange(96, dtype=torch.int32).view(torch.float32).reshape(8, 12).clone()
        base[0, 0], base[0, 1], base[1, 0] = float("nan"), float("-inf"), -0.0
        base = base.to(getattr(torch, dtype)) if dtype != "int32" else base.view(torch.int32)
        out = {
            "contiguous": lambda: base,
            "split": lambda: base.split([4, 4, 4], dim=-1)[1],
            "transposed": lambda: base.t(),
            "step": lambda: base[::2, ::3],
            "offset": lambda: base[3],
        }[layout]()
        everything_before, before = bits(torch, base), bits(torch, out)
        seen = []

        def fails(inp: Any, out: Any) -> Any:
            out.fill_(3)
            raise RuntimeError("no kernel image")

        def good(inp: Any, out: Any) -> Any:
            seen.append((bits(torch, out), bits(torch, base)))
            return out

        registry.register_many([implementation("moe_sum", "a", fails), implementation("moe_sum", "b", good)])
        assert run("moe_sum", None, out) is out
        assert torch.equal(seen[0][0], before)
        assert torch.equal(seen[0][1], everything_before)

    def test_two_views_of_one_tensor(self, torch: Any, registry: OpRegistry, run: Callable[..., Any]) -> None:
        qkv = torch.randn(4, 3, 2, 8)
        before = qkv.clone()
        query, key = qkv[:, 0], qkv[:, 1]

        def fails(query: Any, key: Any, cos: Any, sin: Any, position_ids: Any, *_: Any) -> Any:
            query.mul_(2)
            if key is not None:
                key.zero_()
            raise RuntimeError("no kernel image")

        def good(query: Any, key: Any, cos: Any, sin: Any, position_ids: Any, *_: Any) -> Any:
            return query.clone(), None if key is None else key.clone()

        registry.register_many(
            [implementation("rotary_embedding", "a", fails), implementation("rotary_embedding", "b", good)]
        )
        got = run("rotary_embedding", query, key, None, None, None)
        assert torch.equal(got[0], before[:, 0])
        assert torch.equal(got[1], before[:, 1])
        get_default_manager().clear_failed_impls()
        got = call_op("rotary_embedding", query, None, None, None, None)
        assert torch.equal(got[0], before[:, 0])
        assert torch.equal(qkv, before)

    def test_no_clone_after_the_first_success(self, torch: Any, registry: OpRegistry) -> None:
        from torch.utils._python_dispatch import TorchDispatchMode

        class Counting(TorchDispatchMode):
            clones = 0

            def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
                self.clones += func in (torch.ops.aten.clone.default, torch.ops.aten.copy_.default)
                return func(*args, **(kwargs or {}))

        for vendor in "ab":
            registry.register_impl(implementation("moe_sum", vendor, lambda inp, out: out.fill_(1)))
        out = torch.zeros(3)
        with Counting() as counting:
            call_op("moe_sum", None, out)
            assert counting.clones == 1
            call_op("moe_sum", None, out)
            resolve_op("moe_sum")(None, out)
            set_global_policy(SelectionPolicy(prefer="vendor"))
            resolve_op("moe_sum")(None, out)
            assert counting.clones == 1


def bits(torch: Any, tensor: Any) -> Any:
    whole = tensor.contiguous()
    return whole.view({2: torch.int16, 4: torch.int32}[whole.element_size()]).clone()


# -- 7. tracing, capture, ranks --------------------------------------------------------


class TestTracing:
    """`torch.compile(fullgraph=True)`: a graph break or an untraceable construct is an error."""

    @pytest.fixture(autouse=True)
    def _fresh(self, torch: Any) -> Iterator[None]:
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()

    @staticmethod
    def compiled(torch: Any, fn: Callable[..., Any]) -> tuple[Callable[..., Any], list[Any]]:
        graphs: list[Any] = []

        def backend(graph: Any, inputs: Any) -> Any:
            graphs.append(graph)
            return graph.forward

        return torch.compile(fn, backend=backend, fullgraph=True, dynamic=True), graphs

    @pytest.mark.parametrize(
        "form", ["plain", "guard", "predicate", "strict predicate", "adapted", "adapted predicate", "spent"]
    )
    def test_every_form_is_traceable(self, torch: Any, registry: OpRegistry, form: str) -> None:
        """Without a break, without a copy, for other sizes too."""

        def rotate(
            query: Any, key: Any, cos: Any, sin: Any, position_ids: Any, rotary_interleaved: bool = False
        ) -> Any:
            query.mul_(cos)
            return query, key

        def whole(query: Any, key: Any, cos: Any, sin: Any, position_ids: Any, *_: Any) -> Any:
            query.mul_(cos)
            return query, key

        def fails(*_: Any, **__: Any) -> Any:
            raise ValueError

        def supports(query: Any, key: Any, *_: Any) -> bool | str:
            return query.shape[-1] % 2 == 0 or "odd"

        def old_supports(query: Any, key: Any, cos: Any, sin: Any, position_ids: Any) -> bool | str:
            return query.dtype.is_floating_point or "integers"

        fn = rotate if form.startswith("adapted") else whole
        predicates = {"predicate": supports, "strict predicate": supports, "adapted predicate": old_supports}
        registry.register_many(
            [
                implementation("rotary_embedding", "b", fn, supports=predicates.get(form)),
                implementation("rotary_embedding", "c", whole),
            ]
        )
        if form == "spent":
            registry.register_impl(implementation("rotary_embedding", "a", fails))
        if form in ("plain", "strict predicate"):
            set_global_policy(STRICT)
        op = resolve_op("rotary_embedding")
        if form == "spent":
            op(torch.ones(2, 4), None, 1.0, None, None)
            assert set_aside() == "a"
        wanted = "plain" if form == "plain" else "guard"
        assert get_default_manager().explain("rotary_embedding").form == wanted

        def layer(query: Any, cos: Any) -> Any:
            return op(query, None, cos, None, None, False, True, None)[0] + 1

        compiled, graphs = self.compiled(torch, layer)
        for rows in (3, 5, 17):
            query = torch.randn(rows, 4)
            assert torch.equal(compiled(query.clone(), torch.full((4,), 2.0)), query * 2 + 1)
        assert len(graphs) == 1
        calls = [node.target for node in graphs[0].graph.nodes if node.op.startswith("call_")]
        # A sum is a function or a method of its tensor: whatever else the process has imported decides.
        names = [getattr(target, "__name__", target) for target in calls]
        assert names == ["mul_", "add"]
        assert set_aside() == ("a" if form == "spent" else "")

    def test_a_first_call_that_is_traced_proves_nothing(self, torch: Any, registry: OpRegistry) -> None:
        sums = [torch.sum, torch.sum]
        registry.register_many(
            [
                implementation("moe_sum", v, lambda inp, out, fn=fn: fn(inp))
                for v, fn in zip("ab", sums, strict=True)
            ]
        )
        op = resolve_op("moe_sum")
        compiled, _ = self.compiled(torch, lambda x: op(x, x))
        assert compiled(torch.ones(3)) == 3
        assert not get_default_manager().failures.is_proven("moe_sum", "vendor.a")

    @pytest.mark.parametrize(
        ("op_name", "refusal"),
        [
            ("silu_and_mul", NotImplementedError),
            ("silu_and_mul", RefusedBeforeWriting),
            ("moe_sum", RefusedBeforeWriting),
        ],
    )
    def test_a_refusal_at_trace_time_falls_to_the_next(
        self, torch: Any, registry: OpRegistry, op_name: str, refusal: type[Exception]
    ) -> None:
        def refuses(x: Any, out: Any = None) -> Any:
            raise refusal("not for these")

        def doubles(x: Any, out: Any = None) -> Any:
            return x * 2

        has_out = op_name == "moe_sum"
        fns = [refuses, refuses, doubles]
        if not has_out:
            fns = [lambda x, fn=fn: fn(x) for fn in fns]
        else:
            fns = [lambda inp, out, fn=fn: fn(inp, out) for fn in fns]
        registry.register_many([implementation(op_name, v, fn) for v, fn in zip("abc", fns, strict=True)])
        op = resolve_op(op_name)
        compiled, graphs = self.compiled(torch, (lambda x: op(x, x)) if has_out else (lambda x: op(x)))
        assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))
        assert len(graphs) == 1
        assert set_aside() == ""

    @pytest.mark.parametrize(
        ("op_name", "error"),
        [("silu_and_mul", ValueError), ("moe_sum", ValueError), ("moe_sum", NotImplementedError)],
    )
    def test_another_exception_at_trace_time_is_raised(
        self,
        torch: Any,
        registry: OpRegistry,
        op_name: str,
        error: type[Exception],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """Of one that writes NotImplementedError is one: what was traced before it stays in the graph."""
        ran = []

        def fails(*_: Any, **__: Any) -> Any:
            raise error("at trace time")

        def other(*args: Any, **_: Any) -> Any:
            ran.append("b")
            return args[0]

        registry.register_many([implementation(op_name, "a", fails), implementation(op_name, "b", other)])
        op = resolve_op(op_name)
        two = op_name == "moe_sum"
        compiled, _ = self.compiled(torch, (lambda x: op(x, x)) if two else (lambda x: op(x)))
        with pytest.raises(Exception, match="at trace time"):
            compiled(torch.ones(3))
        assert (ran, set_aside(), warned(caplog)) == ([], "", "")

    def test_a_predicate_chooses_at_trace_time(self, torch: Any, registry: OpRegistry) -> None:
        registry.register_many(
            [
                implementation(
                    "silu_and_mul", "a", lambda x: x + 1, supports=lambda x: x.dtype == torch.int32
                ),
                implementation("silu_and_mul", "b", lambda x: x + 2),
            ]
        )
        op = resolve_op("silu_and_mul")
        compiled, _ = self.compiled(torch, lambda x: op(x))
        assert compiled(torch.zeros(2, dtype=torch.int32)).tolist() == [1, 1]
        assert compiled(torch.zeros(2)).tolist() == [2, 2]

    def test_keyword_only_arguments(self, torch: Any, registry: OpRegistry) -> None:
        def experts(x: Any, w1: Any, w2: Any, weights: Any, ids: Any, *, activation: str = "silu") -> Any:
            return x * 2

        with pytest.raises(Exception, match="hidden_states"):
            registry.register_impl(implementation("fused_experts", "a", experts))

        def named(
            hidden_states: Any,
            w1: Any,
            w2: Any,
            topk_weights: Any,
            topk_ids: Any,
            *,
            activation: str = "silu",
        ) -> Any:
            return hidden_states * 2

        registry.register_many([implementation("fused_experts", v, named) for v in "ab"])
        op = resolve_op("fused_experts")
        compiled, graphs = self.compiled(torch, lambda x: op(x, x, x, x, x, activation="gelu"))
        assert compiled(torch.ones(2)).tolist() == [2, 2]
        assert len(graphs) == 1


def with_modules(monkeypatch: pytest.MonkeyPatch, **modules: Any) -> None:
    for name, values in modules.items():
        module = types.ModuleType(name.replace("__", "."))
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, module.__name__, module)


def distributed(ranks: int, *, initialized: bool = True, available: bool = True) -> dict[str, Any]:
    return {
        "is_available": lambda: available,
        "is_initialized": lambda: initialized,
        "get_world_size": lambda: ranks,
    }


@pytest.mark.parametrize("op_name", ["silu_and_mul", "moe_sum"])
def test_one_of_several_ranks_raises(
    registry: OpRegistry, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, op_name: str
) -> None:
    with_modules(monkeypatch, torch__distributed=distributed(2))
    args = (1,) if op_name == "silu_and_mul" else (1, Buffer(1.0))
    ran = []

    def fails(*_: Any, **__: Any) -> Any:
        raise ValueError("of a")

    registry.register_many(
        [implementation(op_name, "a", fails), implementation(op_name, "b", lambda *_, **__: ran.append("b"))]
    )
    with pytest.raises(ValueError, match="of a") as caught:
        run(op_name, *args)
    assert "one rank of several" in caught.value.__notes__[0]
    assert (ran, set_aside()) == ([], "")


@pytest.mark.parametrize(
    "group",
    [distributed(1), distributed(2, initialized=False), distributed(2, available=False)],
    ids=["one rank", "no group", "not built in"],
)
def test_a_rank_alone_goes_on(
    registry: OpRegistry, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, group: dict[str, Any]
) -> None:
    with_modules(monkeypatch, torch__distributed=group)
    failing_then_good(registry)
    assert run("silu_and_mul", 1) == "b"


def test_several_ranks_may_still_refuse(
    registry: OpRegistry, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal looks at the arguments alone, so that every rank refuses alike."""
    with_modules(monkeypatch, torch__distributed=distributed(2))
    three_sums(registry, NotImplementedError(), None)
    assert run("moe_sum", 0, Buffer(1.0)) == "b"


@pytest.mark.parametrize("op_name", ["silu_and_mul", "moe_sum"])
def test_capture_raises_and_makes_no_copies(
    registry: OpRegistry, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, op_name: str
) -> None:
    device = types.SimpleNamespace(is_initialized=lambda: True, is_current_stream_capturing=lambda: True)
    with_modules(monkeypatch, torch={"get_device_module": lambda: device})
    out = Buffer(1.0)
    args = (1,) if op_name == "silu_and_mul" else (1, out)

    def fails(*_: Any, **__: Any) -> Any:
        raise ValueError("of a")

    registry.register_many(
        [implementation(op_name, "a", fails), implementation(op_name, "b", lambda *_, **__: None)]
    )
    with pytest.raises(ValueError, match="of a") as caught:
        run(op_name, *args)
    assert "while a graph is captured" in caught.value.__notes__[0]
    assert (out.clones, set_aside()) == (0, "")


def test_two_real_ranks(torch: Any, tmp_path: Path) -> None:
    code = textwrap.dedent(
        """
        import sys
        import torch.distributed as dist
        from vllm_fl.dispatch import *
        rank, rendezvous = int(sys.argv[1]), sys.argv[2]
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
        def fails(x): raise ValueError("of a")
        registry = OpRegistry()
        registry.register_many([
            OpImpl("silu_and_mul", "vendor.a", "vendor", fails, "a", 400),
            OpImpl("silu_and_mul", "vendor.b", "vendor", lambda x: x, "b"),
        ])
        op = OpManager(registry).resolve("silu_and_mul")
        try:
            op(1)
        except ValueError as error:
            print(error.__notes__[0])
        dist.destroy_process_group()
        print(op(1))
        """
    )
    source = tmp_path / "rank.py"
    source.write_text(code)
    path = str(Path(vllm_fl.__file__).parents[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, str(source), str(rank), str(tmp_path / "rendezvous")],
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        out, err = rank.communicate(timeout=600)
        assert rank.returncode == 0, err
        note, result = out.splitlines()
        assert "one rank of several" in note
        assert result == "1"  # alone again


# -- threads ----------------------------------------------------------------------------


@pytest.mark.parametrize("chain", ["ab", "abc", "abcd"])
@pytest.mark.parametrize("op_name", ["silu_and_mul", "moe_sum"])
def test_sixteen_threads_hit_the_first_failure_at_once(
    registry: OpRegistry,
    run: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
    chain: str,
    op_name: str,
) -> None:
    """All but the last of the chain fail, with all threads inside."""
    barriers = {vendor: threading.Barrier(16) for vendor in chain[:-1]}
    seen: list[Any] = []

    def fails(vendor: str) -> Callable[..., Any]:
        def fn(*args: Any, **_: Any) -> Any:
            barriers[vendor].wait(300)
            if op_name == "moe_sum":
                args[1].values[0] = 99.0
            raise ValueError(vendor)

        return fn

    def good(*args: Any, **_: Any) -> Any:
        if op_name == "moe_sum":
            seen.append(args[1].values[0])
        return args[0]

    fns = [*map(fails, chain[:-1]), good]
    registry.register_many([implementation(op_name, v, fn) for v, fn in zip(chain, fns, strict=True)])
    results: dict[int, Any] = {}
    if run is not call_op:
        run_once = resolve_op(op_name)
        run = lambda _, *args: run_once(*args)  # noqa: E731

    def one(number: int) -> None:
        args = (number,) if op_name == "silu_and_mul" else (number, Buffer(1.0))
        try:
            results[number] = run(op_name, *args)
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=one, args=(number,)) for number in range(16)]
    with caplog.at_level(logging.WARNING):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
    assert results == {number: number for number in range(16)}
    assert set(seen) <= {1.0}
    assert set_aside() == warned(caplog) == chain[:-1]


def test_a_thread_that_fails_after_another_set_the_first_aside(registry: OpRegistry) -> None:
    """Two calls are inside `a`; the second comes back when `a` is set aside already."""
    inside, go_on = threading.Event(), threading.Event()

    def fails(x: int) -> Any:
        if x == 1:
            inside.set()
            assert go_on.wait(300)
        raise ValueError("of a")

    registry.register_many(
        [implementation("silu_and_mul", "a", fails), implementation("silu_and_mul", "b", lambda x: x)]
    )
    op = resolve_op("silu_and_mul")
    results = []

    def slow() -> None:
        try:
            results.append(op(1))
        except ValueError as error:
            results.append(error)

    thread = threading.Thread(target=slow)
    thread.start()
    assert inside.wait(300)
    assert op(2) == 2
    assert set_aside() == "a"
    go_on.set()
    thread.join(300)
    assert results == [1]


# -- parameters that an implementation lacks -----------------------------------------------


def rotary(query: Any, key: Any, cos: Any, sin: Any, position_ids: Any, *more: Any) -> Any:
    return "whole", more


class TestLackingParameters:
    def old_rotary(
        self, query: Any, key: Any, cos: Any, sin: Any, position_ids: Any, rotary_interleaved: bool = False
    ) -> Any:
        return "old", rotary_interleaved

    @pytest.mark.parametrize("strict", [False, True])
    def test_a_hint_is_dropped(self, registry: OpRegistry, run: Callable[..., Any], strict: bool) -> None:
        def without_hint(
            query: Any,
            key: Any,
            cos: Any,
            sin: Any,
            position_ids: Any,
            rotary_interleaved: bool = False,
            inplace: bool = True,
        ) -> Any:
            return "no hint", rotary_interleaved, inplace

        registry.register_many(
            [
                implementation("rotary_embedding", "a", without_hint),
                implementation("rotary_embedding", "b", rotary),
            ]
        )
        set_global_policy(SelectionPolicy(strict=strict))
        table = Buffer(1.0)
        assert run("rotary_embedding", 1, 2, 3, 4, 5, cos_sin_cache=table) == ("no hint", False, True)
        assert run("rotary_embedding", 1, 2, 3, 4, 5, True, False, table) == ("no hint", True, False)
        assert set_aside() == ""

    def test_another_value_than_the_default_is_refused(
        self, registry: OpRegistry, run: Callable[..., Any]
    ) -> None:
        registry.register_many(
            [
                implementation("rotary_embedding", "a", self.old_rotary),
                implementation("rotary_embedding", "b", rotary),
            ]
        )
        assert run("rotary_embedding", 1, 2, 3, 4, 5) == ("old", False)
        assert run("rotary_embedding", 1, 2, 3, 4, 5, True) == ("old", True)
        assert run("rotary_embedding", 1, 2, 3, 4, 5, inplace=True) == ("old", False)
        assert run("rotary_embedding", 1, 2, 3, 4, 5, inplace=False) == ("whole", (False, False, None))
        assert run("rotary_embedding", 1, 2, 3, 4, 5, True, False, 7) == ("whole", (True, False, 7))
        assert set_aside() == ""

    def test_nothing_else_takes_it(self, registry: OpRegistry, run: Callable[..., Any]) -> None:
        registry.register_impl(implementation("rotary_embedding", "a", self.old_rotary))
        with pytest.raises(
            NotImplementedError, match=r"old_rotary does not take 'inplace', so only its default True"
        ):
            run("rotary_embedding", 1, 2, 3, 4, 5, inplace=False)

    def test_defaults_are_those_of_the_contract(self, registry: OpRegistry, run: Callable[..., Any]) -> None:
        """Also where an implementation has others: every candidate gets the same arguments."""

        def gelu(x: Any, approximate: str = "tanh") -> Any:
            return approximate

        registry.register_many([implementation("gelu_and_mul", v, gelu) for v in "ab"])
        assert run("gelu_and_mul", 1) == "none"
        assert run("gelu_and_mul", 1, "tanh") == run("gelu_and_mul", 1, approximate="tanh") == "tanh"

    def test_defaults_of_the_contract_hold_for_a_plain_callable(self, registry: OpRegistry) -> None:
        def gelu(x: Any, approximate: str = "tanh") -> Any:
            return approximate

        registry.register_impl(implementation("gelu_and_mul", "a", gelu))
        assert call_op("gelu_and_mul", 1) == "none"
        set_global_policy(STRICT)
        assert call_op("gelu_and_mul", 1) == "none"

    def test_keyword_only_parameters(self, registry: OpRegistry, run: Callable[..., Any]) -> None:
        def old(hidden_states: Any, w1: Any, w2: Any, topk_weights: Any, topk_ids: Any) -> Any:
            return "old"

        def positional(
            hidden_states: Any, w1: Any, w2: Any, topk_weights: Any, topk_ids: Any, activation: str = "silu"
        ) -> Any:
            return "positional", activation

        def whole(hidden_states: Any, w1: Any, w2: Any, topk_weights: Any, topk_ids: Any, **more: Any) -> Any:
            return "whole", more

        registry.register_many(
            [
                implementation("fused_experts", v, fn)
                for v, fn in zip("abc", (old, positional, whole), strict=True)
            ]
        )
        five = (1, 2, 3, 4, 5)
        assert run("fused_experts", *five) == "old"
        assert run("fused_experts", *five, activation="silu", expert_map=None) == "old"
        assert run("fused_experts", *five, activation="gelu") == ("positional", "gelu")
        name, more = run("fused_experts", *five, activation="gelu", expert_map=7)
        assert name == "whole"
        assert more == {
            "activation": "gelu",
            "apply_router_weight_on_input": False,
            "global_num_experts": -1,
            "expert_map": 7,
        }
        with pytest.raises(TypeError, match="positional"):
            run("fused_experts", *five, "gelu")

    def test_an_attention_backend_from_an_older_guide(
        self, registry: OpRegistry, run: Callable[..., Any]
    ) -> None:
        """The selector only helps; a method that does not take it is as good."""
        registry.register_impl(
            implementation("attention_backend", "a", lambda use_mla=False, use_sparse=False: "a.Backend")
        )
        assert run("attention_backend") == "a.Backend"
        assert run("attention_backend", True, selector=object()) == "a.Backend"

    def test_parameters_that_are_keyword_only_in_the_implementation(
        self, registry: OpRegistry, run: Callable[..., Any]
    ) -> None:
        def gelu(x: Any, *, approximate: str = "none") -> Any:
            return x, approximate

        registry.register_impl(implementation("gelu_and_mul", "a", gelu))
        assert run("gelu_and_mul", 1, "tanh") == (1, "tanh")

    def test_variadic_implementations(self, registry: OpRegistry, run: Callable[..., Any]) -> None:
        def positional(query: Any, key: Any, cos: Any, sin: Any, position_ids: Any, *more: Any) -> Any:
            return more

        def named(query: Any, key: Any, cos: Any, sin: Any, position_ids: Any, **more: Any) -> Any:
            return more

        registry.register_impl(implementation("rotary_embedding", "a", positional))
        assert run("rotary_embedding", 1, 2, 3, 4, 5, cos_sin_cache=8) == (False, True, 8)
        other = OpRegistry()
        other.register_impl(implementation("rotary_embedding", "a", named))
        assert OpManager(other).call("rotary_embedding", 1, 2, 3, 4, 5, inplace=False) == {
            "rotary_interleaved": False,
            "inplace": False,
            "cos_sin_cache": None,
        }

    def test_an_optional_parameter_of_its_own_gets_nothing_of_the_contract(
        self, registry: OpRegistry, run: Callable[..., Any]
    ) -> None:
        def norm(x: Any, residual: Any, weight: Any, block: int = 128, epsilon: float = 1e-6) -> Any:
            return block, epsilon

        registry.register_impl(implementation("rms_norm", "a", norm))
        assert run("rms_norm", 1, None, None, 0.5) == (128, 0.5)

    @pytest.mark.parametrize(
        "supports",
        [
            lambda query, key, cos, sin, position_ids: cos == 3,
            lambda query, key, cos, sin, position_ids, rotary_interleaved=False: cos == 3,
            lambda q, k, *_: (q, k) == (1, 2),
            lambda *args: args[2] == 3,
            lambda cos, **_: cos == 3,
        ],
    )
    def test_predicates_may_lack_parameters(
        self, registry: OpRegistry, run: Callable[..., Any], supports: Callable[..., Any]
    ) -> None:
        registry.register_many(
            [
                implementation("rotary_embedding", "a", rotary, supports=supports),
                implementation("rotary_embedding", "b", lambda *_, **__: "b"),
            ]
        )
        assert run("rotary_embedding", 1, 2, 3, 4, 5, inplace=False)[0] == "whole"
        assert run("rotary_embedding", 0, 2, 0, 4, 5, inplace=False) == "b"
        assert set_aside() == ""

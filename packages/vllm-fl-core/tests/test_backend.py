"""A backend: what it registers, and when it is available."""

from __future__ import annotations

import functools
import signal
import sys
import threading
from typing import TYPE_CHECKING
from typing import Any

import pytest

from vllm_fl.dispatch import Backend
from vllm_fl.dispatch import BackendImplKind
from vllm_fl.dispatch import Operators
from vllm_fl.dispatch import OpImpl
from vllm_fl.dispatch import OpManager
from vllm_fl.dispatch import OpRegistry
from vllm_fl.dispatch import RegistrationError
from vllm_fl.dispatch import implementation
from vllm_fl.dispatch import operator
from vllm_fl.dispatch.backend import forget_availability

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

OP = "silu_and_mul"


class Acme(Backend):
    """Its answer, or what it raises, is given to it; it counts how often it is asked."""

    name = "acme"

    def __init__(self, answer: Any = True, missing: Any = None) -> None:
        self.answer = answer
        self.lacks = missing
        self.asked = 0

    def is_available(self) -> bool:
        self.asked += 1
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer  # type: ignore[no-any-return]

    def missing(self, op_name: str) -> str | None:
        if isinstance(self.lacks, BaseException):
            raise self.lacks
        return f"it has no {op_name}" if op_name == self.lacks else None

    def silu_and_mul(self, x: Any) -> Any:
        return x

    def moe_sum(self, inp: Any, out: Any) -> Any:
        return out


def impl_of(fn: Callable[..., Any]) -> OpImpl:
    return OpImpl(OP, "vendor.acme", BackendImplKind.VENDOR, fn, "acme")


ANSWERS = [
    (True, None),
    (1, None),
    (False, "Acme.is_available() is False"),
    (None, "Acme.is_available() is None"),
    (0, "Acme.is_available() is 0"),
    ("the device is busy", "the device is busy"),
    ("", "Acme.is_available() is ''"),
    (ImportError("libacme.so: cannot open"), "ImportError: libacme.so: cannot open"),
    (
        ModuleNotFoundError("No module named 'acme_npu'", name="acme_npu"),
        "acme_npu is not installed: No module named 'acme_npu'",
    ),
    (
        ModuleNotFoundError("No module named 'acme_npu.ops'", name="acme_npu.ops"),
        "acme_npu is not installed: No module named 'acme_npu.ops'",
    ),
    (RuntimeError("driver 5 is too old"), "RuntimeError: driver 5 is too old"),
    (ValueError(), "ValueError"),
    (AssertionError("x"), "AssertionError: x"),
    (SystemExit(2), "SystemExit: 2"),
    (SystemExit(), "SystemExit"),
]


@pytest.mark.parametrize(("answer", "reason"), ANSWERS)
def test_the_answer_is_the_reason_and_asked_for_once(answer: Any, reason: str | None) -> None:
    backend = Acme(answer)
    impls = backend.implementations()
    for _ in range(3):
        for impl in impls:
            assert impl.unavailable_reason() == reason
            assert impl.is_available() is (reason is None)
    assert backend.asked == 1
    forget_availability()
    assert impls[0].unavailable_reason() == reason
    assert backend.asked == 2


class Interrupted(Acme):
    def is_available(self) -> bool:
        if self.answer:
            signal.raise_signal(self.answer)
        return True


def test_an_interrupt_is_no_reason() -> None:
    """Ctrl-C ends the program in the middle of a question, and the question is asked again."""
    backend = Interrupted(signal.SIGINT)
    impl = backend.implementations()[0]
    with pytest.raises(KeyboardInterrupt):
        impl.is_available()
    backend.answer = 0
    assert impl.is_available()


def test_a_signal_of_the_programs_own_is_no_reason() -> None:
    """vLLM ends its processes by a handler that raises SystemExit."""

    def end(number: int, frame: object) -> None:
        sys.exit(3)

    backend = Interrupted(signal.SIGTERM)
    before = signal.signal(signal.SIGTERM, end)
    try:
        with pytest.raises(SystemExit):
            backend.implementations()[0].is_available()
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("raised", [KeyboardInterrupt, GeneratorExit, SystemExit])
def test_what_a_backend_raises_itself_is_a_reason(raised: type[BaseException]) -> None:
    assert Acme(raised()).implementations()[0].unavailable_reason() == raised.__name__


def test_each_backend_answers_for_itself() -> None:
    impls = [Acme(answer).implementations()[0] for answer in (True, False, True)]
    assert [impl.is_available() for impl in impls] == [True, False, True]


def test_many_threads_ask_once() -> None:
    backend = Acme()
    impl = backend.implementations()[0]
    together = threading.Barrier(8)

    def ask() -> None:
        together.wait()
        impl.is_available()

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert backend.asked == 1


@pytest.mark.parametrize("answer", [True, False])
def test_a_property_is_taken_too(*, answer: bool) -> None:
    class Property(Acme):
        @property
        def is_available(self) -> bool:  # type: ignore[override]
            return answer

    assert Property().implementations()[0].is_available() is answer


def test_a_property_that_raises() -> None:
    class Property(Acme):
        @property
        def is_available(self) -> bool:  # type: ignore[override]
            raise OSError("no /dev/acme0")

    assert Property().implementations()[0].unavailable_reason() == "OSError: no /dev/acme0"


def test_what_one_operator_lacks() -> None:
    reasons = {i.op_name: i.unavailable_reason() for i in Acme(missing="moe_sum").implementations()}
    assert reasons == {"silu_and_mul": None, "moe_sum": "it has no moe_sum"}


@pytest.mark.parametrize(
    ("error", "reason"), [(KeyError("x"), "KeyError: 'x'"), (SystemExit(1), "SystemExit: 1")]
)
def test_missing_that_raises_is_the_reason(error: BaseException, reason: str) -> None:
    assert Acme(missing=error).implementations()[0].unavailable_reason() == reason


def test_missing_is_not_asked_of_what_is_not_there() -> None:
    assert Acme(answer=False, missing=OSError()).implementations()[0].unavailable_reason() == ANSWERS[2][1]


def wrapped(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def around(x: Any) -> Any:
        return method(x)

    return around


@pytest.mark.parametrize(
    "form",
    [
        lambda backend: backend.silu_and_mul,
        lambda backend: wrapped(backend.silu_and_mul),
        lambda backend: wrapped(wrapped(backend.silu_and_mul)),
        lambda backend: functools.partial(backend.silu_and_mul),
        lambda backend: functools.partial(wrapped(backend.silu_and_mul)),
        lambda backend: wrapped(functools.partial(backend.silu_and_mul)),
    ],
)
def test_whatever_is_around_a_method_it_knows_its_backend(form: Any) -> None:
    assert impl_of(form(Acme(answer=False))).unavailable_reason() == "Acme.is_available() is False"


def test_a_decorated_method_knows_its_backend() -> None:
    class Decorated(Acme):
        silu_and_mul = functools.wraps(Acme.silu_and_mul)(lambda self, x: x)

    backend = Decorated(answer=False)
    assert backend.silu_and_mul.__wrapped__ is Acme.silu_and_mul  # type: ignore[attr-defined]
    assert (impl_of(backend.silu_and_mul).unavailable_reason() or "").endswith(
        "Decorated.is_available() is False"
    )


def hooked(answer: Any) -> Callable[..., Any]:
    def kernel(x: Any) -> Any:
        return x

    kernel._is_available = lambda: answer  # type: ignore[attr-defined]
    return kernel


@pytest.mark.parametrize("answer", [True, False])
@pytest.mark.parametrize("form", [lambda fn: fn, wrapped, lambda fn: wrapped(wrapped(fn)), functools.partial])
def test_a_function_carries_its_own_question(form: Any, *, answer: bool) -> None:
    impl = impl_of(form(hooked(answer)))
    assert impl.is_available() is answer
    assert impl.is_available() is answer


def test_a_hook_that_is_a_backends_method() -> None:
    backend = Acme(answer=OSError("gone"))
    kernel = hooked(True)
    kernel._is_available = backend.is_available  # type: ignore[attr-defined]
    assert impl_of(kernel).unavailable_reason() == "OSError: gone"
    assert impl_of(wrapped(kernel)).unavailable_reason() == "OSError: gone"
    assert backend.asked == 1


def test_a_plain_function_is_available() -> None:
    assert impl_of(lambda x: x).unavailable_reason() is None
    assert impl_of(print).unavailable_reason() is None


# -- what a backend registers ----------------------------------------------------------------


def test_the_overridden_operators_are_registered() -> None:
    backend = Acme()
    impls = backend.implementations()
    assert [(i.op_name, i.impl_id, i.kind, i.vendor, i.priority) for i in impls] == [
        ("silu_and_mul", "vendor.acme", "vendor", "acme", 100),
        ("moe_sum", "vendor.acme", "vendor", "acme", 100),
    ]
    assert impls[0].fn == backend.silu_and_mul


def test_inherited_operators_are_registered_too() -> None:
    class Child(Acme):
        name = "child"

        def gelu_and_mul(self, x: Any, approximate: str = "none") -> Any:
            return x

    assert {i.op_name for i in Child().implementations()} == {"silu_and_mul", "gelu_and_mul", "moe_sum"}
    assert {i.impl_id for i in Child().implementations()} == {"vendor.child"}


def test_a_kind_for_every_vendor() -> None:
    class Everywhere(Acme):
        name = "numpy"
        kind = BackendImplKind.REFERENCE

    (impl, _) = Everywhere().implementations()
    assert (impl.impl_id, impl.kind, impl.vendor, impl.priority) == ("reference.numpy", "reference", None, 50)


def test_a_vendor_of_another_name() -> None:
    class Other(Acme):
        vendor = "acme-corp"

    assert {i.impl_id for i in Other().implementations()} == {"vendor.acme-corp"}


def test_options_of_a_method() -> None:
    class Options(Acme):
        @implementation(
            supports=lambda x: "never", writes=("x",), traceable=True, graph_safe=True, priority=7
        )
        def silu_and_mul(self, x: Any) -> Any:
            return x

    impl, plain = Options().implementations()
    assert (impl.writes, impl.traceable, impl.graph_safe, impl.priority) == (("x",), True, True, 7)
    assert impl.supports is not None
    assert impl.supports(1) == "never"
    assert (plain.writes, plain.traceable, plain.graph_safe, plain.supports) == (None, False, False, None)


@pytest.mark.parametrize("name", ["Acme", "ac me", "", "acme/x"])
def test_a_bad_name(name: str) -> None:
    backend = type("Bad", (Acme,), {"name": name})()
    with pytest.raises(RegistrationError):
        backend.implementations()


def test_a_backend_needs_a_name_and_an_answer() -> None:
    with pytest.raises(TypeError, match="abstract"):
        type("Nameless", (Backend,), {"is_available": lambda self: True})()
    with pytest.raises(TypeError, match="abstract"):
        type("Mute", (Backend,), {"name": "mute"})()


def test_what_an_available_backend_lacks_is_told_and_not_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Partial(Backend):
        name = "partial"

        def is_available(self) -> bool:
            return True

        def missing(self, op_name: str) -> str | None:
            return "it was left out" if op_name == "silu_and_mul" else None

        def silu_and_mul(self, x: object) -> object:
            return x

        def gelu_and_mul(self, x: object, approximate: str = "none") -> object:
            return x

    registry = OpRegistry()
    registry.register_backend(Partial())
    reference = OpImpl("silu_and_mul", "reference.torch", BackendImplKind.REFERENCE, lambda x: x)
    registry.register_impl(reference)
    manager = OpManager(registry)
    decision = manager.explain("silu_and_mul")
    assert decision.impl_id == "reference.torch"
    (rejected,) = [c for c in decision.candidates if c.impl_id == "vendor.partial"]
    assert (rejected.status, rejected.reason) == ("missing", "not available: it was left out")
    assert manager.explain("gelu_and_mul").impl_id == "vendor.partial"
    assert not caplog.records


# -- one line for an operator -----------------------------------------------------------------------


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that is imported when something of it is chosen, and not before."""
    name = f"library_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(
        "asked = []\n"
        "def silu_and_mul(x): return ['silu', x]\n"
        "def supports(x): return x >= 0 or 'negative'\n"
        "def for_layer(x): asked.append(x); return x != 7 or 'seven'\n"
        "def no_such_argument(y, z): return y\n"
        "def my_op(x): return ['mine', x]\n"
        "value = 5\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return name


def registered(backend: Backend) -> OpManager:
    registry = OpRegistry()
    registry.register_backend(backend)
    return OpManager(registry)


def acme(**attributes: Any) -> Backend:
    none = {name: getattr(Operators, name) for name in ("silu_and_mul", "moe_sum")}
    return type("Named", (Acme,), {**none, **attributes})()


def test_an_implementation_is_named_and_loaded_when_it_is_chosen(library: str) -> None:
    backend = acme(
        silu_and_mul=implementation(
            f"{library}:silu_and_mul", supports=f"{library}:supports", writes=(), traceable=True
        )
    )
    manager = registered(backend)
    assert library not in sys.modules
    (impl,) = backend.implementations()
    assert (impl.backend, impl.writes, impl.traceable) == (backend, (), True)
    assert manager.call("silu_and_mul", 5) == ["silu", 5]
    with pytest.raises(NotImplementedError, match="negative"):
        manager.call("silu_and_mul", -1)
    assert backend.silu_and_mul(3) == ["silu", 3]  # as a method is called


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("{}:gone", "cannot be loaded: AttributeError: module '{}' has no attribute 'gone'"),
        ("no_such_library:f", "cannot be loaded: no_such_library is not installed"),
        ("{}:value", "cannot be loaded: TypeError: {}:value is 5, not a function"),
        ("{}:no_such_argument", "it does not take 'x'; the contract is silu_and_mul(x)"),
    ],
)
@pytest.mark.parametrize("what", ["target", "supports"])
def test_what_is_named_is_checked_when_it_is_loaded(
    library: str, target: str, reason: str, what: str
) -> None:
    names = {"target": f"{library}:silu_and_mul", "supports": None, what: target.format(library)}
    manager = registered(acme(silu_and_mul=implementation(names["target"], supports=names["supports"])))
    decision = manager.explain("silu_and_mul")
    if what == "supports" and target.endswith("no_such_argument"):
        reason = "its predicate {}:no_such_argument cannot be called: it takes 'z' at a place"
    assert decision.impl_id is None
    assert reason.format(library) in decision.candidates[0].reason


def test_a_named_implementation_asks_its_backend(library: str) -> None:
    class Away(Acme):
        silu_and_mul = implementation(f"{library}:silu_and_mul")

    manager = registered(Away(answer=OSError("no card")))
    assert manager.explain("silu_and_mul").candidates[0].reason == "not available: OSError: no card"
    assert library not in sys.modules


@pytest.mark.parametrize("by", ["name", "method"])
def test_a_marked_name_that_is_no_operator_is_an_error(library: str, by: str) -> None:
    mark = implementation(f"{library}:silu_and_mul") if by == "name" else implementation()(lambda self, x: x)
    with pytest.raises(RegistrationError) as caught:
        OpRegistry().register_backend(acme(silu_and_mull=mark))
    assert str(caught.value) == (
        "Named.silu_and_mull is marked with @implementation, and there is no operator 'silu_and_mull'. "
        "Did you mean 'silu_and_mul'? A new operator is declared there, with @operator."
    )


@pytest.mark.parametrize("by", ["name", "method"])
def test_an_operator_of_its_own_is_declared_by_its_method(library: str, by: str) -> None:
    def my_op(self: Any, x: int) -> int:
        """Return something of one's own."""
        return ["mine", x]

    target = f"{library}:my_op" if by == "name" else None
    manager = registered(acme(my_op=operator(hints=("x",))(implementation(target)(my_op))))
    assert manager.snapshot().operators["my_op"].doc == "Return something of one's own."
    assert manager.call("my_op", 4) == ["mine", 4]


# -- two questions --------------------------------------------------------------------------------------


def asked_of(library: str) -> list[Any]:
    return sys.modules[library].asked


def test_a_layers_question_is_asked_at_every_call_of_anybody_else(library: str) -> None:
    named = implementation(
        f"{library}:silu_and_mul", supports=f"{library}:supports", supports_layer=f"{library}:for_layer"
    )
    manager = registered(acme(silu_and_mul=named))
    assert [manager.call("silu_and_mul", x) for x in (1, 2)] == [["silu", 1], ["silu", 2]]
    assert asked_of(library) == [1, 2]
    with pytest.raises(NotImplementedError, match="seven"):
        manager.call("silu_and_mul", 7)
    with pytest.raises(NotImplementedError, match="negative"):
        manager.call("silu_and_mul", -3)
    assert asked_of(library)[:4] == [1, 2, 7, 7]  # once for the choice, once for its reason


def test_a_layer_asks_its_question_once(library: str) -> None:
    named = implementation(f"{library}:silu_and_mul", supports_layer=f"{library}:for_layer")
    manager = registered(acme(silu_and_mul=named))
    resolved = manager.resolve_with_native("silu_and_mul", lambda x: ["native", x], layer=[(1,), (2,)])
    assert resolved.decision.impl_id == "vendor.acme"
    before = len(asked_of(library))
    assert [resolved.fn(x) for x in (1, 7)] == [["silu", 1], ["silu", 7]]
    assert len(asked_of(library)) == before
    other = manager.resolve_with_native("silu_and_mul", lambda x: ["native", x], layer=[(7,)])
    assert other.fn(1) == ["native", 1]
    (refused,) = [c for c in other.decision.candidates if c.impl_id == "vendor.acme"]
    assert (refused.status, refused.reason) == ("not-this-layer", "does not take this layer's inputs: seven")
    both = manager.resolve_with_native("silu_and_mul", lambda x: ["native", x], layer=[(1,), (7,)])
    assert [both.fn(x) for x in (1, 7)] == [["silu", 1], ["native", 7]], (
        "it answers a layer's calls differently"
    )
    assert (resolved.is_settled, both.is_settled) == (True, False)

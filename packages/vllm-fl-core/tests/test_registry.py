"""Registration: what is refused and in what words, and that it is whole or nothing."""

from __future__ import annotations

import dataclasses
import sys
import threading
from typing import TYPE_CHECKING
from typing import Any

import pytest

from vllm_fl.dispatch import Backend
from vllm_fl.dispatch import BackendImplKind
from vllm_fl.dispatch import OpImpl
from vllm_fl.dispatch import OpManager
from vllm_fl.dispatch import OpRegistry
from vllm_fl.dispatch import RegistrationError
from vllm_fl.dispatch import UnknownOperatorError
from vllm_fl.dispatch import call_op
from vllm_fl.dispatch import get_default_manager
from vllm_fl.dispatch import operator
from vllm_fl.dispatch.types import Origin

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("no_plugins")

DEFAULT, VENDOR, REFERENCE = BackendImplKind.DEFAULT, BackendImplKind.VENDOR, BackendImplKind.REFERENCE
OP = "silu_and_mul"


def same(x: Any) -> Any:
    return x


def impl(op_name: str = OP, impl_id: str = "vendor.acme", fn: Any = same, **more: Any) -> OpImpl:
    return OpImpl(op_name, impl_id, VENDOR, fn, impl_id.split(".")[1], **more)


# -- one OpImpl ----------------------------------------------------------------------------

ID_FORM = "impl_id must be '<kind>.<name>' in lower case, such as 'vendor.acme' or 'reference.torch', not "

BAD = [
    (("Rms", "vendor.a", VENDOR, same, "a"), "op_name must be a name like 'rms_norm', not 'Rms'."),
    (("", "vendor.a", VENDOR, same, "a"), "op_name must be a name like 'rms_norm', not ''."),
    (("rms.norm", "vendor.a", VENDOR, same, "a"), "op_name must be a name like 'rms_norm', not 'rms.norm'."),
    ((None, "vendor.a", VENDOR, same, "a"), "op_name must be a name like 'rms_norm', not None."),
    ((OP, "vendor.a", "gpu", same, "a"), "kind must be a BackendImplKind, not 'gpu'."),
    ((OP, "vendor.a", None, same, "a"), "kind must be a BackendImplKind, not None."),
    ((OP, "vendor", VENDOR, same, "a"), f"{ID_FORM}'vendor'."),
    ((OP, "vendor.", VENDOR, same, "a"), f"{ID_FORM}'vendor.'."),
    ((OP, "vendor.Acme", VENDOR, same, "Acme"), f"{ID_FORM}'vendor.Acme'."),
    ((OP, "acme", VENDOR, same, "a"), f"{ID_FORM}'acme'."),
    ((OP, "flagos.x", DEFAULT, same), f"{ID_FORM}'flagos.x'."),
    ((OP, "vendor.a b", VENDOR, same, "a b"), f"{ID_FORM}'vendor.a b'."),
    ((OP, "vendor.a\n", VENDOR, same, "a"), f"{ID_FORM}'vendor.a\\n'."),
    ((OP, "vendor..a", VENDOR, same, "a"), f"{ID_FORM}'vendor..a'."),
    ((OP, 7, VENDOR, same, "a"), f"{ID_FORM}7."),
    ((OP, "vendor.a", DEFAULT, same), "an impl_id of kind DEFAULT begins with 'default'."),
    ((OP, "default.a", VENDOR, same, "a"), "an impl_id of kind VENDOR begins with 'vendor'."),
    ((OP, "vendor.a", VENDOR, same), "an implementation of kind VENDOR needs vendor=."),
    ((OP, "vendor.a", VENDOR, same, ""), "an implementation of kind VENDOR needs vendor=."),
    ((OP, "vendor.a", VENDOR, same, "b"), "impl_id of vendor 'b' begins with 'vendor.b'."),
    ((OP, "vendor.ab", VENDOR, same, "a"), "impl_id of vendor 'a' begins with 'vendor.a'."),
    ((OP, "default.a", DEFAULT, same, "a"), "vendor='a' belongs to kind VENDOR, not DEFAULT."),
    ((OP, "reference.a", REFERENCE, same, "a"), "vendor='a' belongs to kind VENDOR, not REFERENCE."),
    ((OP, "vendor.a", VENDOR, None, "a"), "fn must be a callable or 'module:function', not None."),
    ((OP, "vendor.a", VENDOR, "module", "a"), "fn must be a callable or 'module:function', not 'module'."),
    ((OP, "vendor.a", VENDOR, "a:b:c", "a"), "fn must be a callable or 'module:function', not 'a:b:c'."),
    ((OP, "vendor.a", VENDOR, same, "a", "high"), "priority must be an integer, not 'high'."),
    ((OP, "vendor.a", VENDOR, same, "a", True), "priority must be an integer, not True."),
    ((OP, "vendor.a", VENDOR, same, "a", 1.5), "priority must be an integer, not 1.5."),
]


@pytest.mark.parametrize(("arguments", "reason"), BAD)
def test_a_bad_implementation(arguments: tuple[Any, ...], reason: str) -> None:
    with pytest.raises(RegistrationError) as caught:
        OpImpl(*arguments)
    assert isinstance(caught.value, ValueError)
    assert str(caught.value) == f"OpImpl({arguments[0]!r}, {arguments[1]!r}): {reason}"


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"supports": "float16"}, "supports must be a callable, 'module:function' or None, not 'float16'."),
        ({"supports_layer": 5}, "supports_layer must be a callable, 'module:function' or None, not 5."),
        ({"writes": "x"}, "writes must be a tuple of argument names, not 'x'."),
    ],
)
def test_a_bad_keyword(more: dict[str, Any], reason: str) -> None:
    with pytest.raises(RegistrationError) as caught:
        impl(**more)
    assert str(caught.value).endswith(reason)


@pytest.mark.parametrize(
    ("kind", "impl_id", "vendor", "priority"),
    [
        (DEFAULT, "default.flagos", None, 150),
        (VENDOR, "vendor.acme", "acme", 100),
        (VENDOR, "vendor.acme.fast.v2", "acme", 100),
        (VENDOR, "vendor.acme-corp_2", "acme-corp_2", 100),
        (REFERENCE, "reference.torch", None, 50),
        ("vendor", "vendor.acme", "acme", 100),
        ("flagos", "default.flagos", None, 150),
    ],
)
def test_a_good_implementation(kind: Any, impl_id: str, vendor: str | None, priority: int) -> None:
    good = OpImpl(OP, impl_id, kind, same, vendor)
    assert (good.kind, good.priority) == (BackendImplKind(kind), priority)
    with pytest.raises(dataclasses.FrozenInstanceError):
        good.priority = 1  # type: ignore[misc]
    assert OpImpl(OP, impl_id, kind, same, vendor, 0).priority == 0


# -- signatures ------------------------------------------------------------------------------

GOOD_SIGNATURES: list[tuple[str, Callable[..., Any]]] = [
    ("silu_and_mul", lambda x: x),
    ("silu_and_mul", lambda x, /: x),
    ("silu_and_mul", lambda *args, **kwargs: args),
    ("silu_and_mul", lambda x, fast=True: x),
    ("silu_and_mul", lambda x, *, fast=True: x),
    ("gelu_and_mul", lambda x: x),  # written when there was no `approximate`
    ("gelu_and_mul", lambda x, approximate: x),
    ("gelu_and_mul", lambda x, *, approximate="tanh": x),
    ("rms_norm", lambda x, residual, weight, epsilon: x),
    ("rms_norm", lambda x, residual=None, weight=None, epsilon=1e-6: x),
    ("rotary_embedding", lambda query, key, cos, sin, position_ids: query),
    ("rotary_embedding", lambda query, key, cos, sin, position_ids, rotary_interleaved=False: query),
    ("rotary_embedding", lambda query, key, cos, sin, position_ids, inplace=True: query),
]

BAD_SIGNATURES: list[tuple[str, Callable[..., Any], str]] = [
    ("silu_and_mul", lambda: 0, "it does not take 'x'; the contract is silu_and_mul(x), defined in "),
    ("silu_and_mul", lambda y: y, "it does not take 'x'"),
    ("silu_and_mul", lambda x, y: x, "it requires 'y', which nobody passes"),
    ("silu_and_mul", lambda x, *, out: x, "it requires 'out', which nobody passes"),
    ("silu_and_mul", lambda **kwargs: 0, "it does not take 'x'"),
    ("silu_and_mul", lambda *args: 0, "it does not take 'x'"),  # x=... is a call too
    ("rms_norm", lambda x, weight, residual, epsilon: x, "its arguments stand in another order"),
    ("rms_norm", lambda x, weight, epsilon: x, "it does not take 'residual'"),
    ("rms_norm", lambda x, residual, weight, eps: x, "it does not take 'epsilon'"),
    ("rms_norm", lambda *args, epsilon: args, "it does not take 'x'"),
    ("gelu_and_mul", lambda approximate, x: x, "its arguments stand in another order"),
    (
        "rotary_embedding",
        lambda key, query, cos, sin, position_ids: 0,
        "its arguments stand in another order",
    ),
]


@pytest.mark.parametrize(("op_name", "fn"), GOOD_SIGNATURES)
def test_a_signature_that_fits(op_name: str, fn: Callable[..., Any]) -> None:
    OpRegistry().register_impl(impl(op_name, fn=fn))


@pytest.mark.parametrize(("op_name", "fn", "reason"), BAD_SIGNATURES)
def test_a_signature_that_does_not(op_name: str, fn: Callable[..., Any], reason: str) -> None:
    registry = OpRegistry()
    with pytest.raises(RegistrationError) as caught:
        registry.register_impl(impl(op_name, fn=fn))
    message = str(caught.value)
    assert message.startswith(f"vendor.acme of {op_name}: {reason}")
    assert f"the contract is {op_name}(" in message
    assert f"defined in {__file__}:{fn.__code__.co_firstlineno} as (" in message
    assert not registry.snapshot().impls_by_op


class Wrong(Backend):
    name = "acme"

    def is_available(self) -> bool:
        return True

    def silu_and_mul(self, x: Any) -> Any:
        return x

    def rms_norm(self, x: Any, weight: Any) -> Any:  # type: ignore[override]
        return x


def test_a_method_that_does_not_fit_its_contract() -> None:
    registry = OpRegistry()
    with pytest.raises(RegistrationError) as caught:
        registry.register_backend(Wrong())
    assert str(caught.value).startswith(
        "vendor.acme of rms_norm: it does not take 'residual'; the contract is "
        f"rms_norm(x, residual, weight, epsilon), defined in {__file__}:"
    )
    assert str(caught.value).endswith(" as (x, weight)")
    assert registry.snapshot().version == 0


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x,
        lambda x, /: x,
        lambda x, fast=True: x,
        lambda *, x: x,
        lambda *a, **k: (*a, *k.values())[0],
    ],
)
def test_a_call_may_name_its_arguments_whatever_the_signature(fn: Callable[..., Any]) -> None:
    registry = OpRegistry()
    registry.register_impl(impl(fn=fn))
    manager = OpManager(registry)
    assert manager.call(OP, 3) == 3
    assert manager.call(OP, x=3) == 3


def test_an_older_method_is_called_without_what_it_does_not_know() -> None:
    registry = OpRegistry()
    registry.register_impl(impl("gelu_and_mul", fn=lambda x: ("old", x)))
    manager = OpManager(registry)
    assert manager.call("gelu_and_mul", 1) == ("old", 1)
    assert manager.call("gelu_and_mul", 1, "none") == ("old", 1)
    with pytest.raises(NotImplementedError, match="does not take 'approximate', so only its default 'none'"):
        manager.call("gelu_and_mul", 1, "tanh")


@pytest.mark.parametrize(
    ("op_name", "writes", "reason"),
    [
        (OP, ("x",), "writes x, which the contract does not allow"),
        ("rms_norm", ("x", "weight", "epsilon"), "writes epsilon, weight, which the contract does not allow"),
        ("rms_norm", ("nothing",), "writes nothing, which the contract does not allow"),
    ],
)
def test_writes_that_the_contract_does_not_allow(op_name: str, writes: tuple[str, ...], reason: str) -> None:
    with pytest.raises(RegistrationError) as caught:
        OpRegistry().register_impl(impl(op_name, fn=lambda *args, **kwargs: args, writes=writes))
    assert str(caught.value) == f"vendor.acme of {op_name}: {reason}"


@pytest.mark.parametrize("writes", [(), ("x",), ["residual"], ("x", "residual"), None])
def test_writes_that_it_does(writes: Any) -> None:
    OpRegistry().register_impl(impl("rms_norm", fn=lambda *args, **kwargs: args, writes=writes))


# -- whole or nothing --------------------------------------------------------------------------


def test_one_bad_implementation_registers_nothing_and_every_bad_one_is_named() -> None:
    registry = OpRegistry()
    before = registry.snapshot()
    bad = [impl("rms_norm", fn=same), impl("moe_sum", fn=same), impl("gelu_and_mul")]
    with pytest.raises(RegistrationError) as caught:
        registry.register_many([impl(), *bad])
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in lines] == ["vendor.acme of rms_norm", "vendor.acme of moe_sum"]
    assert registry.snapshot() is before


@pytest.mark.parametrize("wrong", [None, "vendor.acme", Wrong()])
def test_what_is_no_implementation(wrong: Any) -> None:
    registry = OpRegistry()
    with pytest.raises(RegistrationError, match="is no OpImpl"):
        registry.register_many([impl(), wrong])
    assert registry.snapshot().version == 0


def test_an_iterator_that_raises_registers_nothing() -> None:
    def impls() -> Any:
        yield impl()
        raise ZeroDivisionError

    registry = OpRegistry()
    with pytest.raises(ZeroDivisionError):
        registry.register_many(impls())
    assert not registry.snapshot().impls_by_op


def test_an_id_is_taken_once() -> None:
    registry = OpRegistry()
    first = impl(origin=Origin("acme", "1.0", "acme"))
    registry.register_impl(first)
    registry.register_impl(first)  # the same again is the same
    assert registry.snapshot().impls_by_op[OP] == (first,)
    with pytest.raises(RegistrationError) as caught:
        registry.register_impl(impl(fn=lambda x: -x))
    assert str(caught.value) == (
        "vendor.acme of silu_and_mul: this id is registered already by acme 1.0 (entry point 'acme')"
    )
    registry.register_impl(impl("gelu_and_mul"))  # the id of another operator


def test_two_of_one_id_in_one_call() -> None:
    with pytest.raises(RegistrationError, match="this id is registered already"):
        OpRegistry().register_many([impl(), impl(fn=lambda x: -x)])


# -- snapshots ----------------------------------------------------------------------------------


def test_a_snapshot_never_changes() -> None:
    registry = OpRegistry()
    registry.register_impl(impl())
    before = registry.snapshot()
    with pytest.raises(TypeError):
        before.impls_by_op["moe_sum"] = ()  # type: ignore[index]
    with pytest.raises(TypeError):
        before.operators["mine"] = None  # type: ignore[index]
    with pytest.raises(AttributeError):
        before.impls_by_op[OP].append(impl())  # type: ignore[attr-defined]
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.version = 7  # type: ignore[misc]
    registry.register_many([impl(impl_id="vendor.b"), impl("gelu_and_mul")])
    after = registry.snapshot()
    assert (before.version, after.version) == (1, 2)
    assert [i.impl_id for i in before.impls_by_op[OP]] == ["vendor.acme"]
    assert [i.impl_id for i in after.impls_by_op[OP]] == ["vendor.acme", "vendor.b"]
    assert "gelu_and_mul" not in before.impls_by_op
    assert after.vendors() == {"acme", "b"}
    assert after.impl_ids() == {"vendor.acme", "vendor.b"}


def test_many_threads_register() -> None:
    registry = OpRegistry()
    together = threading.Barrier(8)

    def register(number: int) -> None:
        together.wait()
        for index in range(25):
            registry.register_impl(impl(impl_id=f"vendor.t{number}.i{index}"))
            registry.snapshot().impls_by_op[OP]

    threads = [threading.Thread(target=register, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert len(registry.snapshot().impls_by_op[OP]) == registry.snapshot().version == 200


# -- declarations -------------------------------------------------------------------------------


@operator(mutates=("y",))
def axpy(self: Any, a: float, x: Any, y: Any) -> Any:
    """Add ``a * x`` to y!."""


def test_a_declaration_of_ones_own() -> None:
    registry = OpRegistry()
    registry.declare(axpy)
    registry.declare(axpy)
    with pytest.raises(RegistrationError, match=r"it does not take 'a'; the contract is axpy\(a, x, y\)"):
        registry.register_impl(impl("axpy", fn=lambda x, y: y))
    with pytest.raises(RegistrationError, match="writes x, which the contract does not allow"):
        registry.register_impl(impl("axpy", fn=lambda a, x, y: y, writes=("x",)))
    registry.register_impl(impl("axpy", fn=lambda a, x, y: a * x + y))
    assert OpManager(registry).call("axpy", 2, x=3, y=4) == 10
    assert "axpy" not in OpRegistry().snapshot().operators


def test_a_second_declaration_must_be_the_same() -> None:
    def rms_norm(self: Any, x: Any, weight: Any) -> Any: ...

    registry = OpRegistry()
    with pytest.raises(RegistrationError) as caught:
        registry.declare(operator()(rms_norm))
    assert str(caught.value).startswith("operator 'rms_norm' is declared already, as rms_norm(x")


@pytest.mark.parametrize("wrong", [same, "axpy", None])
def test_what_is_no_declaration(wrong: Any) -> None:
    with pytest.raises(RegistrationError, match=r"is no declaration: decorate it with @operator\."):
        OpRegistry().declare(wrong)


# -- late registrations ---------------------------------------------------------------------------


def test_a_late_registration_is_used_at_once() -> None:
    registry = get_default_manager().registry
    registry.register_impl(impl(fn=lambda x: "first"))
    assert call_op(OP, 1) == "first"
    registry.register_impl(impl(impl_id="vendor.b", fn=lambda x: "better", priority=200))
    assert call_op(OP, 1) == "better"
    with pytest.raises(UnknownOperatorError):
        call_op("new_op", 1)
    registry.register_impl(impl("new_op", fn=lambda x: "new"))
    assert call_op("new_op", 1) == "new"


def test_while_frozen_it_is_recorded_not_used_and_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    manager = get_default_manager()
    manager.registry.register_impl(impl(fn=lambda x: "first"))
    plan = manager.freeze()
    for name in ("b", "c"):
        manager.registry.register_impl(impl(impl_id=f"vendor.{name}", fn=lambda x: "better", priority=200))
    manager.registry.register_impl(impl("new_op", fn=lambda x: "new"))
    assert call_op(OP, 1) == "first"
    assert manager.explain(OP).impl_id == "vendor.acme"
    assert manager.freeze() is plan
    with pytest.raises(UnknownOperatorError):
        call_op("new_op", 1)
    assert len(manager.registry.snapshot().impls_by_op[OP]) == 3
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning == "something was registered after the dispatch was frozen; it is used after thaw()"
    manager.thaw()
    assert call_op(OP, 1) == "better"
    assert call_op("new_op", 1) == "new"


@pytest.mark.skipif(
    sys.version_info < (3, 14), reason="Python evaluates annotations when the function is defined"
)
def test_an_annotation_that_only_a_type_checker_resolves() -> None:
    """From Python 3.14 on such a function can be defined; its annotations are not ours to evaluate."""
    scope: dict[str, Any] = {}
    exec("def fn(x: OnlyForTypeCheckers) -> OnlyForTypeCheckers: return x", scope)
    registry = OpRegistry()
    registry.register_impl(impl(fn=scope["fn"]))
    assert OpManager(registry).call(OP, 1) == 1

"""What a plugin registers: what is wrong of it is left out and said, the rest is used."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING
from typing import Any

import pytest
from wheels import OP
from wheels import discover
from wheels import lines

from vllm_fl.dispatch import Backend
from vllm_fl.dispatch import BackendImplKind
from vllm_fl.dispatch import OpImpl
from vllm_fl.dispatch import OpRegistry
from vllm_fl.dispatch import RegistrationError
from vllm_fl.dispatch import call_op

if TYPE_CHECKING:
    from collections.abc import Callable

    from wheels import Site

HEAD = """
import functools, itertools
class Lies:
    "An object that says that it is an OpImpl, and answers everything."
    def __init__(self, of): object.__setattr__(self, "of", of)
    @property
    def __class__(self): return self.of
    def __getattr__(self, name): return getattr(impl("acme"), name)
class Raises:
    __eq__ = __hash__ = __bool__ = __str__ = __repr__ = __len__ = __iter__ = lambda *_: 1 / 0
    def __getattr__(self, name): raise RuntimeError(name)
class Long:
    def __repr__(self): return "x" * 10**8
class Acme(Backend):
    name = "acme"
    def is_available(self): return True
    def silu_and_mul(self, x): return "acme"
def gen(x): yield x
async def co(x): return x
async def agen(x): yield x
class Call:
    async def __call__(self, x): return x
    async def method(self, x): return x
def cycle(x): return x
cycle.__wrapped__ = cycle
def register(registry):
"""

#: The body of `register`, and what is said.
REGISTERED = {
    "a coroutine function": ("registry.register_impl(impl('acme', co))", "is asynchronous (async def)"),
    "a coroutine method": ("registry.register_impl(impl('acme', Call().method))", "is asynchronous"),
    "a partial of one": ("registry.register_impl(impl('acme', functools.partial(co)))", "is asynchronous"),
    "a callable that is one": ("registry.register_impl(impl('acme', Call()))", "is asynchronous"),
    "an asynchronous generator": ("registry.register_impl(impl('acme', agen))", "is asynchronous"),
    "a generator function": ("registry.register_impl(impl('acme', gen))", "is a generator function"),
    "a class": ("registry.register_impl(impl('acme', Acme))", "is a class, and calling it makes an instance"),
    "a builtin class": ("registry.register_impl(impl('acme', dict))", "is a class"),
    "no function": ("registry.register_impl(impl('acme', 5))", "fn must be a callable"),
    "a function that raises": ("registry.register_impl(impl('acme', Raises()))", "fn must be a callable"),
    "a long repr": ("registry.register_impl(impl('acme', Long()))", "fn must be a callable"),
    "a reference that is none": ("registry.register_impl(impl('acme', 'a b'))", "fn must be a callable"),
    "an asynchronous predicate": ("registry.register_impl(impl('acme', supports=co))", "supports: "),
    "a generator as a predicate": ("registry.register_impl(impl('acme', supports=gen))", "supports: "),
    "a class as a predicate": ("registry.register_impl(impl('acme', supports=Acme))", "supports: "),
    "a number as a predicate": ("registry.register_impl(impl('acme', supports=5))", "supports must be"),
    "writes without end": (
        "registry.register_impl(impl('acme', writes=itertools.repeat('x')))",
        "writes must be a tuple",
    ),
    "writes numbers": ("registry.register_impl(impl('acme', writes=(1,)))", "writes must be a tuple"),
    "writes that raise": ("registry.register_impl(impl('acme', writes=Raises()))", "ZeroDivisionError"),
    "writes a number": ("registry.register_impl(impl('acme', writes=5))", "TypeError"),
    "a vendor that is a number": (
        "OpImpl('silu_and_mul', 'vendor.5', 'vendor', co.__class__, 5)",
        "OpImpl('silu_and_mul', 'vendor.5')",
    ),
    "an operator that is no name": ("registry.register_impl(impl('acme', op=Raises()))", "op_name must be"),
    "an operator with an odd name": ("registry.register_impl(impl('acme', op='a\\nb'))", "op_name must be"),
    "an id of two lines": ("registry.register_impl(impl('acme\\nfake'))", "impl_id must be"),
    "an id with colours": ("registry.register_impl(impl('acme\\x1b[31m'))", "impl_id must be"),
    "a long id": ("registry.register_impl(impl('A' * 10**7))", "impl_id must be"),
    "a priority that raises": ("registry.register_impl(impl('acme', priority=Raises()))", "priority must be"),
    "a kind that raises": ("OpImpl('silu_and_mul', 'vendor.a', Raises(), len, 'a')", "kind must be"),
    "None": ("registry.register_impl(None)", "None is no OpImpl"),
    "an object that raises": ("registry.register_impl(Raises())", "is no OpImpl"),
    "an object without end": ("registry.register_impl(Long())", "is no OpImpl"),
    "a proxy": ("registry.register_impl(Lies(OpImpl))", "is no OpImpl"),
    "a proxy of a backend": ("registry.register_backend(Lies(Acme))", "is no Backend"),
    "a class of a backend": ("registry.register_backend(Acme)", "is a class; register an instance of it"),
    "a backend that raises": ("registry.register_backend(Raises())", "is no Backend"),
    "no backend": ("registry.register_backend(None)", "None is no Backend"),
    "a backend named 5": (
        "registry.register_backend(type('B', (Acme,), {'name': 5})())",
        "OpImpl('silu_and_mul', 'vendor.5')",
    ),
    "a backend whose name raises": (
        "registry.register_backend(type('B', (Acme,), {'name': property(lambda s: 1 / 0)})())",
        "ZeroDivisionError",
    ),
    "a backend whose vendor interrupts": (
        "def v(s): raise KeyboardInterrupt\n"
        "    registry.register_backend(type('B', (Acme,), {'vendor': property(v)})())",
        "KeyboardInterrupt",
    ),
    "a backend that is abstract": (
        "registry.register_backend(type('B', (Backend,), {'name': 'acme'})())",
        "TypeError: Can't instantiate abstract class",
    ),
    "a backend with a coroutine": (
        "registry.register_backend(type('B', (Acme,), {'silu_and_mul': Call.method})())",
        "is asynchronous",
    ),
    "a backend with a number": (
        "registry.register_backend(type('B', (Acme,), {'silu_and_mul': 5})())",
        "fn must be a callable",
    ),
    "no declaration": ("registry.declare(Raises())", "RuntimeError"),
    "an odd declaration": ("registry.declare(Long())", "is no declaration"),
    "a coroutine of implementations": ("registry.register_many(co(1))", "TypeError"),
    "an iterator that interrupts": (
        "def many():\n        yield impl('acme')\n        raise KeyboardInterrupt\n"
        "    registry.register_many(many())",
        "KeyboardInterrupt",
    ),
}


@pytest.mark.parametrize(("body", "said"), REGISTERED.values(), ids=REGISTERED)
@pytest.mark.filterwarnings("ignore:coroutine:RuntimeWarning")
def test_nothing_is_registered(site: Site, caplog: pytest.LogCaptureFixture, body: str, said: str) -> None:
    site.wheel("acme", f"{HEAD}    {body}\n")
    site.wheel("good")
    assert call_op(OP, 1) == "good"
    record = discover()["acme"]
    assert record.state == "failed"
    assert said in record.reason
    assert len(record.reason) < 3000
    (line,) = lines(caplog)
    assert line == f"plugin 'acme' of acme 1.0 is not used: {record.reason}"


@pytest.mark.parametrize(("body", "said"), REGISTERED.values(), ids=REGISTERED)
@pytest.mark.filterwarnings("ignore:coroutine:RuntimeWarning")
def test_what_else_it_registers_is_used(
    site: Site, caplog: pytest.LogCaptureFixture, body: str, said: str
) -> None:
    """Where the plugin goes on after what it was told."""
    tries = body.replace("\n", "\n    ")
    text = f"    try:\n        {tries}\n    except BaseException: pass\n"
    text += "    registry.register_impl(impl('acme.right'))\n"
    site.wheel("acme", HEAD + text)
    assert call_op(OP, 1) == "acme"
    assert discover()["acme"].success
    assert all(line.startswith("plugin 'acme' of acme 1.0: not all is used: ") for line in lines(caplog))


async def coroutine_function(x: Any) -> Any:
    return x


class Proxy:
    """What wrapt and unittest.mock make: an object that says that it is another one."""

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped

    @property
    def __class__(self) -> Any:
        return type(self._wrapped)

    @__class__.setter
    def __class__(self, value: Any) -> None:
        raise TypeError

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)


class Acme(Backend):
    name = "acme"  # type: ignore[assignment]

    def is_available(self) -> bool:
        return True

    def silu_and_mul(self, x: Any) -> Any:
        return x


def impl(fn: Any = lambda x: x) -> OpImpl:
    return OpImpl(OP, "vendor.acme", BackendImplKind.VENDOR, fn, "acme")


DIRECTLY: dict[str, Callable[[OpRegistry], Any]] = {
    "proxy": lambda registry: registry.register_impl(Proxy(impl())),  # type: ignore[arg-type]
    "proxy of a backend": lambda registry: registry.register_backend(Proxy(Acme())),  # type: ignore[arg-type]
    "a class": lambda registry: registry.register_impl(impl(int)),
    "a coroutine function": lambda registry: registry.register_impl(impl(coroutine_function)),
    "a partial": lambda registry: registry.register_impl(impl(functools.partial(coroutine_function))),
    "a class of a backend": lambda registry: registry.register_backend(Acme),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("register", DIRECTLY.values(), ids=DIRECTLY)
def test_what_is_registered_directly(register: Callable[[OpRegistry], Any]) -> None:
    registry = OpRegistry()
    with pytest.raises(RegistrationError):
        register(registry)
    assert registry.snapshot().impls_by_op == {}


@pytest.mark.parametrize("target", ["acme_lazy:Acme", "acme_lazy:co", "acme_lazy:gen"])
def test_what_is_loaded_late_is_no_function(site: Site, target: str) -> None:
    (site.folder / "acme_lazy.py").write_text(
        "class Acme: pass\nasync def co(x): return x\ndef gen(x): yield x\n"
    )
    site.wheel("acme", f"def register(registry): registry.register_impl(impl('acme', {target!r}))")
    site.wheel("good")
    assert call_op(OP, 1) == "good"


def test_a_function_that_wraps_itself(site: Site) -> None:
    """Whoever looks through its layers comes to an end."""
    site.wheel("acme", f"{HEAD}    registry.register_impl(impl('acme', cycle))\n")
    done: list[Any] = []
    thread = threading.Thread(target=lambda: done.append(call_op(OP, 1)), daemon=True)
    thread.start()
    thread.join(300)
    assert done == [1]

"""What a backend answers, and what an implementation is made of: a bad answer is a reason, said once."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from wheels import OP
from wheels import discover
from wheels import lines
from wheels import reason_of

from vllm_fl.dispatch import call_op
from vllm_fl.dispatch.common import log

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from wheels import Site

HEAD = """
class Raises:
    __eq__ = __hash__ = __bool__ = __str__ = __repr__ = __len__ = __iter__ = lambda *_: 1 / 0
class Text(str):
    def __getitem__(self, key): raise RuntimeError
    def __len__(self): raise RuntimeError
    def __format__(self, spec): raise RuntimeError
async def co(*_): return True
def gen(*_): yield True
class Odd(BaseException):
    def __str__(self): 1 / 0
def raises(error):
    def method(*_): raise error
    return method
class Acme(Backend):
    name = "acme"
    def is_available(self): return True
    def silu_and_mul(self, x): return "acme"
"""

AVAILABLE = {
    "it is asynchronous": ("co", "it is asynchronous (async def), and nobody awaits it"),
    "it is a generator": ("gen", "it is a generator function"),
    "its truth raises": ("lambda s: Raises()", "ZeroDivisionError"),
    "its truth is no truth": ("lambda s: type('T', (), {'__bool__': lambda s: 5})()", "TypeError"),
    "it is None": ("lambda s: None", "Acme.is_available() is None"),
    "it is a long text": ("lambda s: 'x' * 10**8", "(100,000,000 characters)"),
    "it is an odd text": ("lambda s: Text('no device')", "no device"),
    "it is an empty object": ("lambda s: {}", "Acme.is_available() is {}"),
    "it is NotImplemented": ("raises(NotImplementedError('later'))", "NotImplementedError: later"),
    "it takes more": ("lambda s, more: True", "TypeError"),
    "it is a property that raises": ("property(raises(KeyError('x')))", "KeyError: 'x'"),
    "it interrupts": ("raises(KeyboardInterrupt())", "KeyboardInterrupt"),
    "it exits": ("raises(SystemExit(0))", "SystemExit: 0"),
    "it ends a generator": ("raises(GeneratorExit())", "GeneratorExit"),
    "it raises what has no text": ("raises(Odd())", "Odd, whose text cannot be read"),
    "it raises a long text": ("raises(ValueError('x' * 10**8))", "(100,000,000 characters)"),
    "it lacks an odd module": ("raises(ModuleNotFoundError('x', name=5))", "ModuleNotFoundError: x"),
    "it recurses": ("lambda s: s.is_available()", "RecursionError"),
    "it calls itself": ("lambda s: __import__('vllm_fl.dispatch').dispatch.call_op('silu_and_mul', 1)", ""),
}

MISSING = {
    "it is asynchronous": ("co", "it is asynchronous"),
    "it is a generator": ("gen", "it is a generator function"),
    "it is a number": ("lambda s, op: 5", "Acme.missing('silu_and_mul'): it is 5, not a sentence or None"),
    "it is false": ("lambda s, op: False", "it is False, not a sentence or None"),
    "it raises": ("lambda s, op: 1 / 0", "ZeroDivisionError"),
    "it cannot be shown": ("lambda s, op: Raises()", "not a sentence or None"),
    "it interrupts": ("raises(KeyboardInterrupt())", "KeyboardInterrupt"),
    "it is a long text": ("lambda s, op: 'x' * 10**8", "(100,000,000 characters)"),
    "it takes nothing": ("lambda s: None", "TypeError"),
}

POLICIES = {
    "it raises": "property(lambda s: 1 / 0)",
    "it interrupts": "property(raises(KeyboardInterrupt()))",
    "it exits": "property(raises(SystemExit(0)))",
    "it raises what has no text": "property(raises(Odd()))",
    "it is a number": "5",
    "it is asynchronous": "property(co)",
    "it cannot be shown": "Raises()",
    "it has a key that is no name": "{5: 'x'}",
    "it has a key that raises": "{'prefer': Raises()}",
    "it has a wrong value": "{'prefer': 'nothing'}",
}

#: Bodies of `f`, an object that is registered as it is.
FUNCTIONS = {
    "it wraps itself": "def f(x): return 'acme'\nf.__wrapped__ = f",
    "two wrap each other": "def f(x): return 'acme'\ndef g(x): return 1\nf.__wrapped__, g.__wrapped__ = g, f",
    "it wraps a new one each time": (
        "class F:\n    def __call__(self, x): return 'acme'\n"
        "    @property\n    def __wrapped__(self): return F()\nf = F()"
    ),
    "a partial of itself": (
        "import functools\nf = functools.partial(len)\nf.__setstate__((f, ('x',), {}, None))\n"
        "f.__setstate__((lambda x: 'acme', (), {}, {'__wrapped__': f}))"
    ),
    "its attributes raise": (
        "class F:\n    def __call__(self, x): return 'acme'\n"
        "    def __getattr__(self, name): raise RuntimeError(name)\nf = F()"
    ),
    "its attributes interrupt": (
        "class F:\n    def __call__(self, x): return 'acme'\n"
        "    def __getattr__(self, name): raise KeyboardInterrupt\nf = F()"
    ),
    "it is a mock": "from unittest.mock import MagicMock\nf = MagicMock(return_value='acme')",
    "its hook interrupts": "def f(x): return 'acme'\nf._is_available = raises(KeyboardInterrupt())",
    "its hook is asynchronous": "def f(x): return 'acme'\nf._is_available = co",
    "its owner lies": (
        "class O:\n    __class__ = property(lambda s: 1 / 0)\n    def m(self, x): return 'acme'\nf = O().m"
    ),
}


def in_time(function: Callable[..., Any], *args: Any) -> Any:
    """Return what a function returns; fail where it does not come back."""
    done: list[Any] = []
    thread = threading.Thread(target=lambda: done.append(function(*args)), daemon=True)
    thread.start()
    thread.join(300)
    assert not thread.is_alive()
    return done[0]


@pytest.mark.parametrize(("answer", "reason"), AVAILABLE.values(), ids=AVAILABLE)
def test_is_available(site: Site, caplog: pytest.LogCaptureFixture, answer: str, reason: str) -> None:
    register = "def register(registry): registry.register_backend(Acme())\n"
    site.wheel("acme", f"{HEAD}\nAcme.is_available = {answer}\n{register}")
    site.wheel("good")
    assert discover()["acme"].success
    assert call_op(OP, 1) == "good"
    assert reason_of("acme").startswith("unavailable: not available: ")
    assert reason in reason_of("acme")
    assert len(reason_of("acme")) < 3000
    assert all(len(line) < 4000 for line in lines(caplog))


@pytest.mark.parametrize(("answer", "reason"), MISSING.values(), ids=MISSING)
def test_missing(site: Site, answer: str, reason: str) -> None:
    register = "def register(registry): registry.register_backend(Acme())\n"
    site.wheel("acme", f"{HEAD}\nAcme.missing = {answer}\n{register}")
    site.wheel("good")
    assert call_op(OP, 1) == "good"
    assert reason_of("acme").startswith("missing: not available: ")
    assert reason in reason_of("acme")
    assert len(reason_of("acme")) < 3000


@pytest.mark.parametrize("answer", POLICIES.values(), ids=POLICIES)
@pytest.mark.filterwarnings("ignore:coroutine:RuntimeWarning")
def test_default_policy(
    site: Site, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    monkeypatch.setattr(log, "_said", set())
    register = "def register(registry): registry.register_backend(Acme())\n"
    site.wheel("acme", f"{HEAD}\nAcme.default_policy = {answer}\n{register}")
    assert call_op(OP, 1) == "acme"
    (line,) = lines(caplog)
    assert "the packaged defaults of acme (acme 1.0)" in line
    assert line.endswith(("They are not used.", "It is left out, and the rest holds."))
    assert len(line) < 4000


@pytest.mark.parametrize("text", FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_function_is_odd(site: Site, text: str) -> None:
    """It runs, or the next one does; nobody looks at it for ever."""
    site.wheel("acme", f"{HEAD}\n{text}\ndef register(registry): registry.register_impl(impl('acme', f))\n")
    site.wheel("good")
    assert in_time(call_op, OP, 1) in ("acme", "good")
    assert discover()["good"].success


@pytest.mark.parametrize("raised", ["KeyboardInterrupt", "GeneratorExit", "SystemExit(0)", "Odd"])
def test_a_module_that_is_loaded_late_raises(site: Site, raised: str) -> None:
    (site.folder / "acme_lazy.py").write_text(
        f"class Odd(BaseException):\n    def __str__(self): 1 / 0\nraise {raised}\n"
    )
    site.wheel("acme", "def register(registry): registry.register_impl(impl('acme', 'acme_lazy:kernel'))")
    site.wheel("good")
    assert call_op(OP, 1) == "good"
    assert reason_of("acme").startswith(f"unavailable: cannot be loaded: {raised.partition('(')[0]}")

"""What somebody else's code raises, answers and offers, looked at so that nothing of it gets through.

The text of an exception may raise, or have gigabytes; ``KeyboardInterrupt`` may be an answer.
"""

from __future__ import annotations

import inspect
import signal
import sys
import threading
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.dispatch.common.suggest import shown

if TYPE_CHECKING:
    from types import TracebackType

#: More than this of a text that is not ours is no reason that anybody reads.
LONGEST = 2000
_LONGEST_TRACEBACK = 100_000

#: Where a statement, or a generator's ``throw``, raises; Python looks for signals elsewhere.
_RAISING = ("RAISE_VARARGS", "RETURN_GENERATOR", "YIELD_VALUE")


def shortened(text: str) -> str:
    """Return a text of somebody else's as a ``str`` of bearable length."""
    # A subclass may have a `len` and a slice of its own.
    length = str.__len__(text)
    if length <= LONGEST:
        return str.__getitem__(text, slice(0, length))
    return f"{str.__getitem__(text, slice(0, LONGEST))}... ({length:,} characters)"


def describe(error: BaseException) -> str:
    """Return an exception as a reason that a person reads; nothing raises here."""
    try:
        name = type(error).__name__
    except BaseException:  # noqa: BLE001 - a metaclass may do that
        return "an exception whose class has no name"
    try:
        text = shortened(str(error))
    except BaseException as second:  # noqa: BLE001 - SystemExit too
        raise_if_from_a_signal(second)
        return f"{name}, whose text cannot be read"
    absent = absent_module(error)
    if absent:
        return f"{shortened(absent).partition('.')[0]} is not installed: {text}"
    return f"{name}: {text}" if text else name


def absent_module(error: BaseException) -> str:
    """Return the module that a ``ModuleNotFoundError`` names; nothing of another exception."""
    # Its class is asked: an object may tell that it has another one, or raise.
    if not issubclass(type(error), ModuleNotFoundError):
        return ""
    try:
        name: object = error.name  # type: ignore[attr-defined]
    except BaseException:  # noqa: BLE001 - a property may do that
        return ""
    return name if isinstance(name, str) else ""


def is_loggable(error: BaseException) -> bool:
    """Whether the traceback of an exception can be written, and has a bearable length."""
    import traceback  # only when something has failed

    try:
        return sum(map(len, traceback.format_exception(error))) <= _LONGEST_TRACEBACK
    except BaseException as second:  # noqa: BLE001 - as of its text
        raise_if_from_a_signal(second)
        return False


def raise_if_from_a_signal(error: BaseException) -> None:
    """Raise the exception that is being handled again if a signal has raised it.

    Ctrl-C and a server's own handlers end the process in the middle of somebody else's code
    as they do elsewhere. ``raise KeyboardInterrupt`` or ``sys.exit()`` in a plugin is the
    plugin's, and is caught like any other exception.
    """
    if threading.current_thread() is not threading.main_thread():
        return  # Python runs the handlers of signals in the main thread alone
    handlers = _codes_of_handlers()
    last = traceback = sys.exc_info()[2]
    while traceback is not None:
        if traceback.tb_frame.f_code in handlers:
            raise error
        last, traceback = traceback, traceback.tb_next
    # Python's own handler of Ctrl-C is written in C and leaves no frame.
    if issubclass(type(error), KeyboardInterrupt) and last is not None and not _is_raised_there(last):
        raise error


def _codes_of_handlers() -> set[Any]:
    found = set()
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        handler = getattr(handler, "func", handler)  # functools.partial, as asyncio has it
        code = getattr(getattr(handler, "__func__", handler), "__code__", None)
        if code is not None:
            found.add(code)
    return found


def _is_raised_there(traceback: TracebackType) -> bool:
    import dis  # only for this question

    code, last = traceback.tb_frame.f_code.co_code, traceback.tb_lasti
    # From Python 3.13 on what a generator's first ``throw`` raises stands behind that instruction.
    if 2 <= last < len(code) and dis.opname[code[last]] == "POP_TOP":
        last -= 2
    return 0 <= last < len(code) and dis.opname[code[last]] in _RAISING


def unfit(fn: object) -> str | None:
    """Say why something that can be called is no function of ours to call; None if it is."""
    if isinstance(fn, type):
        return f"{shown(fn)} is a class, and calling it makes an instance"
    # A callable object has its code in `__call__`.
    for one in (fn, getattr(type(fn), "__call__", None)):  # noqa: B004 - looked at, not called
        if inspect.iscoroutinefunction(one) or inspect.isasyncgenfunction(one):
            return f"{shown(fn)} is asynchronous (async def), and nobody awaits it"
        if inspect.isgeneratorfunction(one):
            return f"{shown(fn)} is a generator function, and nobody iterates over it"
    return None


def left_undone(answer: object) -> str | None:
    """Say that an answer is code that has not run; None if it is not."""
    if inspect.iscoroutine(answer):
        answer.close()  # Python warns of one that nobody awaits
        return "it is asynchronous (async def), and nobody awaits it"
    if inspect.isgenerator(answer) or inspect.isasyncgen(answer):
        return "it is a generator function, and nobody iterates over it"
    return None

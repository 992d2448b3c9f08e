"""Processes that end with this one, whatever ends it.

Whoever is told to end by SIGTERM or SIGHUP, or by Ctrl-C, ends its children first, with
theirs. Where there is no time for that (SIGKILL), Linux ends the child itself.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from contextlib import suppress
from typing import TYPE_CHECKING
from typing import Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Sequence

#: What is told to processes that are to end, and that Python would end without a clean-up.
_SIGNALS = ("SIGTERM", "SIGHUP")
_PARENT = "VLLMFL_CHILD_OF"
_PR_SET_PDEATHSIG = 1


@contextmanager
def child(command: Sequence[str], env: dict[str, str], **more: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process in a session of its own; it and all that it has started is killed at the end.

    Args:
        command: the process; its module calls :func:`end_with_parent` first.
        env: its environment.
        **more: arguments of ``subprocess.Popen``.
    """
    with _signals_raise():
        process = subprocess.Popen(
            command, env={**env, _PARENT: str(os.getpid())}, start_new_session=True, **more
        )
        try:
            yield process
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Let the signals that would end this process at once raise SystemExit instead."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        for name in _SIGNALS:
            number = getattr(signal, name, None)
            # A handler of the program's own is left alone.
            if number is not None and signal.getsignal(number) is signal.SIG_DFL:
                before[number] = signal.signal(number, _end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int, frame: object) -> None:
    raise SystemExit(128 + number)  # as shells count it


def end_with_parent() -> None:
    """End this process when the one that started it by :func:`child` has ended, also by SIGKILL."""
    parent = os.environ.pop(_PARENT, "")
    if not parent or sys.platform != "linux":
        return
    import ctypes

    # Also without the interpreter's lock, which code that hangs may hold.
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if str(os.getppid()) != parent:
        os._exit(1)  # it has ended meanwhile

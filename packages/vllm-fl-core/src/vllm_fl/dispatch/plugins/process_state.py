"""What belongs to the user's program and is put back where a plugin changes it while it is loaded."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from contextlib import suppress
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.dispatch.variables import VARIABLES

if TYPE_CHECKING:
    from collections.abc import Iterator

_STREAMS = {"stdout": 1, "stderr": 2}


@contextmanager
def process_kept() -> Iterator[list[str]]:
    """Put back the standard streams, the current folder and the core's environment variables.

    A plugin that changes these would silence what is said, or answer for the user: what is
    chosen is what the variables said before, and a relative path in them means the same file.

    Yields:
        A list that is filled at the end with what was changed.
    """
    streams = {name: getattr(sys, name) for name in _STREAMS}
    variables = {name: os.environ.get(name) for name in VARIABLES}
    folder = _current_folder()
    changed: list[str] = []
    try:
        yield changed
    finally:
        changed += [f"sys.{name}" for name, stream in streams.items() if put_back(name, stream)]
        for name, value in variables.items():
            if os.environ.get(name) != value:
                changed.append(name)
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
        if folder is not None and _current_folder() != folder:
            changed.append("the current folder")
            with suppress(OSError):  # it may be gone
                os.chdir(folder)


def put_back(name: str, stream: Any) -> bool:
    """Make ``sys.stdout`` or ``sys.stderr`` what it was, and usable; say whether it was changed."""
    is_closed = stream is not None and _is_closed(stream)
    if not is_closed and getattr(sys, name) is stream:
        return False
    now = getattr(sys, name) if is_closed else stream
    # The second time it is the new one that was opened the first time.
    if is_closed and (now is stream or now is None or _is_closed(now)):
        now = _opened(name)
    setattr(sys, name, now)
    return True


def _current_folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:
        return None


def _is_closed(stream: Any) -> bool:
    try:
        return bool(stream.closed)
    except Exception:  # noqa: BLE001 - an object of the program's own
        return False


def _opened(name: str) -> Any:
    """Return a new stream where the old one was closed; Python leaves the file itself open."""
    try:
        return open(_STREAMS[name], "w", buffering=1, errors="backslashreplace", closefd=False)
    except OSError:
        return None

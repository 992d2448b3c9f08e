"""Work that is done once, by the thread that needs it first, while others wait.

It is no lock. What is done is somebody else's code: it imports modules, starts threads
and takes locks of its own, so that who waits for it may be who it waits for. A thread
that waits here looks whether it is waited for in its turn, and its patience has an end.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import TYPE_CHECKING

from vllm_fl.dispatch.errors import DispatchError

if TYPE_CHECKING:
    from types import FrameType

#: How long a thread waits for what another one does, before it raises.
PATIENCE_SECONDS = 120.0
_LOOK_EVERY_SECONDS = 0.01

# Which thread waits here for which; polled, because a fork could break a condition's lock.
_waiting: dict[int, int] = {}

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_waiting.clear)


class Work:
    """Something that this thread is about to do.

    Args:
        what: a name for messages, the subject of a sentence.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self.is_done = False
        self._thread = threading.current_thread().name
        self._ident = threading.get_ident()
        self._since = time.monotonic()

    @property
    def is_mine(self) -> bool:
        """Whether this thread does it."""
        return self._ident == threading.get_ident()

    def goes_on(self, what: str) -> None:
        """Note that the next part has begun; the patience of those who wait begins anew."""
        self.what, self._since = what, time.monotonic()

    def wait(self) -> str:
        """Wait until it is done, or until that would be for ever.

        Returns:
            ``"done"``; ``"import"`` if the thread that does it waits for a module that
            this thread is importing; ``"deadlock"`` if it waits for this thread otherwise.

        Raises:
            DispatchError: it takes too long. Whether the two wait for each other by a lock
                of somebody else's cannot be seen.
        """
        me, began = threading.get_ident(), time.monotonic()
        _waiting[me] = self._ident
        try:
            while not self.is_done:
                edge = _edge_to(me, self._ident)
                if edge:
                    return edge
                seconds = time.monotonic() - max(began, self._since)
                if seconds > PATIENCE_SECONDS:
                    raise DispatchError(
                        f"{self.what} has kept thread {self._thread!r} busy for {seconds:.0f} seconds. "
                        f"Thread {threading.current_thread().name!r} stops waiting for it: the two may wait "
                        "for each other. `vllm-fl doctor` tests each plugin by itself."
                    )
                time.sleep(_LOOK_EVERY_SECONDS)
            return "done"
        finally:
            _waiting.pop(me, None)


def _edge_to(me: int, ident: int | None) -> str:
    """Follow who waits for whom from a thread; say how this one is reached, or ``""``."""
    frames, seen, edge = sys._current_frames(), set[int](), "deadlock"
    frames.pop(me, None)  # this very frame, which would hold itself
    while ident is not None and ident not in seen:
        if ident == me:
            return edge
        seen.add(ident)
        if ident in _waiting:
            ident, edge = _waiting[ident], "deadlock"
        else:
            ident, edge = _blocker(frames.get(ident))
    return ""


def _blocker(frame: FrameType | None) -> tuple[int | None, str]:
    """Return the thread that a thread in ``frame`` joins, or whose import it waits for."""
    if frame is None:
        return None, ""
    code, owner = frame.f_code, frame.f_locals.get("self")
    if code.co_filename == "<frozen importlib._bootstrap>" and code.co_name == "acquire":
        return getattr(owner, "owner", None), "import"
    if code.co_filename == threading.__file__ and isinstance(owner, threading.Thread):
        return owner.ident, "deadlock"
    return None, ""

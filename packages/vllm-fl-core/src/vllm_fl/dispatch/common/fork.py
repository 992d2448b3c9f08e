"""What must be made anew in a forked child: locks, caches, choices.

A lock that another thread held when the process forked is never released in
the child. Every lock of this package is therefore a :class:`ForkSafeLock`, and
every object that keeps process-local state registers a hook here.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from typing import TYPE_CHECKING
from typing import Any
from typing import cast

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import MethodType
    from types import TracebackType

# Weak references, so that a manager made for a test does not live for ever. By
# number, so that threads add and remove without a lock, which a fork could break.
_hooks: dict[int, tuple[weakref.ref[Any], Callable[[Any], None]]] = {}
_numbers = itertools.count()


def after_fork_in_child(method: Callable[[], None]) -> None:
    """Call the bound ``method`` in every forked child, for as long as its object lives."""
    number, bound = next(_numbers), cast("MethodType", method)

    # `hooks` is bound here, because a module's globals are gone when the interpreter ends.
    def forget(_: weakref.ref[Any], hooks: dict[int, Any] = _hooks) -> None:
        hooks.pop(number, None)

    # No WeakMethod: that of an object in a dying cycle may print an error of its own.
    _hooks[number] = weakref.ref(bound.__self__, forget), bound.__func__


def _run_hooks() -> None:
    for ref, function in list(_hooks.values()):
        owner = ref()
        if owner is not None:
            function(owner)


class ForkSafeLock:
    """A re-entrant lock that is free in a forked child, whoever held it in the parent."""

    __slots__ = ("__weakref__", "_lock")

    def __init__(self) -> None:
        self._lock: Any = threading.RLock()
        after_fork_in_child(self._renew)

    def _renew(self) -> None:
        # The thread that forked may hold it (a plugin that forks while it is
        # asked for its availability): then it holds the new one as often.
        old, self._lock = self._lock, threading.RLock()
        while old._is_owned():
            old.release()
            self._lock.acquire()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_run_hooks)

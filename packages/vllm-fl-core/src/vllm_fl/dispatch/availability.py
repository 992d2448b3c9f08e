"""Whether a backend's library and device are here, asked once for a process.

Who is asked is an implementation's own backend. Plug-ins that register functions by hand
have two older manners: a method of a backend, whatever is wrapped around it, and a function
with a callable ``_is_available``.
"""

from __future__ import annotations

import abc
import functools
from typing import TYPE_CHECKING

from vllm_fl.dispatch.common.foreign import describe
from vllm_fl.dispatch.common.foreign import left_undone
from vllm_fl.dispatch.common.foreign import raise_if_from_a_signal
from vllm_fl.dispatch.common.foreign import shortened
from vllm_fl.dispatch.common.fork import ForkSafeLock
from vllm_fl.dispatch.common.fork import after_fork_in_child
from vllm_fl.dispatch.common.slow_blocks import Watch
from vllm_fl.dispatch.common.suggest import shown
from vllm_fl.dispatch.errors import DispatchError
from vllm_fl.dispatch.shared_work import Work

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Iterator

    from vllm_fl.dispatch.types import OpImpl

#: Wrappers of wrappers; no decorated function has as many.
_MOST_LAYERS = 100


class Library(abc.ABC):
    """What is asked whether its implementations can run in this process."""

    @abc.abstractmethod
    def is_available(self) -> bool:
        """Whether the library and its device are here.

        It is asked once per process, in the process that computes, never in a
        server's front end. To say why not, raise: the exception's text is the
        reason that people read.
        """

    def missing(self, op_name: str) -> str | None:
        """Say in a sentence what one operator lacks on an available backend, or None."""
        return None


class _Availability:
    """What each backend answered in this process.

    No lock is held while a backend is asked. Who asked first decides for all; the others wait.
    """

    def __init__(self) -> None:
        self._lock = ForkSafeLock()
        self._answers: dict[tuple[int, str], tuple[object, str | None]] = {}
        self._asking: dict[tuple[int, str], tuple[Work, ...]] = {}
        #: Another object after the answers were forgotten.
        self.era = object()
        #: Grows with every answer that holds for one call alone.
        self.provisional = 0
        after_fork_in_child(self._answers_of_parent)

    def _answers_of_parent(self) -> None:
        self.era = object()
        self._answers.clear()
        self._asking.clear()

    def reason(self, owner: object, question: str, ask: Callable[[], object]) -> str | None:
        """Return why the answer to a question is no, None where it is yes.

        Where the answer waits for this very thread, because a module that is imported for it
        resolves an operator, this thread asks too, and what it hears holds for its call alone.

        Raises:
            DispatchError: the answer waits for this thread otherwise, or for itself.
        """
        key = (id(owner), question)
        mine, how = Work(question), ""
        while True:
            with self._lock:
                found = self._answers.get(key)
                if found is not None:
                    return found[1]
                works = self._asking.get(key, ())
                nested = sum(work.is_mine for work in works)
                if not works or nested == 1 or (how == "import" and not nested):
                    self._asking[key] = (*works, mine)
                    break
            how = "deadlock" if nested else works[0].wait()
            if how == "deadlock":
                raise DispatchError(f"{question} uses an operator that is chosen by its answer")
        reason, is_first, is_answered = None, not works, False
        try:
            late = f"{question} has been running", "`vllm-fl doctor` tests it by itself."
            with Watch() as watch, watch.over(*late):
                reason = _answer(question, ask)
            is_answered = True
        finally:
            with self._lock:
                works = self._asking.pop(key, ())
                others = tuple(work for work in works if work is not mine)
                if others:
                    self._asking[key] = others
                if not is_first:
                    self.provisional += 1
                elif is_answered and mine in works:  # and nobody has forgotten the answers meanwhile
                    # The entry keeps `owner` alive, so its id is not used again.
                    self._answers[key] = (owner, reason)
                mine.is_done = True
        return reason

    def forget(self) -> None:
        with self._lock:
            self.era = object()
            self._answers.clear()
            self._asking.clear()


_availability = _Availability()


def forget_availability() -> None:
    """Ask every backend again the next time; for tests, and after a device appears."""
    _availability.forget()


def answers() -> object:
    """Return an object that is another one after the backends' answers were forgotten."""
    return _availability.era


def provisional_answers() -> int:
    """Return how many answers held for one call alone; a choice by such a one is not kept."""
    return _availability.provisional


def _answer(question: str, ask: Callable[[], object]) -> str | None:
    try:
        answer = ask()
        undone = left_undone(answer)
        if undone:
            return f"{question}: {undone}"
        if isinstance(answer, str):
            answer = shortened(answer)
            if answer:
                return answer
        return None if answer else f"{question} is {shown(answer)}"
    except BaseException as error:  # noqa: BLE001 - SystemExit too: a plugin must not end the process
        raise_if_from_a_signal(error)
        return describe(error)


def layers_of(fn: object) -> Iterator[object]:
    """Yield ``fn``, and what it is a partial or a wrapper of, from the outside in.

    An object may wrap itself, or make a new one whenever it is asked.
    """
    seen: set[int] = set()
    while fn is not None and id(fn) not in seen and len(seen) < _MOST_LAYERS:
        yield fn
        seen.add(id(fn))
        fn = fn.func if isinstance(fn, functools.partial) else getattr(fn, "__wrapped__", None)


def availability(impl: OpImpl) -> tuple[str | None, str | None]:
    """Say why ``impl`` cannot run in this process.

    Returns:
        Why its backend is not available, and, of an available one, what this
        operator lacks; None where there is nothing to say.
    """
    try:
        hook, backend = (None, impl.backend) if impl.backend is not None else _who_answers(impl.fn)
        owner, name = getattr(hook, "__self__", hook), getattr(hook, "__qualname__", "is_available")
        question = f"{name}()"
    except BaseException as error:  # noqa: BLE001 - an object may raise whatever is asked of it
        raise_if_from_a_signal(error)
        return describe(error), None
    if hook is not None:
        return _availability.reason(owner, question, hook), None
    if backend is None:
        return None, None

    def ask() -> object:
        # Plugins were seen to declare it as a property.
        answer: object = backend.is_available
        return answer() if callable(answer) else answer

    reason = _availability.reason(backend, f"{type(backend).__qualname__}.is_available()", ask)
    if reason is not None:
        return reason, None
    try:
        lacks: object = backend.missing(impl.op_name)
        undone = left_undone(lacks)
        if isinstance(lacks, str):
            return None, shortened(lacks) or None
        if undone or lacks is not None:
            question = f"{type(backend).__qualname__}.missing({impl.op_name!r})"
            return None, f"{question}: {undone or f'it is {shown(lacks)}, not a sentence or None'}"
        return None, None
    except BaseException as error:  # noqa: BLE001 - the reason, as above
        raise_if_from_a_signal(error)
        return None, describe(error)


def _who_answers(fn: object) -> tuple[Callable[[], object] | None, Library | None]:
    """Return the ``_is_available`` of a function or of what it wraps, or the backend whose method it is."""
    backend = None
    for layer in layers_of(fn):
        hook = getattr(layer, "_is_available", None)
        if callable(hook):
            return hook, None
        backend = backend if backend is not None else getattr(layer, "__self__", None)
    # Its class is asked, because a proxy may tell that it is another one.
    return None, backend if issubclass(type(backend), Library) else None

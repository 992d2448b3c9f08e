"""The callable that a resolved operator is, and what it does when one fails.

A resolved operator has one of two forms here (a third, opaque to a compiler,
wraps one of them in :mod:`vllm_fl.integration`):

*plain*
    the implementation itself: a strict policy and no predicate, or nothing to
    fall back to.
*guard*
    a function with the operator's own signature that calls the first candidate,
    and on a refusal or a failure the guard of the rest. The list "When one fails"
    in :mod:`vllm_fl.dispatch.manager` says when.

What Dynamo traces holds no lock, logger, clock or ``add_note``.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING
from typing import Any
from typing import Protocol

from vllm_fl.dispatch.calling import predicate
from vllm_fl.dispatch.calling import torch_state
from vllm_fl.dispatch.calling.binding import signature_of
from vllm_fl.dispatch.calling.fatal import is_fatal
from vllm_fl.dispatch.calling.generated import GUARD
from vllm_fl.dispatch.calling.generated import generated
from vllm_fl.dispatch.calling.refusal import is_promised
from vllm_fl.dispatch.common.foreign import describe
from vllm_fl.dispatch.errors import RefusedBeforeWriting

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Iterable
    from collections.abc import Sequence

    from vllm_fl.dispatch.declaration import Operator


class Failures(Protocol):
    """Who is told of failures and of first successes; an ``OpManager``."""

    def set_aside(self, op_name: str, impl_id: str, error: BaseException) -> None:
        """Do not choose the implementation for this operator again."""

    def is_proven(self, op_name: str, impl_id: str, kind: tuple[bool, ...] = ()) -> bool:
        """Whether it has succeeded once in this process, for a kind of arguments."""

    def prove(self, op_name: str, impl_id: str, kind: tuple[bool, ...] = ()) -> None:
        """Note its first success."""

    def bad_answer(self, op_name: str, impl_id: str, answer: str) -> None:
        """Note that its predicate returned neither a bool nor a sentence."""


@dataclass(frozen=True)
class Candidate:
    """A loaded implementation, ready to be called with the operator's arguments.

    Attributes:
        impl_id: its id.
        fn: takes the arguments of the contract, all of them.
        supports: what is asked at every call, or None.
        supports_layer: what is asked before it, unless it has been asked for the layer.
        writes: the arguments that it may write.
        traceable: Dynamo can trace it.
    """

    impl_id: str
    fn: Callable[..., Any]
    supports: Callable[..., Any] | None = None
    supports_layer: Callable[..., Any] | None = None
    writes: tuple[str, ...] = ()
    traceable: bool = False

    @functools.cached_property
    def predicates(self) -> tuple[Callable[..., Any], ...]:
        """What is asked at every call, in order."""
        return tuple(one for one in (self.supports_layer, self.supports) if one is not None)


# `_tried` says whose exception it is: by the time that it is looked at, another
# thread may have replaced `_first`.
_GUARD = """\
_tried = _first
try:
    return _tried({call})
except Exception as _error:
    return _recover(_error, _tried, {packed})"""

_ASKED = """\
_answer = {predicate}({call})
if _answer is True or _agrees(_answer):
"""

_GUARD_WITH_PREDICATES = """\
_tried = None
try:
{asked}
except Exception as _error:
    return _recover(_error, _tried, {packed})
return _rest({call})"""


def _asking(count: int) -> str:
    """Return the lines of a guard that asks so many predicates, one inside of the other."""
    lines = [
        "    " * depth + line
        for depth in range(1, count + 1)
        for line in _ASKED.format(predicate=f"_supports_{depth - 1}", call="{call}").splitlines()
    ]
    lines += ["    " * (count + 1) + line for line in ("_tried = _first", "return _tried({call})")]
    return _GUARD_WITH_PREDICATES.replace("{asked}", "\n".join(lines))


#: By the number of predicates; made once, because a guard is made for every layer.
_GUARDS = (_GUARD, _asking(1), _asking(2))


class _Level:
    """One candidate and the guard of the rest."""

    def __init__(
        self,
        name: str,
        operator: Operator | None,
        candidate: Candidate,
        rest: Callable[..., Any] | None,
        failures: Failures,
        *,
        strict: bool,
    ) -> None:
        self.name = name
        self.operator = operator
        self.candidate = candidate
        self.rest = rest
        self.failures = failures
        self.strict = strict
        # Dynamo folds torch's own function to a constant and never looks at the
        # branch that it does not take.
        self.is_tracing = torch_state.tracing_probe()
        self.set_first: Callable[[Callable[..., Any]], None] = lambda _: None

    def agrees(self, answer: Any) -> bool:
        """Whether a predicate's answer, which is not True itself, means yes."""
        if isinstance(answer, str) and answer:
            return False
        if self.is_tracing():
            # What is compared of symbolic shapes is a bool to Dynamo, and never `is True`.
            return bool(answer) if isinstance(answer, bool) else isinstance(answer, int) and answer == 1
        if predicate.as_bool(answer) is None:
            self.failures.bad_answer(self.name, self.candidate.impl_id, predicate.shown(answer))
        return predicate.as_bool(answer) is True

    def recover(
        self,
        error: Exception,
        tried: Callable[..., Any] | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Apply the list "When one fails" to what ``tried``, or None for the predicate, raised."""
        rest = self.rest
        if rest is None or (tried is rest and tried is not self.candidate.fn):
            raise error  # nothing is left, or the list has been applied to it
        is_unwritten = tried is None or not self.candidate.writes
        if self.is_tracing():
            # Operations that were traced before it raised stay in the graph.
            if isinstance(error, NotImplementedError if is_unwritten else RefusedBeforeWriting):
                return rest(*args, **kwargs)
            raise error
        if tried is not None and tried is not self.candidate.fn:
            raise error  # `insured`, or the rest: the list has been applied to it
        return self._recover_eagerly(rest, error, args, kwargs, is_unwritten=is_unwritten)

    def _recover_eagerly(
        self,
        rest: Callable[..., Any],
        error: Exception,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        is_unwritten: bool,
    ) -> Any:
        """Try the rest, where that is right.

        Args:
            rest: the guard of the rest.
            error: what the candidate raised.
            args: the operator's arguments.
            kwargs: its keyword-only arguments.
            is_unwritten: the arguments are as they were, whatever the candidate did.
        """
        if is_fatal(error):
            raise error
        refused = isinstance(error, NotImplementedError) and (is_unwritten or is_promised(error))
        if not refused:
            self._raise_what_must_not_be_retried(error, args, kwargs, is_unwritten=is_unwritten)
        try:
            result = rest(*args, **kwargs)
        except Exception as later:
            if is_fatal(later):
                raise
            if _says_less(later, error):
                _add_notes(later, [f"before it, {self._raised(error)}"])
                raise
            notes = getattr(later, "__notes__", ())
            _add_notes(error, [f"{self._raised(error)}; the next candidate raised {describe(later)}"])
            _add_notes(error, notes, prefix="")
        else:
            if not refused:
                self.set_first(rest)
                self.failures.set_aside(self.name, self.candidate.impl_id, error)
            error.__traceback__ = None  # it may be one object that is raised again and again
            return result
        raise error  # out here, so that `later` does not become its context

    def _raised(self, error: Exception) -> str:
        return f"{self.name}: {self.candidate.impl_id} raised {type(error).__name__}"

    def _raise_what_must_not_be_retried(
        self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_unwritten: bool
    ) -> None:
        if self.strict or self._is_the_callers(error, args, kwargs):
            raise error
        if isinstance(error, NotImplementedError):
            note = (
                f"{self._raised(error)}, which does not promise that {', '.join(self.candidate.writes)} "
                "is unchanged, so no other implementation is tried. One that may write says 'not for these "
                "inputs' by `supports`, or raises vllm_fl.dispatch.RefusedBeforeWriting itself before it "
                f"writes. To choose another: VLLM_FL_PER_OP='{self.name}=...'."
            )
            _add_notes(error, [note])
            raise error
        if torch_state.is_capturing() or torch_state.is_one_of_several_ranks():
            error.add_note(
                f"vllm-fl: {self.name}: {self.candidate.impl_id} raised this; no other implementation "
                "is tried while a graph is captured, or by one rank of several."
            )
            raise error
        if not is_unwritten:
            error.add_note(
                f"vllm-fl: {self.name}: {self.candidate.impl_id} may have written "
                f"{', '.join(self.candidate.writes)}, so no other implementation is tried. "
                f"To choose another: VLLM_FL_PER_OP='{self.name}=...'."
            )
            raise error

    def _is_the_callers(self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        # The generated signature refuses what does not bind; only an operator
        # that nobody declared passes everything on.
        if self.operator is not None or not isinstance(error, TypeError):
            return False
        try:
            signature_of(self.candidate.fn).bind(*args, **kwargs)
        except TypeError:
            return True
        except ValueError:
            return False
        return False

    def insured(self, operator: Operator, rest: Callable[..., Any]) -> Callable[..., Any]:
        """Return the candidate with copies of what it may write, until its first success.

        With and without an optional tensor it may be two kernels, so that each has its own.
        """
        fn, is_tracing, failures = self.candidate.fn, self.is_tracing, self.failures
        key = (self.name, self.candidate.impl_id)
        written, optional = operator.places(self.candidate.writes), operator.places(_optional(operator))

        def insured(*args: Any, **kwargs: Any) -> Any:
            if is_tracing():
                return fn(*args, **kwargs)
            given = (*args, *kwargs.values())  # all of them, in the contract's order
            kind = tuple([given[place] is not None for place in optional])
            is_new = not failures.is_proven(*key, kind)
            values = [given[place] for place in written] if is_new else []
            copies = torch_state.copies_of(values) if is_new and not torch_state.is_capturing() else None
            try:
                result = fn(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - raised again unless the rest succeeds
                is_put_back = False
                if copies is not None and not is_fatal(error):
                    problem = torch_state.put_back(values, copies)
                    is_put_back = problem is None
                    if problem is not None:
                        _add_notes(error, [f"{self.name}: the arguments cannot be put back: {problem}"])
                return self._recover_eagerly(rest, error, args, kwargs, is_unwritten=is_put_back)
            if is_new:
                failures.prove(*key, kind)
                if _is_proven(operator, self.candidate, failures):
                    self.set_first(fn)
            return result

        return insured


def _optional(operator: Operator) -> list[str]:
    """Return the optional tensors with and without which an operator is two of torch's."""
    return sorted({name for form in operator.forms for name in form.present})


def _is_proven(operator: Operator, candidate: Candidate, failures: Failures) -> bool:
    """Whether a candidate has succeeded with and without each optional tensor."""
    kinds = itertools.product((False, True), repeat=len(_optional(operator)))
    return all(failures.is_proven(operator.name, candidate.impl_id, kind) for kind in kinds)


def _says_less(later: Exception, error: Exception) -> bool:
    """Whether ``later`` promises less of the arguments than ``error``: then it is what is raised.

    A refusal that is raised means to whoever gets it that nothing was written.
    """
    promises = (RefusedBeforeWriting, NotImplementedError)
    return sum(isinstance(later, one) for one in promises) < sum(isinstance(error, one) for one in promises)


def _add_notes(error: Exception, notes: Iterable[str], prefix: str = "vllm-fl: ") -> None:
    for note in notes:
        if prefix + note not in getattr(error, "__notes__", ()):
            error.add_note(prefix + note)


def guarded(
    name: str,
    operator: Operator | None,
    candidates: Sequence[Candidate],
    failures: Failures,
    *,
    strict: bool,
) -> Callable[..., Any]:
    """Return one callable for the candidates in order; see the module's text."""
    signature = operator.signature if operator else None
    function: Callable[..., Any] | None = None
    for candidate in reversed(candidates):
        rest = function
        if not candidate.predicates and (strict or rest is None):
            function = candidate.fn
            continue
        level = _Level(name, operator, candidate, rest, failures, strict=strict)
        names = {f"_supports_{number}": ask for number, ask in enumerate(candidate.predicates)}
        body = _GUARDS[len(names)]
        if names:
            names |= {"_agrees": level.agrees, "_rest": rest or _exhausted(name, candidates)}
        names["_recover"] = level.recover
        function, level.set_first = generated(GUARD, name, signature, body, names)
        function.__doc__ = operator.doc if operator else None
        level.set_first(candidate.fn)
        # Of an operator that nobody declared, the written arguments cannot be told.
        if operator is None or rest is None or strict or not candidate.writes:
            continue
        if not _is_proven(operator, candidate, failures):
            level.set_first(level.insured(operator, rest))
    assert function is not None, "a decision without a candidate builds nothing"
    return function


def _exhausted(name: str, candidates: Sequence[Candidate]) -> Callable[..., Any]:
    def exhausted(*args: Any, **kwargs: Any) -> Any:
        asked = [(c.impl_id, ask) for c in candidates for ask in c.predicates]
        reasons = [(impl_id, predicate.refusal(ask, args, kwargs)) for impl_id, ask in asked]
        listed = "; ".join(f"{impl_id}: {reason}" for impl_id, reason in reasons if reason)
        raise RefusedBeforeWriting(f"no implementation of {name} takes these arguments: {listed}")

    return exhausted

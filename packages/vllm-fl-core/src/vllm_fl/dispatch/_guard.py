"""The callable that a resolved operator is, and what it does when one fails.

A resolved operator has one of two forms here (a third, opaque to a compiler,
wraps one of them in :mod:`vllm_fl.integration`):

*plain*
    the implementation itself: a strict policy and no predicate, or nothing to
    fall back to.
*guard*
    a function with the operator's own signature that calls the first candidate,
    and on a refusal or a failure the guard of the rest. The list "When one
    fails" in :mod:`vllm_fl.dispatch.manager` says when.

Guards are generated from the signature, as dataclasses are: a function that
takes ``x`` and passes ``x`` costs a third of one that takes ``*args`` and passes
``*args``. What Dynamo traces holds no lock, logger, clock or ``add_note``.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING
from typing import Any
from typing import Protocol

from vllm_fl.dispatch import _runtime

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence

    from vllm_fl.dispatch.ops import Operator


class Failures(Protocol):
    """Who is told of failures and of first successes; an ``OpManager``."""

    def set_aside(self, op_name: str, impl_id: str, error: BaseException) -> None:
        """Do not choose the implementation for this operator again."""

    def is_proven(self, op_name: str, impl_id: str) -> bool:
        """Whether it has succeeded once in this process."""

    def prove(self, op_name: str, impl_id: str) -> None:
        """Note its first success."""


@dataclass(frozen=True)
class Candidate:
    """A loaded implementation, ready to be called with the operator's arguments.

    Attributes:
        impl_id: its id.
        fn: takes the arguments of the contract, all of them.
        supports: its predicate, or None.
        writes: the arguments that it may write.
        traceable: Dynamo can trace it.
    """

    impl_id: str
    fn: Callable[..., Any]
    supports: Callable[..., Any] | None = None
    writes: tuple[str, ...] = ()
    traceable: bool = False


def _generated(
    operator_name: str, signature: inspect.Signature | None, body: str, names: dict[str, Any]
) -> tuple[Callable[..., Any], Callable[[Callable[..., Any]], None]]:
    """Compile a function with the operator's signature; ``{call}`` passes everything on.

    Every name that it uses begins with an underscore, so that an operator may
    call a parameter ``first``. Returns the function and a setter of ``_first``.
    """
    names = dict(names)
    if signature is None:
        head, call, packed = "*args, **kwargs", "*args, **kwargs", "args, kwargs"
    else:
        heads: list[str] = []
        calls: list[str] = []
        positional: list[str] = []
        keywords: list[str] = []
        for parameter in signature.parameters.values():
            name = parameter.name
            keyword_only = parameter.kind is parameter.KEYWORD_ONLY
            if keyword_only and "*" not in heads:
                heads.append("*")
            if parameter.default is parameter.empty:
                heads.append(name)
            else:
                names[f"_default_of_{name}"] = parameter.default
                heads.append(f"{name}=_default_of_{name}")
            calls.append(f"{name}={name}" if keyword_only else name)
            (keywords if keyword_only else positional).append(name)
        head, call = ", ".join(heads), ", ".join(calls)
        items = ", ".join(f"{name!r}: {name}" for name in keywords)
        packed = f"({''.join(name + ', ' for name in positional)}), {{{items}}}"
    lines = body.format(call=call, packed=packed).splitlines()
    source = "\n".join(
        [
            f"def make({', '.join({'_first': None, **names})}):",
            f"    def {operator_name}({head}):",
            *("        " + line for line in lines),
            "    def _set_first(new):",
            "        nonlocal _first",
            "        _first = new",
            f"    return {operator_name}, _set_first",
        ]
    )
    namespace: dict[str, Any] = {"__name__": __name__}
    exec(compile(source, f"<vllm-fl guard of {operator_name}>", "exec"), namespace)  # noqa: S102
    made: tuple[Callable[..., Any], Any] = namespace["make"](**{"_first": None, **names})
    return made


# `_tried` says whose exception it is: by the time that it is looked at, another
# thread may have replaced `_first`.
_GUARD = """\
_tried = _first
try:
    return _tried({call})
except Exception as _error:
    return _recover(_error, _tried, {packed})"""

_GUARD_WITH_PREDICATE = """\
_tried = None
try:
    if _supports({call}) is True:
        _tried = _first
        return _tried({call})
except Exception as _error:
    return _recover(_error, _tried, {packed})
return _rest({call})"""


def adapt(operator: Operator | None, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``fn`` taking every argument of the contract.

    That is ``fn`` itself where it does. An optional parameter that it lacks (it
    was written from an older contract) is dropped where it is a hint; where it
    is not, any value but the default is refused.
    """
    if operator is None:
        return fn
    try:
        has = inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return fn
    kinds = {p.kind for p in has.values()}
    if {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds:
        return fn
    wanted = operator.signature.parameters
    lacks = [name for name in wanted if name not in has]
    by_name = [n for n in wanted if n in has and has[n].kind is inspect.Parameter.KEYWORD_ONLY]
    moved = [n for n in by_name if wanted[n].kind is not inspect.Parameter.KEYWORD_ONLY]
    if not lacks and not moved:
        return fn
    lines, names = [], {}
    for name in lacks:
        if name in operator.hints:
            continue
        default = wanted[name].default
        differs = "is not" if default is None or isinstance(default, bool) else "!="
        names[f"refusal_of_{name}"] = (
            f"{getattr(fn, '__qualname__', fn)} does not take {name!r}, so only its default {default!r}"
        )
        lines.append(f"if {name} {differs} default_of_{name}:")
        lines.append(f"    raise NotImplementedError(refusal_of_{name})")
    passed = []
    for name, parameter in wanted.items():
        if name in has:
            keyword = name in by_name or parameter.kind is parameter.KEYWORD_ONLY
            passed.append(f"{name}={name}" if keyword else name)
    lines.append(f"return first({', '.join(passed)})")
    adapted, set_first = _generated(operator.name, operator.signature, "\n".join(lines), names)
    set_first(fn)
    return adapted


class _Level:
    """One candidate and the guard of the rest."""

    def __init__(
        self, name: str, operator: Operator | None, candidate: Candidate, rest: Any, failures: Failures
    ) -> None:
        self.name = name
        self.operator = operator
        self.candidate = candidate
        self.rest: Callable[..., Any] | None = rest
        self.failures = failures
        # Dynamo folds torch's own function to a constant and never looks at the
        # branch that it does not take.
        self.is_tracing = _runtime.tracing_probe()
        self.set_first: Callable[[Callable[..., Any]], None] = lambda _: None
        # Set aside: `first` is the guard of the rest, which has tried everything.
        self.is_spent = False

    def recover(self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Apply the list "When one fails" to an exception of this candidate."""
        if self.is_spent or self.rest is None:
            raise error
        if self.is_tracing():
            if isinstance(error, NotImplementedError):
                return self.rest(*args, **kwargs)
            raise error
        return self._recover_eagerly(self.rest, error, args, kwargs)

    def _recover_eagerly(
        self, rest: Callable[..., Any], error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        restored = isinstance(error, _Restored)
        if restored and isinstance(error.__cause__, Exception):
            error = error.__cause__
        refused = isinstance(error, NotImplementedError)
        if not refused:
            self._raise_what_must_not_be_retried(error, args, kwargs, restored)
        try:
            result = rest(*args, **kwargs)
        except Exception as later:
            if _runtime.is_fatal(later):
                raise
            error.add_note(
                f"vllm-fl: {self.name}: {self.candidate.impl_id} raised this; the next candidate "
                f"raised {type(later).__name__}: {later}"
            )
            raise error from None
        if not refused:
            self.is_spent = True
            self.set_first(rest)
            self.failures.set_aside(self.name, self.candidate.impl_id, error)
        return result

    def _raise_what_must_not_be_retried(
        self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any], restored: bool
    ) -> None:
        if _runtime.is_fatal(error) or self._is_the_callers(error, args, kwargs):
            raise error
        if _runtime.is_capturing() or _runtime.is_one_of_several_ranks():
            error.add_note(
                f"vllm-fl: {self.name}: {self.candidate.impl_id} raised this; no other implementation "
                "is tried while a graph is captured, or by one rank of several."
            )
            raise error
        if self.candidate.writes and not restored:
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
            inspect.signature(self.candidate.fn).bind(*args, **kwargs)
        except TypeError:
            return True
        except ValueError:
            return False
        return False

    def insured(self) -> Callable[..., Any]:
        """Return the candidate with copies of what it may write, until its first success."""
        fn, is_tracing = self.candidate.fn, self.is_tracing
        assert self.operator is not None
        names = list(self.operator.signature.parameters)
        written = [names.index(name) for name in self.candidate.writes]

        def insured(*args: Any, **kwargs: Any) -> Any:
            if is_tracing():
                return fn(*args, **kwargs)
            values = [args[index] for index in written]
            insurable = all(map(_runtime.can_be_saved, values)) and not _runtime.is_capturing()
            saved = [_runtime.save(value) for value in values] if insurable else []
            try:
                result = fn(*args, **kwargs)
            except NotImplementedError:
                raise
            except Exception as error:
                if not insurable or _runtime.is_fatal(error):
                    raise
                for value, copy in zip(values, saved, strict=True):
                    _runtime.restore(value, copy)
                raise _Restored from error
            self.failures.prove(self.name, self.candidate.impl_id)
            self.set_first(fn)
            return result

        return insured


def build(
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
        if candidate.supports is None and (strict or rest is None):
            function = candidate.fn
            continue
        level = _Level(name, operator, candidate, rest, failures)
        names: dict[str, Any] = {}
        if candidate.supports is None:
            body = _GUARD
        else:
            body = _STRICT_WITH_PREDICATE if strict else _GUARD_WITH_PREDICATE
            names = {"supports": candidate.supports, "rest": rest or _exhausted(name, candidates)}
        if not strict:
            names["recover"] = level.recover
        function, level.set_first = _generated(name, signature, body, names)
        insure = (
            not strict
            and rest is not None
            and bool(candidate.writes)
            and not failures.is_proven(name, candidate.impl_id)
        )
        level.set_first(level.insured() if insure else candidate.fn)
        function.__doc__ = operator.doc if operator else None
    assert function is not None, "a decision without a candidate builds nothing"
    return function


def form(candidates: Sequence[Candidate], *, strict: bool) -> str:
    """Name the form that :func:`build` gives the first candidate."""
    is_plain = candidates[0].supports is None and (strict or len(candidates) == 1)
    return "plain" if is_plain else "guard"


def _exhausted(name: str, candidates: Sequence[Candidate]) -> Callable[..., Any]:
    def exhausted(*args: Any, **kwargs: Any) -> Any:
        reasons = [
            f"{candidate.impl_id}: {candidate.supports(*args, **kwargs)}"
            for candidate in candidates
            if candidate.supports is not None
        ]
        raise NotImplementedError(f"no implementation of {name} takes these arguments: {'; '.join(reasons)}")

    return exhausted

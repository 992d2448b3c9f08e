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

    from vllm_fl.dispatch.declaration import Operator


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


def adapt(
    operator: Operator | None, fn: Callable[..., Any], *, is_predicate: bool = False
) -> Callable[..., Any]:
    """Return ``fn`` taking every argument of the contract.

    That is ``fn`` itself where it does, with the contract's defaults. An optional
    parameter that it lacks (it was written from an older contract) is dropped
    where it is a hint; where it is not, any value but the default is refused. A
    predicate may lack any: it does not look at them.
    """
    if operator is None:
        return fn
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return fn
    wanted = operator.signature.parameters
    if is_predicate and _takes_all(signature, operator.signature):
        return fn
    has = signature.parameters
    kinds = {p.kind for p in has.values()}
    if {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds:
        return fn
    places = [n for n, p in has.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    lacks: list[str] = []
    passed: list[str] = []
    by_name: list[str] = []
    is_as_wanted = True
    for name, parameter in wanted.items():
        its = places[len(passed)] if len(passed) < len(places) else None
        takes_more = its is None and inspect.Parameter.VAR_POSITIONAL in kinds and name not in has
        if parameter.kind is not parameter.KEYWORD_ONLY and (its == name or takes_more):
            passed.append(name)
            is_as_wanted &= not takes_more
        elif name in has or inspect.Parameter.VAR_KEYWORD in kinds:
            by_name.append(f"{name}={name}")
            is_as_wanted &= parameter.kind is parameter.KEYWORD_ONLY
        else:
            lacks.append(name)
        if name in has and parameter.default is not parameter.empty:
            is_as_wanted &= bool(has[name].default == parameter.default)
    # A positional-only parameter has no name in a call, and the contract gives it one.
    if is_as_wanted and not lacks and inspect.Parameter.POSITIONAL_ONLY not in kinds:
        return fn
    lines, names = [], {}
    for name in lacks:
        if is_predicate or name in operator.hints:
            continue
        default = wanted[name].default
        differs = "is not" if default is None or isinstance(default, bool) else "!="
        names[f"_refusal_of_{name}"] = (
            f"{getattr(fn, '__qualname__', fn)} does not take {name!r}, so only its default {default!r}"
        )
        lines.append(f"if {name} {differs} _default_of_{name}:")
        lines.append(f"    raise NotImplementedError(_refusal_of_{name})")
    lines.append(f"return _first({', '.join(passed + by_name)})")
    adapted, set_first = _generated(operator.name, operator.signature, "\n".join(lines), names)
    set_first(fn)
    return adapted


def _takes_all(signature: inspect.Signature, wanted: inspect.Signature) -> bool:
    """Whether the arguments of ``wanted`` bind, whatever ``signature`` calls them."""
    keyword_only = [n for n, p in wanted.parameters.items() if p.kind is p.KEYWORD_ONLY]
    try:
        signature.bind(*[None] * (len(wanted.parameters) - len(keyword_only)), **dict.fromkeys(keyword_only))
    except TypeError:
        return False
    return True


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
        self.is_tracing = _runtime.tracing_probe()
        self.set_first: Callable[[Callable[..., Any]], None] = lambda _: None

    def recover(
        self,
        error: Exception,
        tried: Callable[..., Any] | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Apply the list "When one fails" to what ``tried``, or None for the predicate, raised."""
        if self.rest is None:
            raise error
        if self.is_tracing():
            if isinstance(error, NotImplementedError):
                return self.rest(*args, **kwargs)
            raise error
        if tried is not None and tried is not self.candidate.fn:
            raise error  # `insured`, or the rest: the list has been applied to it
        return self._recover_eagerly(self.rest, error, args, kwargs, is_unwritten=tried is None)

    def _recover_eagerly(
        self,
        rest: Callable[..., Any],
        error: Exception,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        is_unwritten: bool,
    ) -> Any:
        refused = isinstance(error, NotImplementedError)
        if not refused:
            self._raise_what_must_not_be_retried(error, args, kwargs, is_unwritten=is_unwritten)
        try:
            result = rest(*args, **kwargs)
        except Exception as later:
            if _runtime.is_fatal(later):
                raise
            note = (
                f"vllm-fl: {self.name}: {self.candidate.impl_id} raised {type(error).__name__}; "
                f"the next candidate raised {type(later).__name__}: {later}"
            )
            for its_note in (note, *getattr(later, "__notes__", ())):
                if its_note not in getattr(error, "__notes__", ()):
                    error.add_note(its_note)
        else:
            if not refused:
                self.set_first(rest)
                self.failures.set_aside(self.name, self.candidate.impl_id, error)
            return result
        raise error  # out here, so that `later` does not become its context

    def _raise_what_must_not_be_retried(
        self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_unwritten: bool
    ) -> None:
        if self.strict or _runtime.is_fatal(error) or self._is_the_callers(error, args, kwargs):
            raise error
        if _runtime.is_capturing() or _runtime.is_one_of_several_ranks():
            error.add_note(
                f"vllm-fl: {self.name}: {self.candidate.impl_id} raised this; no other implementation "
                "is tried while a graph is captured, or by one rank of several."
            )
            raise error
        if self.candidate.writes and not is_unwritten:
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

    def insured(self, operator: Operator, rest: Callable[..., Any]) -> Callable[..., Any]:
        """Return the candidate with copies of what it may write, until its first success."""
        fn, is_tracing = self.candidate.fn, self.is_tracing
        parameters = operator.signature.parameters
        places = [name for name, p in parameters.items() if p.kind is not p.KEYWORD_ONLY]
        written = [name for name in self.candidate.writes if name in parameters]

        def insured(*args: Any, **kwargs: Any) -> Any:
            if is_tracing():
                return fn(*args, **kwargs)
            by_name = {**dict(zip(places, args, strict=True)), **kwargs}
            values = [by_name[name] for name in written]
            insurable = all(map(_runtime.can_be_saved, values)) and not _runtime.is_capturing()
            saved = [_runtime.save(value) for value in values] if insurable else []
            try:
                result = fn(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - raised again unless the rest succeeds
                if insurable and not isinstance(error, NotImplementedError) and not _runtime.is_fatal(error):
                    for value, copy in zip(values, saved, strict=True):
                        _runtime.restore(value, copy)
                return self._recover_eagerly(rest, error, args, kwargs, is_unwritten=insurable)
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
        level = _Level(name, operator, candidate, rest, failures, strict=strict)
        names: dict[str, Any] = {"_recover": level.recover}
        if candidate.supports is not None:
            names |= {"_supports": candidate.supports, "_rest": rest or _exhausted(name, candidates)}
        body = _GUARD if candidate.supports is None else _GUARD_WITH_PREDICATE
        function, level.set_first = _generated(name, signature, body, names)
        function.__doc__ = operator.doc if operator else None
        is_new = bool(candidate.writes) and not failures.is_proven(name, candidate.impl_id)
        # Of an operator that nobody declared, the written arguments cannot be told.
        if is_new and not strict and operator is not None and rest is not None:
            level.set_first(level.insured(operator, rest))
        else:
            level.set_first(candidate.fn)
    assert function is not None, "a decision without a candidate builds nothing"
    return function


def form(candidates: Sequence[Candidate], *, strict: bool) -> str:
    """Name the form that :func:`build` gives the first candidate."""
    is_plain = candidates[0].supports is None and (strict or len(candidates) == 1)
    return "plain" if is_plain else "guard"


def _exhausted(name: str, candidates: Sequence[Candidate]) -> Callable[..., Any]:
    def exhausted(*args: Any, **kwargs: Any) -> Any:
        answers = [(c.impl_id, c.supports(*args, **kwargs)) for c in candidates if c.supports is not None]
        reasons = "; ".join(f"{impl_id}: {answer}" for impl_id, answer in answers if answer is not True)
        raise NotImplementedError(f"no implementation of {name} takes these arguments: {reasons}")

    return exhausted

"""How the arguments of a contract reach the parameters of a function.

Registration refuses what :func:`binding_of` cannot bind, and :func:`adapt` calls as it
says, so that what is accepted gets the right values: a parameter that the contract
names gets that argument, whatever its place; what the function does not name goes to
its ``*args`` and ``**kwargs``; its own parameters keep their defaults.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.dispatch.calling.generated import ADAPTER
from vllm_fl.dispatch.calling.generated import generated
from vllm_fl.dispatch.errors import RefusedBeforeWriting

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_fl.dispatch.declaration import Operator

_POSITIONAL_ONLY = inspect.Parameter.POSITIONAL_ONLY
_VAR_POSITIONAL = inspect.Parameter.VAR_POSITIONAL
_KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY
_VAR_KEYWORD = inspect.Parameter.VAR_KEYWORD
_EMPTY = inspect.Parameter.empty


class _CannotBindError(Exception):
    """The message says why."""


@dataclass(frozen=True)
class Binding:
    """What a function is called with.

    Attributes:
        by_position: the contract's arguments that are passed by position, in order.
        by_name: those that are passed by name.
        lacks: those that it does not take.
        is_direct: called as the contract says it does the same by itself.
    """

    by_position: tuple[str, ...]
    by_name: tuple[str, ...]
    lacks: tuple[str, ...]
    is_direct: bool


def binding_of(operator: Operator, fn: Callable[..., Any], *, is_predicate: bool = False) -> Binding | str:
    """Return how ``fn`` gets the operator's arguments, or why it cannot get them.

    It may lack optional parameters and may have optional ones of its own. A predicate
    may lack any, and call them what it likes where it takes them in the contract's order.
    """
    wanted = operator.signature.parameters
    told, real = _told(fn), _real(fn)
    signature = told or real
    if signature is None:  # a builtin does not tell
        places = tuple(name for name, p in wanted.items() if p.kind is not _KEYWORD_ONLY)
        return Binding(places, tuple(name for name in wanted if name not in places), (), is_direct=False)
    try:
        binding = _Function(signature, operator, is_predicate=is_predicate).binding()
        if told is None or real is None or _kinds(told) == _kinds(real):
            return binding
        # A wrapper tells the signature of what it wraps, and has one of its own.
        _check_call(real, binding, wanted, is_predicate=is_predicate)
        if all(p.kind in (_VAR_POSITIONAL, _VAR_KEYWORD) for p in real.parameters.values()):
            return binding
        its_own = _Function(real, operator, is_predicate=is_predicate).binding()
    except _CannotBindError as error:
        contract = f"the contract is {operator.name}{_names_of(operator.signature)}"
        return f"{error}; {contract}, defined {_where(fn)} as {_names_of(signature)}"
    is_direct = binding.is_direct and its_own.is_direct
    return Binding(binding.by_position, binding.by_name, binding.lacks, is_direct)


def signature_problem(
    operator: Operator, fn: Callable[..., Any], *, is_predicate: bool = False
) -> str | None:
    """Say why ``fn`` cannot be called as the contract says; None if it can."""
    found = binding_of(operator, fn, is_predicate=is_predicate)
    return found if isinstance(found, str) else None


class _Function:
    """One signature against a contract."""

    def __init__(self, signature: inspect.Signature, operator: Operator, *, is_predicate: bool) -> None:
        self.has = signature.parameters
        self.wanted = operator.signature.parameters
        self.places = [name for name, p in self.wanted.items() if p.kind is not _KEYWORD_ONLY]
        self.is_predicate = is_predicate
        variadic = (_VAR_POSITIONAL, _VAR_KEYWORD)
        named = {name: p for name, p in self.has.items() if p.kind not in variadic}
        self.positional = [name for name, p in named.items() if p.kind is not _KEYWORD_ONLY]
        self.required = [name for name, p in named.items() if p.default is _EMPTY]
        self.named = named
        kinds = {p.kind for p in self.has.values()}
        self.takes_places = _VAR_POSITIONAL in kinds
        self.takes_names = _VAR_KEYWORD in kinds

    def binding(self) -> Binding:
        foreign = [name for name in self.required if name not in self.wanted]
        by_place = self._by_place() if foreign and self.is_predicate else self._by_own_names()
        if foreign and not self.is_predicate:
            raise _CannotBindError(f"it requires {foreign[0]!r}, which nobody passes")
        # The rest of a contract follows into *args only where everything before it stands at its place.
        at_place = by_place == self.places[: len(by_place)] and len(by_place) == len(self.positional)
        named_later = [name for name in self.places[len(by_place) :] if name in self.named]
        if self.takes_places and at_place and not named_later:
            by_place = list(self.places)
        by_name, lacks = [], []
        at_own_place = self.positional[: len(by_place)]
        for name, parameter in self.wanted.items():
            if name in by_place and (name not in self.named or name in at_own_place):
                continue
            if name in self.named and self.named[name].kind is _POSITIONAL_ONLY:
                raise _CannotBindError(self._unreachable(name))
            if name in self.named or self.takes_names:
                by_name.append(name)
            elif parameter.default is _EMPTY and not self.is_predicate:
                raise _CannotBindError(f"it does not take {name!r}")
            else:
                lacks.append(name)
        binding = Binding(tuple(by_place), tuple(by_name), tuple(lacks), is_direct=False)
        return Binding(binding.by_position, binding.by_name, binding.lacks, self._is_direct(binding))

    def _by_own_names(self) -> list[str]:
        """Return what goes by position where every parameter is the contract's or optional."""
        known = [name for name in self.positional if name in self.wanted]
        in_order = [name for name in self.wanted if name in known]
        is_by_position = any(self.named[name].kind is _POSITIONAL_ONLY for name in known)
        if known != in_order and not (self.is_predicate and not is_by_position):
            raise _CannotBindError("its arguments stand in another order")
        if not (self.takes_places and self.takes_names):
            for name, parameter in self.wanted.items():
                # A call may give every argument by name: *args alone does not take it.
                if parameter.default is _EMPTY and name not in self.named and not self.is_predicate:
                    raise _CannotBindError(f"it does not take {name!r}")
        return list(takewhile(lambda name: name in self.places, self.positional))

    def _by_place(self) -> list[str]:
        """Return what goes by position to a predicate that has names of its own for it."""
        by_place: list[str] = []
        for name in self.positional:
            if name not in self.wanted and name not in self.required:
                break
            place = len(by_place)
            if place == len(self.places) or (name in self.wanted and self.places[place] != name):
                raise _CannotBindError(f"it takes {name!r} at a place that is not the contract's")
            by_place.append(self.places[place])
        left = [
            n for n in self.required if n not in self.wanted and n not in self.positional[: len(by_place)]
        ]
        if left:
            raise _CannotBindError(f"it requires {left[0]!r}, which nobody passes")
        return by_place

    def _unreachable(self, name: str) -> str:
        if name not in self.places:
            return f"it takes {name!r} by position alone, which the contract passes by name"
        return f"it takes {name!r} by position alone, after a parameter that nobody passes"

    def _is_direct(self, binding: Binding) -> bool:
        if binding.lacks or set(binding.by_name) & set(self.places):
            return False
        if list(binding.by_position) != self.places:
            return False
        if self.is_predicate:
            return True  # a guard passes everything, and by position what it can
        for name, parameter in self.wanted.items():
            its = self.named.get(name)
            if parameter.default is not _EMPTY and (
                its is None or not _is_same(its.default, parameter.default)
            ):
                return False  # the contract's default holds
            if its is not None and its.kind is _POSITIONAL_ONLY:
                return False  # a call may name it
        return True


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, (int, float, str)) and one == other)


def _check_call(real: inspect.Signature, binding: Binding, wanted: Any, *, is_predicate: bool) -> None:
    """Check that a call gives the parameters of another signature the right values, too."""
    try:
        call = real.bind(*binding.by_position, **{name: name for name in binding.by_name})
    except TypeError as error:
        raise _CannotBindError(f"it is a wrapper that takes {_names_of(real)}: {error}") from None
    for name, value in call.arguments.items():
        kind = real.parameters[name].kind
        if kind in (_VAR_POSITIONAL, _VAR_KEYWORD) or value == name:
            continue
        if name in wanted or not is_predicate:
            raise _CannotBindError(
                f"it is a wrapper that takes {_names_of(real)}: its {name!r} would be {value!r}"
            )


def _kinds(signature: inspect.Signature) -> list[tuple[str, Any]]:
    return [(name, p.kind) for name, p in signature.parameters.items()]


def signature_of(fn: Callable[..., Any]) -> inspect.Signature:
    """Return the signature that a function tells, without evaluating its annotations.

    Python 3.14 evaluates them when they are asked for, and what only a type checker imports is a
    NameError then.
    """
    if sys.version_info >= (3, 14):
        import annotationlib

        return inspect.signature(fn, annotation_format=annotationlib.Format.STRING)
    return inspect.signature(fn)


def _told(fn: Callable[..., Any]) -> inspect.Signature | None:
    """Return the signature that a function tells, that of the wrapped one where it is a wrapper."""
    try:
        return signature_of(fn)
    except Exception:  # noqa: BLE001 - a builtin tells none, and a plug-in's object may raise anything
        return None


def _real(fn: Callable[..., Any]) -> inspect.Signature | None:
    """Return the signature that a call meets first; None of what is not written in Python."""
    try:
        bare = _bare(fn)
        return None if bare is None else inspect.signature(bare)
    except Exception:  # noqa: BLE001 - as above
        return None


def _bare(fn: Any) -> Any:
    """Return a callable of the same parameters that has no ``__wrapped__`` and no ``__signature__``."""
    if isinstance(fn, types.FunctionType):
        copy = types.FunctionType(fn.__code__, {}, fn.__name__, fn.__defaults__, fn.__closure__)
        copy.__kwdefaults__ = fn.__kwdefaults__
        return copy
    if isinstance(fn, functools.partial):
        inner = _bare(fn.func)
        return None if inner is None else functools.partial(inner, *fn.args, **fn.keywords)
    if isinstance(fn, types.MethodType):
        inner = _bare(fn.__func__)
        return None if inner is None else types.MethodType(inner, fn.__self__)
    call: Any = type(fn).__call__
    return types.MethodType(_bare(call), fn) if isinstance(call, types.FunctionType) else None


def _names_of(signature: inspect.Signature) -> str:
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    try:
        return str(signature.replace(parameters=bare, return_annotation=signature.empty))
    except Exception:  # noqa: BLE001 - the text of a default may raise
        return f"({', '.join(signature.parameters)})"


def _where(fn: Callable[..., Any]) -> str:
    try:
        code = getattr(inspect.unwrap(fn), "__code__", None)
        return f"in {code.co_filename}:{code.co_firstlineno}" if code else f"as {fn!r}"
    except Exception:  # noqa: BLE001 - a wrapper of itself, or an object without a text
        return f"as an object of type {type(fn).__qualname__}"


def adapt(
    operator: Operator | None, fn: Callable[..., Any], *, is_predicate: bool = False
) -> Callable[..., Any]:
    """Return ``fn`` taking every argument of the contract.

    That is ``fn`` itself where it does, with the contract's defaults. An optional
    parameter that it lacks (it was written from an older contract) is dropped
    where it is a hint; where it is not, any value but the default is refused. A
    predicate may lack any: it does not look at them.

    Raises:
        TypeError: it cannot be bound, which registration has refused already.
    """
    if operator is None:
        return fn
    binding = binding_of(operator, fn, is_predicate=is_predicate)
    if isinstance(binding, str):
        raise TypeError(binding)
    if binding.is_direct:
        return fn
    lines: list[str] = []
    names: dict[str, Any] = {"_refused": RefusedBeforeWriting}
    for name in binding.lacks:
        if is_predicate or name in operator.hints:
            continue
        default = operator.signature.parameters[name].default
        differs = "is not" if default is None or isinstance(default, bool) else "!="
        names[f"_refusal_of_{name}"] = (
            f"{getattr(fn, '__qualname__', fn)} does not take {name!r}, so only its default {default!r}"
        )
        lines.append(f"if {name} {differs} _default_of_{name}:")
        lines.append(f"    raise _refused(_refusal_of_{name})")
    by_name = [f"{name}={name}" for name in binding.by_name]
    lines.append(f"return _first({', '.join([*binding.by_position, *by_name])})")
    adapted, set_first = generated(ADAPTER, operator.name, operator.signature, "\n".join(lines), names)
    set_first(fn)
    return adapted

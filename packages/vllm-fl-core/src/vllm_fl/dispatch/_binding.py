"""How an operator's arguments reach a function."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.dispatch._generate import ADAPTER
from vllm_fl.dispatch._generate import generated
from vllm_fl.dispatch.errors import RefusedBeforeWriting

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_fl.dispatch.declaration import Operator


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
    lines: list[str] = []
    names: dict[str, Any] = {"_refused": RefusedBeforeWriting}
    for name in lacks:
        if is_predicate or name in operator.hints:
            continue
        default = wanted[name].default
        differs = "is not" if default is None or isinstance(default, bool) else "!="
        names[f"_refusal_of_{name}"] = (
            f"{getattr(fn, '__qualname__', fn)} does not take {name!r}, so only its default {default!r}"
        )
        lines.append(f"if {name} {differs} _default_of_{name}:")
        lines.append(f"    raise _refused(_refusal_of_{name})")
    lines.append(f"return _first({', '.join(passed + by_name)})")
    adapted, set_first = generated(ADAPTER, operator.name, operator.signature, "\n".join(lines), names)
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

"""What a predicate's answer means.

True agrees, and a sentence says why not. Other bools are taken too: 1 and 0, and
what libraries have of their own. A False refuses without saying why. Anything else
is a fault of the plug-in, counted as a refusal.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.dispatch.common.foreign import describe

if TYPE_CHECKING:
    from collections.abc import Callable

_SHOWN = (type(None), int, float, str, bytes)
_LONGEST = 60


def as_bool(answer: Any) -> bool | None:
    """Return what kind of bool an answer is; None where it is none."""
    if isinstance(answer, int):
        return bool(answer) if answer in (0, 1) else None
    dtype = getattr(answer, "dtype", None)
    if getattr(dtype, "kind", None) == "b" and getattr(answer, "shape", None) == ():
        return bool(answer)  # a scalar of an array library; torch's tensors have no such kind
    if isinstance(answer, getattr(sys.modules.get("torch"), "SymBool", ())):
        return bool(answer)
    return None


def refusal(supports: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Ask a predicate and return its reason in a sentence; None where it agrees."""
    try:
        answer = supports(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - it is asked for its reason, and this is one
        return f"its predicate raised {describe(error)}"
    if isinstance(answer, str) and answer:
        return answer
    agrees = as_bool(answer)
    if agrees is None:
        return f"its predicate returned {shown(answer)}, which is neither a bool nor a sentence"
    return None if agrees else "its predicate returned False, and no reason"


def shown(answer: Any) -> str:
    """Return what an answer is, for a message; a device's tensor is not looked into."""
    if type(answer) not in _SHOWN:
        return f"an object of type {type(answer).__qualname__}"
    text = repr(answer)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."

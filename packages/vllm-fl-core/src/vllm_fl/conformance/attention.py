"""Attention backends: whether a class fits the installed vLLM, and computes what is right.

The operator ``attention_backend`` returns the dotted path of a class. vLLM finds out
in the middle of a model's start whether it fits; here it is asked before.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING
from typing import Any
from typing import TypeAlias

from vllm_fl.conformance import vllm_layer
from vllm_fl.conformance.attention_cases import cases
from vllm_fl.conformance.case import Tier
from vllm_fl.conformance.paged import serve
from vllm_fl.conformance.result import Result
from vllm_fl.conformance.result import Status
from vllm_fl.conformance.tensors import named
from vllm_fl.dispatch.calling.fatal import is_fatal
from vllm_fl.dispatch.common.foreign import describe

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from vllm_fl.conformance.attention_cases import AttentionCase
    from vllm_fl.conformance.dispatched import Dispatched

OPERATOR = "attention_backend"
_FITS = "the class imports and fits the installed vLLM"

#: How it ended, why, and the error in tolerances where something was compared.
_Answer: TypeAlias = tuple[Status, str, float | None]


def questions(
    dispatched: Dispatched, device: torch.device, tier: Tier
) -> list[tuple[str, Callable[[float], Result]]]:
    """Return what is asked of an attention backend, by name; each takes what tolerances are multiplied by."""
    fits = functools.partial(_outcome, dispatched, _FITS, functools.partial(_fits, dispatched), None)
    found: list[tuple[str, Callable[[float], Result]]] = [(_FITS, fits)]
    if not vllm_layer.is_installed():
        return found
    for case in cases():
        if case.is_smoke or tier > Tier.SMOKE:
            ask = functools.partial(_serves, dispatched, case, device)
            found.append((str(case), functools.partial(_outcome, dispatched, str(case), ask, case.dtype)))
    return found


def names() -> list[str]:
    """Return the names of every case, for what a waiver may name."""
    return [_FITS, *map(str, cases())]


def _outcome(
    dispatched: Dispatched,
    name: str,
    ask: Callable[[], _Answer],
    dtype: torch.dtype | None,
    loosen: float,
) -> Result:
    try:
        status, note, ratio = ask()
        if ratio is not None:
            status = Status.PASSED if ratio <= loosen else Status.FAILED
    except NotImplementedError as error:
        status, note, ratio = Status.REFUSED, str(error), None
    except Exception as error:
        if is_fatal(error):
            raise
        status, note, ratio = Status.FAILED, f"raised {describe(error)}", None
    kind = "" if dtype is None else named(dtype)
    is_case = dtype is not None
    return Result(
        dispatched.impl.impl_id, OPERATOR, name, status, kind, ratio, note=note[:600], is_case=is_case
    )


def path_of(dispatched: Dispatched, selector: Any = None) -> str | None:
    """Ask the operator, through the dispatch, for the class that serves plain attention."""
    path: str | None = dispatched({"use_mla": False, "use_sparse": False, "selector": selector})
    return path


def _fits(dispatched: Dispatched) -> _Answer:
    path = path_of(dispatched)
    if path is None:
        return Status.NOT_RUN, "returns None: vLLM's own choice", None
    if not isinstance(path, str) or "." not in path:
        return Status.FAILED, f"returns {path!r}, and not the dotted path of a class", None
    if not vllm_layer.is_installed():
        return Status.NOT_RUN, f"vLLM is not installed, so that {path} could not be looked at", None
    problems = vllm_layer.misfits(path)
    return (Status.FAILED if problems else Status.PASSED), "; ".join(problems) or path, None


def _serves(dispatched: Dispatched, case: AttentionCase, device: torch.device) -> _Answer:
    verdict = serve(case, functools.partial(path_of, dispatched), device)
    return (Status.PASSED if verdict.is_right else Status.FAILED), verdict.note, verdict.ratio

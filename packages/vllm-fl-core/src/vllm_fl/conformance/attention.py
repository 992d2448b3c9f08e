"""Attention backends: whether a class fits the installed vLLM.

The operator ``attention_backend`` returns the dotted path of a class. vLLM finds out
in the middle of a model's start whether it fits; here it is asked before. What it
computes is judged in :mod:`vllm_fl.conformance.paged`.
"""

from __future__ import annotations

import functools
from importlib.util import find_spec
from typing import TYPE_CHECKING
from typing import Any
from typing import TypeAlias

from vllm_fl.conformance.result import Result
from vllm_fl.conformance.result import Status
from vllm_fl.dispatch._fatal import is_fatal
from vllm_fl.dispatch._foreign import describe
from vllm_fl.integration.fit import load
from vllm_fl.integration.fit import problems_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from vllm_fl.conformance.dispatched import Dispatched

OPERATOR = "attention_backend"
_FITS = "the class imports and fits the installed vLLM"


def steps(
    dispatched: Dispatched, device: torch.device, is_smoke: bool
) -> list[tuple[str, Callable[[float], Result]]]:
    """Return what is asked of an attention backend, by name; each takes what tolerances are multiplied by."""
    found: list[tuple[str, Callable[[float], Result]]] = [
        (_FITS, functools.partial(_outcome, dispatched, _FITS, functools.partial(_fits, dispatched), None))
    ]
    if find_spec("vllm") is None:
        return found
    from vllm_fl.conformance import paged

    for case in paged.cases():
        if case.is_smoke or not is_smoke:
            judge = functools.partial(paged.judge, case, functools.partial(path_of, dispatched), device)
            found.append((str(case), functools.partial(_outcome, dispatched, str(case), judge, case.dtype)))
    return found


def names() -> list[str]:
    """Return the names of every case, for what an exceptions file may name."""
    from vllm_fl.conformance import paged

    return [_FITS, *map(str, paged.cases())]


_Answer: TypeAlias = tuple[Status, str, float | None]


def _outcome(
    dispatched: Dispatched,
    name: str,
    judge: Callable[[], _Answer],
    dtype: torch.dtype | None,
    loosen: float,
) -> Result:
    try:
        status, note, ratio = judge()
        if ratio is not None:
            status = Status.PASSED if ratio <= loosen else Status.FAILED
    except NotImplementedError as error:
        status, note, ratio = Status.REFUSED, str(error), None
    except Exception as error:
        if is_fatal(error):
            raise
        status, note, ratio = Status.FAILED, f"raised {describe(error)}", None
    kind = "" if dtype is None else str(dtype).removeprefix("torch.")
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
    if find_spec("vllm") is None:
        return Status.NOT_RUN, f"vLLM is not installed, so that {path} could not be looked at", None
    problems = problems_of(load(path))
    return (Status.FAILED if problems else Status.PASSED), "; ".join(problems) or path, None

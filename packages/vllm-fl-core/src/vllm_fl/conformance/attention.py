"""Attention backends: whether a class fits the installed vLLM.

The operator ``attention_backend`` returns the dotted path of a class. vLLM finds out
in the middle of a model's start whether it fits; here it is asked before. What it
computes is judged in :mod:`vllm_fl.conformance.paged`.
"""

from __future__ import annotations

import functools
import inspect
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING
from typing import Any
from typing import TypeAlias

from vllm_fl.conformance.result import Result
from vllm_fl.conformance.result import Status
from vllm_fl.dispatch._binding import signature_of
from vllm_fl.dispatch._fatal import is_fatal
from vllm_fl.dispatch._foreign import describe

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


def load(path: str) -> Any:
    """Import the class that a path names."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def problems_of(backend: Any) -> list[str]:
    """Say what of a backend's classes does not fit the installed vLLM; empty where all does."""
    base = import_module("vllm.v1.attention.backend")
    if not (inspect.isclass(backend) and issubclass(backend, base.AttentionBackend)):
        return [f"{backend!r} is no subclass of {base.__name__}.AttentionBackend"]
    problems = _class_problems(backend, base.AttentionBackend)
    problems += _name_problems(backend)
    parts = {
        "get_impl_cls": getattr(base, "AttentionImplBase", base.AttentionImpl),
        "get_builder_cls": base.AttentionMetadataBuilder,
    }
    for method, wanted in parts.items():
        part = getattr(backend, method)()
        if not (inspect.isclass(part) and issubclass(part, wanted)):
            problems.append(f"{method}() returns {part!r}, no subclass of {wanted.__name__}")
        else:
            problems += _class_problems(part, wanted)
    return problems


def _name_problems(backend: Any) -> list[str]:
    """VLLM looks the name up among its backends when it builds a layer."""
    known = import_module("vllm.v1.attention.backends.registry").AttentionBackendEnum.__members__
    name = backend.get_name()
    if name in known:
        return []
    return [f"get_name() is {name!r}, which vLLM does not know; a plug-in's is 'CUSTOM'"]


def _class_problems(cls: Any, base: Any) -> list[str]:
    """Say which methods are missing, and which cannot be called as vLLM calls them."""
    name = cls.__qualname__
    problems = [f"{name}.{method} is missing" for method in sorted(getattr(cls, "__abstractmethods__", ()))]
    for method, declared in vars(base).items():
        ours = inspect.getattr_static(cls, method, None)
        wanted = getattr(declared, "__func__", declared)
        function = getattr(ours, "__func__", ours)
        if method.startswith("__") or function is wanted or not inspect.isfunction(function):
            continue
        problem = _signature_problem(function, wanted) if inspect.isfunction(wanted) else ""
        if problem:
            problems.append(f"{name}.{method} {problem}")
    return problems


def _signature_problem(function: Any, wanted: Any) -> str:
    has, asked = signature_of(function).parameters, signature_of(wanted).parameters
    kinds = {p.kind for p in has.values()}
    takes_more = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds
    usual = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if not takes_more:
        lacks = [n for n, p in asked.items() if p.kind in usual and n not in has and n not in ("self", "cls")]
        if lacks and inspect.Parameter.VAR_KEYWORD not in kinds:
            return f"does not take {', '.join(lacks)}"
    extra = [n for n, p in has.items() if p.kind in usual and p.default is p.empty and n not in asked]
    return f"requires {', '.join(extra)}, which vLLM does not pass" if extra else ""

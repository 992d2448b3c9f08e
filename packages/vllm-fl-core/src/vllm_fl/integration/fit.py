"""Whether an attention backend fits the installed vLLM, by its classes' signatures.

vLLM itself finds out in the middle of a model's start, by a TypeError.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

from vllm_fl.dispatch.calling.binding import signature_of


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
            # vLLM calls what its own classes declare, each of them on the way to the part's.
            for one in part.__mro__:
                problems += _class_problems(part, one) if one.__module__ == base.__name__ else []
    return list(dict.fromkeys(problems))


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
        # With validate_configuration a class is asked for what it takes of it.
        is_special = method == "validate_configuration" or (method.startswith("__") and method != "__init__")
        if is_special or function is wanted or not inspect.isfunction(function):
            continue
        problem = _signature_problem(function, wanted) if inspect.isfunction(wanted) else ""
        if problem:
            problems.append(f"{name}.{method} {problem}")
    return problems


def _signature_problem(function: Any, wanted: Any) -> str:
    has, asked = signature_of(function).parameters, signature_of(wanted).parameters
    kinds = {p.kind for p in has.values()}
    takes_more = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds
    usual = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    )
    if not takes_more:
        lacks = [n for n, p in asked.items() if p.kind in usual and n not in has and n not in ("self", "cls")]
        if inspect.Parameter.VAR_KEYWORD in kinds:
            # What is passed only now and then can be refused then.
            lacks = [name for name in lacks if asked[name].default is inspect.Parameter.empty]
        if lacks:
            return f"does not take {', '.join(lacks)}"
    extra = [n for n, p in has.items() if p.kind in usual and p.default is p.empty and n not in asked]
    return f"requires {', '.join(extra)}, which vLLM does not pass" if extra else ""

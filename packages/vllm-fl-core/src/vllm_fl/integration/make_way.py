"""Layers that another plug-in registers after us: make way, and stack.

vLLM's registry holds one class a name and asserts where a second one is registered; that
would end the worker. Our class makes way for the moment of such a registration, and is then
built anew on what was registered.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.integration import engine
from vllm_fl.integration.layer import Served
from vllm_fl.integration.log import logger
from vllm_fl.integration.served import served_class
from vllm_fl.integration.vendors import name_of
from vllm_fl.integration.vendors import vllms_own
from vllm_fl.integration.vendors import why_not_on

if TYPE_CHECKING:
    from collections.abc import Iterator


def make_way() -> None:
    """Let plug-ins register a layer that we serve, from now on."""
    from vllm.model_executor.custom_op import CustomOp
    from vllm.model_executor.custom_op import PluggableLayer

    for owner in (CustomOp, PluggableLayer):
        _wrap(owner)


def _wrap(owner: Any) -> None:
    original = owner.register_oot.__func__
    if hasattr(original, "__wrapped__"):
        return

    # Plug-ins pass the class by position or by keyword, or use it as a decorator.
    @functools.wraps(original)
    def register_oot(cls: Any, *args: Any, **kwargs: Any) -> Any:
        name = kwargs.get("name", args[1] if len(args) > 1 else None) or cls.__name__
        with _out_of_the_way(name):
            result = original(cls, *args, **kwargs)
        if isinstance(result, type):
            return result

        def decorator(theirs: type) -> Any:
            with _out_of_the_way(name):
                return result(theirs)

        return decorator

    owner.register_oot = classmethod(register_oot)


@contextmanager
def _out_of_the_way(name: str) -> Iterator[None]:
    from vllm.model_executor.custom_op import op_registry_oot

    ours = op_registry_oot.get(name)
    if ours is None or not issubclass(ours, Served):
        yield
        return
    del op_registry_oot[name]
    try:
        yield
    finally:
        theirs = op_registry_oot.setdefault(name, ours)
        if theirs is not ours:
            _stack(name, theirs, ours)


def _stack(name: str, theirs: Any, ours: Any) -> None:
    from vllm.model_executor.custom_op import op_registry_oot

    cls, layer = vllms_own(ours), ours.vllm_fl_layer
    reason = why_not_on(theirs, cls, layer)
    if reason is None:
        op_registry_oot[name] = served_class(theirs, cls, layer)
        logger.warning("vllm-fl: serves %s on %s, which was registered later", name, name_of(theirs))
    else:
        logger.warning("vllm-fl: %s is no longer served: %s", name, reason)
    # Graphs that were compiled with the layers that the plan names are others.
    engine.note_fault(f"{name} on {name_of(theirs)}")

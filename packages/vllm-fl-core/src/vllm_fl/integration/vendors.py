"""Layers that another plug-in replaces too: stack, do not fight.

vLLM's registry holds one class a name and asserts where a second one is registered;
that would end the worker. Where a vendor's plug-in came first, our class is built on
the vendor's; where it comes later, ours makes way for the moment of its registration
and is then built on it anew. The vendor's forward is what `native` means for that
layer, and the only one that is served beside it by the reference alone.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.dispatch import get_default_manager
from vllm_fl.dispatch import get_policy
from vllm_fl.dispatch.types import BackendImplKind
from vllm_fl.integration import engine
from vllm_fl.integration.bindings import Served
from vllm_fl.integration.log import logger

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Iterator

    from vllm_fl.integration.bindings import Binding


def name_of(cls: type) -> str:
    """Return where a class is defined, as a log names it."""
    return f"{cls.__module__}.{cls.__qualname__}"


def why_not_on(theirs: type, cls: type, binding: Binding) -> str | None:
    """Say why ours cannot be built on what another plug-in has put in the place of ``cls``."""
    if theirs is cls:
        return None
    if not issubclass(theirs, cls):
        return f"{name_of(theirs)} replaces it and is no subclass of it"
    return None if binding.stacks else f"{name_of(theirs)} replaces it"


def wins(served: type, binding: Binding) -> str | None:
    """Say why a vendor's layer below ours stays in its place; None where it does not, or there is none.

    The reference is there for machines where nobody has a kernel. Only who asks for
    it in so many words gets it instead of a vendor's layer.
    """
    theirs = _below(served)
    if theirs is None or get_policy().is_explicit_for(binding.op_name):
        return None
    usable = get_default_manager().explain(binding.op_name, native=True).usable
    if not usable or usable[0].kind != BackendImplKind.REFERENCE:
        return None
    return f"{name_of(theirs)} replaces it, and nothing but the reference would serve it"


def _below(served: type) -> type | None:
    """Return the other plug-in's class that ours is built on, None where that is vLLM's own."""
    ours = next(cls for cls in served.__mro__ if not issubclass(cls, Served))
    return None if ours is _vllms(served) else ours


def _vllms(served: type) -> type:
    # The last one, as a vendor may give its own class the same name.
    name = served.__name__.removeprefix("Served")
    return [cls for cls in served.__mro__ if cls.__name__ == name][-1]


def make_way(build: Callable[[type, type, Binding], type]) -> None:
    """Let plug-ins register a layer that we serve, from now on.

    Args:
        build: ``build(theirs, cls, binding)`` returns our class on top of theirs.
    """
    from vllm.model_executor.custom_op import CustomOp
    from vllm.model_executor.custom_op import PluggableLayer

    for owner in (CustomOp, PluggableLayer):
        _wrap(owner, build)


def _wrap(owner: Any, build: Callable[[type, type, Binding], type]) -> None:
    original = owner.register_oot.__func__
    if hasattr(original, "__wrapped__"):
        return

    # Plug-ins pass the class by position or by keyword, or use it as a decorator.
    @functools.wraps(original)
    def register_oot(cls: Any, *args: Any, **kwargs: Any) -> Any:
        name = kwargs.get("name", args[1] if len(args) > 1 else None) or cls.__name__
        with _out_of_the_way(name, build):
            result = original(cls, *args, **kwargs)
        if isinstance(result, type):
            return result

        def decorator(theirs: type) -> Any:
            with _out_of_the_way(name, build):
                return result(theirs)

        return decorator

    owner.register_oot = classmethod(register_oot)


@contextmanager
def _out_of_the_way(name: str, build: Callable[[type, type, Binding], type]) -> Iterator[None]:
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
            _stack(name, theirs, ours, build)


def _stack(name: str, theirs: Any, ours: Any, build: Callable[[type, type, Binding], type]) -> None:
    from vllm.model_executor.custom_op import op_registry_oot

    cls, binding = _vllms(ours), ours.vllm_fl_binding
    reason = why_not_on(theirs, cls, binding)
    if reason is None:
        op_registry_oot[name] = build(theirs, cls, binding)
        logger.warning("vllm-fl: serves %s on %s, which was registered later", name, name_of(theirs))
    else:
        logger.warning("vllm-fl: %s is no longer served: %s", name, reason)
    # Graphs that were compiled with the layers that the plan names are others.
    engine.note_fault(f"{name} on {name_of(theirs)}")

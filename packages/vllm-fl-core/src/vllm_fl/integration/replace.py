"""Which of vLLM's layers are served: their classes in its registry, and the seams that it has none for."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from vllm_fl.dispatch import PolicyError
from vllm_fl.dispatch import trace
from vllm_fl.dispatch.common.suggest import suggest
from vllm_fl.integration import activation
from vllm_fl.integration import attention
from vllm_fl.integration import engine
from vllm_fl.integration import moe
from vllm_fl.integration import normalization
from vllm_fl.integration import quantization
from vllm_fl.integration import rotary
from vllm_fl.integration import seam
from vllm_fl.integration import settings
from vllm_fl.integration.layer import Served
from vllm_fl.integration.log import logger
from vllm_fl.integration.make_way import make_way
from vllm_fl.integration.served import served_class
from vllm_fl.integration.vendors import name_of
from vllm_fl.integration.vendors import why_not_on

if TYPE_CHECKING:
    from vllm_fl.integration.layer import Layer
    from vllm_fl.integration.seam import Seam

LAYERS: tuple[type[Layer], ...] = (
    *activation.LAYERS,
    *normalization.LAYERS,
    *rotary.LAYERS,
    *moe.LAYERS,
    *quantization.LAYERS,
)

SEAMS: tuple[Seam, ...] = (quantization.INT8, attention.ATTENTION)


# -- which classes ------------------------------------------------------------------


def check_lists() -> None:
    """Check the names in the two variables that say which layers are served.

    Raises:
        PolicyError: an unknown name, or both are set.
    """
    allowed, denied = settings.lists()
    known = {name for layer in LAYERS for name in (layer.class_name, layer.vllm_name)}
    known |= {name for one in SEAMS for name in (one.class_name, one.vllm_name)}
    unknown = [name for name in [*(allowed or []), *denied] if name not in known]
    if unknown:
        # A subclass's name is known after an import that takes most of a second.
        for layer in LAYERS:
            with suppress(ImportError, AttributeError):  # this vLLM has no such layer
                known |= {cls.__name__ for cls, _ in classes_of(layer)}
    for name in unknown:
        if name not in known:
            variable = settings.WHITELIST if allowed is not None else settings.BLACKLIST
            raise PolicyError(f"{variable}: unknown layer {name!r}.{suggest(name, known)}")


def classes_of(layer: type[Layer]) -> list[tuple[type, str | None]]:
    """Return vLLM's classes of a layer, each with the reason why it is not served, or None.

    Raises:
        ImportError: this vLLM has no such module.
        AttributeError: the module has no such class.
    """
    module = __import__(layer.module, fromlist=[layer.class_name])
    base = getattr(module, layer.class_name)
    if layer.with_subclasses:
        more = [(cls, _own_forward(cls, base)) for cls in descendants(base)]
    else:
        # Those of vLLM's models; a vendor's stands in the place of the class itself.
        own = [cls for cls in descendants(base) if cls.__module__.startswith("vllm.")]
        more = [(cls, f"only {base.__name__} itself is served, not this subclass") for cls in own]
    return [(base, None), *more]


def descendants(cls: type) -> list[type]:
    """Return the subclasses of a class, and theirs, by name; none of ours."""
    subclasses: list[type] = type.__subclasses__(cls)
    direct = [sub for sub in subclasses if not issubclass(sub, Served)]
    found = {sub.__name__: sub for parent in direct for sub in (parent, *descendants(parent))}
    return [found[name] for name in sorted(found)]


def _own_forward(cls: type, base: type) -> str | None:
    """Say which forward a class between ``cls`` and ``base`` defines, or None."""
    for ancestor in cls.__mro__[: cls.__mro__.index(base)]:
        own = [name for name in vars(ancestor) if name.startswith("forward")]
        if own:
            return f"{ancestor.__name__} has its own {', '.join(sorted(own))}"
    return None


# -- replacing them -----------------------------------------------------------------


def take_over() -> None:
    """Replace the layers' classes and wrap the seams, before the process builds its first layer.

    Raises:
        PolicyError: a list is wrong.
    """
    served: list[str] = []
    skipped: dict[str, str] = {}
    trace.on_traced = _note_graph
    try:
        served, skipped = replace_classes()
    except Exception as error:  # noqa: BLE001 - what is not contained is raised again
        seam.contain("every layer", error, is_start=True)
    for one in SEAMS:
        reason = settings.why_not_listed(one.class_name, one.vllm_name)
        if reason is not None:
            skipped[one.class_name] = reason
            continue
        try:
            one.install()
        except Exception as error:  # noqa: BLE001 - as above
            seam.contain(one.class_name, error, is_start=True)
        else:
            served.append(one.class_name)
    # The fingerprint covers what may be served.
    engine.remember("layers", sorted(served))
    logger.info("vllm-fl: serves %s", ", ".join(served) or "no layer")
    for name, reason in skipped.items():
        logger.info("vllm-fl: %s stays vLLM's own: %s", name, reason)
    record = trace.recorder()
    if record is not None:
        record.fact("served_layers", sorted(served))
        record.fact("skipped_layers", skipped)


def replace_classes() -> tuple[list[str], dict[str, str]]:
    """Replace the layers' classes in vLLM's registry.

    Returns:
        What is replaced, and why what is not.

    Raises:
        PolicyError: a list is wrong.
    """
    from vllm.model_executor.custom_op import op_registry_oot

    served: list[str] = []
    skipped: dict[str, str] = {}
    for layer in LAYERS:
        try:
            classes = classes_of(layer)
        except (ImportError, AttributeError) as error:
            skipped[layer.class_name] = f"this vLLM has no {layer.class_name}: {error}"
            continue
        for cls, why_not in classes:
            name = cls.__name__
            theirs = op_registry_oot.get(name, cls)
            reason = (
                why_not or settings.why_not_listed(name, layer.vllm_name) or why_not_on(theirs, cls, layer)
            )
            if reason is not None:
                skipped[name] = reason
                continue
            # Not register_oot, which asserts where another plug-in came first:
            # our class is then built on theirs, and theirs is its native path.
            op_registry_oot[name] = served_class(theirs, cls, layer)
            served.append(name if theirs is cls else f"{name} on {name_of(theirs)}")
    make_way()
    return served, skipped


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _note_graph(op_name: str, impl_id: str) -> bool:
    """Note a trace. Dynamo runs it while it traces and keeps nothing of it in the graph."""
    record = trace.recorder()
    if record is not None:
        record.traced(op_name, impl_id, str(torch._guards.CompileContext.current_compile_id()))
    return True

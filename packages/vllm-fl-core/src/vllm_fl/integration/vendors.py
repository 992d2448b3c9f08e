"""What stays of a layer that another plug-in replaces too.

Our class is built on the vendor's, whose forward is what `native` means for that layer.
The reference alone does not take its place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_fl.dispatch import get_default_manager
from vllm_fl.dispatch import get_policy
from vllm_fl.dispatch.types import BackendImplKind
from vllm_fl.integration.layer import Served

if TYPE_CHECKING:
    from vllm_fl.integration.layer import Layer


def name_of(cls: type) -> str:
    """Return where a class is defined, as a log names it."""
    return f"{cls.__module__}.{cls.__qualname__}"


def why_not_on(theirs: type, cls: type, layer: type[Layer]) -> str | None:
    """Say why ours cannot be built on what another plug-in has put in the place of ``cls``."""
    if theirs is cls:
        return None
    if not issubclass(theirs, cls):
        return f"{name_of(theirs)} replaces it and is no subclass of it"
    return None if layer.stacks else f"{name_of(theirs)} replaces it"


def wins(served: type, op_name: str) -> str | None:
    """Say why a vendor's layer below ours stays in its place; None where it does not, or there is none.

    The reference is there for machines where nobody has a kernel. Only who asks for
    it explicitly gets it instead of a vendor's layer.
    """
    theirs = _below(served)
    if theirs is None or get_policy().is_explicit_for(op_name):
        return None
    usable = get_default_manager().explain(op_name, native=True).usable
    if not usable or usable[0].kind != BackendImplKind.REFERENCE:
        return None
    return f"{name_of(theirs)} replaces it, and nothing but the reference would serve it"


def _below(served: type) -> type | None:
    """Return the other plug-in's class that ours is built on, None where that is vLLM's own."""
    ours = next(cls for cls in served.__mro__ if not issubclass(cls, Served))
    return None if ours is vllms_own(served) else ours


def vllms_own(served: type) -> type:
    """Return the class of vLLM's whose place a class of ours takes."""
    # The last one, as a vendor may give its own class the same name.
    name = served.__name__.removeprefix("Served")
    return [cls for cls in served.__mro__ if cls.__name__ == name][-1]

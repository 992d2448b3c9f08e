"""The classes that take the place of vLLM's."""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.integration.choice import choose
from vllm_fl.integration.layer import Served

if TYPE_CHECKING:
    from vllm_fl.integration.layer import Layer


class DecidesWhenBuilt(Served):
    """Chooses its forward at the end of its constructor."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        choose(self.vllm_fl_layer(self))


def served_class(theirs: type, cls: type, layer: type[Layer]) -> type:
    """Return the class that builds a layer as ever and then decides what its forward is.

    Args:
        theirs: what it is built on: ``cls``, or the subclass by which a vendor's plug-in replaces it.
        cls: vLLM's class.
        layer: how it is served.
    """
    served = type(
        f"Served{cls.__name__}",
        (layer.when or DecidesWhenBuilt, theirs),
        {
            "__module__": __name__,
            "__doc__": f"vLLM's {cls.__name__}, served by the operator {layer.op_name}.",
            "vllm_fl_layer": layer,
        },
    )
    if hasattr(cls, "name"):
        # vLLM's switch is "+rms_norm": the name of its own class.
        served.name = cls.name  # type: ignore[attr-defined]
    return served

"""How one of vLLM's layers is served by an operator: a subclass of :class:`Layer` each."""

from __future__ import annotations

from abc import ABC
from abc import abstractmethod
from typing import TYPE_CHECKING
from typing import Any
from typing import ClassVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


class Layer(ABC):
    """One of vLLM's layers, and how an operator serves it.

    A subclass says which class of vLLM's it serves, and by which operator; an instance
    belongs to one layer, and is its ``vllm_fl``. That class is all that a new layer of an
    existing operator needs, with a place in the ``LAYERS`` of its module and its names in
    :mod:`vllm_fl.integration.settings`.

    Where vLLM's forward takes the operator's own arguments, neither :meth:`forward` nor
    :meth:`native` is overridden, and the layer calls the operator without a step between.

    Args:
        owner: the object that calls a forward.
        layer: what knows the sizes and has the weights; the owner itself if None.

    Attributes:
        module: where vLLM defines the class.
        class_name: its name.
        vllm_name: vLLM's own name of it, as in ``+rms_norm``.
        op_name: the operator.
        with_subclasses: serve every subclass that has no forward of its own.
        attribute: where the owner keeps the forward that it calls.
        stacks: it can be built on another plug-in's subclass of the class.
        is_traced: a compiler may look into it, where the implementation can be traced.
        when: the first base of the class that takes the place of vLLM's, which says when the
            choice is made; None where that is the end of the constructor.
        name: the layer as the log and the record name it: its class in vLLM.
        own: vLLM's own forward of this layer.
        fixed: the operator's keyword arguments, which are fixed for a layer.
        operator: the operator as this layer calls it; None where the layer is vLLM's own.
        is_opaque: a compiler does not look into ``operator``.
        dtype: that of the input for which ``operator`` was chosen, where what it needs was asked
            once for the layer; any other input goes vLLM's own path. None: asked at every call.
    """

    module: ClassVar[str]
    class_name: ClassVar[str]
    vllm_name: ClassVar[str]
    op_name: ClassVar[str]
    with_subclasses: ClassVar[bool] = False
    attribute: ClassVar[str] = "_forward_method"
    stacks: ClassVar[bool] = True
    is_traced: ClassVar[bool] = True
    when: ClassVar[type[Served] | None] = None

    def __init__(self, owner: Any, layer: Any = None) -> None:
        self.owner = owner
        self.layer = owner if layer is None else layer
        self.name = type(owner).__name__.removeprefix("Served")
        self.own: Callable[..., Any] = getattr(owner, self.attribute)
        self.fixed: dict[str, Any] = {}
        self.operator: Any = None
        self.is_opaque = False
        self.dtype: torch.dtype | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``operator`` with the arguments of vLLM's forward, and return what that returns."""
        return self.operator(*args, **kwargs)

    def native(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``own`` with the operator's arguments, by place or by name, and keep its contract."""
        return self.own(*args, **kwargs)

    @abstractmethod
    def examples(self) -> list[tuple[Any, ...]]:
        """Return tiny arguments of the operator, of one row: for first calls.

        Their shapes, dtypes and device, and ``fixed``, are what the choice is made for: two layers
        of a class with the same ones get the same.
        """

    def asked_once(self) -> list[tuple[Any, ...]]:
        """Return calls with the dtypes, devices and last dimensions of every call of this layer.

        The first argument's dtype may differ all the same: :meth:`forward` compares it with
        ``dtype``. Empty where the layer does not know them: then each call is asked.
        """
        return []

    def refuses(self) -> str | None:
        """Say why this layer needs vLLM's own path, or return None."""
        return None

    # -- what is called ------------------------------------------------------------

    def serve(self, operator: Callable[..., Any], *, is_opaque: bool, is_settled: bool = False) -> None:
        """Let the layer call the operator from now on."""
        self.operator, self.is_opaque = operator, is_opaque
        self.dtype = self.asked_once()[0][0].dtype if is_settled else None
        is_direct = type(self).forward is Layer.forward
        setattr(self.owner, self.attribute, operator if is_direct else self.forward)

    def leave(self) -> None:
        """Let the layer run vLLM's own path from now on."""
        self.operator = None
        setattr(self.owner, self.attribute, self.own)

    def own_path(self) -> Callable[..., Any]:
        """Return what takes the operator's arguments and runs vLLM's own path."""
        return self.own if type(self).native is Layer.native else self.native


class Served:
    """The first base of every class that takes the place of one of vLLM's."""

    vllm_fl_layer: ClassVar[type[Layer]]
    vllm_fl: Layer


def serving(owner: Any) -> Layer | None:
    """Return what serves a layer of vLLM's, None where vLLM's own forward runs."""
    layer: Layer | None = getattr(owner, "vllm_fl", None)
    return None if layer is None or layer.operator is None else layer


def ones(layer: Any, *shape: int) -> torch.Tensor:
    """Return ones on the device of the layer's weight: an example that draws no random number."""
    weight = getattr(layer, "weight", None)
    device = weight.device if isinstance(weight, torch.Tensor) else None
    return torch.ones(shape, device=device)

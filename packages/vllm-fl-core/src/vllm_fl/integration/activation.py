"""Gated activations."""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.integration.layer import Layer
from vllm_fl.integration.layer import ones

if TYPE_CHECKING:
    import torch


class SiluAndMul(Layer):
    """``silu(gate) * up``."""

    module = "vllm.model_executor.layers.activation"
    class_name = "SiluAndMul"
    vllm_name = "silu_and_mul"
    op_name = "silu_and_mul"

    def examples(self) -> list[tuple[Any, ...]]:
        """Return one row; the layer knows neither its width nor its dtype."""
        return [(ones(self.layer, 1, 128),)]


class GeluAndMul(Layer):
    """``gelu(gate) * up``."""

    module = "vllm.model_executor.layers.activation"
    class_name = "GeluAndMul"
    vllm_name = "gelu_and_mul"
    op_name = "gelu_and_mul"

    def __init__(self, owner: Any) -> None:
        super().__init__(owner)
        self.approximate: str = owner.approximate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the approximation, which is fixed for a layer."""
        return self.operator(x, self.approximate)  # type: ignore[no-any-return]

    def native(self, x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
        """Leave it out."""
        return self.own(x)  # type: ignore[no-any-return]

    def examples(self) -> list[tuple[Any, ...]]:
        """Return one row; the layer knows neither its width nor its dtype."""
        return [(ones(self.layer, 1, 128), self.approximate)]


LAYERS: tuple[type[Layer], ...] = (SiluAndMul, GeluAndMul)

"""Norms by the root mean square."""

from __future__ import annotations

from typing import Any

import torch

from vllm_fl.integration.layer import Layer


class RMSNorm(Layer):
    """The root mean square's norm, with or without a residual that is added before."""

    module = "vllm.model_executor.layers.layernorm"
    class_name = "RMSNorm"
    vllm_name = "rms_norm"
    op_name = "rms_norm"

    def __init__(self, owner: Any) -> None:
        super().__init__(owner)
        self.epsilon: float = owner.variance_epsilon

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """Add the weight, where the layer has one, and epsilon."""
        if self.dtype is not None and x.dtype is not self.dtype:
            return self.native(x, residual, None, self.epsilon)
        layer = self.layer
        has_weight = layer.pass_weight if residual is None else layer.pass_weight_add
        weight = layer.weight.data if has_weight else None
        return self.operator(x, residual, weight, self.epsilon)

    def native(self, x: torch.Tensor, residual: torch.Tensor | None, weight: Any, epsilon: float) -> Any:
        """Leave them out."""
        return self.own(x) if residual is None else self.own(x, residual)

    def examples(self) -> list[tuple[Any, ...]]:
        """Return one row of the layer's width, without a residual and with one."""
        weight = self.layer.weight.data.clone()
        x = torch.ones(1, weight.shape[0], device=weight.device)
        return [(x.clone(), None, weight, self.epsilon), (x.clone(), x, weight, self.epsilon)]

    def asked_once(self) -> list[tuple[Any, ...]]:
        """Return both examples: the layer knows its width, and is made with the model's dtype."""
        return self.examples()

    def refuses(self) -> str | None:
        """Refuse a mean square over a part of the row."""
        if getattr(self.layer, "variance_size_override", None) is None:
            return None
        return "the operator has no variance_size_override"


class GemmaRMSNorm(RMSNorm):
    """The norm whose weight is around zero."""

    class_name = "GemmaRMSNorm"
    vllm_name = "gemma_rms_norm"

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """Add the weight that the operator multiplies by, and epsilon."""
        if self.dtype is not None and x.dtype is not self.dtype:
            return self.native(x, residual, None, self.epsilon)
        return self.operator(x, residual, self.layer.weight.float() + 1.0, self.epsilon)


LAYERS: tuple[type[Layer], ...] = (RMSNorm, GemmaRMSNorm)

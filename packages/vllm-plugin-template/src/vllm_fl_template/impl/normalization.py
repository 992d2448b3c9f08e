"""Normalisation by the root mean square."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm_fl_template.impl.precision import widened

if TYPE_CHECKING:
    from torch import Tensor


def rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float
) -> Tensor | tuple[Tensor, Tensor]:
    """Normalise by the root mean square of the last dimension.

    Args:
        x: T[..., h], floating, of any stride; not written, although the contract
            would allow it.
        residual: x's shape and dtype, or None; added to x first, not written either.
        weight: T[h], x's dtype.
        epsilon: added to the mean square.

    Returns:
        Where residual is None: T[..., h], new and contiguous. Otherwise the pair
        (normed, x + residual), both new and contiguous. Of x's dtype; computed in
        float32 or wider.
    """
    wide = widened(x) if residual is None else widened(x) + widened(residual)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    # The contract rounds before the weight, as vLLM's own layer does.
    normed = (normed.to(x.dtype) * weight).contiguous()
    if residual is None:
        return normed
    return normed, wide.to(x.dtype).contiguous()

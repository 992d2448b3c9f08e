"""Normalisation by the root mean square."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_fl_ascend.impl._npu import torch_npu

if TYPE_CHECKING:
    from torch import Tensor


def rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float
) -> Tensor | tuple[Tensor, Tensor]:
    """Normalise by the root mean square of the last dimension.

    Args:
        x: T[..., h] of 2 to 8 dimensions, float16, bfloat16 or float32, of any
            stride; not written, although the contract would allow it.
        residual: x's shape and dtype, or None; not written either.
        weight: T[h], x's dtype.
        epsilon: added to the mean square.

    Returns:
        By ``npu_rms_norm`` where residual is None: T[..., h], new and contiguous.
        Otherwise by ``npu_add_rms_norm`` the pair (normed, x + residual), both new
        and contiguous.
    """
    x = x.contiguous()
    normed: Tensor
    if residual is None:
        if not x.numel():
            return x.new_empty(x.shape)
        normed, _ = torch_npu.npu_rms_norm(x, weight, epsilon=epsilon)
        return normed.contiguous()
    if not x.numel():
        return x.new_empty(x.shape), x.new_empty(x.shape)
    total: Tensor
    normed, _, total = torch_npu.npu_add_rms_norm(x, residual.contiguous(), weight, epsilon=epsilon)
    return normed.contiguous(), total.contiguous()

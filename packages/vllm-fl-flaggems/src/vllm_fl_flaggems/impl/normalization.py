"""Normalisation by the root mean square."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_fl_flaggems._gems import flag_gems

if TYPE_CHECKING:
    from torch import Tensor


def rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, epsilon: float
) -> Tensor | tuple[Tensor, Tensor]:
    """Normalise by the root mean square of the last dimension, in float32.

    Args:
        x: T[..., h], float16, bfloat16 or float32, of any stride. Not written where
            residual is None; else its memory is reused where it is contiguous.
        residual: T[..., h] of x's dtype, or None; added to x first. The float32 sum
            is normalised, and the returned one rounded. Its memory is reused where
            it is contiguous.
        weight: T[h] of x's dtype or float32, or None, which means ones.
        epsilon: added to the mean square.

    Returns:
        Where residual is None: T[..., h], new and contiguous, x's dtype. Otherwise
        the pair (normed, x + residual), contiguous, x's dtype.
    """
    width = x.shape[-1]
    if weight is None:
        weight = x.new_ones(width)
    if residual is None:
        if not x.numel():
            return x.new_empty(x.shape)
        out: Tensor = flag_gems.rms_norm(x.contiguous(), (width,), weight, epsilon)
        return out
    if not x.numel():
        return x.new_empty(x.shape), x.new_empty(x.shape)
    if residual.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
        residual = residual.clone()  # the kernel writes both
    # Of a strided one it makes a copy and writes that, so that what it returns is
    # what counts.
    normed, total = flag_gems.fused_add_rms_norm(x, residual, (width,), weight, epsilon)
    return normed, total

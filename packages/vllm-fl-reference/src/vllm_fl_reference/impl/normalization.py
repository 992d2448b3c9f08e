"""Normalisation by the root mean square."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_fl_reference.impl._precision import wide

if TYPE_CHECKING:
    from torch import Tensor


def rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, epsilon: float
) -> Tensor | tuple[Tensor, Tensor]:
    """Normalise by the root mean square of the last dimension.

    ``y = x / sqrt(mean(x ** 2) + epsilon)``, in float32; then
    ``(y.to(weight.dtype) * weight).to(x.dtype)``. With a residual, what is
    normalised is the float32 sum; the returned sum is that one, rounded. Both are
    what vLLM's own layer computes, to the bit.

    Args:
        x: T[..., h], floating, of any stride; not written, although the contract
            would allow it.
        residual: T[..., h] or None; not written either.
        weight: T[h] or None, which means ones. Its dtype may differ from x's.
        epsilon: added to the mean square.

    Returns:
        Where residual is None: T[..., h], new and contiguous, x's dtype. Otherwise
        the pair (normed, x + residual), both new and contiguous, x's dtype.
    """
    dtype = x.dtype
    y = wide(x)
    if residual is not None:
        y = y + residual
    # y * y has the bits of y.pow(2), for less.
    normed = y * (y * y).mean(-1, keepdim=True).add_(epsilon).rsqrt_()
    if weight is not None:
        normed = normed.to(weight.dtype).mul_(weight)
    normed = normed.to(dtype).contiguous()
    if residual is None:
        return normed
    return normed, y.to(dtype).contiguous()

"""Normalisation by the root mean square."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm_fl_cuda.impl._inputs import dense
from vllm_fl_cuda.impl._inputs import problem
from vllm_fl_cuda.impl._inputs import vector
from vllm_fl_cuda.impl._inputs import width_problem
from vllm_fl_cuda.kernels import FUSED_ADD_RMS_NORM
from vllm_fl_cuda.kernels import RMS_NORM

if TYPE_CHECKING:
    from torch import Tensor


def rms_norm_layer(x: Tensor, weight: Tensor | None) -> bool | str:
    """Whether the kernels take the dtypes; a layer may come with a residual and without."""
    if x.dim() == 0:
        return "x has no dimension"
    reason = problem(RMS_NORM, x) or problem(FUSED_ADD_RMS_NORM, x) or width_problem(x, x.shape[-1])
    if reason is not None:
        return reason
    if weight is not None and weight.dtype is not x.dtype:
        return f"{RMS_NORM} takes a weight of x's dtype {x.dtype}, not {weight.dtype}"
    return weight is None or weight.dim() == 1 or f"{RMS_NORM} takes a weight of one dimension"


def rms_norm_call(x: Tensor, residual: Tensor | None, weight: Tensor | None, epsilon: float) -> bool | str:
    """Whether the residual fits, which a model may keep in another dtype."""
    if weight is not None and not weight.is_contiguous():
        return f"{RMS_NORM} takes a contiguous weight"
    if residual is None:
        return True
    if residual is x:
        return f"{FUSED_ADD_RMS_NORM} writes x and residual, which are one tensor"
    if residual.dtype is not x.dtype:
        return f"{FUSED_ADD_RMS_NORM} takes a residual of x's dtype {x.dtype}, not {residual.dtype}"
    return residual.shape == x.shape or f"{FUSED_ADD_RMS_NORM} takes a residual of x's shape"


def rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, epsilon: float
) -> Tensor | tuple[Tensor, Tensor]:
    """Normalise by the root mean square of the last dimension.

    With a residual the sum is rounded to x's dtype first and then normalised, where
    the contract normalises the sum before it is rounded: within a rounding of it.

    Args:
        x: T[..., h], float32, float16 or bfloat16. Without a residual read where it
            lies, also as rows of a wider tensor on a GPU. With one it is written,
            and returned, where it is contiguous; else a copy is.
        residual: T[..., h] or None, x's dtype; written and returned likewise.
        weight: T[h] of x's dtype, or None for ones.
        epsilon: added to the mean square.

    Returns:
        Where residual is None: T[..., h], new and contiguous. Otherwise the pair
        (normed, x + residual), contiguous, in the memory of x and residual.
    """
    if residual is None:
        out = x.new_empty(x.shape)
        if out.numel():
            RMS_NORM.call(out, _rows(x), weight, epsilon)
        return out
    x, residual = dense(x, x.shape[-1]), dense(residual, x.shape[-1])
    if x.dim() == 1:
        FUSED_ADD_RMS_NORM.call(x.unsqueeze(0), residual.unsqueeze(0), weight, epsilon)
    elif x.numel():
        FUSED_ADD_RMS_NORM.call(x, residual, weight, epsilon)
    return x, residual


def _rows(x: Tensor) -> Tensor:
    """Return ``x`` as the kernel reads it: in 2 to 4 dimensions, rows aligned."""
    rank, width = x.dim(), x.shape[-1]
    if x.is_contiguous() or x.device.type == "cpu" or not 2 <= rank <= 4 or x.stride(-1) != 1:
        # The CPU's kernel takes no strides, and is silently wrong where there are.
        x = dense(x, width)
        return x if 2 <= rank <= 4 else x.view(-1, width)
    size = vector(x, width)
    if any(step % size for step in x.stride()[:-1]):
        return x.contiguous()
    if not torch.compiler.is_compiling() and x.storage_offset() % size:
        return x.contiguous()
    return x

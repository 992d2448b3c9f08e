"""Dynamic quantisation, one scale for each row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm_fl_cuda.impl._inputs import problem
from vllm_fl_cuda.impl._inputs import width_problem
from vllm_fl_cuda.kernels import FP8_QUANT
from vllm_fl_cuda.kernels import INT8_QUANT

if TYPE_CHECKING:
    from torch import Tensor

    from vllm_fl_cuda.kernels import Kernel

_FLOAT32_TINY = torch.finfo(torch.float32).tiny


def _layer(kernel: Kernel, x: Tensor) -> bool | str:
    if x.dim() != 2:
        return f"x must be T[tokens, hidden], not of {x.dim()} dimensions"
    return problem(kernel, x) or width_problem(x, x.shape[1]) or True


def int8_layer(x: Tensor) -> bool | str:
    """Whether the kernel takes ``x``; a sentence where not."""
    return _layer(INT8_QUANT, x)


def dynamic_per_token_quant_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise each row symmetrically to int8.

    ``scale = max(abs(row)) / 127``. The kernel multiplies by the scale's inverse, so
    that a code may differ by one from the quotient's.

    Args:
        x: T[n, h], float32, float16 or bfloat16; copied where it is not contiguous,
            not written.

    Returns:
        (int8 T[n, h], float32 scales T[n, 1]), new and contiguous. A row of zeros
        gives zeros and the smallest normal scale, where the kernel alone gives 0.
    """
    q = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scales = torch.empty((x.shape[0], 1), dtype=torch.float32, device=x.device)
    if q.numel():
        INT8_QUANT.call(q, x.contiguous(), scales, None)
        scales.clamp_(min=_FLOAT32_TINY)
    return q, scales


def fp8_layer(x: Tensor) -> bool | str:
    """Whether the kernel takes ``x``; a sentence where not."""
    return _layer(FP8_QUANT, x)


def dynamic_per_token_quant_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise each row to float8_e4m3fn.

    ``scale = max(max(abs(row)) / 448, 1 / (448 * 512))``,
    ``q = clamp(row / scale, -448, 448)``.

    Args:
        x: T[n, h], float32, float16 or bfloat16; copied where it is not contiguous,
            not written.

    Returns:
        (float8_e4m3fn T[n, h], float32 scales T[n, 1]), new and contiguous.
    """
    q = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((x.shape[0], 1), dtype=torch.float32, device=x.device)
    if q.numel():
        FP8_QUANT.call(q, x.contiguous(), scales, None)
    return q, scales

"""Dynamic quantisation, one scale for each row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm_fl_reference.impl._precision import wide

if TYPE_CHECKING:
    from torch import Tensor

_INT8_MAX = 127.0
_FP8_MAX = 448.0
_FP8_MIN_SCALE = 1.0 / (448.0 * 512.0)
_FLOAT32_TINY = torch.finfo(torch.float32).tiny


def dynamic_per_token_quant_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise each row symmetrically to int8.

    ``scale = max(abs(row)) / 127``, ``q = round_half_even(row / scale)``. A scale
    below the smallest normal float32 is raised to it, so that no row divides by 0.

    Args:
        x: T[n, h], floating, of any stride, h > 0; not written.

    Returns:
        (int8 T[n, h], float32 scales T[n, 1]), new and contiguous. A row of zeros
        gives zeros and a scale that is finite and not 0.
    """
    x = wide(x)
    scales = (x.abs().amax(-1, keepdim=True) / _INT8_MAX).float().clamp_(min=_FLOAT32_TINY)
    return (x / scales).round_().to(torch.int8).contiguous(), scales.contiguous()


def dynamic_per_token_quant_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise each row to float8_e4m3fn.

    ``scale = max(max(abs(row)) / 448, 1 / (448 * 512))``,
    ``q = clamp(row / scale, -448, 448)``.

    Args:
        x: T[n, h], floating, of any stride, h > 0; not written.

    Returns:
        (float8_e4m3fn T[n, h], float32 scales T[n, 1]), new and contiguous.
    """
    x = wide(x)
    scales = (x.abs().amax(-1, keepdim=True) / _FP8_MAX).float().clamp_(min=_FP8_MIN_SCALE)
    # The division's rounding may exceed 448, and not every device's cast saturates.
    q = (x / scales).clamp_(-_FP8_MAX, _FP8_MAX)
    return q.to(torch.float8_e4m3fn).contiguous(), scales.contiguous()

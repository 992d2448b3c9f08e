"""Dynamic quantisation, one scale for each row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

_TINY = torch.finfo(torch.float32).tiny


def dynamic_per_token_quant_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise each row symmetrically to int8.

    ``scale = max(abs(row)) / 127``, ``q = round_half_even(row / scale)``.

    Args:
        x: T[n, h], floating, of any stride; not written.

    Returns:
        (int8 T[n, h], float32 scales T[n, 1]), new and contiguous. A row of zeros
        gives zeros and the smallest normal float32.
    """
    wide = x.float()
    scales = (wide.abs().amax(-1, keepdim=True) / 127).clamp(min=_TINY)
    return (wide / scales).round().to(torch.int8).contiguous(), scales.contiguous()

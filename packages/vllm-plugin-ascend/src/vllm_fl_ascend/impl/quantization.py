"""Dynamic quantisation, one scale for each row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm_fl_ascend.impl._npu import torch_npu

if TYPE_CHECKING:
    from torch import Tensor

_FLOAT32_TINY = torch.finfo(torch.float32).tiny


def dynamic_per_token_quant_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise each row symmetrically to int8, by ``npu_dynamic_quant``.

    Args:
        x: T[n, h], float16 or bfloat16, of any stride; not written.

    Returns:
        (int8 T[n, h], float32 scales T[n, 1]), new and contiguous. A row of zeros
        gives zeros and a scale that is finite and not 0.
    """
    shape = (*x.shape[:-1], 1)
    if not x.numel():
        return x.new_empty(x.shape, dtype=torch.int8), x.new_empty(shape, dtype=torch.float32)
    q, scales = torch_npu.npu_dynamic_quant(x.contiguous())
    scales = scales.view(shape)
    # The kernel's formula divides a row of zeros by 0; what it then writes, nobody says.
    zeros = scales == 0
    return q.masked_fill_(zeros, 0).contiguous(), scales.masked_fill(zeros, _FLOAT32_TINY).contiguous()

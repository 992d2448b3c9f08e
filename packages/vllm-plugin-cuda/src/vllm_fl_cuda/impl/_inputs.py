"""What the predicates ask of a tensor."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from vllm_fl_cuda.kernels import Kernel

FLOATS = (torch.float32, torch.float16, torch.bfloat16)

#: What the CPU's kernels want the last dimension to be a multiple of.
_CPU_VECTOR = 8


def problem(kernel: Kernel, x: Tensor) -> str | None:
    """Say why a kernel cannot read ``x`` by its device or its dtype; None if it can."""
    if not kernel.runs_on(x.device.type):
        return f"{kernel} has no kernel for {x.device.type}"
    if x.dtype not in FLOATS:
        return f"{kernel} takes float32, float16 and bfloat16, not {x.dtype}"
    return None


def width_problem(x: Tensor, width: int) -> str | None:
    """Say why rows of ``width`` elements cannot be read; None if they can."""
    if width == 0:
        return "the last dimension is empty"
    if width % _CPU_VECTOR and x.device.type == "cpu":
        return f"the CPU's kernel takes multiples of {_CPU_VECTOR}, not {width}"
    return None


def dense(x: Tensor, width: int) -> Tensor:
    """Return ``x`` contiguous, and where vectors of a row of ``width`` are aligned.

    Most kernels load 16 bytes at once where the width allows, and never look at the
    address: a tensor that begins in the middle of a vector is a fault of the device,
    and on a CPU the end of the process.
    """
    if not x.is_contiguous():
        return x.contiguous()
    # A compiler's own buffers are aligned, and it must not look at an offset.
    if not torch.compiler.is_compiling():
        offset = x.storage_offset()
        if offset and offset % vector(x, width):
            return x.clone()
    return x


def vector(x: Tensor, width: int) -> int:
    """Return how many elements of a row are loaded at once."""
    return math.gcd(16 // x.element_size(), width)

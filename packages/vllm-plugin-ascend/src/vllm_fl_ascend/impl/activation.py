"""Gated activations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_fl_ascend.impl._npu import torch_npu

if TYPE_CHECKING:
    from torch import Tensor

_APPROXIMATE = {"none": 0, "tanh": 1}


def silu_and_mul(x: Tensor) -> Tensor:
    """Return ``silu(x[..., :d]) * x[..., d:]`` by ``npu_swiglu``.

    Args:
        x: T[..., 2d], float16, bfloat16 or float32, of any stride; not written.

    Returns:
        T[..., d], new and contiguous, x's dtype.
    """
    if not x.numel():
        return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
    # Its documentation does not say that x may be strided.
    out: Tensor = torch_npu.npu_swiglu(x.contiguous(), dim=-1)
    return out.contiguous()


def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """Return ``gelu(x[..., :d]) * x[..., d:]`` by ``npu_geglu``.

    Args:
        x: T[..., 2d], float16, bfloat16 or float32, of any stride; not written.
        approximate: ``"none"`` for the error function, ``"tanh"`` for its
            approximation.

    Returns:
        T[..., d], new and contiguous, x's dtype.

    Raises:
        ValueError: another ``approximate``.
    """
    if approximate not in _APPROXIMATE:
        raise ValueError(f"approximate must be 'none' or 'tanh', not {approximate!r}")
    if not x.numel():
        return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
    # Left is the first half; without the argument the kernel activates the second.
    out: Tensor
    out, _ = torch_npu.npu_geglu(
        x.contiguous(), dim=-1, approximate=_APPROXIMATE[approximate], activate_left=True
    )
    return out.contiguous()

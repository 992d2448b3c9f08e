"""Gated activations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_fl_flaggems._gems import device_of
from vllm_fl_flaggems._gems import flag_gems

if TYPE_CHECKING:
    from torch import Tensor


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def silu_and_mul(x: Tensor) -> Tensor:
    """Return ``silu(x[..., :d]) * x[..., d:]``.

    Args:
        x: T[..., 2d], float16, bfloat16 or float32, of any stride; not written.

    Returns:
        T[..., d], new and contiguous, x's dtype; one rounding.
    """
    gate, up = _halves(x)
    if not gate.numel():
        return x.new_empty(gate.shape)
    with device_of(x.device):
        # Its result keeps the order of x's strides.
        out: Tensor = flag_gems.silu_and_mul(gate, up)
    return out.contiguous()


def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """Return ``gelu(x[..., :d]) * x[..., d:]``.

    Args:
        x: T[..., 2d], float16, bfloat16 or float32, of any stride; not written.
        approximate: ``"none"`` for the error function, ``"tanh"`` for its
            approximation.

    Returns:
        T[..., d], new and contiguous, x's dtype; one rounding.

    Raises:
        ValueError: another ``approximate``.
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate must be 'none' or 'tanh', not {approximate!r}")
    gate, up = _halves(x)
    if not gate.numel():
        return x.new_empty(gate.shape)
    with device_of(x.device):
        out: Tensor = flag_gems.gelu_and_mul(gate, up, approximate)
    return out.contiguous()

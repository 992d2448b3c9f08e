"""Gated activations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional

from vllm_fl_template.impl.precision import widened

if TYPE_CHECKING:
    from torch import Tensor


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    if width % 2:
        # Unequal halves may broadcast against each other, and be wrong in silence.
        raise ValueError(f"the last dimension holds two halves; {width} is odd")
    return x[..., : width // 2], x[..., width // 2 :]


def silu_and_mul(x: Tensor) -> Tensor:
    """Return ``silu(x[..., :d]) * x[..., d:]``.

    Args:
        x: T[..., 2d], floating, of any stride; not written.

    Returns:
        T[..., d], new and contiguous, x's dtype; computed in float32 or wider, rounded once.

    Raises:
        ValueError: the last dimension is odd.
    """
    gate, up = _halves(x)
    return (functional.silu(widened(gate)) * widened(up)).to(x.dtype).contiguous()


def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """Return ``gelu(x[..., :d]) * x[..., d:]``.

    Args:
        x: T[..., 2d], floating, of any stride; not written.
        approximate: ``"none"`` for the error function, ``"tanh"`` for its
            approximation.

    Returns:
        T[..., d], new and contiguous, x's dtype; computed in float32 or wider, rounded once.

    Raises:
        ValueError: another ``approximate``, or the last dimension is odd.
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate must be 'none' or 'tanh', not {approximate!r}")
    gate, up = _halves(x)
    return (functional.gelu(widened(gate), approximate=approximate) * widened(up)).to(x.dtype).contiguous()

"""Gated activations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional

from vllm_fl_reference.impl._precision import wide

if TYPE_CHECKING:
    from torch import Tensor


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    if width % 2:
        # Unequal halves may broadcast against each other, and be wrong in silence.
        raise ValueError(f"the last dimension holds two halves; {width} is odd")
    half = width // 2
    return x[..., :half], x[..., half:]


def silu_and_mul(x: Tensor) -> Tensor:
    """Return ``silu(x[..., :d]) * x[..., d:]``.

    Args:
        x: T[..., 2d], floating, of any stride; not written.

    Returns:
        T[..., d], new and contiguous, x's dtype; one rounding.

    Raises:
        ValueError: the last dimension is odd.
    """
    gate, up = _halves(x)
    # The product is taken in silu's dtype: mul_ widens a narrower `up` by itself.
    return functional.silu(wide(gate)).mul_(up).to(x.dtype).contiguous()


def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """Return ``gelu(x[..., :d]) * x[..., d:]``.

    Args:
        x: T[..., 2d], floating, of any stride; not written.
        approximate: ``"none"`` for the error function, ``"tanh"`` for its
            approximation.

    Returns:
        T[..., d], new and contiguous, x's dtype; one rounding.

    Raises:
        ValueError: another ``approximate``, or the last dimension is odd.
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate must be 'none' or 'tanh', not {approximate!r}")
    gate, up = _halves(x)
    return functional.gelu(wide(gate), approximate=approximate).mul_(up).to(x.dtype).contiguous()

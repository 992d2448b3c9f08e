"""Gated activations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_fl_cuda.impl._inputs import dense
from vllm_fl_cuda.impl._inputs import problem
from vllm_fl_cuda.impl._inputs import width_problem
from vllm_fl_cuda.kernels import GELU_AND_MUL
from vllm_fl_cuda.kernels import GELU_TANH_AND_MUL
from vllm_fl_cuda.kernels import SILU_AND_MUL

if TYPE_CHECKING:
    from torch import Tensor

    from vllm_fl_cuda.kernels import Kernel

_GELU = {"none": GELU_AND_MUL, "tanh": GELU_TANH_AND_MUL}


def _gated_problem(kernel: Kernel, x: Tensor) -> str | None:
    if x.dim() and x.shape[-1] % 2:
        return f"the last dimension holds two halves; {x.shape[-1]} is odd"
    return problem(kernel, x) or width_problem(x, x.shape[-1] // 2 if x.dim() else 0)


def _gated(kernel: Kernel, x: Tensor) -> Tensor:
    *leading, width = x.shape
    half = width // 2
    # Not empty_like, which would take on the strides of a strided x.
    out = x.new_empty((*leading, half))
    if out.numel():
        kernel.call(out, dense(x, half))
    return out


def silu_and_mul_layer(x: Tensor) -> bool | str:
    """Whether the kernel takes ``x``; a sentence where not."""
    return _gated_problem(SILU_AND_MUL, x) or True


def silu_and_mul(x: Tensor) -> Tensor:
    """Return ``silu(x[..., :d]) * x[..., d:]``.

    Args:
        x: T[..., 2d], float32, float16 or bfloat16; copied where it is not
            contiguous, not written.

    Returns:
        T[..., d], new and contiguous, x's dtype. In 16 bits the activation is
        rounded before it is multiplied.
    """
    return _gated(SILU_AND_MUL, x)


def gelu_and_mul_layer(x: Tensor, approximate: str = "none") -> bool | str:
    """Whether the kernel takes the arguments; a sentence where not."""
    # Another one is the caller's fault, and said by the function.
    return _gated_problem(_GELU.get(approximate, GELU_AND_MUL), x) or True


def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """Return ``gelu(x[..., :d]) * x[..., d:]``.

    Args:
        x: T[..., 2d], float32, float16 or bfloat16; copied where it is not
            contiguous, not written.
        approximate: ``"none"`` for the error function, ``"tanh"`` for its
            approximation.

    Returns:
        T[..., d], new and contiguous, x's dtype. In 16 bits the activation is
        rounded before it is multiplied.

    Raises:
        ValueError: another ``approximate``.
    """
    kernel = _GELU.get(approximate)
    if kernel is None:
        raise ValueError(f"approximate must be 'none' or 'tanh', not {approximate!r}")
    return _gated(kernel, x)

"""Tensors of one value in several layouts, and how close is close."""

from __future__ import annotations

import numpy as np
import torch

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def identifier(value: object) -> str:
    return str(value).removeprefix("torch.").replace(" ", "")


def random(
    *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


def contiguous(x: torch.Tensor) -> torch.Tensor:
    return x


def sliced(x: torch.Tensor) -> torch.Tensor:
    """Rows of a wider buffer, as a split of a fused projection gives."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 5), float("nan"), dtype=x.dtype)
    wide[..., 2 : 2 + x.shape[-1]] = x
    return wide[..., 2 : 2 + x.shape[-1]]


def transposed(x: torch.Tensor) -> torch.Tensor:
    """The last axis has the largest stride."""
    return x.movedim(-1, 0).contiguous().movedim(0, -1)


def every_other(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x, torch.full_like(x, float("nan"))], dim=-1)[..., 0]


LAYOUTS = (contiguous, sliced, transposed, every_other)

# Of one rounding: half a unit in the last place. float32 and float64 are also
# allowed for the rounding of the computation itself.
_RELATIVE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}


def close(
    out: torch.Tensor, truth: np.ndarray, dtype: torch.dtype, absolute: float = 1e-6, steps: float = 1.01
):
    """Fail unless ``out`` is ``truth`` but for one rounding to ``dtype``."""
    assert out.dtype is dtype
    assert tuple(out.shape) == truth.shape
    expected = torch.from_numpy(np.asarray(truth, dtype=np.float64))
    if dtype is torch.float64:
        absolute *= 1e-7
    torch.testing.assert_close(
        out.double(), expected, rtol=_RELATIVE[dtype] * steps, atol=absolute, equal_nan=True
    )


def fresh(out: torch.Tensor, *inputs: torch.Tensor | None) -> None:
    """Fail unless ``out`` is contiguous and shares no memory with an input."""
    assert out.is_contiguous()
    for x in inputs:
        assert x is None or not torch._C._is_alias_of(out, x)

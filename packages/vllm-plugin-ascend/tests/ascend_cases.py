"""Tensors in several layouts, and how an operator is called as the dispatch calls it."""

from __future__ import annotations

from typing import Any

import torch

HALVES = (torch.float16, torch.bfloat16)
FLOATING = (*HALVES, torch.float32)

#: Of two roundings, and for float32 of the order of a sum.
_TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.float16: (2e-3, 2e-3), torch.bfloat16: (1e-2, 1.6e-2)}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values as a slice of a wider buffer, as a split of a fused projection gives."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 6), float("nan"), dtype=x.dtype)
    wide[..., 2 : 2 + x.shape[-1]] = x
    return wide[..., 2 : 2 + x.shape[-1]]


def refusal(backend: Any, op_name: str, *args: Any, **kwargs: Any) -> str | None:
    """What ``supports`` says against a call; None if it agrees."""
    answer = backend.implementation_of(op_name).supports(*args, **kwargs)
    return None if answer is True else answer


def call(backend: Any, op_name: str, *args: Any, **kwargs: Any) -> Any:
    """Call an operator that ``supports`` agrees to."""
    implementation = backend.implementation_of(op_name)
    assert implementation.supports(*args, **kwargs) is True
    return implementation.load()(*args, **kwargs)


def close(out: torch.Tensor, expected: torch.Tensor) -> None:
    absolute, relative = _TOLERANCE[expected.dtype]
    assert out.dtype is expected.dtype
    assert out.shape == expected.shape
    torch.testing.assert_close(out, expected, atol=absolute, rtol=relative, equal_nan=True)


def fresh(out: torch.Tensor, *inputs: torch.Tensor | None) -> None:
    """Fail unless ``out`` is contiguous and shares no memory with an input."""
    assert out.is_contiguous()
    for x in inputs:
        assert x is None or not torch._C._is_alias_of(out, x)


def unchanged(*tensors: torch.Tensor | None):
    """Return a check that these tensors are to the bit what they are now."""
    before = [None if x is None else x.clone() for x in tensors]

    def check() -> None:
        for x, old in zip(tensors, before, strict=True):
            assert x is None or torch.equal(x, old)

    return check

"""Cases of attention backends: one layer, its cache, and how its tokens come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vllm_fl.conformance.tensors import named

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class AttentionCase:
    """What is varied.

    Attributes:
        dtype: of query, key, value and the cache.
        heads: of the query, and of the key.
        head: elements of a head.
        block: tokens of a block.
        window: the sliding window, None for none.
        peak: what queries are multiplied by; much makes one key win.
        layout: ``fused`` (views of one qkv buffer) or ``apart``.
        padding: rows at the end that are no tokens.
        is_smoke: in the smoke tier.
    """

    dtype: torch.dtype
    heads: tuple[int, int] = (8, 2)
    head: int = 64
    block: int = 128
    window: int | None = None
    peak: float = 1.0
    layout: str = "fused"
    padding: int = 0
    is_smoke: bool = False

    def __str__(self) -> str:
        parts = [
            named(self.dtype),
            f"{self.heads[0]} heads to {self.heads[1]} of {self.head}",
            f"blocks of {self.block}",
        ]
        if self.window is not None:
            parts.append(f"window {self.window}")
        if self.peak != 1.0:
            parts.append("peaked")
        if self.layout != "fused":
            parts.append(self.layout)
        if self.padding:
            parts.append(f"{self.padding} rows of padding")
        return ", ".join(parts)


def cases() -> Iterator[AttentionCase]:
    """Return every case; a backend refuses those whose heads, blocks or dtype it lacks."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        low = dtype is not torch.float32
        yield AttentionCase(dtype, is_smoke=True)
        for block in (16, 32, 256):
            yield AttentionCase(dtype, block=block, is_smoke=low)
        for heads in ((4, 4), (5, 1), (32, 8), (8, 1)):
            yield AttentionCase(dtype, heads=heads, is_smoke=heads in ((4, 4), (5, 1)) and low)
        for head in (32, 80, 96, 128, 192, 256):
            yield AttentionCase(dtype, heads=(4, 2), head=head, is_smoke=head in (80, 128) and low)
        for window in (1, 20, 128, 150):
            yield AttentionCase(dtype, window=window, is_smoke=window in (20, 128) and low)
        yield AttentionCase(dtype, block=16, window=20)
        yield AttentionCase(dtype, peak=4.0, is_smoke=low)
        yield AttentionCase(dtype, layout="apart")
        yield AttentionCase(dtype, padding=6, is_smoke=low)

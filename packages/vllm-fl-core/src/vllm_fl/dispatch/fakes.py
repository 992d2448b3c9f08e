"""What operators return, as empty tensors: for what traces a call and computes nothing.

Each takes the torch module, because the core imports none, and the operator's arguments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    Tensor: TypeAlias = Any  # torch.Tensor; the core imports no torch


def half_of_the_last(torch: Any, x: Tensor, *_: Any) -> Tensor:
    """Return T[..., n] of T[..., 2 * n]."""
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def contiguous_like(torch: Any, x: Tensor, *_: Any, **__: Any) -> Tensor:
    """Return a contiguous tensor of x's shape and dtype."""
    return x.new_empty(x.shape)


def one_or_with_the_sum(torch: Any, x: Tensor, residual: Tensor | None, *_: Any) -> Any:
    """Return one tensor like x, or two where there is a residual."""
    first = contiguous_like(torch, x)
    return first if residual is None else (first, contiguous_like(torch, x))


def chosen_of_each_row(torch: Any, scores: Tensor, n_group: int, topk_group: int, topk: int, *_: Any) -> Any:
    """Return float32 weights and int32 indices, both [rows, topk]."""
    shape = (scores.shape[0], topk)
    return scores.new_empty(shape, dtype=torch.float32), scores.new_empty(shape, dtype=torch.int32)


def aligned_blocks(
    torch: Any, topk_ids: Tensor, block_size: int, num_experts: int, expert_map: Any, pad: bool, *_: Any
) -> Any:
    """Return int32 tensors: the sorted pairs with room for padding, the blocks' experts, and a count."""
    pairs = topk_ids.numel()
    padded = pairs + num_experts * (block_size - 1)
    if pad:
        padded = (padded + block_size - 1) // block_size * block_size
    # The smaller one, always: a branch on a traced number of tokens would be frozen.
    padded = torch.sym_min(pairs * block_size, padded)
    blocks = (padded + block_size - 1) // block_size
    return tuple(topk_ids.new_empty((size,), dtype=torch.int32) for size in (padded, blocks, 1))


def quantized(dtype: str) -> Callable[..., Any]:
    """Return the fake of a quantisation by row: codes of ``dtype`` like x, and float32 [rows, 1]."""

    def fake(torch: Any, x: Tensor) -> Any:
        scales = x.new_empty((x.shape[0], 1), dtype=torch.float32)
        return x.new_empty(x.shape, dtype=getattr(torch, dtype)), scales

    return fake

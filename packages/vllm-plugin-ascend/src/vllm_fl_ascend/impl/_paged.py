"""The paged KV cache as the kernels read it, and a batch as runs of equal queries.

vLLM gives every layer one tensor, and a page of it holds keys and values. The
kernels take keys and values as two tensors of whole pages, both contiguous. So a
page's memory is read as two halves, keys ``[N, H, D]`` and then values, and the
layer as twice as many half pages: keys are all of them but the last, values all
but the first, and half page ``2 * b`` of either is block ``b``. Nothing is copied,
and a block's bytes stay together in its page.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

#: torch_npu: "the product of all dimensions of key and of value is an int32".
_MOST_ELEMENTS = 2**31 - 1


def key_and_value(kv_cache: Tensor, num_kv_heads: int, head_size: int) -> tuple[Tensor, Tensor]:
    """Return a layer's cache as the kernels' two tensors, views of it.

    Args:
        kv_cache: T[blocks, ...], a whole number of tokens in each block, contiguous.
        num_kv_heads: heads of keys and of values.
        head_size: elements of a head.

    Returns:
        (keys, values), each T[2 * blocks - 1, N, heads, head_size] and contiguous;
        block b is row 2 * b.

    Raises:
        RuntimeError: the cache is not contiguous, or too large for the kernels.
    """
    blocks = kv_cache.shape[0]
    if not kv_cache.is_contiguous():
        raise RuntimeError(
            f"the KV cache of a layer must be contiguous, not of strides {kv_cache.stride()}: vLLM shares "
            "its pages between layers in a way that the kernels cannot read"
        )
    row = num_kv_heads * head_size
    halves = kv_cache.view(2 * blocks, kv_cache.numel() // (2 * blocks * row), num_kv_heads, head_size)
    if halves.numel() > _MOST_ELEMENTS:
        raise RuntimeError(
            f"the KV cache of a layer has {halves.numel()} elements and the kernels address "
            f"{_MOST_ELEMENTS}: lower gpu_memory_utilization, or set num_gpu_blocks_override to at most "
            f"{_MOST_ELEMENTS // (kv_cache.numel() // blocks)}"
        )
    return halves[:-1], halves[1:]


def half_page_slots(slot_mapping: Tensor, block_size: int) -> Tensor:
    """Return where vLLM's slots are in :func:`key_and_value`'s rows; int32.

    A negative slot is a token that is not kept. There is no device-side filter
    that does not wait for the device, so it goes into slot 0: vLLM's block 0 is
    the null block, which no request owns.
    """
    slots = slot_mapping.clamp(min=0)
    return (slots + slots.div(block_size, rounding_mode="floor") * block_size).to(torch.int32)


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive requests with queries of one length: one call of the kernel, without padding.

    Attributes:
        first_token: where their queries begin in the batch.
        first_request: the first of them.
        requests: how many they are.
        query_len: tokens of each query.
        kv_lens: tokens in the cache of each request, those of the query included.
    """

    first_token: int
    first_request: int
    requests: int
    query_len: int
    kv_lens: list[int]

    @property
    def tokens(self) -> slice:
        """Their queries' place in the batch."""
        return slice(self.first_token, self.first_token + self.requests * self.query_len)

    @property
    def rows(self) -> slice:
        """Their rows of the block table."""
        return slice(self.first_request, self.first_request + self.requests)


def runs_of(query_start: Sequence[int], kv_lens: Sequence[int]) -> list[Run]:
    """Cut a batch into runs of equal queries; requests without a query are left out."""
    runs: list[Run] = []
    for request, kv_len in enumerate(kv_lens):
        begin, end = query_start[request], query_start[request + 1]
        length = end - begin
        if not length:
            continue
        last = runs[-1] if runs else None
        if last is not None and last.query_len == length and last.rows.stop == request:
            runs[-1] = Run(
                last.first_token, last.first_request, last.requests + 1, length, [*last.kv_lens, kv_len]
            )
        else:
            runs.append(Run(begin, request, 1, length, [kv_len]))
    return runs


@dataclass(frozen=True, slots=True)
class Window:
    """What single-token queries of a sliding window need.

    Attributes:
        block_table: int32[requests, blocks], only the blocks that the window touches.
        kv_lens: tokens of each request in those blocks.
        mask: bool[requests, 1, 1, blocks * N]; True for the tokens before the window.
    """

    block_table: Tensor
    kv_lens: list[int]
    mask: Tensor


def window_of(run: Run, block_table: Tensor, block_size: int, size: int) -> Window:
    """Return the last ``size`` tokens of each request of a run of single tokens.

    The kernel ignores its window arguments for such queries, and takes a mask.
    """
    width = min((size + block_size - 2) // block_size + 1, block_table.shape[1])
    starts = [max(length - size, 0) for length in run.kv_lens]
    skipped = [start // block_size for start in starts]
    device = block_table.device
    first = torch.tensor(skipped, device=device).unsqueeze(1)
    columns = (first + torch.arange(width, device=device)).clamp_(max=block_table.shape[1] - 1)
    before = [start - blocks * block_size for start, blocks in zip(starts, skipped, strict=True)]
    mask = torch.arange(width * block_size, device=device) < torch.tensor(before, device=device).unsqueeze(1)
    return Window(
        block_table[run.rows].gather(1, columns).contiguous(),
        [length - blocks * block_size for length, blocks in zip(run.kv_lens, skipped, strict=True)],
        mask.view(run.requests, 1, 1, width * block_size),
    )

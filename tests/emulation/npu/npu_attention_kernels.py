"""The kernels of attention; see :mod:`npu_kernels`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING
from typing import Any

import torch
from npu_kernels import kernel
from npu_kernels import need

if TYPE_CHECKING:
    from torch import Tensor

#: The documentation allows float16 and bfloat16. A test that compares greedy tokens with
#: those of transformers adds float32, in which rounding cannot change one.
attention_dtypes = {torch.float16, torch.bfloat16}

_NO_LIMIT = 2147483647


@kernel("atb", "_npu_reshape_and_cache")
def reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_indices: Tensor
) -> None:
    need(key.is_contiguous() and value.is_contiguous(), "_npu_reshape_and_cache: contiguous keys and values")
    need(
        key_cache.is_contiguous() and value_cache.is_contiguous(), "_npu_reshape_and_cache: contiguous cache"
    )
    need(key_cache.shape == value_cache.shape and key_cache.shape[2:] == key.shape[1:], "cache: shape")
    need(slot_indices.dtype is torch.int32 and slot_indices.shape == key.shape[:1], "cache: slots")
    need(key.dtype is value.dtype is key_cache.dtype is value_cache.dtype, "_npu_reshape_and_cache: dtype")
    slots = slot_indices.long()
    count = key_cache.shape[0] * key_cache.shape[1]
    need(bool(((slots >= 0) & (slots < count)).all()), "_npu_reshape_and_cache: slots in the cache")
    key_cache.view(count, -1)[slots] = key.flatten(1)
    value_cache.view(count, -1)[slots] = value.flatten(1)


@kernel("npu", "npu_fused_infer_attention_score")
def fused_infer_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    atten_mask: Tensor | None = None,
    actual_seq_lengths: list[int] | None = None,
    actual_seq_lengths_kv: list[int] | None = None,
    block_table: Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = _NO_LIMIT,
    next_tokens: int = _NO_LIMIT,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    block_size: int = 0,
    **more: Any,
) -> tuple[Tensor, Tensor]:
    """Layout BSH and a paged cache, as documented, for one token in a query and for more."""
    need(all(option in (None, 0, False) for option in more.values()), f"attention: {more}")
    need(input_layout == "BSH" and query.dim() == 3, "attention: this simulation has layout BSH")
    batch, query_len, width = query.shape
    heads_kv = num_key_value_heads or num_heads
    head = width // num_heads
    need({query.dtype, key.dtype, value.dtype} <= attention_dtypes, "attention: dtype")
    need(query.dtype is key.dtype is value.dtype, "attention: one dtype")
    need(all(x.is_contiguous() for x in (query, key, value)), "attention: contiguous tensors")
    need(num_heads % heads_kv == 0 and num_heads // heads_kv <= 64 and num_heads <= 256, "attention: heads")
    need(head % 16 == 0 and head <= 512 and width < 65535, "attention: head size")
    need(key.shape == value.shape and key.shape[1:] == (block_size, heads_kv * head), "attention: cache")
    need(key.numel() <= 2**31 - 1, "attention: cache size")
    need(block_table is not None and block_table.dtype is torch.int32, "attention: block_table")
    assert block_table is not None
    assert actual_seq_lengths_kv is not None
    longest = max(actual_seq_lengths_kv)
    need(block_table.shape[0] == batch == len(actual_seq_lengths_kv), "attention: batch")
    need(block_table.is_contiguous() and block_table.shape[1] * block_size >= longest, "attention: blocks")
    need(actual_seq_lengths == [query_len] * batch, "attention: this simulation has no padded queries")
    if query_len > 1:
        need(block_size % 128 == 0 and 128 <= block_size <= 512, "attention: block_size")
        need(sparse_mode in (3, 4) and atten_mask is not None, "attention: sparse_mode")
        assert atten_mask is not None
        need(atten_mask.shape == (2048, 2048) and atten_mask.dtype in (torch.bool, torch.int8), "mask")
        need(
            torch.equal(atten_mask.bool(), torch.ones(2048, 2048, dtype=torch.bool).triu(1)), "mask's values"
        )
    else:
        need(block_size % 16 == 0 and 0 < block_size <= 512, "attention: block_size")
        if atten_mask is not None:
            shape = (batch, 1, 1, block_table.shape[1] * block_size)
            need(atten_mask.shape == shape and atten_mask.dtype is torch.bool, "attention: mask")
    out = torch.empty_like(query)
    for row, kv_len in enumerate(actual_seq_lengths_kv):
        if not kv_len:
            out[row] = 0
            continue
        need(query_len <= kv_len, "attention: more queries than keys")
        blocks = block_table[row, : -(-kv_len // block_size)].long()
        need(bool(((blocks >= 0) & (blocks < key.shape[0])).all()), "attention: a block that is not there")
        keys, values = (
            x[blocks].view(-1, heads_kv, head)[:kv_len].float().repeat_interleave(num_heads // heads_kv, 1)
            for x in (key, value)
        )
        scores = (
            torch.einsum("qhd,khd->hqk", query[row].float().view(query_len, num_heads, head), keys) * scale
        )
        if query_len > 1:
            # Both modes count from the last token of queries and keys.
            place = torch.arange(query_len).unsqueeze(1) + kv_len - query_len
            distance = place - torch.arange(kv_len)
            masked = distance < 0
            if sparse_mode == 4:
                masked = (distance > pre_tokens) | (distance < -next_tokens)
            scores = scores.masked_fill(masked, -math.inf)
        elif atten_mask is not None:
            # pre_tokens, next_tokens and sparse_mode mean nothing here.
            scores = scores.masked_fill(atten_mask[row, 0, 0, :kv_len], -math.inf)
        out[row] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).reshape(query_len, width)
    return out, torch.zeros(1)

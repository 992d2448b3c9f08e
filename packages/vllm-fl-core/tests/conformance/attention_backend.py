"""An attention backend for vLLM in plain torch, right but for ``FAULT``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from typing import ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backend import AttentionImpl
from vllm.v1.attention.backend import AttentionMetadataBuilder
from vllm.v1.kv_cache_interface import KVCacheLayout

#: What is wrong with it; "" for nothing.
FAULT = ""

FAULTS = (
    "window off by one",
    "window ignored",
    "unused slots read",
    "heads mapped in turn",
    "scale left out",
    "looks ahead",
    "decode a block too short",
    "blocks in order",
    "last block of 16",
    "writes its query",
    "padding kept in block 1",
    "metadata kept by its shapes",
)

_KEPT: dict[Any, Any] = {}


class PlainBackend(AttentionBackend):
    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls():
        return PlainImpl

    @staticmethod
    def get_builder_cls():
        return PlainBuilder

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supported_kv_cache_layouts(cls):
        return (KVCacheLayout.LBHNC,)


@dataclass
class PlainMetadata:
    starts: list[int]
    lengths: list[int]
    table: torch.Tensor
    num_actual_tokens: int


class PlainBuilder(AttentionMetadataBuilder):
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        common = common_attn_metadata
        metadata = PlainMetadata(
            common.query_start_loc.tolist(),
            common.seq_lens.tolist(),
            common.block_table_tensor,
            common.num_actual_tokens,
        )
        if FAULT == "metadata kept by its shapes":
            metadata = _KEPT.setdefault((self, common.num_reqs, common.num_actual_tokens), metadata)
        return metadata


class PlainImpl(AttentionImpl):
    def __init__(
        self,
        num_heads,
        head_size,
        scale,
        num_kv_heads=None,
        alibi_slopes=None,
        sliding_window=None,
        kv_cache_dtype="auto",
        logits_soft_cap=None,
        attn_type="decoder",
        kv_sharing_target_layer_name=None,
        **more: Any,
    ):
        self.heads, self.head, self.scale, self.kv_heads = num_heads, head_size, scale, num_kv_heads
        self.num_heads, self.head_size, self.num_kv_heads = num_heads, head_size, num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.window = sliding_window

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        # [blocks, kv_heads, block, 2 * head]
        block = kv_cache.shape[2]
        for row, slot in enumerate(slot_mapping.tolist()):
            if slot < 0:
                if FAULT != "padding kept in block 1":
                    continue
                slot = block
            kv_cache[slot // block, :, slot % block, : self.head] = key[row]
            kv_cache[slot // block, :, slot % block, self.head :] = value[row]

    def forward(
        self,
        layer,
        query,
        key,
        value,
        kv_cache,
        attn_metadata,
        output,
        output_scale=None,
        output_block_scale=None,
    ):
        block = kv_cache.shape[2]
        for request, length in enumerate(attn_metadata.lengths):
            begin, end = attn_metadata.starts[request : request + 2]
            if begin == end:
                continue
            blocks = attn_metadata.table[request, : -(-length // block)]
            if FAULT == "blocks in order":
                blocks = blocks.sort().values
            seen = length
            if FAULT == "unused slots read":
                seen = blocks.numel() * block
            if FAULT == "last block of 16" and length % block > 16:
                seen = length - length % block + 16
            pages = kv_cache[blocks.long()].float().movedim(1, 0).flatten(1, 2)[:, :seen]
            keys, values = pages.split(self.head, -1)
            group = self.heads // self.kv_heads
            if FAULT == "heads mapped in turn":
                keys, values = keys.repeat(group, 1, 1), values.repeat(group, 1, 1)
            else:
                keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
            scores = query[begin:end].float().movedim(1, 0) @ keys.transpose(1, 2)
            scores = scores * (1.0 if FAULT == "scale left out" else self.scale)
            own = torch.arange(end - begin).unsqueeze(1) + length - (end - begin)
            place = torch.arange(keys.shape[1]).unsqueeze(0)
            hidden = place > own + (FAULT == "looks ahead")
            if FAULT == "unused slots read" and end - begin == 1:
                hidden = hidden & False
            if FAULT == "decode a block too short" and end - begin == 1 and length > block:
                hidden = hidden | (place < block)
            if self.window is not None and FAULT != "window ignored":
                hidden = hidden | (place <= own - self.window - int(FAULT == "window off by one"))
            probability = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            output[begin:end] = (probability @ values).movedim(0, 1).to(output.dtype)
        if FAULT == "writes its query":
            query.zero_()
        return output

"""Attention for vLLM over its paged cache, in plain torch.

vLLM asks the backend class before it builds a layer, makes one metadata builder for
the layers that share a cache, and one implementation for each layer. In every step
the builder describes the batch, then each layer writes its keys and values into its
cache and attends to it.

This module imports vLLM: it is imported only where vLLM asks for attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from typing import Any
from typing import ClassVar

import torch
from torch.nn import functional
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backend import AttentionImpl
from vllm.v1.attention.backend import AttentionMetadataBuilder
from vllm.v1.attention.backend import AttentionType

if TYPE_CHECKING:
    from torch import Tensor


class TemplateAttentionBackend(AttentionBackend):  # type: ignore[misc]
    """What vLLM asks of a backend before it builds a layer.

    What is not overridden says no: latent and sparse attention, sinks, encoders,
    attention that is not causal.
    """

    #: The layer calls do_kv_cache_update, then forward.
    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        """Return the name that vLLM logs; its enumeration has no member for a plug-in's."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[TemplateAttentionImpl]:
        """Return the class of a layer's attention."""
        return TemplateAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TemplateAttentionMetadataBuilder]:
        """Return the class that builds a batch's metadata."""
        return TemplateAttentionMetadataBuilder

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """It does."""
        return True

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
        **more: Any,
    ) -> tuple[int, ...]:
        """Return the shape of a layer's cache; from vLLM 0.32 on it is always this one."""
        _refuse(more, "get_kv_cache_shape")
        return (num_blocks, num_kv_heads, block_size, 2 * head_size)


def _is_on(value: Any) -> bool:
    """Whether a keyword of a later vLLM asks for something; -1 is how vLLM writes none of a number."""
    if value is None or isinstance(value, (int, float, str, list, tuple, dict)):
        return bool(value) and value != -1
    return True


def _refuse(more: dict[str, Any], method: str) -> None:
    asked = [name for name, value in more.items() if _is_on(value)]
    if asked:
        raise NotImplementedError(f"TemplateAttentionBackend: {method} has no {', no '.join(asked)}")


def refusals(selector: Any) -> list[str]:
    """Say why the backend does not fit an ``AttentionSelectorConfig``; empty where it does."""
    from vllm.platforms import current_platform

    if current_platform.device_type != "cpu":
        return [f"it runs on CPUs, and vLLM on {current_platform.device_type}"]
    reasons: list[str] = TemplateAttentionBackend.validate_configuration(
        device_capability=None, **selector._asdict()
    )
    return reasons


@dataclass(slots=True)
class TemplateAttentionMetadata:
    """One batch.

    Attributes:
        num_actual_tokens: tokens that are not padding; vLLM reads it of every backend.
        query_start: where each request's queries begin, and the end of the last.
        seq_lens: tokens of each request, those of this batch included.
        block_table: int32[requests, blocks], the blocks of each request in order.
    """

    num_actual_tokens: int
    query_start: list[int]
    seq_lens: list[int]
    block_table: Tensor


class TemplateAttentionMetadataBuilder(AttentionMetadataBuilder[TemplateAttentionMetadata]):  # type: ignore[misc]
    """Builds a batch's metadata, once for all layers that share a cache group."""

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
        **more: Any,
    ) -> None:
        # What every step needs again, such as masks, is made here.
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, **more)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False, **more: Any
    ) -> TemplateAttentionMetadata:
        """Take what the layers need of vLLM's description of the batch.

        Raises:
            NotImplementedError: attention that is not causal, or something that a later vLLM
                asks for.
        """
        _refuse(more, "build")
        common = common_attn_metadata
        if common.causal is not True:
            raise NotImplementedError("this attention is causal only")
        requests = common.num_reqs
        return TemplateAttentionMetadata(
            common.num_actual_tokens,
            common.query_start_loc_cpu[: requests + 1].tolist(),
            # On another device this would wait for it, once in every step.
            common.seq_lens[:requests].tolist(),
            common.block_table_tensor[:requests],
        )


class TemplateAttentionImpl(AttentionImpl[TemplateAttentionMetadata]):  # type: ignore[misc]
    """The attention of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **more: Any,
    ) -> None:
        """Check that there is what the layer needs; vLLM's selector does not tell all of it.

        Raises:
            NotImplementedError: naming what is missing, and how to choose another backend.
        """
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        lacks = {
            "ALiBi": alibi_slopes is not None,
            "soft cap of the logits": bool(logits_soft_cap),
            f"attention of type {attn_type}": attn_type != AttentionType.DECODER,
            "quantised KV cache": kv_cache_dtype not in TemplateAttentionBackend.supported_kv_cache_dtypes,
            **{name: _is_on(value) for name, value in more.items()},
        }
        missing = [name for name, needed in lacks.items() if needed]
        if missing:
            raise NotImplementedError(
                f"TemplateAttentionBackend has no {', no '.join(missing)}; "
                "choose another backend with vLLM's --attention-backend"
            )

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor, **more: Any
    ) -> None:
        """Write the keys and values of a batch's tokens into their slots.

        Args:
            layer: the layer.
            key: T[n, kv_heads, head], of any stride.
            value: T[n, kv_heads, head].
            kv_cache!: T[blocks, kv_heads, block, 2 * head], of any stride; a token's key,
                then its value.
            slot_mapping: int[m], m <= n; a negative one is a token that is not kept.
            more: what a later vLLM passes, and does not ask for.
        """
        _refuse(more, "do_kv_cache_update")
        if not kv_cache.numel():
            return
        tokens = slot_mapping.shape[0]
        kept = slot_mapping >= 0
        slots = slot_mapping[kept]
        rows = torch.cat((key[:tokens][kept], value[:tokens][kept]), dim=-1)
        block_size = kv_cache.shape[2]
        kv_cache[slots // block_size, :, slots % block_size] = rows.to(kv_cache.dtype)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: TemplateAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
        **more: Any,
    ) -> Tensor:
        """Attend to the cache, which holds this batch's keys and values already.

        Args:
            layer: the layer.
            query: T[n, heads, head], of any stride.
            key: not read.
            value: not read.
            kv_cache: the layer's cache, as in :meth:`do_kv_cache_update`.
            attn_metadata: the batch; None while vLLM measures memory.
            output!: T[n, heads, head] or T[n, heads * head]; what is beyond the
                batch's tokens is left as it is.
            output_scale: None.
            output_block_scale: None.
            more: what a later vLLM passes, and does not ask for.

        Returns:
            output.

        Raises:
            NotImplementedError: a quantised output, or something that a later vLLM asks for.
        """
        _refuse(more, "forward")
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("this attention does not quantise its output")
        if attn_metadata is None:
            return output
        out = output.view(output.shape[0], self.num_heads, self.head_size)
        starts = attn_metadata.query_start
        for request, length in enumerate(attn_metadata.seq_lens):
            begin, end = starts[request], starts[request + 1]
            if end > begin:
                table = attn_metadata.block_table[request]
                out[begin:end] = self._attend(query[begin:end], kv_cache, table, length)
        return output

    def _attend(self, query: Tensor, kv_cache: Tensor, table: Tensor, length: int) -> Tensor:
        """Return the attention of one request's last tokens, T[q, heads, head]."""
        queries, block_size = query.shape[0], kv_cache.shape[2]
        # vLLM takes back the blocks before a window: what is in them must not be read.
        window = self.sliding_window or length
        first = max(0, length - queries + 1 - window)
        blocks = table[first // block_size : (length - 1) // block_size + 1].long()
        pages = kv_cache[blocks].transpose(0, 1).flatten(1, 2).float()
        skipped = first // block_size * block_size
        keys, values = pages[:, first - skipped : length - skipped].chunk(2, dim=-1)
        # Where each query and each key stand in the request.
        query_at = torch.arange(length - queries, length, device=query.device).unsqueeze(1)
        key_at = torch.arange(first, length, device=query.device)
        visible = (key_at <= query_at) & (key_at > query_at - window)
        result: Tensor = functional.scaled_dot_product_attention(
            query.transpose(0, 1).float(),
            keys,
            values,
            attn_mask=visible,
            scale=self.scale,
            enable_gqa=True,
        )
        return result.transpose(0, 1).to(query.dtype)

"""Attention for vLLM on torch_npu's kernels.

The cache is written by atb's ``_npu_reshape_and_cache`` and read, paged, by
``npu_fused_infer_attention_score``. Each run of requests with equally long queries
is one call: decodes, of one token each, are one, and so is every prefill or chunk
of another length. That is the way of calling which torch_npu documents for a paged
cache: layout BSH, blocks of 128 to 512 tokens, the compressed causal mask aligned
to the end of the keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import field
from typing import TYPE_CHECKING
from typing import Any
from typing import ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backend import AttentionImpl
from vllm.v1.attention.backend import AttentionMetadataBuilder
from vllm.v1.attention.backend import AttentionType

from vllm_fl_ascend.impl._npu import torch_npu
from vllm_fl_ascend.impl._paged import half_page_slots
from vllm_fl_ascend.impl._paged import key_and_value
from vllm_fl_ascend.impl._paged import runs_of
from vllm_fl_ascend.impl._paged import window_of

if TYPE_CHECKING:
    from torch import Tensor

    from vllm_fl_ascend.impl._paged import Run
    from vllm_fl_ascend.impl._paged import Window

#: For more than one token in a query: multiples of 128, up to 512.
_BLOCK_SIZES = (128, 256, 384, 512)
#: D a multiple of 16, up to 512; num_heads * D below 65535.
_LARGEST_HEAD = 512
_LARGEST_ROW = 65535
_MOST_HEADS = 256
_MOST_QUERIES_PER_KV = 64
#: Platforms whose model runner makes the KV cache itself, not as vLLM's does.
_OWN_CACHE = ("vllm_ascend",)
#: The side of the compressed masks.
_MASK_SIDE = 2048
_RIGHT_DOWN_CAUSAL = 3
_BAND = 4


class AscendAttentionBackend(AttentionBackend):  # type: ignore[misc]
    """What vLLM asks of a backend before it builds a layer."""

    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        """Return the name that vLLM logs; its enumeration has no member for a plug-in's."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[AscendAttentionImpl]:
        """Return the class of a layer's attention."""
        return AscendAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[AscendAttentionMetadataBuilder]:
        """Return the class that builds a batch's metadata."""
        return AscendAttentionMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None, **_: Any) -> list[int]:
        """Return the tokens of a block; before vLLM 0.32 there is no argument."""
        return list(_BLOCK_SIZES)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Whether heads are a multiple of 16 elements, up to 512."""
        return head_size % 16 == 0 and 0 < head_size <= _LARGEST_HEAD

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """It does: a band mask for prefills, a mask of the last blocks for decodes."""
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        """It does not: a page is laid out as the kernels read it, not as vLLM describes it."""
        return False

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """Return the layout in which a layer's pages follow each other; vLLM 0.32 and later."""
        from vllm.v1.kv_cache_interface import KVCacheLayout

        return (KVCacheLayout.LBHNC,)

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
        **more: Any,
    ) -> tuple[int, ...]:
        """Return the shape of a layer's cache; vLLM before 0.32 asks for it."""
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
        raise NotImplementedError(f"AscendAttentionBackend: {method} has no {', no '.join(asked)}")


def refusals(selector: Any) -> list[str]:
    """Say why the backend does not fit an ``AttentionSelectorConfig``; empty where it does."""
    from vllm.platforms import current_platform

    package = type(current_platform).__module__.partition(".")[0]
    if package in _OWN_CACHE:
        return [f"{package} keeps the KV cache in a layout of its own"]
    reasons: list[str] = AscendAttentionBackend.validate_configuration(
        device_capability=None, **selector._asdict()
    )
    return reasons


@dataclass(slots=True)
class AscendAttentionMetadata:
    """One batch.

    Attributes:
        num_actual_tokens: tokens that are not padding; vLLM reads it of every backend.
        block_table: int32[requests, blocks], rows of the two caches.
        runs: the requests, by equal queries.
        causal_mask: bool[2048, 2048], True above the diagonal.
    """

    num_actual_tokens: int
    block_table: Tensor
    runs: list[Run]
    causal_mask: Tensor
    _windows: dict[tuple[int, int], Window] = field(default_factory=dict)

    def window(self, run: Run, size: int, block_size: int) -> Window:
        """Return what single-token queries of a window need; made once for all layers."""
        key = (run.first_request, size)
        if key not in self._windows:
            self._windows[key] = window_of(run, self.block_table, block_size, size)
        return self._windows[key]


class AscendAttentionMetadataBuilder(AttentionMetadataBuilder[AscendAttentionMetadata]):  # type: ignore[misc]
    """Builds a batch's metadata, once for all layers that share a cache group."""

    #: Decodes first: then they are one run.
    reorder_batch_threshold: int | None = 1

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
        **more: Any,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, **more)
        side = torch.ones(_MASK_SIDE, _MASK_SIDE, dtype=torch.bool, device=device)
        self._causal_mask = side.triu_(1)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False, **more: Any
    ) -> AscendAttentionMetadata:
        """Cut the batch into runs.

        The kernel takes the lengths of the sequences on the host, and vLLM has
        them on the device only: this waits for the device once in every step.

        Raises:
            NotImplementedError: attention that is not causal, or something that a later vLLM
                asks for.
        """
        _refuse(more, "build")
        common = common_attn_metadata
        if common.causal is not True:
            raise NotImplementedError("this attention is causal only")
        requests = common.num_reqs
        query_start = common.query_start_loc_cpu[: requests + 1].tolist()
        kv_lens = common.seq_lens[:requests].tolist()
        return AscendAttentionMetadata(
            common.num_actual_tokens,
            # Half pages; see _paged.
            (common.block_table_tensor[:requests] * 2).to(torch.int32).contiguous(),
            runs_of(query_start, kv_lens),
            self._causal_mask,
        )


class AscendAttentionImpl(AttentionImpl[AscendAttentionMetadata]):  # type: ignore[misc]
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
        """Check that the kernels have what the layer needs.

        Raises:
            NotImplementedError: naming what they lack, and how to choose another backend.
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
            "a soft cap of the logits": bool(logits_soft_cap),
            f"attention of type {attn_type}": attn_type != AttentionType.DECODER,
            "a quantised KV cache": kv_cache_dtype not in AscendAttentionBackend.supported_kv_cache_dtypes,
            f"heads of {head_size}": not AscendAttentionBackend.supports_head_size(head_size),
            f"{num_heads} heads": num_heads > _MOST_HEADS or num_heads * head_size >= _LARGEST_ROW,
            f"{num_heads} heads to {self.num_kv_heads} of the keys": (
                num_heads % self.num_kv_heads != 0 or num_heads // self.num_kv_heads > _MOST_QUERIES_PER_KV
            ),
            **{name: _is_on(value) for name, value in more.items()},
        }
        missing = [name for name, needed in lacks.items() if needed]
        if missing:
            raise NotImplementedError(
                f"AscendAttentionBackend has no {', no '.join(missing)}; "
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
            kv_cache!: the layer's cache.
            slot_mapping: int[m], m <= n; a negative one is a token that is not kept.
            more: what a later vLLM passes, and does not ask for.
        """
        _refuse(more, "do_kv_cache_update")
        if not kv_cache.numel() or not slot_mapping.shape[0]:
            return
        keys, values = key_and_value(kv_cache, self.num_kv_heads, self.head_size)
        tokens = slot_mapping.shape[0]
        torch_npu._npu_reshape_and_cache(
            key=key[:tokens].contiguous(),
            value=value[:tokens].contiguous(),
            key_cache=keys,
            value_cache=values,
            slot_indices=half_page_slots(slot_mapping, keys.shape[1]),
        )

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: AscendAttentionMetadata | None,
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
            kv_cache: the layer's cache.
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
        keys, values = key_and_value(kv_cache, self.num_kv_heads, self.head_size)
        width = self.num_heads * self.head_size
        rows = query.reshape(query.shape[0], width)
        out = output.view(output.shape[0], width)
        for run in attn_metadata.runs:
            shape = (run.requests, run.query_len, width)
            result = self._run(rows[run.tokens].contiguous().view(shape), keys, values, attn_metadata, run)
            out[run.tokens].copy_(result.view(-1, width))
        return output

    def _run(
        self, query: Tensor, keys: Tensor, values: Tensor, batch: AscendAttentionMetadata, run: Run
    ) -> Tensor:
        """Return the attention of one run, T[requests, query_len, heads * head]."""
        blocks, block_size = keys.shape[:2]
        table = batch.block_table[run.rows]
        kv_lens = run.kv_lens
        arguments: dict[str, Any]
        window = self.sliding_window
        if run.query_len > 1:
            arguments = {"atten_mask": batch.causal_mask, "sparse_mode": _RIGHT_DOWN_CAUSAL}
            if window is not None:
                # The token itself counts in vLLM's window, and not in the kernel's.
                arguments |= {"sparse_mode": _BAND, "pre_tokens": window - 1, "next_tokens": 0}
        elif window is not None and max(kv_lens) > window:
            last = batch.window(run, window, block_size)
            table, kv_lens = last.block_table, last.kv_lens
            arguments = {"atten_mask": last.mask}
        else:
            # One token attends to all of its keys.
            arguments = {}
        result: Tensor
        result, _ = torch_npu.npu_fused_infer_attention_score(
            query,
            keys.view(blocks, block_size, -1),
            values.view(blocks, block_size, -1),
            block_table=table,
            block_size=block_size,
            actual_seq_lengths=[run.query_len] * run.requests,
            actual_seq_lengths_kv=kv_lens,
            num_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            scale=self.scale,
            input_layout="BSH",
            **arguments,
        )
        return result

"""One of vLLM's own attention layers, with a backend: all that the kit knows of vLLM."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any
from typing import NamedTuple

import torch

from vllm_fl.conformance.tensors import named
from vllm_fl.integration import fit

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Sequence

    from torch import Tensor

    from vllm_fl.conformance.attention_cases import AttentionCase

_GARBAGE = 3e4
_LAYER = "model.layers.0.self_attn.attn"
#: Larger than any sequence of a case.
_CONTEXT = 4096


class Batch(NamedTuple):
    """What one step gives a layer, request by request.

    Attributes:
        counts: new tokens of each request.
        lengths: tokens of each request, the new ones included.
        slots: where the cache keeps each new token.
        tables: the blocks of each request.
        padding: rows after the last token that are none.
    """

    counts: Sequence[int]
    lengths: Sequence[int]
    slots: Sequence[int]
    tables: Sequence[Sequence[int]]
    padding: int


class _Place(NamedTuple):
    """Where the layers of one buffer lie, as vLLM's ``KVCacheTensor`` says it."""

    layers: list[str]
    offset: int
    layer_stride: int
    block_stride: int


def is_installed() -> bool:
    """Whether there is a vLLM to build a layer of."""
    return find_spec("vllm") is not None


def misfits(path: str) -> list[str]:
    """Say what of the class that a path names does not fit the installed vLLM."""
    return fit.problems_of(fit.load(path))


def selector(case: AttentionCase) -> Any:
    """Return what vLLM tells the operator ``attention_backend`` of the case's layer."""
    config = import_module("vllm.v1.attention.selector").AttentionSelectorConfig
    values = {
        "head_size": case.head,
        "dtype": case.dtype,
        "kv_cache_dtype": "auto",
        "block_size": case.block,
        "use_mla": False,
        "has_sink": False,
        "use_sparse": False,
        "attn_type": "decoder",
        "has_sliding_window": case.window is not None,
    }
    return config(**{name: value for name, value in values.items() if name in config._fields})


@contextmanager
def configured(case: AttentionCase) -> Iterator[Any]:
    """Give vLLM a configuration of a model with one such layer, and yield it; no weights are made."""
    import vllm.config as configs

    model = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": case.heads[0] * case.head,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": case.heads[0],
        "num_key_value_heads": case.heads[1],
        "head_dim": case.head,
        "vocab_size": 128,
        "max_position_embeddings": _CONTEXT,
        "torch_dtype": named(case.dtype),
    }
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(model), encoding="utf-8")
        whole = configs.VllmConfig(
            model_config=configs.ModelConfig(
                model=folder,
                tokenizer=folder,
                skip_tokenizer_init=True,
                dtype=case.dtype,
                max_model_len=_CONTEXT,
                enforce_eager=True,
            ),
            cache_config=configs.CacheConfig(block_size=case.block, enable_prefix_caching=False),
        )
        with configs.set_current_vllm_config(whole):
            yield whole


class VllmLayer:
    """VLLM's own layer with a backend, and a cache that only the backend writes.

    Args:
        case: the layer's heads, dtype and window.
        path: of the backend's class.
        config: the one that :func:`configured` yields, which is in force.
        device: where it computes.

    Attributes:
        scale: what scores are multiplied by.
        block: tokens of a block: a layer with a window may take smaller ones than the model's.
        blocks: how many there are; 0 is vLLM's null block.

    Raises:
        NotImplementedError: the class says that it lacks something of the case.
    """

    def __init__(self, case: AttentionCase, path: str, config: Any, device: torch.device) -> None:
        backend = fit.load(path)
        lacks = _refusals(backend, case)
        if lacks:
            raise NotImplementedError(", ".join(lacks))
        self.device = device
        self.scale = case.head**-0.5
        with device:
            self._layer = _build(case, backend, config, self.scale)
        spec = self._layer.get_kv_cache_spec(config)
        self._builder = backend.get_builder_cls()(spec, [_LAYER], config, device)
        self._updates_itself = getattr(backend, "forward_includes_kv_cache_update", True)
        self.block: int = spec.block_size
        self.blocks = 12 + 4 * (512 // self.block)
        self._cache = _cache(backend, spec, self.blocks, device)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, output: Tensor, batch: Batch) -> None:
        """Keep the new tokens, and attend.

        Args:
            query: T[tokens + padding, heads, head].
            key: T[tokens + padding, kv_heads, head].
            value: as ``key``.
            output: as ``query``; written.
            batch: whose tokens they are.
        """
        metadata = self._builder.build(0, self._metadata(batch))
        with torch.inference_mode():
            impl = self._layer.impl
            if not self._updates_itself:
                slots = [*batch.slots, *[-1] * batch.padding]
                rows = torch.tensor(slots, dtype=torch.int64, device=self.device)
                impl.do_kv_cache_update(self._layer, key, value, self._cache, rows)
            impl.forward(self._layer, query, key, value, self._cache, metadata, output=output)

    def _metadata(self, batch: Batch) -> Any:
        metadata = import_module("vllm.v1.attention.backend").CommonAttentionMetadata
        int32, device = torch.int32, self.device
        starts = [sum(batch.counts[:number]) for number in range(len(batch.counts) + 1)]
        # Beyond a request's blocks vLLM's table holds what was there before: other blocks' numbers.
        width = max(map(len, batch.tables)) + 2
        tables = [[*table, *[1] * (width - len(table))] for table in batch.tables]
        computed = [length - count for length, count in zip(batch.lengths, batch.counts, strict=True)]
        values = {
            "query_start_loc": torch.tensor(starts, dtype=int32, device=device),
            "query_start_loc_cpu": torch.tensor(starts, dtype=int32),
            "seq_lens": torch.tensor(batch.lengths, dtype=int32, device=device),
            "seq_lens_cpu": torch.tensor(batch.lengths, dtype=int32),
            "_seq_lens_cpu": torch.tensor(batch.lengths, dtype=int32),
            "seq_lens_cpu_upper_bound": torch.tensor(batch.lengths, dtype=int32),
            "num_computed_tokens_cpu": torch.tensor(computed, dtype=int32),
            "_num_computed_tokens_cpu": torch.tensor(computed, dtype=int32),
            "num_reqs": len(batch.counts),
            "num_actual_tokens": sum(batch.counts),
            "max_query_len": max(batch.counts),
            "max_seq_len": max(batch.lengths),
            "block_table_tensor": torch.tensor(tables, dtype=int32, device=device),
            "slot_mapping": torch.tensor(batch.slots, dtype=torch.int64, device=device),
            "causal": True,
        }
        known = {field.name for field in dataclasses.fields(metadata) if field.init}
        return metadata(**{name: value for name, value in values.items() if name in known})


def _refusals(backend: Any, case: AttentionCase) -> list[str]:
    """Say what the class itself says that it lacks."""
    asked = {
        f"heads of {case.head}": backend.supports_head_size(case.head),
        named(case.dtype): backend.supports_dtype(case.dtype),
        f"blocks of {case.block}": backend.supports_block_size(case.block),
    }
    if case.window is not None and hasattr(backend, "supports_sliding_window"):
        asked["a sliding window"] = backend.supports_sliding_window()
    return [f"it does not support {what}" for what, answer in asked.items() if not answer]


def _build(case: AttentionCase, backend: Any, config: Any, scale: float) -> Any:
    attention = import_module("vllm.model_executor.layers.attention").Attention
    default = torch.get_default_dtype()
    torch.set_default_dtype(case.dtype)
    try:
        return attention(
            case.heads[0],
            case.head,
            scale,
            num_kv_heads=case.heads[1],
            cache_config=config.cache_config,
            per_layer_sliding_window=case.window,
            prefix=_LAYER,
            attn_backend=backend,
        )
    finally:
        torch.set_default_dtype(default)


def _cache(backend: Any, spec: Any, blocks: int, device: torch.device) -> Tensor:
    """Return a cache as vLLM allocates it, full of what nobody must read."""
    interface = import_module("vllm.v1.kv_cache_interface")
    if hasattr(interface, "create_kv_cache_views"):  # vLLM 0.32 and later
        layouts = backend.supported_kv_cache_layouts() or (interface.KVCacheLayout.LBNHC,)
        page = spec.page_size_bytes
        place = _Place([_LAYER], 0, blocks * page, page)
        raw = torch.zeros(blocks * page, dtype=torch.int8, device=device)
        (cache,) = interface.create_kv_cache_views(raw, spec, blocks, layouts[0], place)
    else:
        shape = backend.get_kv_cache_shape(blocks, spec.block_size, spec.num_kv_heads, spec.head_size)
        cache = torch.empty(shape, dtype=spec.dtype, device=device)
        try:
            order = backend.get_kv_cache_stride_order()
        except (AttributeError, NotImplementedError):
            order = tuple(range(len(shape)))
        physical = torch.empty([shape[i] for i in order], dtype=spec.dtype, device=device)
        cache = physical.permute(*[order.index(i) for i in range(len(order))])
    sign = torch.where(torch.arange(cache.shape[-1], device=device) % 2 == 0, _GARBAGE, -_GARBAGE)
    filled: Tensor = cache.copy_(sign.to(cache.dtype).expand(cache.shape))
    return filled

"""Paged attention through vLLM's own interface, against plain attention in float64.

Requests have their whole history; the cache is only ever written by the backend, and
what no request wrote holds large numbers, so that reading it shows. The truth comes
from the histories and shares neither layout nor table with the backend.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any
from typing import NamedTuple

import torch

from vllm_fl.conformance import truth
from vllm_fl.conformance.judge import ATTENTION
from vllm_fl.conformance.judge import RIGHT
from vllm_fl.conformance.judge import Expected
from vllm_fl.conformance.judge import relative_to_rms
from vllm_fl.conformance.judge import vacuity
from vllm_fl.conformance.judge import wrong
from vllm_fl.conformance.result import Status
from vllm_fl.conformance.tensors import moved
from vllm_fl.conformance.tensors import named
from vllm_fl.conformance.tensors import random
from vllm_fl.integration.fit import load

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Iterator

    from torch import Tensor

    from vllm_fl.conformance.judge import Verdict

#: Each step gives the requests, by name, so many new tokens.
_STEPS: tuple[dict[str, int], ...] = (
    {"a": 37, "b": 25, "c": 1},  # prefill
    {"a": 1, "b": 1, "c": 1},  # decode
    {"a": 1, "c": 1, "b": 130, "d": 3},  # decodes, a chunk of a running request, and a new one
    {"a": 1, "b": 30, "c": 2, "d": 100},  # chunks
    {"a": 1, "b": 1, "c": 1, "d": 1},
    {"d": 1, "b": 1, "c": 1, "a": 1},  # the same shapes, and other requests in them
)
_GARBAGE = 3e4
_LAYER = "model.layers.0.self_attn.attn"
#: Larger than any sequence here.
_CONTEXT = 4096


class _Place(NamedTuple):
    """Where the layers of one buffer lie, as vLLM's ``KVCacheTensor`` says it."""

    layers: list[str]
    offset: int
    layer_stride: int
    block_stride: int


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


def judge(
    case: AttentionCase, path_of: Callable[[Any], str | None], device: torch.device
) -> tuple[Status, str, float | None]:
    """Run a case's steps one after the other and judge each.

    Args:
        case: what is run.
        path_of: takes a selector and returns a class path, or None.
        device: where.

    Raises:
        NotImplementedError: the backend says that it is not for this.
    """
    with tempfile.TemporaryDirectory() as folder, _vllm_config(case, Path(folder)) as config:
        path = path_of(_selector(case))
        if path is None:
            raise NotImplementedError("returns None: vLLM's own choice")
        backend = load(path)
        lacks = _refusals(backend, case)
        if lacks:
            raise NotImplementedError(", ".join(lacks))
        world = _World(case, backend, config, device)
        verdict = RIGHT
        for number, queries in enumerate(_STEPS, 1):
            verdict += world.step(number, queries)
    return (Status.PASSED if verdict.is_right else Status.FAILED), verdict.note, verdict.ratio


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


def _selector(case: AttentionCase) -> Any:
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
def _vllm_config(case: AttentionCase, folder: Path) -> Iterator[Any]:
    """Give vLLM a configuration of a model with one such layer; no weights are made."""
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
    (folder / "config.json").write_text(json.dumps(model), encoding="utf-8")
    whole = configs.VllmConfig(
        model_config=configs.ModelConfig(
            model=str(folder),
            tokenizer=str(folder),
            skip_tokenizer_init=True,
            dtype=case.dtype,
            max_model_len=_CONTEXT,
            enforce_eager=True,
        ),
        cache_config=configs.CacheConfig(block_size=case.block, enable_prefix_caching=False),
    )
    with configs.set_current_vllm_config(whole):
        yield whole


class _World:
    """Requests with their whole history, and a cache that only the backend writes."""

    def __init__(self, case: AttentionCase, backend: Any, config: Any, device: torch.device) -> None:
        self.case = case
        self.device = device
        self.scale = case.head**-0.5
        with device:
            self.layer = _layer(case, backend, config, self.scale)
        spec = self.layer.get_kv_cache_spec(config)
        builder = backend.get_builder_cls()
        self.builder = builder(spec, [_LAYER], config, device)
        self.updates_itself = getattr(backend, "forward_includes_kv_cache_update", True)
        # A layer with a window may take smaller blocks than the model's.
        self.block = spec.block_size
        blocks = 12 + 4 * (512 // self.block)
        self.cache = _cache(backend, spec, blocks, device)
        # Never in order; 0 is vLLM's null block.
        order = 1 + torch.randperm(blocks - 1, generator=torch.Generator().manual_seed(1))
        self.free = order.tolist()
        self.history: dict[str, tuple[Tensor, Tensor]] = {}
        self.tables: dict[str, list[int]] = {}

    def step(self, number: int, queries: dict[str, int]) -> Verdict:
        """Give each request its new tokens, run the layer, and judge what it returns."""
        case = self.case
        tokens = sum(queries.values())
        query, key, value = self._new(number, tokens + case.padding)
        starts, lengths, slots, expected = [0], [], [], []
        for name, count in queries.items():
            new = slice(starts[-1], starts[-1] + count)
            keys, values = self.history.get(name, (key[:0], value[:0]))
            begin = keys.shape[0]
            keys, values = torch.cat([keys, key[new]]), torch.cat([values, value[new]])
            self.history[name] = keys, values
            table = self.tables.setdefault(name, [])
            while len(table) * self.block < begin + count:
                table.append(self.free.pop())
            places = range(begin, begin + count)
            slots += [table[at // self.block] * self.block + at % self.block for at in places]
            lengths.append(begin + count)
            starts.append(starts[-1] + count)
            expected.append(truth.attention(query[new], keys, values, self.scale, case.window))
        metadata = self.builder.build(0, self._common(queries, starts, lengths, slots))
        output = torch.full((tokens + case.padding, case.heads[0], case.head), 7.0, dtype=case.dtype)
        output = output.to(self.device)
        # Moved as a whole, views of one buffer stay views.
        q, k, v = self._on_device(query, key, value)
        before = q.clone()
        with torch.inference_mode():
            impl = self.layer.impl
            if not self.updates_itself:
                rows = torch.tensor(slots + [-1] * case.padding, dtype=torch.int64, device=self.device)
                impl.do_kv_cache_update(self.layer, k, v, self.cache, rows)
            impl.forward(self.layer, q, k, v, self.cache, metadata, output=output)
        if not torch.equal(q, before):
            return wrong(f"step {number}: the query was written")
        return _judged(number, output[:tokens].cpu(), torch.cat(expected), case.dtype)

    def _new(self, number: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value of so many tokens, with a mean of zero."""
        case = self.case
        widths = [heads * case.head for heads in (case.heads[0], case.heads[1], case.heads[1])]
        qkv = random(rows, sum(widths), dtype=torch.float32, seed=number)
        qkv[:, : widths[0]] *= case.peak
        query, key, value = torch.split(qkv.to(case.dtype), widths, -1)
        q, k, v = (part.view(rows, -1, case.head) for part in (query, key, value))
        return (q, k, v) if case.layout == "fused" else (q.contiguous(), k.contiguous(), v.contiguous())

    def _on_device(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        return tuple(moved({"q": query, "k": key, "v": value}, self.device).values())

    def _common(
        self, queries: dict[str, int], starts: list[int], lengths: list[int], slots: list[int]
    ) -> Any:
        metadata = import_module("vllm.v1.attention.backend").CommonAttentionMetadata
        int32 = torch.int32
        # Beyond a request's blocks vLLM's table holds what was there before: other blocks' numbers.
        width = max(map(len, self.tables.values())) + 2
        rows = [self.tables[name] + [1] * (width - len(self.tables[name])) for name in queries]
        computed = [length - count for length, count in zip(lengths, queries.values(), strict=True)]
        values = {
            "query_start_loc": torch.tensor(starts, dtype=int32, device=self.device),
            "query_start_loc_cpu": torch.tensor(starts, dtype=int32),
            "seq_lens": torch.tensor(lengths, dtype=int32, device=self.device),
            "seq_lens_cpu": torch.tensor(lengths, dtype=int32),
            "_seq_lens_cpu": torch.tensor(lengths, dtype=int32),
            "seq_lens_cpu_upper_bound": torch.tensor(lengths, dtype=int32),
            "num_computed_tokens_cpu": torch.tensor(computed, dtype=int32),
            "_num_computed_tokens_cpu": torch.tensor(computed, dtype=int32),
            "num_reqs": len(queries),
            "num_actual_tokens": sum(queries.values()),
            "max_query_len": max(queries.values()),
            "max_seq_len": max(lengths),
            "block_table_tensor": torch.tensor(rows, dtype=int32, device=self.device),
            "slot_mapping": torch.tensor(slots, dtype=torch.int64, device=self.device),
            "causal": True,
        }
        known = {field.name for field in dataclasses.fields(metadata) if field.init}
        return metadata(**{name: value for name, value in values.items() if name in known})


def _judged(number: int, output: Tensor, exact: Tensor, dtype: torch.dtype) -> Verdict:
    def of(outs: tuple[Tensor | None, ...]) -> Verdict:
        return relative_to_rms(outs[0], exact, dtype, ATTENTION[dtype], what=f"step {number}")

    blind = vacuity(Expected((exact.to(dtype),), of))
    return wrong(f"a fault of this case, not of the implementation: {blind}") if blind else of((output,))


def _layer(case: AttentionCase, backend: Any, config: Any, scale: float) -> Any:
    """Build vLLM's own layer with the backend."""
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

"""The attention backend through vLLM's interface, against plain attention over each history."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import TYPE_CHECKING
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_fl_template.impl.attention import TemplateAttentionBackend

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

PATH = "vllm_fl_template.impl.attention.TemplateAttentionBackend"
HEADS, KV_HEADS, HEAD, BLOCKS = 4, 2, 16, 24


class World:
    """Requests with their whole history, and a paged cache that only the backend writes."""

    def __init__(
        self, *, block: int = 16, window: int | None = None, dtype: torch.dtype = torch.float32
    ) -> None:
        self.block, self.window, self.dtype = block, window, dtype
        shape = TemplateAttentionBackend.get_kv_cache_shape(BLOCKS, block, KV_HEADS, HEAD)
        # What no request wrote must not be read: NaN would spread.
        self.cache = torch.full(shape, torch.nan, dtype=dtype)
        spec = FullAttentionSpec(block_size=block, num_kv_heads=KV_HEADS, head_size=HEAD, dtype=dtype)
        device = torch.device("cpu")
        self.builder = TemplateAttentionBackend.get_builder_cls()(spec, ["layer"], None, device)
        impl = TemplateAttentionBackend.get_impl_cls()
        self.impl = impl(HEADS, HEAD, 1 / math.sqrt(HEAD), KV_HEADS, None, window, "auto")
        self.generator = torch.Generator().manual_seed(0)
        # Never in order; 0 is vLLM's null block.
        self.free = (1 + torch.randperm(BLOCKS - 1, generator=self.generator)).tolist()
        self.history: dict[str, tuple[Tensor, Tensor]] = {}
        self.tables: dict[str, list[int]] = {}

    def step(self, queries: dict[str, int], padding: int = 0) -> None:
        """Give each request so many new tokens, and check what attention returns."""
        tokens = sum(queries.values())
        # Views of one projection, as vLLM gives them.
        qkv = torch.randn(tokens + padding, HEADS + 2 * KV_HEADS, HEAD, generator=self.generator).to(
            self.dtype
        )
        query, key, value = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        starts, lengths, slots = [0], [], []
        for name, count in queries.items():
            begin, new = starts[-1], slice(starts[-1], starts[-1] + count)
            old = self.history.get(name, (key[:0], value[:0]))
            self.history[name] = torch.cat((old[0], key[new])), torch.cat((old[1], value[new]))
            table = self.tables.setdefault(name, [])
            length = old[0].shape[0] + count
            while len(table) * self.block < length:
                table.append(self.free.pop())
            places = range(old[0].shape[0], length)
            slots += [table[at // self.block] * self.block + at % self.block for at in places]
            lengths.append(length)
            starts.append(begin + count)
        widest = max(map(len, self.tables.values()))
        rows = [self.tables[name] + [BLOCKS - 1] * (widest - len(self.tables[name])) for name in queries]
        common = CommonAttentionMetadata(
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            query_start_loc_cpu=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            num_reqs=len(queries),
            num_actual_tokens=tokens,
            max_query_len=max(queries.values()),
            max_seq_len=max(lengths),
            block_table_tensor=torch.tensor(rows, dtype=torch.int32),
            slot_mapping=torch.tensor(slots + [-1] * padding, dtype=torch.int64),
            causal=True,
        )
        output = torch.full((tokens + padding, HEADS, HEAD), 7.0, dtype=self.dtype)
        self.impl.do_kv_cache_update(None, key, value, self.cache, common.slot_mapping)
        metadata = self.builder.build(0, common)
        assert self.impl.forward(None, query, key, value, self.cache, metadata, output=output) is output
        assert (output[tokens:] == 7).all()
        for name, begin, end in zip(queries, starts, starts[1:], strict=False):
            self._check(name, query[begin:end], output[begin:end])

    def _check(self, name: str, query: Tensor, output: Tensor) -> None:
        keys, values = (x.double() for x in self.history[name])
        for i, row in enumerate(query.double()):
            last = keys.shape[0] - query.shape[0] + i
            first = 0 if self.window is None else max(0, last - self.window + 1)
            for head in range(HEADS):
                kv_head = head // (HEADS // KV_HEADS)
                scores = keys[first : last + 1, kv_head] @ row[head] / math.sqrt(HEAD)
                truth = scores.softmax(0) @ values[first : last + 1, kv_head]
                limit = 1e-5 if self.dtype is torch.float32 else 2 * torch.finfo(self.dtype).eps
                torch.testing.assert_close(output[i, head].double(), truth, rtol=limit, atol=limit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize("block", [16, 32])
def test_prefill_decode_and_both(block: int, window: int | None, dtype: torch.dtype) -> None:
    world = World(block=block, window=window, dtype=dtype)
    world.step({"a": 37, "b": 5, "c": 1})
    world.step({"a": 1, "b": 1, "c": 1}, padding=5)
    # A decode, a chunk of a running request across blocks, and a new request.
    world.step({"c": 1, "b": 40, "d": 3})
    world.step({"a": 1, "b": 0, "c": 2, "d": 1})


def test_blocks_before_the_window_are_not_read() -> None:
    """VLLM takes them back, and another request writes them."""
    world = World(window=20)
    world.step({"a": 100})
    for block in world.tables["a"][:4]:
        world.cache[block] = torch.nan
    world.step({"a": 1})


def test_while_vllm_measures_memory() -> None:
    world, x = World(), torch.zeros(3, HEADS, HEAD)
    assert world.impl.forward(None, x, x, x, torch.empty(0), None, output=x) is x


def selector(**changes: Any) -> AttentionSelectorConfig:
    fields = {"head_size": 64, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16}
    return AttentionSelectorConfig(**(fields | changes))


def test_the_operator_names_the_class_where_it_fits(call: Callable[..., Any]) -> None:
    assert call("attention_backend", False, False) == PATH
    assert call("attention_backend", False, False, selector=selector()) == PATH
    assert resolve_obj_by_qualname(PATH) is TemplateAttentionBackend
    for change, reason in {
        ("kv_cache_dtype", "fp8"): "kv_cache_dtype not supported",
        ("has_sink", True): "sinks not supported",
        ("attn_type", "encoder_only"): "encoder_only not supported",
    }.items():
        with pytest.raises(NotImplementedError, match=reason):
            call("attention_backend", False, False, selector=selector(**dict([change])))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"alibi_slopes": [1.0]}, "ALiBi"),
        ({"logits_soft_cap": 30.0}, "soft cap"),
        ({"attn_type": "encoder_only"}, "encoder_only"),
        ({"kv_cache_dtype": "fp8"}, "quantised"),
        ({"sinks": torch.ones(HEADS)}, "sinks"),
    ],
)
def test_a_layer_with_what_it_lacks(change: dict[str, Any], reason: str) -> None:
    impl = TemplateAttentionBackend.get_impl_cls()
    with pytest.raises(NotImplementedError, match=reason):
        impl(**{"num_heads": HEADS, "head_size": HEAD, "scale": 1.0, **change})


@pytest.mark.parametrize("value", [None, False, 0, -1, "", [], 0.0])
def test_what_a_later_vllm_does_not_ask_for(value: Any) -> None:
    """A keyword that is off is no reason to refuse, wherever vLLM passes it."""
    world, x = World(), torch.zeros(3, HEADS, HEAD)
    backend = TemplateAttentionBackend
    more = {"later": value}
    backend.get_impl_cls()(HEADS, HEAD, 1.0, **more)
    assert backend.get_kv_cache_shape(2, 16, 2, 8, **more) == (2, 2, 16, 16)
    assert world.impl.forward(None, x, x, x, torch.empty(0), None, output=x, **more) is x
    world.impl.do_kv_cache_update(None, x, x, torch.empty(0), torch.empty(0), **more)
    with pytest.raises(NotImplementedError, match="causal only"):
        world.builder.build(0, SimpleNamespace(causal=False), **more)


@pytest.mark.parametrize("value", [True, 1, 0.5, "fp8", [1], torch.zeros(1)])
def test_what_a_later_vllm_asks_for(value: Any) -> None:
    world, x = World(), torch.zeros(3, HEADS, HEAD)
    more = {"later": value}
    for call in (
        lambda: TemplateAttentionBackend.get_impl_cls()(HEADS, HEAD, 1.0, **more),
        lambda: TemplateAttentionBackend.get_kv_cache_shape(2, 16, 2, 8, **more),
        lambda: world.impl.forward(None, x, x, x, torch.empty(0), None, output=x, **more),
        lambda: world.impl.do_kv_cache_update(None, x, x, torch.empty(0), torch.empty(0), **more),
        lambda: world.builder.build(0, SimpleNamespace(causal=True), **more),
    ):
        with pytest.raises(NotImplementedError, match="later"):
            call()


def test_it_fits_the_installed_vllm() -> None:
    from vllm_fl.integration.fit import problems_of

    assert problems_of(TemplateAttentionBackend) == []


def test_only_causal() -> None:
    with pytest.raises(NotImplementedError, match="causal only"):
        World().builder.build(0, SimpleNamespace(causal=False))

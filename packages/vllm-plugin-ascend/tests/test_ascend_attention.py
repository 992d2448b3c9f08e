"""AscendAttentionBackend: its calls, its blocks and its refusals; its results: test_ascend_conformance.py."""

from __future__ import annotations

import math
from collections import namedtuple

import pytest
import torch

from vllm_fl.conformance import truth
from vllm_fl.conformance.judge import ATTENTION
from vllm_fl.conformance.judge import relative_to_rms
from vllm_fl.conformance.tensors import random

DEVICE = torch.device("cpu")


class World:
    """Requests with their whole history, and the cache and metadata of the backend, to be looked at.

    The kit's requests go through one of vLLM's layers, which hides both.
    """

    def __init__(
        self, *, heads=4, kv_heads=2, head=32, block=128, window=None, dtype=torch.float16, blocks=40
    ):
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        from vllm_fl_ascend.impl.attention import AscendAttentionBackend as Backend

        self.heads, self.kv_heads, self.head, self.block, self.window = heads, kv_heads, head, block, window
        self.dtype = dtype
        self.scale = 1 / math.sqrt(head)
        shape = Backend.get_kv_cache_shape(blocks, block, kv_heads, head)
        # What no request wrote must not be read: NaN would spread.
        self.cache = torch.full(shape, float("nan"), dtype=dtype)
        spec = FullAttentionSpec(block_size=block, num_kv_heads=kv_heads, head_size=head, dtype=dtype)
        self.builder = Backend.get_builder_cls()(spec, ["layer"], None, DEVICE)
        self.impl = Backend.get_impl_cls()(heads, head, self.scale, kv_heads, None, window, "auto")
        # Never in order; 0 is vLLM's null block.
        free = 1 + torch.randperm(blocks - 1, generator=torch.Generator().manual_seed(1))
        self.free = free.tolist()
        self.history = {}
        self.tables = {}
        self.seed = 0

    def _new(self, *shape):
        self.seed += 1
        return random(*shape, dtype=self.dtype, seed=self.seed, scale=2.0)

    def step(self, queries, *, padding=0, layout="fused"):
        """Give each request, by name, so many new tokens; check what attention returns."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        tokens = sum(queries.values())
        total = tokens + padding
        width = (self.heads + 2 * self.kv_heads) * self.head
        qkv = self._new(total, width)
        parts = qkv.split([self.heads * self.head, *[self.kv_heads * self.head] * 2], -1)
        query, key, value = (part.view(total, -1, self.head) for part in parts)
        if layout == "contiguous":
            query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        starts, lengths, slots, start = [0], [], [], 0
        for name, count in queries.items():
            old_key, old_value = self.history.get(name, (key[:0], value[:0]))
            begin = old_key.shape[0]
            self.history[name] = (
                torch.cat([old_key, key[start : start + count]]),
                torch.cat([old_value, value[start : start + count]]),
            )
            table = self.tables.setdefault(name, [])
            while len(table) * self.block < begin + count:
                table.append(self.free.pop())
            slots += [
                table[at // self.block] * self.block + at % self.block for at in range(begin, begin + count)
            ]
            lengths.append(begin + count)
            start += count
            starts.append(start)
        longest = max(map(len, self.tables.values())) + 2
        rows = [self.tables[name] + [9999] * (longest - len(self.tables[name])) for name in queries]
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
        metadata = self.builder.build(0, common)
        before = query.clone()
        self.impl.do_kv_cache_update(None, key, value, self.cache, common.slot_mapping)
        output = torch.full((total, self.heads, self.head), 7.0, dtype=self.dtype)
        assert self.impl.forward(None, query, key, value, self.cache, metadata, output=output) is output
        assert torch.equal(query, before)
        assert (output[tokens:] == 7).all()
        for (name, count), begin in zip(queries.items(), starts, strict=False):
            self._check(query[begin : begin + count], name, output[begin : begin + count])
        return metadata

    def _check(self, query, name, out):
        exact = truth.attention(query, *self.history[name], self.scale, self.window)
        verdict = relative_to_rms(out, exact, self.dtype, ATTENTION[self.dtype], what=name)
        assert verdict.is_right, verdict.note


@pytest.fixture
def world(npu):
    npu.calls.clear()
    return World


FIA = "npu_fused_infer_attention_score"


def test_a_step_is_kept_once_and_decodes_are_one_call(world, npu):
    w = world()
    w.step({"a": 37, "b": 5, "c": 1})
    w.step({"a": 1, "c": 1, "b": 130, "d": 3})
    assert npu.calls["_npu_reshape_and_cache"] == 2
    # Whatever their lengths.
    npu.calls.clear()
    metadata = w.step(dict.fromkeys("abcd", 1))
    assert npu.calls[FIA] == len(metadata.runs) == 1


@pytest.mark.parametrize("block", [384, 512])
@pytest.mark.parametrize("window", [None, 100])
def test_blocks_that_the_kit_does_not_ask_for(world, block, window):
    w = world(block=block, heads=2, kv_heads=1, head=16, window=window)
    w.step({"a": block + 3, "b": block - 1})
    w.step({"a": 1, "b": 1})
    w.step({"b": 1, "a": 1})


@pytest.mark.parametrize("layout", ["fused", "contiguous"])
def test_padding_is_neither_kept_nor_written(world, layout):
    w = world(window=8)
    w.step({"a": 5, "b": 3}, padding=6, layout=layout)
    w.step({"a": 1, "b": 1}, padding=3, layout=layout)
    used = {block for table in w.tables.values() for block in table}
    written = {b for b in range(w.cache.shape[0]) if not w.cache[b].isnan().all()}
    # What has no slot lands in the null block.
    assert written == used | {0}


def test_a_request_without_a_query(world, npu):
    w = world()
    w.step({"a": 6, "b": 2})
    w.step({"a": 1, "b": 0, "c": 4})
    w.step({"b": 1, "a": 0})


def test_equal_prefills_are_one_call_and_others_are_not(world, npu):
    w = world()
    metadata = w.step({"a": 4, "b": 4, "c": 6})
    assert [(run.requests, run.query_len) for run in metadata.runs] == [(2, 4), (1, 6)]
    assert npu.calls[FIA] == 2


def test_two_runs_of_decodes_in_one_batch(world):
    w = world(window=5)
    w.step({"a": 9, "b": 12, "c": 150})
    metadata = w.step({"a": 1, "b": 3, "c": 1})
    assert [run.requests for run in metadata.runs] == [1, 1, 1]


def test_window_reads_only_its_blocks(world, npu):
    """The first blocks of a windowed request may be gone: vLLM gives them back."""
    w = world(window=20, blocks=12)
    w.step({"a": 300})
    for block in w.tables["a"][:2]:
        w.cache[block] = float("nan")
    metadata = w.step({"a": 1})
    window = metadata.window(metadata.runs[0], 20, 128)
    assert window.block_table.shape == (1, 2)
    assert window.kv_lens == [301 - 256]


def test_while_vllm_measures_memory(world):
    w = world()
    output = torch.zeros(3, 4, 32, dtype=torch.float16)
    query = random(3, 4, 32, dtype=torch.float16)
    key = random(3, 2, 32, dtype=torch.float16)
    assert w.impl.forward(None, query, key, key, torch.empty(0), None, output=output) is output
    w.impl.do_kv_cache_update(None, key, key, torch.empty(0), torch.zeros(3, dtype=torch.int64))


def test_a_cache_that_the_kernels_cannot_read(world):
    w = world()
    key = random(3, 2, 32, dtype=torch.float16)
    w.cache = w.cache.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(RuntimeError, match="contiguous"):
        w.impl.do_kv_cache_update(None, key, key, w.cache, torch.arange(3))
    huge = torch.empty(2**13, 2**5, 2**7, 2**8, dtype=torch.float16, device="meta")
    from vllm_fl_ascend.impl._paged import key_and_value

    with pytest.raises(RuntimeError, match="num_gpu_blocks_override to at most 2047"):
        key_and_value(huge, 32, 128)


def test_layers_of_vllms_allocation_can_be_read(world):
    """vLLM's own views of one buffer for two layers, in the layout that the backend asks for."""
    interface = pytest.importorskip("vllm.v1.kv_cache_interface")
    if not hasattr(interface, "create_kv_cache_views"):
        pytest.skip("vLLM before 0.32 asks for a shape")
    from vllm_fl_ascend.impl._paged import key_and_value
    from vllm_fl_ascend.impl.attention import AscendAttentionBackend

    (layout,) = AscendAttentionBackend.supported_kv_cache_layouts()
    spec = interface.FullAttentionSpec(block_size=128, num_kv_heads=2, head_size=16, dtype=torch.float16)
    page = 128 * 2 * 2 * 16 * 2
    place = namedtuple("Place", "layers offset layer_stride block_stride")(["x", "y"], 0, 3 * page, page)
    views = interface.create_kv_cache_views(torch.zeros(6 * page, dtype=torch.int8), spec, 3, layout, place)
    for view in views:
        keys, values = key_and_value(view, 2, 16)
        assert keys.shape == values.shape == (5, 128, 2, 16)
        keys[2], values[2] = 1, 2
        assert (view[1].flatten()[: page // 4] == 1).all()
        assert (view[1].flatten()[page // 4 :] == 2).all()
        assert not view[0].any()
        assert not view[2].any()


def _selector(**change):
    from vllm.v1.attention.selector import AttentionSelectorConfig

    values = {
        "head_size": 128,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "auto",
        "block_size": 128,
        "use_mla": False,
        "has_sink": False,
        "use_sparse": False,
        "attn_type": "decoder",
    }
    known = AttentionSelectorConfig._fields
    return AttentionSelectorConfig(**{k: v for k, v in (values | change).items() if k in known})


PATH = "vllm_fl_ascend.impl.attention.AscendAttentionBackend"


def test_the_operator_names_the_backend_where_it_fits(backend):
    from vllm.utils.import_utils import resolve_obj_by_qualname

    assert backend.attention_backend() == PATH
    assert resolve_obj_by_qualname(PATH).get_name() == "CUSTOM"
    assert backend.attention_backend(selector=_selector()) == PATH
    for change in (
        {"head_size": 100},
        {"head_size": 576},
        {"dtype": torch.float32},
        {"kv_cache_dtype": "fp8"},
        {"block_size": 16},
        {"has_sink": True},
        {"attn_type": "encoder_only"},
    ):
        with pytest.raises(NotImplementedError, match="not supported"):
            backend.attention_backend(selector=_selector(**change))


def test_a_platform_with_a_cache_of_its_own_keeps_its_attention(backend, monkeypatch):
    platform = type("NPUPlatform", (), {"__module__": "vllm_ascend.platform"})
    monkeypatch.setattr("vllm.platforms._current_platform", platform())
    with pytest.raises(NotImplementedError, match="vllm_ascend keeps the KV cache in a layout of its own"):
        backend.attention_backend(selector=_selector())


def test_no_latent_and_no_sparse_attention(backend):
    assert "latent" in backend.implementation_of("attention_backend").supports(True, False)
    assert "sparse" in backend.implementation_of("attention_backend").supports(False, True, selector=None)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"alibi_slopes": [1.0]}, "ALiBi"),
        ({"logits_soft_cap": 30.0}, "soft cap"),
        ({"attn_type": "encoder_only"}, "encoder_only"),
        ({"kv_cache_dtype": "fp8"}, "quantised"),
        ({"head_size": 24}, "heads of 24"),
        ({"num_kv_heads": 3}, "8 heads to 3"),
        ({"num_heads": 512}, "512 heads"),
        ({"sinks": torch.ones(8)}, "sinks"),
    ],
)
def test_a_layer_that_the_kernels_lack(npu, change, reason):
    from vllm_fl_ascend.impl.attention import AscendAttentionImpl

    arguments = {"num_heads": 8, "head_size": 64, "scale": 1.0, "num_kv_heads": 2} | change
    with pytest.raises(NotImplementedError, match=reason):
        AscendAttentionImpl(**arguments)


@pytest.mark.parametrize("value", [None, False, 0, -1, ""])
def test_what_a_later_vllm_does_not_ask_for(npu, value):
    from vllm_fl_ascend.impl.attention import AscendAttentionBackend as Backend

    arguments = {"num_heads": 8, "head_size": 64, "scale": 1.0, "num_kv_heads": 2, "later": value}
    assert Backend.get_impl_cls()(**arguments).num_heads == 8
    assert Backend.get_kv_cache_shape(2, 128, 2, 64, later=value) == (2, 2, 128, 128)
    assert Backend.get_supported_kernel_block_sizes(later=value)


@pytest.mark.parametrize("value", [True, 1, "fp8", torch.zeros(1)])
def test_what_a_later_vllm_asks_for(npu, value):
    from vllm_fl_ascend.impl.attention import AscendAttentionBackend as Backend

    arguments = {"num_heads": 8, "head_size": 64, "scale": 1.0, "num_kv_heads": 2, "later": value}
    with pytest.raises(NotImplementedError, match="later"):
        Backend.get_impl_cls()(**arguments)
    with pytest.raises(NotImplementedError, match="later"):
        Backend.get_kv_cache_shape(2, 128, 2, 64, later=value)


def test_only_causal(world):
    w = world()
    w.step({"a": 3})
    common = namedtuple("Common", "causal")(False)
    with pytest.raises(NotImplementedError, match="causal only"):
        w.builder.build(0, common)

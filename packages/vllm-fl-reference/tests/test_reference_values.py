"""Every operator against float64, over shapes, dtypes and layouts."""

from __future__ import annotations

import math

import float64_truth as truth
import pytest
import torch
from reference_layouts import DTYPES
from reference_layouts import LAYOUTS
from reference_layouts import close
from reference_layouts import every_other
from reference_layouts import fresh
from reference_layouts import identifier
from reference_layouts import random
from reference_layouts import sliced
from reference_layouts import transposed

from vllm_fl_reference.impl.activation import gelu_and_mul
from vllm_fl_reference.impl.activation import silu_and_mul
from vllm_fl_reference.impl.moe import fused_experts
from vllm_fl_reference.impl.moe import grouped_topk
from vllm_fl_reference.impl.moe import moe_align_block_size
from vllm_fl_reference.impl.moe import moe_sum
from vllm_fl_reference.impl.moe import topk_softmax
from vllm_fl_reference.impl.normalization import rms_norm
from vllm_fl_reference.impl.quantization import dynamic_per_token_quant_fp8
from vllm_fl_reference.impl.quantization import dynamic_per_token_quant_int8
from vllm_fl_reference.impl.rotary import rotary_embedding

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=identifier)
layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)

ACTIVATIONS = {
    "silu": (silu_and_mul, truth.silu),
    "gelu": (gelu_and_mul, truth.gelu),
    "gelu_tanh": (lambda x: gelu_and_mul(x, "tanh"), lambda v: truth.gelu(v, "tanh")),
}


# Activations


@dtypes
@layouts
@pytest.mark.parametrize("shape", [(0, 14), (1, 2), (7, 14), (3, 1538), (2, 19, 10), (6,)], ids=identifier)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gated_activation(name, shape, dtype, layout):
    function, act = ACTIVATIONS[name]
    x = layout(random(*shape, dtype=dtype, scale=3.0))
    out = function(x)
    # In float32 gelu's tail is 1 + erf, most of which cancels.
    close(out, truth.gated(x, act), dtype, absolute=1e-5)
    fresh(out, x)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gated_activation_of_extremes(name):
    function, act = ACTIVATIONS[name]
    gates = [0.0, -0.0, 1e4, -1e4, 10.0, -10.0, 88.0, -88.0, math.inf, math.nan]
    x = torch.tensor([[g, u] for g in gates for u in (1.0, -2.0)])
    out = function(x)
    close(out, truth.gated(x, act), torch.float32)
    # The sign of zero as well.
    assert torch.signbit(out[2]).item()
    assert not torch.signbit(out[0]).item()


@pytest.mark.parametrize("function", [silu_and_mul, gelu_and_mul], ids=lambda f: f.__name__)
@pytest.mark.parametrize("width", [1, 3, 769])
def test_gated_activation_refuses_an_odd_width(function, width):
    with pytest.raises(ValueError, match=f"{width} is odd"):
        function(torch.ones(2, width))


def test_gelu_refuses_an_unknown_approximation():
    with pytest.raises(ValueError, match="'fast'"):
        gelu_and_mul(torch.ones(2, 2), "fast")


def test_activation_rounds_once():
    x = random(64, 128, dtype=torch.bfloat16)
    a, b = x.float().chunk(2, -1)
    assert torch.equal(silu_and_mul(x), (torch.nn.functional.silu(a) * b).bfloat16())


# RMSNorm


@dtypes
@layouts
@pytest.mark.parametrize("with_residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize("shape", [(0, 16), (1, 1), (7, 8), (3, 769), (2, 5, 33), (9,)], ids=identifier)
def test_rms_norm(shape, with_residual, dtype, layout):
    x = layout(random(*shape, dtype=dtype))
    residual = sliced(random(*shape, dtype=dtype, seed=1)) if with_residual else None
    # Ones of one dtype are those of all: the weight's own rounding is tested below.
    for weight in (None, torch.full(shape[-1:], 2.0, dtype=dtype)):
        out = rms_norm(x, residual, weight, 1e-5)
        normed, total = truth.rms_norm(x, residual, weight, 1e-5)
        if with_residual:
            out, summed = out
            close(summed, total, dtype)
            fresh(summed, x, residual, out)
        close(out, normed, dtype)
        fresh(out, x, residual, weight)


@pytest.mark.parametrize("weight_dtype", DTYPES, ids=identifier)
@dtypes
def test_rms_norm_takes_a_weight_of_any_dtype(dtype, weight_dtype):
    x = random(4, 96, dtype=dtype)
    weight = random(96, dtype=weight_dtype)
    out = rms_norm(x, None, weight, 1e-6)
    # Two roundings: to the weight's dtype, and to x's.
    coarsest = max((dtype, weight_dtype), key=lambda d: torch.finfo(d).eps)
    normed, _ = truth.rms_norm(x, None, weight, 1e-6)
    steps = 1.5 * torch.finfo(coarsest).eps / torch.finfo(dtype).eps + 2
    close(out, normed, dtype, steps=steps)
    wide = x if dtype is torch.float64 else x.float()
    unweighted = rms_norm(wide, None, None, 1e-6)
    assert torch.equal(out, (unweighted.to(weight_dtype) * weight).to(dtype))


def test_rms_norm_of_zeros_is_zero_and_epsilon_counts():
    assert torch.equal(rms_norm(torch.zeros(2, 8), None, None, 1e-6), torch.zeros(2, 8))
    small = torch.full((1, 8), 1e-3)
    for epsilon in (1e-5, 1e-6):
        close(
            rms_norm(small, None, None, epsilon), truth.rms_norm(small, None, None, epsilon)[0], torch.float32
        )


def test_rms_norm_does_not_overflow_in_float16():
    x = torch.full((1, 64), 6e4, dtype=torch.float16)
    torch.testing.assert_close(rms_norm(x, None, None, 1e-6), torch.ones(1, 64, dtype=torch.float16))


def test_rms_norm_normalises_the_unrounded_sum():
    x = random(64, 256, dtype=torch.bfloat16)
    residual = random(64, 256, dtype=torch.bfloat16, seed=1)
    normed, total = rms_norm(x, residual, None, 1e-6)
    unrounded = rms_norm(x.float() + residual.float(), None, None, 1e-6).bfloat16()
    assert torch.equal(normed, unrounded)
    assert not torch.equal(normed, rms_norm(total, None, None, 1e-6))


def test_rms_norm_where_the_residual_is_x():
    x = random(3, 16)
    normed, total = rms_norm(x, x, None, 1e-6)
    assert torch.equal(total, 2 * x)
    close(normed, truth.rms_norm(2 * x, None, None, 1e-6)[0], torch.float32)


# Rotary embedding


def tables(rows: int, half: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    inverse = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.outer(torch.arange(rows, dtype=torch.float64), inverse)
    cache = torch.cat([angles.cos(), angles.sin()], -1).to(dtype)
    return cache, *cache.chunk(2, -1)


def fused(tokens: int, heads: int, kv_heads: int, head: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Query and key as views of one projection; the whole of it, too."""
    qkv = random(tokens, (heads + 2 * kv_heads) * head, dtype=dtype)
    query, key, _ = qkv.split([heads * head, kv_heads * head, kv_heads * head], -1)
    return qkv, query.view(tokens, heads, head), key.view(tokens, kv_heads, head)


POSITIONS = [0, 31, 5, 5, 2, 30, 1]
ROTARY = pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "head", "rot"),
    [
        (0, 2, 1, 64, 64),
        (1, 9, 3, 64, 64),
        (7, 17, 1, 8, 8),
        (7, 1, 1, 80, 32),
        (7, 4, 2, 96, 48),
        (1, 1, 8, 6, 2),
        (3, 2, 2, 10, 6),
    ],
)


@dtypes
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=identifier)
@pytest.mark.parametrize("interleaved", [False, True], ids=["neox", "gptj"])
@pytest.mark.parametrize("inplace", [True, False], ids=["inplace", "new"])
@ROTARY
def test_rotary_embedding(tokens, heads, kv_heads, head, rot, inplace, interleaved, index, dtype):
    qkv, query, key = fused(tokens, heads, kv_heads, head, dtype)
    before = qkv.clone()
    cache, cos, sin = tables(32, rot // 2)
    positions = torch.tensor(POSITIONS[:tokens], dtype=index)
    expected = [truth.rotary(x, cos, sin, POSITIONS, interleaved) for x in (query, key)]
    tails = [x[..., rot:].clone() for x in (query, key)]
    outs = rotary_embedding(query, key, cos, sin, positions, interleaved, inplace, cache)
    for x, out, y, tail in zip((query, key), outs, expected, tails, strict=True):
        close(out, y, dtype)
        assert torch.equal(out[..., rot:], tail)
        if inplace:
            assert out is x
        else:
            fresh(out, query, key, cos, sin)
    untouched = slice((heads + kv_heads) * head, None) if inplace else slice(None)
    assert torch.equal(qkv[:, untouched], before[:, untouched])


@pytest.mark.parametrize("interleaved", [False, True], ids=["neox", "gptj"])
@pytest.mark.parametrize("table_dtype", [torch.float32, torch.bfloat16, torch.float64], ids=identifier)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=identifier)
def test_rotary_ways_to_call_are_one(dtype, table_dtype, interleaved):
    """Packed table or not, looked up or not, shaped or flat: the same bits."""
    cache, cos, sin = tables(32, 16, table_dtype)
    positions = torch.tensor(POSITIONS[:6])
    _, query, key = fused(6, 5, 2, 40, dtype)
    want = rotary_embedding(query, key, cos, sin, positions, interleaved, False)
    # Against float64 as well: a narrow table is widened, not computed in.
    close(want[0], truth.rotary(query, cos, sin, POSITIONS, interleaved), dtype)

    def same(outs, shape=None):
        for out, expected in zip(outs, want, strict=True):
            assert torch.equal(out.reshape(expected.shape), expected)

    same(rotary_embedding(query, key, cos, sin, positions, interleaved, False, cache))
    same(rotary_embedding(query, key, cos.contiguous(), sin.contiguous(), positions, interleaved, False))
    same(rotary_embedding(query, key, transposed(cos), every_other(sin), positions, interleaved, False))
    same(rotary_embedding(query, key, cos[positions], sin[positions], None, interleaved, False))
    rows = cache[positions].chunk(2, -1)
    same(rotary_embedding(query, key, *rows, None, interleaved, False, cache))
    apart = [sliced(x) for x in (query, key)]
    same(rotary_embedding(*apart, cos, sin, positions, interleaved, True))
    same(rotary_embedding(*(transposed(x) for x in (query, key)), cos, sin, positions, interleaved, True))
    for shape in ((2, 3), (1, 6)):
        batched = [x.unflatten(0, shape) for x in (query, key)]
        same(rotary_embedding(*batched, cos, sin, positions.view(shape), interleaved, False))
        same(rotary_embedding(*batched, cos, sin, positions, interleaved, False, cache))
    alone, none = rotary_embedding(query, None, cos, sin, positions, interleaved, False)
    assert none is None
    assert torch.equal(alone, want[0])
    same(rotary_embedding(query, key, cos, sin, positions, interleaved, True))


def test_rotary_key_that_only_looks_adjacent():
    """Equal strides and offsets, but key lies elsewhere, before query, or is apart."""
    cache, cos, sin = tables(8, 4)
    positions = torch.arange(3)
    buffer = random(3, 6 * 8)
    other = random(3, 6 * 8, seed=1)
    heads = buffer.view(3, 6, 8)
    for query, key in [
        (heads[:, :2], other.view(3, 6, 8)[:, 2:3]),
        (heads[:, 3:5], heads[:, 2:3]),
        (heads[:, :2], heads[:, 3:4]),
        (heads[:, 0:4:2], heads[:, 1:2]),
        (heads[:, :2], heads[:, 2:6:2]),
    ]:
        want = rotary_embedding(query, key, cos, sin, positions, False, False, cache)
        kept = [b.clone() for b in (buffer, other)]
        got = rotary_embedding(query, key, cos, sin, positions, False, True, cache)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        for x in (query, key):
            x.zero_()
        for now, then, base in zip((buffer, other), kept, (buffer, other), strict=True):
            touched = torch.zeros(now.shape, dtype=torch.bool)
            for x in (query, key):
                if torch._C._is_alias_of(x, base):
                    touched.as_strided(x.shape, x.stride(), x.storage_offset()).fill_(True)
            assert torch.equal(now[~touched], then[~touched])


def test_rotary_position_zero_is_the_identity_to_the_bit():
    _, cos, sin = tables(4, 32)
    query = random(3, 2, 64)
    out, _ = rotary_embedding(query, None, cos, sin, torch.zeros(3, dtype=torch.int64), inplace=False)
    assert torch.equal(out, query)


def test_rotary_in_bfloat16_rounds_once():
    _, query, key = fused(7, 9, 3, 64, torch.bfloat16)
    _, cos, sin = tables(32, 32, torch.bfloat16)
    positions = torch.tensor(POSITIONS)
    c, s = cos[positions].float().unsqueeze(1), sin[positions].float().unsqueeze(1)
    a, b = query.float().chunk(2, -1)
    want = torch.cat([a * c - b * s, b * c + a * s], -1).bfloat16()
    got, _ = rotary_embedding(query, key, cos, sin, positions, inplace=False)
    assert torch.equal(got, want)


def test_rotary_refuses_a_flat_query():
    _, cos, sin = tables(4, 4)
    with pytest.raises(ValueError, match="heads, head"):
        rotary_embedding(random(1, 8), None, cos, sin, torch.zeros(1, dtype=torch.int64))


# Experts


@pytest.mark.parametrize("dtype", DTYPES, ids=identifier)
@pytest.mark.parametrize("renormalize", [False, True], ids=["raw", "renormalized"])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64, torch.uint32], ids=identifier)
@pytest.mark.parametrize(
    ("tokens", "experts", "k"), [(0, 8, 2), (1, 1, 1), (7, 6, 6), (33, 60, 4), (5, 257, 8), (3, 160, 1)]
)
def test_topk_softmax(tokens, experts, k, ids, renormalize, dtype):
    gating = transposed(random(tokens, experts, dtype=dtype, scale=3.0))
    weights = torch.empty(tokens, k)
    indices = torch.zeros(tokens, k, dtype=ids)
    slots = torch.empty(tokens, k, dtype=torch.int32)
    returned = topk_softmax(weights, indices, slots, gating, renormalize)
    assert returned[0] is weights
    assert returned[1] is indices
    expected, best = truth.softmax_topk(gating, k, renormalize)
    close(weights, expected, torch.float32)
    assert indices.long().tolist() == best.tolist()
    assert slots.tolist() == [[s * tokens + r for s in range(k)] for r in range(tokens)]


def test_topk_softmax_of_equals_takes_the_first():
    gating = torch.zeros(3, 12)
    gating[1, 5:8] = 1.0
    _, indices = topk_softmax(
        torch.empty(3, 4), torch.empty(3, 4, dtype=torch.int32), torch.empty(3, 4, dtype=torch.int32), gating
    )
    assert indices.tolist() == [[0, 1, 2, 3], [5, 6, 7, 0], [0, 1, 2, 3]]


def test_topk_softmax_of_extremes():
    gating = torch.zeros(4, 6)
    gating[0] = torch.tensor([-1e30, -1e30, 0.0, -1e30, -1e30, -1e30])
    gating[1] = math.nan
    gating[2] = -math.inf
    gating[2, 3] = 1.0
    weights, indices = topk_softmax(
        torch.empty(4, 2),
        torch.empty(4, 2, dtype=torch.int32),
        torch.empty(4, 2, dtype=torch.int32),
        gating,
        True,
    )
    assert weights[[0, 2, 3]].tolist() == [[1.0, 0.0], [1.0, 0.0], [0.5, 0.5]]
    assert indices[[0, 2], 0].tolist() == [2, 3]
    assert ((indices >= 0) & (indices < 6)).all()


def test_topk_refuses_more_than_there_are():
    with pytest.raises(ValueError, match="2 of 1"):
        topk_softmax(torch.empty(1, 2), torch.empty(1, 2), torch.empty(1, 2), torch.ones(1, 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=identifier)
@pytest.mark.parametrize("renormalize", [False, True], ids=["raw", "renormalized"])
@pytest.mark.parametrize("scoring_func", [0, 1], ids=["final", "sigmoid"])
@pytest.mark.parametrize(
    ("tokens", "experts", "n_group", "topk_group", "topk"),
    [
        (0, 8, 2, 1, 2),
        (1, 6, 3, 2, 3),
        (7, 60, 5, 2, 24),
        (5, 256, 8, 4, 8),
        (4, 5, 5, 3, 3),
        (3, 9, 1, 1, 9),
    ],
)
def test_grouped_topk(tokens, experts, n_group, topk_group, topk, scoring_func, renormalize, dtype):
    scores = random(tokens, experts, dtype=dtype)
    if scoring_func == 0:
        scores = scores.abs() + 0.1
    bias = random(experts, seed=3)
    arguments = (n_group, topk_group, topk, renormalize, 2.5, bias, scoring_func)
    weights, indices = grouped_topk(sliced(scores), *arguments)
    expected, best = truth.grouped_topk(scores, *arguments)
    assert indices.tolist() == best.tolist()
    assert indices.dtype is torch.int32
    close(weights, expected, torch.float32)
    fresh(weights, scores, bias)
    fresh(indices)


def test_grouped_topk_of_equals_takes_the_first_and_rows_are_apart():
    scores = torch.zeros(3, 12)
    scores[1] = math.nan
    weights, indices = grouped_topk(scores, 4, 2, 4, False, 1.0, torch.zeros(12))
    assert indices[[0, 2]].tolist() == [[0, 1, 2, 3]] * 2
    assert weights[[0, 2]].isfinite().all()
    # All scores below zero, and the groups that are left out still are.
    scores = -torch.arange(1.0, 13.0).expand(2, 12)
    assert grouped_topk(scores, 4, 2, 6, False, 1.0, torch.zeros(12))[1].max() == 5


@pytest.mark.parametrize(
    ("n_group", "topk_group", "topk", "scoring_func", "match"),
    [
        (5, 1, 1, 0, "divide"),
        (4, 1, 4, 0, "do not hold"),
        (4, 1, 1, 2, "scoring_func"),
        (4, 5, 1, 0, "5 of 4"),
    ],
)
def test_grouped_topk_refuses(n_group, topk_group, topk, scoring_func, match):
    with pytest.raises(ValueError, match=match):
        grouped_topk(torch.ones(1, 12), n_group, topk_group, topk, False, 1.0, torch.zeros(12), scoring_func)


def some_map(experts: int) -> torch.Tensor:
    """Every third expert is elsewhere; the others are numbered backwards."""
    here = [e for e in range(experts) if e % 3 != 1]
    local = torch.full((experts,), -1, dtype=torch.int32)
    local[torch.tensor(here)] = torch.arange(len(here) - 1, -1, -1, dtype=torch.int32)
    return local


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=identifier)
@pytest.mark.parametrize("block", [1, 4, 16, 64])
@pytest.mark.parametrize("pad", [False, True], ids=["", "pad"])
@pytest.mark.parametrize("mapping", ["none", "map", "ignore"])
@pytest.mark.parametrize(
    ("tokens", "k", "experts"), [(0, 2, 8), (1, 2, 8), (7, 3, 5), (33, 4, 60), (8, 8, 8), (3, 1, 1)]
)
def test_moe_align_block_size(tokens, k, experts, mapping, pad, block, ids_dtype):
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, experts, generator=generator).argsort(-1)[:, :k].to(ids_dtype)
    if tokens == 33:
        ids[:20] = 7  # one expert takes nearly all
    local = None if mapping == "none" else some_map(experts)
    ignore = mapping == "ignore"
    out = moe_align_block_size(every_other(ids.double()).to(ids_dtype), block, experts, local, pad, ignore)
    sorted_ids, expert_ids, used = out
    flat = ids.flatten().tolist()
    pairs = len(flat)
    for x in out:
        assert x.dtype is torch.int32
        fresh(x, ids)

    length = pairs + experts * (block - 1)
    if pad:
        length = -(-length // block) * block
    if pairs < experts:
        length = min(pairs * block, length)
    assert sorted_ids.shape == (length,)
    assert expert_ids.shape == (-(-length // block),)
    assert used.shape == (1,)

    want = []
    names = []
    for e in range(experts):
        if ignore and local[e] < 0:
            continue
        mine = [i for i, chosen in enumerate(flat) if chosen == e]
        padding = -len(mine) % block
        want += mine + [pairs] * padding
        names += [e if local is None else int(local[e])] * ((len(mine) + padding) // block)
    assert used.item() == len(want)
    assert sorted_ids.tolist() == want + [pairs] * (length - len(want))
    assert expert_ids.tolist() == names + [-1] * (len(expert_ids) - len(names))


def test_moe_align_leaves_out_experts_that_do_not_exist():
    ids = torch.tensor([[0, -1], [9, 1]])
    sorted_ids, expert_ids, used = moe_align_block_size(ids, 2, 2)
    assert used.tolist() == [4]
    assert sorted_ids[:4].tolist() == [0, 4, 3, 4]
    assert expert_ids[:2].tolist() == [0, 1]


@dtypes
@layouts
@pytest.mark.parametrize("shape", [(0, 2, 8), (1, 1, 1), (7, 6, 33), (5, 9, 769)], ids=identifier)
def test_moe_sum(shape, layout, dtype):
    inp = layout(random(*shape, dtype=dtype))
    out = layout(torch.full((shape[0], shape[2]), 7.0, dtype=dtype))
    assert moe_sum(inp, out) is out
    close(out, truth.array(inp).sum(1), dtype, absolute=1e-5)


def experts_case(tokens, hidden, inner, experts, k, dtype=torch.float32):
    w1 = random(experts, 2 * inner, hidden, dtype=dtype, scale=hidden**-0.5)
    w2 = random(experts, hidden, inner, dtype=dtype, scale=inner**-0.5, seed=1)
    x = random(tokens, hidden, dtype=dtype)
    gating = random(tokens, max(experts, k), seed=2)
    weights, ids = gating.softmax(-1).topk(k, -1)
    return x, w1, w2, weights, ids


EXPERTS = pytest.mark.parametrize(
    ("tokens", "hidden", "inner", "experts", "k"),
    [
        (0, 8, 4, 4, 2),
        (1, 16, 7, 6, 2),
        (7, 5, 3, 3, 3),
        (33, 17, 9, 60, 4),
        (20, 8, 8, 1, 1),
        (64, 8, 4, 2, 1),
    ],
)


def same_experts(case, steps=1.5, **keywords):
    """Both formulations against float64: the one for a CPU, and the one for all else."""
    x = case[0]
    absolute = {torch.float64: 1e-5, torch.float32: 2e-6}.get(x.dtype, 3e-6)
    expected = truth.fused_experts(
        *case, keywords.get("activation", "silu"), keywords.get("on_input", False), keywords.get("expert_map")
    )
    arguments = dict(keywords)
    if "on_input" in arguments:
        arguments["apply_router_weight_on_input"] = arguments.pop("on_input")
    for blocked in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.compiler, "is_compiling", lambda blocked=blocked: blocked)
            out = fused_experts(*case, **arguments)
        close(out, expected, x.dtype, absolute=absolute, steps=steps)
        fresh(out, *case)


@dtypes
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@EXPERTS
def test_fused_experts(tokens, hidden, inner, experts, k, activation, dtype):
    same_experts(experts_case(tokens, hidden, inner, experts, k, dtype), activation=activation)


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=identifier)
def test_fused_experts_elsewhere_add_nothing(ids_dtype):
    local = some_map(10)
    x, w1, w2, weights, ids = experts_case(21, 8, 6, 10, 3)
    here = int((local >= 0).sum())
    case = (x, w1[:here], w2[:here], weights, ids.to(ids_dtype))
    same_experts(case, expert_map=local, global_num_experts=10)
    same_experts(case, expert_map=torch.full((10,), -1, dtype=torch.int32), global_num_experts=10)


def test_fused_experts_with_the_weight_on_the_input():
    case = experts_case(9, 8, 6, 4, 1)
    same_experts(case, on_input=True)
    same_experts(case, on_input=False)
    with pytest.raises(ValueError, match="one expert per token, not 2"):
        fused_experts(*experts_case(9, 8, 6, 4, 2), apply_router_weight_on_input=True)


def test_fused_experts_of_uneven_loads():
    x, w1, w2, weights, ids = experts_case(50, 8, 6, 8, 2)
    for chosen in (
        torch.zeros_like(ids),  # all to one, and twice to the same
        torch.stack([torch.arange(50) % 8, torch.full((50,), 3)], 1),
        torch.full_like(ids, 7),
        # Each has a little more than fills its blocks, so that the most blocks are used.
        torch.repeat_interleave(torch.arange(8), torch.tensor([8, 8, 8, 8, 15, 15, 15, 23])).view(50, 2),
        torch.repeat_interleave(torch.arange(8), torch.tensor([1, 1, 1, 1, 15, 15, 29, 37])).view(50, 2),
    ):
        same_experts((x, w1, w2, weights, chosen))
    same_experts((x, w1, w2, torch.zeros_like(weights), ids))


def test_fused_experts_refuses_an_activation():
    with pytest.raises(NotImplementedError, match="'relu'"):
        fused_experts(*experts_case(2, 4, 2, 2, 1), activation="relu")


def test_fused_experts_keeps_the_weights_memory_bounded():
    """The blocks gather at most two copies of the layer, one where few pairs are."""
    from vllm_fl_reference.impl import moe

    gathered = []
    real = torch.bmm

    def spy(a, b):
        gathered.append((a.shape, b.shape))
        return real(a, b)

    for tokens in (1, 3, 50, 1000):
        case = experts_case(tokens, 4, 2, 16, 2)
        gathered.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(moe.torch.compiler, "is_compiling", lambda: True)
            patch.setattr(torch, "bmm", spy)
            fused_experts(*case)
        assert gathered
        for rows, weights in gathered:
            assert weights[0] == min(2 * tokens, 32)
            assert rows[0] * rows[1] <= 2 * (2 * tokens + 2 * 16)


# Quantisation


SIZES = pytest.mark.parametrize("shape", [(0, 16), (1, 1), (7, 17), (3, 1025), (2, 5137)], ids=identifier)


@dtypes
@layouts
@SIZES
def test_quant_int8(shape, layout, dtype):
    x = layout(random(*shape, dtype=dtype))
    q, scales = dynamic_per_token_quant_int8(x)
    assert q.dtype is torch.int8
    assert q.shape == shape
    assert scales.shape == (shape[0], 1)
    fresh(q, x)
    fresh(scales, x)
    for row, codes, scale in zip(truth.array(x), q.tolist(), scales.tolist(), strict=True):
        exact = max(abs(v) for v in row) / 127
        assert scale[0] == pytest.approx(exact, rel=1.3e-6)
        for v, code in zip(row, codes, strict=True):
            assert abs(code - v / exact) <= 0.5001
    assert q.abs().max() == 127 if shape[0] else True


def test_quant_int8_rounds_half_to_even_and_reaches_both_ends():
    x = torch.tensor([[127.0, -127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 0.49]])
    q, scales = dynamic_per_token_quant_int8(x)
    assert scales.item() == 1.0
    assert q.tolist() == [[127, -127, 0, 2, 2, 0, -2, 126, 0]]


def test_quant_int8_of_rows_that_are_nearly_nothing():
    x = torch.tensor([[0.0, 0.0], [1e-40, -1e-40], [1e-30, 5e-31], [3.0, 1e-3]])
    q, scales = dynamic_per_token_quant_int8(x)
    assert (scales > 0).all()
    assert scales.isfinite().all()
    assert q.tolist() == [[0, 0], [0, 0], [127, 64], [127, 0]]
    assert ((q * scales - x).abs() <= scales * 0.505).all()


def test_quant_int8_of_a_nan_leaves_the_other_rows_alone():
    x = random(3, 9)
    q, scales = dynamic_per_token_quant_int8(x)
    x[1, 4] = math.nan
    for after, before in zip(dynamic_per_token_quant_int8(x), (q, scales), strict=True):
        assert torch.equal(after[[0, 2]], before[[0, 2]])


def e4m3fn_values() -> list[float]:
    """Return all values of the format that are not negative, from its definition."""
    values = []
    for code in range(127):
        exponent, mantissa = divmod(code, 8)
        values.append(mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return values


@dtypes
@layouts
@SIZES
def test_quant_fp8(shape, layout, dtype):
    x = layout(random(*shape, dtype=dtype))
    q, scales = dynamic_per_token_quant_fp8(x)
    assert q.dtype is torch.float8_e4m3fn
    assert q.shape == shape
    assert scales.shape == (shape[0], 1)
    fresh(q, x)
    fresh(scales, x)
    values = torch.tensor(e4m3fn_values(), dtype=torch.float64)
    values = torch.cat([-values.flip(0), values])
    exact = torch.from_numpy(truth.array(x))
    largest = exact.abs().amax(-1, keepdim=True) if shape[0] else torch.empty(0, 1)
    torch.testing.assert_close(scales.double(), largest.double() / 448, rtol=1.3e-6, atol=0)
    target = (exact / (largest / 448)).unsqueeze(-1) if shape[0] else exact.unsqueeze(-1)
    nearest = (target - values).abs().amin(-1)
    got = (target.squeeze(-1) - q.double()).abs()
    assert (got <= nearest + target.squeeze(-1).abs() * 1e-5).all()


def test_quant_fp8_keeps_the_floor_of_the_scale_and_saturates():
    x = torch.tensor([[0.0, 0.0], [1e-9, 0.0], [448.0, -448.0], [1e30, -1e30], [math.inf, 1.0]])
    q, scales = dynamic_per_token_quant_fp8(x)
    floor = 1 / (448 * 512)
    assert scales[:3].flatten().tolist() == pytest.approx([floor, floor, 1.0], rel=1e-7)
    assert q[:4].float().tolist()[2:] == [[448.0, -448.0], [448.0, -448.0]]
    assert q[0].float().tolist() == [0.0, 0.0]
    wide = random(200, 7, scale=1e4)
    assert dynamic_per_token_quant_fp8(wide)[0].float().isfinite().all()
    assert (dynamic_per_token_quant_fp8(wide)[0].float().abs().amax(-1) == 448).all()


# NaN stays in its row


def test_a_row_of_nan_stays_alone():
    x = random(5, 8)
    x[2] = math.nan
    rest = [0, 1, 3, 4]
    assert silu_and_mul(x)[rest].isfinite().all()
    assert gelu_and_mul(x)[rest].isfinite().all()
    assert rms_norm(x, None, None, 1e-6)[rest].isfinite().all()
    assert all(y[rest].isfinite().all() for y in rms_norm(x, x, None, 1e-6))
    assert dynamic_per_token_quant_fp8(x)[0].float()[rest].isfinite().all()
    assert moe_sum(x.unsqueeze(1), torch.empty(5, 8))[rest].isfinite().all()
    _, cos, sin = tables(8, 4)
    query = x.unsqueeze(1).clone()
    assert rotary_embedding(query, None, cos, sin, torch.arange(5))[0][rest].isfinite().all()

    _, w1, w2, weights, ids = experts_case(5, 8, 6, 4, 2)
    ids[0, 1] = -1
    for blocked in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.compiler, "is_compiling", lambda blocked=blocked: blocked)
            out = fused_experts(x, w1, w2, weights, ids)
            nowhere = fused_experts(x, w1, w2, weights, torch.full_like(ids, -1))
        assert out[rest].isfinite().all()
        assert out[2].isnan().all()
        assert torch.equal(nowhere, torch.zeros(5, 8))

"""What the conformance kit does not ask of the reference, which is the contract in code.

The kit compares with float64, over shapes, dtypes and layouts, and traces: test_reference_conformance.py.
"""

from __future__ import annotations

import inspect
import math

import pytest
import torch

from vllm_fl.conformance import truth
from vllm_fl.conformance.cases import SUITES
from vllm_fl.conformance.judge import EXPERTS
from vllm_fl.conformance.judge import relative_to_rms
from vllm_fl.conformance.tensors import every_other
from vllm_fl.conformance.tensors import named
from vllm_fl.conformance.tensors import odd_stride
from vllm_fl.conformance.tensors import random
from vllm_fl.conformance.tensors import transposed
from vllm_fl.dispatch.ops import OPERATORS
from vllm_fl_reference.impl import moe
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
from vllm_fl_reference.reference import ReferenceBackend

#: Every operator that is the reference's: all of the core but attention.
OPS = sorted(set(OPERATORS) - {"attention_backend"})

# The contract


@pytest.mark.parametrize("op", OPS)
def test_the_signature_is_the_operators(op):
    """Names, order, kinds and defaults."""
    declared = OPERATORS[op].signature
    ours = inspect.signature(function_of(op))
    for mine, its in zip(ours.parameters.values(), declared.parameters.values(), strict=True):
        assert (mine.name, mine.kind, mine.default) == (its.name, its.kind, its.default)
    assert ours.return_annotation == declared.return_annotation


def function_of(op):
    return ReferenceBackend().implementation_of(op).load()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("rows", [1, 5])
def test_results_have_the_declared_shapes(op, rows):
    """What a compiler is told of the operator is what comes out."""
    fake, signature = OPERATORS[op].fake, OPERATORS[op].signature
    for case in SUITES[op].rows(rows):
        if fake is None or case.returns_arguments:
            continue
        call = signature.bind(**case.make())
        call.apply_defaults()
        declared = parts_of(fake(torch, *call.args, **call.kwargs))
        out = parts_of(function_of(op)(*call.args, **call.kwargs))
        for one, like in zip(out, declared, strict=True):
            assert (one.shape, one.dtype) == (like.shape, like.dtype), case.name
            assert one.is_contiguous()


def parts_of(result):
    return result if isinstance(result, tuple) else (result,)


# Activations


@pytest.mark.parametrize("function", [silu_and_mul, gelu_and_mul, lambda x: gelu_and_mul(x, "tanh")])
def test_the_sign_of_zero_is_kept(function):
    positive, negative = function(torch.tensor([[0.0, 1.0], [-0.0, 1.0]])).flatten()
    assert not torch.signbit(positive)
    assert torch.signbit(negative)


@pytest.mark.parametrize("function", [silu_and_mul, gelu_and_mul], ids=lambda f: f.__name__)
@pytest.mark.parametrize("width", [1, 3, 769])
def test_gated_activation_refuses_an_odd_width(function, width):
    with pytest.raises(ValueError, match=f"{width} is odd"):
        function(torch.ones(2, width))


def test_gelu_refuses_an_unknown_approximation():
    with pytest.raises(ValueError, match="'fast'"):
        gelu_and_mul(torch.ones(2, 2), "fast")


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


@pytest.mark.parametrize("interleaved", [False, True], ids=["neox", "gptj"])
@pytest.mark.parametrize("table_dtype", [torch.float32, torch.bfloat16, torch.float64], ids=named)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=named)
def test_rotary_ways_to_call_are_one(dtype, table_dtype, interleaved):
    """Packed table or not, looked up or not, shaped or flat: the same bits."""
    cache, cos, sin = tables(32, 16, table_dtype)
    positions = torch.tensor(POSITIONS[:6])
    _, query, key = fused(6, 5, 2, 40, dtype)
    want = rotary_embedding(query, key, cos, sin, positions, interleaved, False)

    def same(outs, shape=None):
        for out, expected in zip(outs, want, strict=True):
            assert torch.equal(out.reshape(expected.shape), expected)

    same(rotary_embedding(query, key, cos, sin, positions, interleaved, False, cache))
    same(rotary_embedding(query, key, cos.contiguous(), sin.contiguous(), positions, interleaved, False))
    same(rotary_embedding(query, key, transposed(cos), every_other(sin), positions, interleaved, False))
    same(rotary_embedding(query, key, cos[positions], sin[positions], None, interleaved, False))
    rows = cache[positions].chunk(2, -1)
    same(rotary_embedding(query, key, *rows, None, interleaved, False, cache))
    apart = [odd_stride(x) for x in (query, key)]
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


def test_rotary_refuses_a_flat_query():
    _, cos, sin = tables(4, 4)
    with pytest.raises(ValueError, match="heads, head"):
        rotary_embedding(random(1, 8), None, cos, sin, torch.zeros(1, dtype=torch.int64))


# Experts


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


def test_moe_align_keeps_the_order_of_pairs_and_names_no_expert_beyond_them():
    """The kit leaves the order inside an expert free, and what unused blocks are called."""
    ids = torch.tensor([[2, 0], [0, 1], [2, 0]])
    sorted_ids, expert_ids, used = moe_align_block_size(ids, 2, 4)
    assert sorted_ids[:8].tolist() == [1, 2, 5, 6, 3, 6, 0, 4]
    assert used.tolist() == [8]
    assert expert_ids.tolist()[:4] == [0, 0, 1, 2]
    assert set(expert_ids.tolist()[4:]) == {-1}


def test_moe_align_leaves_out_experts_that_do_not_exist():
    ids = torch.tensor([[0, -1], [9, 1]])
    sorted_ids, expert_ids, used = moe_align_block_size(ids, 2, 2)
    assert used.tolist() == [4]
    assert sorted_ids[:4].tolist() == [0, 4, 3, 4]
    assert expert_ids[:2].tolist() == [0, 1]


def experts_case(tokens, hidden, inner, experts, k, dtype=torch.float32):
    w1 = random(experts, 2 * inner, hidden, dtype=dtype, scale=hidden**-0.5)
    w2 = random(experts, hidden, inner, dtype=dtype, scale=inner**-0.5, seed=1)
    x = random(tokens, hidden, dtype=dtype)
    gating = random(tokens, max(experts, k), seed=2)
    weights, ids = gating.softmax(-1).topk(k, -1)
    return x, w1, w2, weights, ids


def both(case, **keywords):
    """Return what both formulations give: the one for a CPU, and the one for all else."""
    outs = []
    for blocked in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.compiler, "is_compiling", lambda blocked=blocked: blocked)
            outs.append(fused_experts(*case, **keywords))
    return outs


def same_experts(case, **keywords):
    """Fail unless both formulations are right."""
    expected = truth.fused_experts(*case, expert_map=keywords.get("expert_map"))
    for out in both(case, **keywords):
        verdict = relative_to_rms(out, expected, out.dtype, EXPERTS[out.dtype])
        assert verdict.is_right, verdict.note


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


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=named)
def test_fused_experts_elsewhere_add_nothing(ids_dtype):
    x, w1, w2, weights, ids = experts_case(21, 8, 6, 10, 3)
    here = torch.tensor([0, -1, 1, 2, -1, 3, 4, -1, 5, 6], dtype=torch.int32)
    case = (x, w1[:7], w2[:7], weights, ids.to(ids_dtype))
    same_experts(case, expert_map=here, global_num_experts=10)
    for out in both(case, expert_map=torch.full_like(here, -1), global_num_experts=10):
        assert torch.equal(out, torch.zeros_like(x))


def test_fused_experts_takes_the_weight_on_the_input_of_one_expert():
    with pytest.raises(ValueError, match="one expert per token, not 2"):
        fused_experts(*experts_case(9, 8, 6, 4, 2), apply_router_weight_on_input=True)


def test_fused_experts_refuses_an_activation():
    with pytest.raises(NotImplementedError, match="'relu'"):
        fused_experts(*experts_case(2, 4, 2, 2, 1), activation="relu")


def test_fused_experts_keeps_the_weights_memory_bounded():
    """The blocks gather at most two copies of the layer, one where few pairs are."""
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
    for out in both((x, w1, w2, weights, ids)):
        assert out[rest].isfinite().all()
        assert out[2].isnan().all()
    for nowhere in both((x, w1, w2, weights, torch.full_like(ids, -1))):
        assert torch.equal(nowhere, torch.zeros(5, 8))

"""Each operator's questions from both sides: what is taken, and the sentence about what is not."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm")

from vllm_fl.dispatch import OPERATORS
from vllm_fl.dispatch.calling.binding import adapt
from vllm_fl.dispatch.calling.predicate import refusal
from vllm_fl_cuda.cuda import CudaBackend
from vllm_fl_cuda.impl import activation

F32, F64, BF16, I32 = torch.float32, torch.float64, torch.bfloat16, torch.int32


@pytest.fixture(scope="module", autouse=True)
def _kernels():
    CudaBackend("cpu").is_available()


def asked(op, *args, **kwargs):
    """Ask for the layer and for the call, and return all that is said against it; True if nothing."""
    call = OPERATORS[op].signature.bind(*args, **kwargs)
    call.apply_defaults()
    asks = CudaBackend("cpu").implementation_of(op).predicates()
    adapted = [adapt(OPERATORS[op], ask, is_predicate=True) for ask in asks]
    return "; ".join(filter(None, (refusal(ask, call.args, call.kwargs) for ask in adapted))) or True


def ones(*shape, dtype=F32):
    return torch.ones(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("x", "reason"),
    [
        (ones(3, 32), None),
        (ones(0, 32, dtype=BF16), None),
        (ones(2, 3, 32), None),
        (ones(3, 40)[:, :32], None),
        (ones(3, 31), "holds two halves; 31 is odd"),
        (ones(3, 0), "the last dimension is empty"),
        (ones(3, 12), "the CPU's kernel takes multiples of 8, not 6"),
        (ones(3, 32, dtype=F64), "takes float32, float16 and bfloat16, not torch.float64"),
        (ones(3, 32).to("meta"), "has no kernel for meta"),
    ],
)
def test_activations(x, reason):
    for answer in (
        asked("silu_and_mul", x),
        asked("gelu_and_mul", x),
        asked("gelu_and_mul", x, "tanh"),
    ):
        assert answer is True if reason is None else reason in answer


def test_another_gelu_is_the_callers_fault():
    assert asked("gelu_and_mul", ones(3, 32), "quick") is True
    with pytest.raises(ValueError, match="approximate must be 'none' or 'tanh', not 'quick'"):
        activation.gelu_and_mul(ones(3, 32), "quick")


same = ones(3, 32)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((ones(3, 32), None, ones(32), 1e-5), None),
        ((ones(3, 32), None, None, 1e-5), None),
        ((ones(32), ones(32), ones(32), 1e-5), None),
        ((ones(2, 3, 4, 5, 32), None, None, 1e-5), None),
        ((ones(3, 40)[:, :32], ones(3, 32), ones(32), 1e-5), None),
        ((torch.tensor(1.0), None, None, 1e-5), "x has no dimension"),
        ((ones(3, 0), None, None, 1e-5), "the last dimension is empty"),
        ((ones(3, 32, dtype=F64), None, None, 1e-5), "not torch.float64"),
        ((ones(3, 32, dtype=BF16), None, ones(32), 1e-5), "takes a weight of x's dtype torch.bfloat16"),
        ((ones(3, 32), None, ones(64)[::2], 1e-5), "takes a contiguous weight"),
        ((same, same, None, 1e-5), "which are one tensor"),
        ((ones(3, 32, dtype=BF16), ones(3, 32), None, 1e-5), "takes a residual of x's dtype"),
        ((ones(3, 32), ones(1, 32), None, 1e-5), "takes a residual of x's shape"),
        ((ones(3, 20), None, None, 1e-5), "multiples of 8, not 20"),
    ],
)
def test_rms_norm(arguments, reason):
    answer = asked("rms_norm", *arguments)
    assert answer is True if reason is None else reason in answer


KEY = ones(5, 2, 64)


def rope(query=None, key=KEY, rot=64, table=F32, positions=None, dtype=F32, interleaved=False):
    query = ones(5, 4, 64, dtype=dtype) if query is None else query
    cache = ones(16, rot, dtype=table)
    positions = torch.arange(5) if positions is None else positions
    return query, key, *cache.chunk(2, -1), positions, interleaved, True, cache


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (rope(), None),
        (rope(key=None), None),
        (rope(query=ones(5, 400)[:, :256].unflatten(-1, (4, 64))), None),
        (rope(query=ones(5, 1, 80)[..., :64], key=None), None),
        (rope(query=ones(5, 256)), "must be T[tokens, heads, head], not of 2 dimensions"),
        (rope(query=ones(5, 4, 80)[..., :64]), "the heads of query do not follow each other"),
        (rope(key=ones(5, 2, 80)[..., :64]), "the heads of key do not follow each other"),
        (rope(key=ones(5, 64, 2).transpose(1, 2)), "the heads of key do not follow each other"),
        (rope(key=ones(5, 3, 64)), "4 query heads are no multiple of 3 key heads"),
        (rope(key=ones(5, 2, 32)), "its heads of query's size"),
        (rope(key=ones(5, 2, 64, dtype=BF16)), "a key of query's dtype"),
        (rope(rot=128), "a head of 64 has no 128 elements to rotate"),
        (rope(positions=torch.zeros(1, 5, dtype=torch.int64)), "position_ids must be T[tokens]"),
        (rope(query=ones(5, 4, 64, dtype=F64)), "not torch.float64"),
        (rope(table=F64), "takes no table of torch.float64"),
        (rope(table=BF16), "a table of query's dtype torch.float32, not torch.bfloat16"),
        (rope(key=None, dtype=BF16, table=BF16, rot=40), "aligned to 8"),
        (rope(key=None, dtype=BF16, table=BF16, rot=40, interleaved=True), None),
    ],
)
def test_rotary_embedding(arguments, reason):
    answer = asked("rotary_embedding", *arguments)
    assert answer is True if reason is None else reason in answer


def test_rotary_of_copies_takes_any_layout():
    query, key, cos, sin, positions, interleaved, _, cache = rope(query=ones(5, 4, 80)[..., :64])
    assert asked("rotary_embedding", query, key, cos, sin, positions, interleaved, False, cache) is True


@pytest.mark.parametrize(
    ("x", "reason"),
    [
        (ones(3, 32), None),
        (ones(3, 40)[:, :32], None),
        (ones(32), "not of 1 dimensions"),
        (ones(2, 3, 32), "not of 3 dimensions"),
        (ones(3, 32, dtype=F64), "not torch.float64"),
        (ones(3, 17), "multiples of 8, not 17"),
    ],
)
def test_int8(x, reason):
    answer = asked("dynamic_per_token_quant_int8", x)
    assert answer is True if reason is None else reason in answer


# Of the rest a CPU build has no kernel, which is what is said of arguments that are right.

_NO_KERNEL = "has no kernel for cpu"


def test_fp8():
    assert _NO_KERNEL in asked("dynamic_per_token_quant_fp8", ones(3, 32))
    assert "not of 1 dimensions" in asked("dynamic_per_token_quant_fp8", ones(3))


def topk(weights=None, indices=None, source=None, gating=None):
    weights = ones(5, 2) if weights is None else weights
    indices = ones(5, 2, dtype=I32) if indices is None else indices
    source = ones(5, 2, dtype=I32) if source is None else source
    return weights, indices, source, ones(5, 8) if gating is None else gating


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (topk(), _NO_KERNEL),
        (topk(indices=ones(5, 2, dtype=torch.uint32)), _NO_KERNEL),
        (topk(gating=ones(5, 16)[:, ::2]), _NO_KERNEL),
        (topk(gating=ones(8)), "gating_output must be T[tokens, experts]"),
        (topk(gating=ones(5, 1)), "there are no 2 of 1 experts"),
        (topk(weights=ones(5, 2, dtype=BF16)), "writes float32 weights"),
        (topk(source=ones(5, 2, dtype=torch.int64)), "int32 token_expert_indices"),
        (topk(indices=ones(5, 2, dtype=torch.int16)), "not torch.int16"),
        (topk(weights=ones(5, 4)[:, ::2]), "writes contiguous tensors of one shape"),
        (topk(indices=ones(5, 1, dtype=I32)), "writes contiguous tensors of one shape"),
    ],
)
def test_topk_softmax(arguments, reason):
    assert reason in asked("topk_softmax", *arguments)


@pytest.mark.parametrize(
    ("dtype", "experts", "groups", "kept", "k", "reason"),
    [
        (BF16, 256, 8, 4, 8, _NO_KERNEL),
        (BF16, 384, 1, 1, 8, _NO_KERNEL),
        (F32, 512, 16, 4, 8, _NO_KERNEL),
        (BF16, 512, 16, 4, 8, "scores in 16 bits for 8 of 512 experts in 4 of 16 groups"),
        (torch.float16, 96, 32, 5, 7, "scores in 16 bits"),
        (BF16, 128, 1, 1, 9, "scores in 16 bits"),
        (F32, 66, 33, 1, 1, "takes 32 groups and chooses 32 experts at most"),
        (F32, 256, 8, 8, 33, "takes 32 groups and chooses 32 experts at most"),
        (F32, 10, 4, 2, 2, "n_group 4 does not divide 10 experts"),
        (F32, 8, 8, 4, 2, "a group has one expert"),
        (F32, 16, 8, 1, 3, "1 of 8 groups do not hold 3 of 16 experts"),
        (F32, 16, 2, 3, 3, "3 of 2 groups do not hold"),
    ],
)
def test_grouped_topk(dtype, experts, groups, kept, k, reason):
    scores = ones(5, experts, dtype=dtype)
    answer = asked("grouped_topk", scores, groups, kept, k, True, 1.0, ones(experts), 1)
    assert reason in answer


def test_grouped_topk_of_other_arguments():
    good = (ones(5, 16), 2, 1, 3, True, 1.0, ones(16))
    assert "scoring_func must be 0" in asked("grouped_topk", *good, 2)
    assert "scores must be" in asked("grouped_topk", ones(16), *good[1:])
    assert "no bias of torch.float64" in asked("grouped_topk", *good[:-1], ones(16, dtype=F64))


@pytest.mark.parametrize(
    ("ids", "experts", "table", "reason"),
    [
        (ones(5, 2, dtype=I32), 8, None, _NO_KERNEL),
        (ones(5, 2, dtype=torch.int64), 992, ones(992, dtype=I32), _NO_KERNEL),
        (ones(5, 2, dtype=I32), 993, None, "takes 992 experts at most, not 993"),
        (ones(10, dtype=I32), 8, None, "topk_ids must be T[tokens, slots]"),
        (ones(5, 2, dtype=torch.int16), 8, None, "of int32 or int64"),
        (ones(5, 2, dtype=I32), 8, ones(8, dtype=torch.int64), "takes an expert_map of int32"),
        (ones(5, 2, dtype=I32), 8, ones(16, dtype=I32)[::2], "takes a contiguous expert_map"),
    ],
)
def test_moe_align_block_size(ids, experts, table, reason):
    assert reason in asked("moe_align_block_size", ids, 16, experts, table)


@pytest.mark.parametrize(
    ("inp", "out", "reason"),
    [
        (ones(5, 2, 32), ones(5, 32), _NO_KERNEL),
        (ones(5, 2, 40)[..., :32], ones(5, 32), _NO_KERNEL),
        (ones(5, 32), ones(5, 32), "inp must be T[tokens, slots, hidden]"),
        (ones(5, 2, 32), ones(5, 32, dtype=BF16), "of inp's dtype"),
        (ones(5, 2, 32), ones(4, 32), "writes a contiguous T[tokens, hidden]"),
        (ones(5, 2, 32), ones(5, 40)[:, :32], "writes a contiguous T[tokens, hidden]"),
    ],
)
def test_moe_sum(inp, out, reason):
    assert reason in asked("moe_sum", inp, out)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, _NO_KERNEL),
        ({"activation": "gelu"}, _NO_KERNEL),
        ({"activation": "relu2"}, "activation must be 'silu' or 'gelu', not 'relu2'"),
        ({"apply_router_weight_on_input": True}, "needs one expert per token, not 2"),
        ({"expert_map": ones(8, dtype=torch.int64)}, "expert_map must be int32"),
        ({"hidden_states": ones(5, 32)}, "multiplies float32 in fewer bits (TF32)"),
        ({"w1": ones(4, 16, 32)}, "the weights are torch.float32 and torch.bfloat16"),
        ({"w2": ones(4, 8, 32, dtype=BF16).transpose(1, 2)}, "the last dimension of w1 and w2"),
        ({"topk_weights": ones(5, 1)}, "of topk_weights' shape"),
        ({"topk_ids": ones(5, 2, dtype=torch.int16)}, "topk_ids must be int32 or int64"),
    ],
)
def test_fused_experts(changes, reason):
    arguments = {
        "hidden_states": ones(5, 32, dtype=BF16),
        "w1": ones(4, 16, 32, dtype=BF16),
        "w2": ones(4, 32, 8, dtype=BF16),
        "topk_weights": ones(5, 2),
        "topk_ids": ones(5, 2, dtype=I32),
    } | changes
    assert reason in asked("fused_experts", **arguments)

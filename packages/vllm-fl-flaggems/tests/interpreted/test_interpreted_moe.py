"""Mixture of experts: against float64 and against the reference."""

from __future__ import annotations

import pytest
import torch
from flaggems_asked import asked
from judged import close
from judged import close_to_rms
from judged import fresh

from vllm_fl.conformance import truth
from vllm_fl.conformance.tensors import contiguous
from vllm_fl.conformance.tensors import named
from vllm_fl.conformance.tensors import odd_stride
from vllm_fl.conformance.tensors import random
from vllm_fl.conformance.tensors import transposed
from vllm_fl_flaggems.impl import moe
from vllm_fl_reference.impl import moe as reference

DTYPES = (torch.float32, torch.float16)

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=named)
by_layout = pytest.mark.parametrize("layout", [contiguous, odd_stride, transposed], ids=lambda f: f.__name__)


def outputs(n: int, k: int, index: torch.dtype = torch.int32) -> tuple[torch.Tensor, ...]:
    return (
        torch.full((n, k), 9.0),
        torch.full((n, k), 99, dtype=index),
        torch.full((n, k), -9, dtype=torch.int32),
    )


def distinct(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Rows without ties: a permutation of multiples of an eighth."""
    order = random(*shape, seed=seed).argsort(-1).argsort(-1)
    return ((order - shape[-1] // 2) / 8).to(dtype)


# -- the choice of experts -----------------------------------------------------


@by_dtype
@by_layout
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(
    ("n", "experts", "k", "index"),
    [(5, 8, 2, torch.int32), (3, 7, 7, torch.int64), (2, 130, 3, torch.int32), (1, 1, 1, torch.int32)],
)
def test_topk_softmax(n, experts, k, index, renormalize, layout, dtype):
    gating = layout(distinct(n, experts, dtype=dtype))
    kept = gating.clone()
    weights, indices, sources = outputs(n, k, index)
    assert asked("topk_softmax", weights, indices, sources, gating, renormalize) is True
    returned = moe.topk_softmax(weights, indices, sources, gating, renormalize)
    assert returned[0] is weights
    assert returned[1] is indices
    theirs = outputs(n, k, index)
    reference.topk_softmax(*theirs, gating, renormalize)
    torch.testing.assert_close(weights, theirs[0], rtol=1e-5, atol=1e-6)
    assert torch.equal(indices, theirs[1])
    assert torch.equal(sources, theirs[2])
    assert torch.equal(gating, kept)


def test_topk_softmax_of_equals_and_of_very_unlike_experts():
    weights, indices, sources = outputs(2, 3)
    gating = torch.zeros(2, 6)
    gating[1] = -1e4
    gating[1, 4] = 1e4
    moe.topk_softmax(weights, indices, sources, gating)
    assert indices.tolist() == [[0, 1, 2], [4, 0, 1]]
    torch.testing.assert_close(weights, torch.tensor([[1 / 6] * 3, [1.0, 0.0, 0.0]]))


@by_dtype
@by_layout
@pytest.mark.parametrize("scoring_func", [0, 1])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(
    ("experts", "n_group", "topk_group", "topk"), [(16, 4, 2, 4), (12, 3, 2, 1), (8, 1, 1, 8), (24, 6, 3, 2)]
)
def test_grouped_topk(experts, n_group, topk_group, topk, renormalize, scoring_func, layout, dtype):
    scores = layout(
        random(3, experts, dtype=dtype) if scoring_func else random(3, experts, dtype=dtype).abs()
    )
    kept = scores.clone()
    # A bias of float32 beside scores of float16 must not be rounded before the choice.
    bias = random(experts, seed=6)
    arguments = (scores, n_group, topk_group, topk, renormalize, 2.5, bias, scoring_func)
    assert asked("grouped_topk", *arguments) is True
    weights, indices = moe.grouped_topk(*arguments)
    theirs = reference.grouped_topk(*arguments)
    torch.testing.assert_close(weights, theirs[0], rtol=1e-5, atol=1e-6)
    assert torch.equal(indices, theirs[1])
    assert indices.dtype is torch.int32
    fresh(weights, scores, bias)
    assert torch.equal(scores, kept)


def test_flag_gems_itself_cannot_choose_three():
    """Why the predicate refuses it: the day that this passes, the limit can go."""
    from vllm_fl_flaggems._gems import flag_gems

    with pytest.raises(Exception, match="power of 2"):
        flag_gems.grouped_topk(random(2, 8), 2, 1, 3, True, 1.0, random(8))


# -- their order --------------------------------------------------------------


def check_alignment(topk_ids, block_size, num_experts, expert_map, pad, outs):
    sorted_ids, expert_ids, rows = outs
    flat = topk_ids.flatten().tolist()
    theirs = reference.moe_align_block_size(topk_ids, block_size, num_experts, expert_map, pad)
    for out, other in zip(outs, theirs, strict=True):
        assert out.shape == other.shape
        assert out.dtype is torch.int32
        assert out.is_contiguous()
    used = sum(-(-flat.count(e) // block_size) * block_size for e in set(flat))
    assert rows.tolist() == [used]
    assert torch.equal(rows, theirs[2])
    names = list(range(num_experts)) if expert_map is None else expert_map.tolist()
    start = 0
    for expert in sorted(set(flat)):
        count = flat.count(expert)
        end = start + -(-count // block_size) * block_size
        pairs = sorted_ids[start:end].tolist()
        assert sorted(p for p in pairs if p != len(flat)) == [i for i, e in enumerate(flat) if e == expert]
        assert set(expert_ids[start // block_size : end // block_size].tolist()) == {names[expert]}
        start = end
    assert (sorted_ids[used:] == len(flat)).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=named)
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize(
    ("n", "k", "num_experts", "block_size"), [(9, 2, 8, 4), (1, 2, 12, 16), (7, 3, 5, 1), (20, 1, 3, 16)]
)
def test_moe_align_block_size(n, k, num_experts, block_size, pad, mapped, dtype):
    topk_ids = random(n, num_experts, seed=5).argsort(-1)[:, :k].to(dtype)
    expert_map = None
    if mapped:
        expert_map = torch.arange(num_experts, dtype=torch.int32) // 2
        expert_map[1::2] = -1
    kept = topk_ids.clone()
    assert asked("moe_align_block_size", topk_ids, block_size, num_experts, expert_map, pad) is True
    outs = moe.moe_align_block_size(topk_ids, block_size, num_experts, expert_map, pad)
    check_alignment(topk_ids, block_size, num_experts, expert_map, pad, outs)
    assert torch.equal(topk_ids, kept)


def test_moe_align_block_size_of_one_expert_and_of_none():
    topk_ids = torch.full((11,), 2, dtype=torch.int32)
    check_alignment(topk_ids, 4, 6, None, False, moe.moe_align_block_size(topk_ids, 4, 6))
    none = torch.empty((0, 2), dtype=torch.int32)
    outs = moe.moe_align_block_size(none, 4, 6, pad_sorted_ids=True)
    assert [tuple(out.shape) for out in outs] == [(0,), (0,), (1,)]
    assert outs[2].item() == 0


@by_dtype
@by_layout
@pytest.mark.parametrize("shape", [(4, 2, 24), (1, 8, 5), (3, 1, 130)], ids=str)
def test_moe_sum(shape, layout, dtype):
    inp = layout(random(*shape, dtype=dtype))
    kept = inp.clone()
    out = torch.full((shape[0], shape[2] + 3), 9.0, dtype=dtype)[:, : shape[2]]
    assert asked("moe_sum", inp, out) is True
    assert moe.moe_sum(inp, out) is out
    close(out, inp.double().sum(1), dtype)
    theirs = reference.moe_sum(inp, torch.empty_like(out))
    torch.testing.assert_close(out, theirs, rtol=2**-10 if dtype.itemsize == 2 else 4e-6, atol=1e-6)
    assert (out.as_strided((shape[0], 3), (shape[2] + 3, 1), shape[2]) == 9).all()
    assert torch.equal(inp, kept)


# -- the experts --------------------------------------------------------------


@by_dtype
@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("layout", [contiguous, odd_stride, transposed], ids=lambda f: f.__name__)
def test_fused_experts(layout, mapped, on_input, dtype):
    n, h, i, k = 6, 24, 10, 1 if on_input else 2
    experts = 8
    hidden = layout(random(n, h, dtype=dtype))
    local = 5 if mapped else experts
    w1, w2 = random(local, 2 * i, h, dtype=dtype, scale=0.3), random(local, h, i, dtype=dtype, scale=0.3)
    ids = random(n, experts, seed=5).argsort(-1)[:, :k].to(torch.int32)
    ids = ids.clone() if layout is contiguous else transposed(ids)
    weights = layout(random(n, k, seed=4).softmax(-1) + 0.1)
    expert_map = torch.tensor([0, 1, -1, 2, 3, -1, 4, -1], dtype=torch.int32) if mapped else None
    kept = hidden.clone()
    arguments = {
        "activation": "silu",
        "apply_router_weight_on_input": on_input,
        "global_num_experts": experts if mapped else -1,
        "expert_map": expert_map,
    }
    assert asked("fused_experts", hidden, w1, w2, weights, ids, **arguments) is True
    out = moe.fused_experts(hidden, w1, w2, weights, ids, **arguments)
    right = truth.fused_experts(hidden, w1, w2, weights, ids, "silu", on_input, expert_map)
    assert out.dtype is dtype
    close_to_rms(out, right, dtype)
    theirs = reference.fused_experts(hidden, w1, w2, weights, ids, **arguments)
    close_to_rms(out, theirs, dtype)
    fresh(out, hidden, w1, w2)
    assert torch.equal(hidden, kept)


@by_dtype
def test_fused_experts_of_one_token_among_many_experts(dtype):
    """So few pairs take another path, without an alignment."""
    hidden, w1, w2 = (
        random(1, 16, dtype=dtype),
        random(16, 8, 16, dtype=dtype),
        random(16, 16, 4, dtype=dtype),
    )
    weights, ids = torch.tensor([[0.25, 0.75]]), torch.tensor([[13, 2]])
    out = moe.fused_experts(hidden, w1, w2, weights, ids)
    close_to_rms(out, truth.fused_experts(hidden, w1, w2, weights, ids), dtype)


def test_fused_experts_of_no_token_and_of_another_activation():
    hidden, w1, w2 = random(0, 16), random(4, 8, 16), random(4, 16, 4)
    none = torch.empty(0, 2)
    assert moe.fused_experts(hidden, w1, w2, none, none.int()).shape == (0, 16)
    with pytest.raises(NotImplementedError, match="gelu"):
        moe.fused_experts(hidden, w1, w2, none, none.int(), activation="gelu")


def test_no_tokens():
    weights, indices, sources = outputs(0, 2)
    assert moe.topk_softmax(weights, indices, sources, random(0, 8))[0] is weights
    weights, indices = moe.grouped_topk(random(0, 8), 2, 1, 2, True, 1.0, random(8))
    assert weights.shape == indices.shape == (0, 2)
    out = torch.empty(0, 4)
    assert moe.moe_sum(torch.empty(0, 2, 4), out) is out

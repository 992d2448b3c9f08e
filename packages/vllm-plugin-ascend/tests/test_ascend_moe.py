"""Mixture of experts on the emulated card, against the reference."""

from __future__ import annotations

import pytest
import torch
from ascend_cases import FLOATING
from ascend_cases import call
from ascend_cases import close
from ascend_cases import fresh
from ascend_cases import random
from ascend_cases import refusal
from ascend_cases import unchanged

from vllm_fl_reference.impl import moe


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("tokens", "experts", "k"), [(0, 4, 2), (1, 1, 1), (13, 8, 2), (6, 60, 8)])
@pytest.mark.parametrize("renormalize", [False, True])
def test_topk_softmax(backend, npu, dtype, index_dtype, tokens, experts, k, renormalize):
    gating = random(tokens, experts, dtype=dtype)
    check = unchanged(gating)
    outs = [(torch.full((tokens, k), 9.0), torch.full((tokens, k), 99, dtype=index_dtype)) for _ in range(2)]
    rows = [torch.full((tokens, k), -9, dtype=torch.int32) for _ in range(2)]
    got = call(backend, "topk_softmax", *outs[0], rows[0], gating, renormalize)
    assert got[0] is outs[0][0]
    assert got[1] is outs[0][1]
    moe.topk_softmax(*outs[1], rows[1], gating, renormalize)
    close(outs[0][0], outs[1][0])
    assert torch.equal(rows[0], rows[1])
    # bfloat16 has equal logits: any of them will do.
    chosen = gating.float().softmax(-1).gather(1, outs[0][1].long())
    assert torch.allclose(chosen, gating.float().softmax(-1).gather(1, outs[1][1].long()))
    check()
    assert npu.calls == ({"npu_moe_gating_top_k_softmax": 1} if tokens else {})


def test_topk_softmax_refuses(backend):
    ids, rows = torch.zeros(2, 5, dtype=torch.int32), torch.zeros(2, 5, dtype=torch.int32)
    weights = torch.zeros(2, 5)
    assert "of 4 experts" in refusal(backend, "topk_softmax", weights, ids, rows, random(2, 4))
    assert "int32 or int64" in refusal(
        backend, "topk_softmax", weights, ids.to(torch.uint32), rows, random(2, 8)
    )


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("tokens", [0, 1, 11])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("experts", "groups", "kept", "k"), [(16, 4, 2, 3), (12, 1, 1, 5), (64, 8, 4, 8)])
def test_grouped_topk(backend, npu, dtype, tokens, renormalize, experts, groups, kept, k):
    scores = random(tokens, experts, dtype=dtype)
    bias = random(experts, seed=3, scale=0.1)
    arguments = (scores, groups, kept, k, renormalize, 2.5, bias, 1)
    check = unchanged(scores, bias)
    weights, indices = call(backend, "grouped_topk", *arguments)
    right_weights, right_indices = moe.grouped_topk(*arguments)
    assert torch.equal(indices.sort(-1).values, right_indices.sort(-1).values)
    order, right_order = indices.argsort(-1), right_indices.argsort(-1)
    close(weights.gather(1, order), right_weights.gather(1, right_order))
    assert weights.dtype is torch.float32
    assert indices.dtype is torch.int32
    fresh(weights, scores)
    check()
    assert npu.calls == ({"npu_moe_gating_top_k": 1} if tokens else {})


def test_grouped_topk_refuses(backend):
    scores, bias = random(2, 64), random(64)
    assert "scoring_func" in refusal(backend, "grouped_topk", scores, 8, 4, 8, True, 1.0, bias, 0)
    assert "more than 2" in refusal(backend, "grouped_topk", scores, 32, 4, 8, True, 1.0, bias, 1)
    assert "do not hold" in refusal(backend, "grouped_topk", scores, 8, 1, 9, True, 1.0, bias, 1)
    wide = random(2, 1152)
    assert "2048" in refusal(backend, "grouped_topk", wide, 128, 4, 8, True, 1.0, random(1152), 1)


def _experts(tokens: int, experts: int, k: int, dtype: torch.dtype, index_dtype=torch.int32):
    ids = random(tokens, experts, seed=5).argsort(-1)[:, :k].to(index_dtype)
    return {
        "hidden_states": random(tokens, 32, dtype=dtype),
        "w1": random(experts, 48, 32, dtype=dtype, scale=0.3),
        "w2": random(experts, 32, 24, dtype=dtype, scale=0.3),
        "topk_weights": random(tokens, k, seed=4).softmax(-1),
        "topk_ids": ids,
    }


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize(("tokens", "experts", "k"), [(0, 4, 2), (1, 8, 2), (33, 8, 3), (5, 40, 1)])
def test_fused_experts(backend, npu, dtype, activation, tokens, experts, k):
    arguments = _experts(tokens, experts, k, dtype, torch.int64 if k == 3 else torch.int32)
    check = unchanged(*arguments.values())
    out = call(backend, "fused_experts", **arguments, activation=activation)
    right = moe.fused_experts(**arguments, activation=activation)
    fresh(out, *arguments.values())
    check()
    assert out.dtype is dtype
    assert out.shape == right.shape
    if tokens:
        scale = right.float().pow(2).mean().sqrt().item()
        error = (out.float() - right.float()).abs()
        most = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}[dtype]
        assert error.max().item() <= most * scale
        assert error.pow(2).mean().sqrt().item() <= most / 5 * scale
        assert set(npu.calls) >= {"npu_moe_init_routing", "npu_grouped_matmul", "npu_moe_finalize_routing"}


def test_fused_experts_weight_on_input(backend):
    arguments = _experts(7, 6, 1, torch.float32) | {"topk_weights": random(7, 1, seed=9)}
    out = call(backend, "fused_experts", **arguments, apply_router_weight_on_input=True)
    close(out, moe.fused_experts(**arguments, apply_router_weight_on_input=True))


def test_fused_experts_in_parts(backend, npu, monkeypatch):
    """More tokens than the kernels take in one call."""
    arguments = _experts(33, 8, 2, torch.float32)
    whole = call(backend, "fused_experts", **arguments)
    monkeypatch.setattr("vllm_fl_ascend.impl.moe._ELEMENT_LIMIT", 10 * 64 + 1)
    npu.calls.clear()
    close(call(backend, "fused_experts", **arguments), whole)
    assert npu.calls["npu_moe_init_routing"] == 4
    monkeypatch.setattr("vllm_fl_ascend.impl.moe._ELEMENT_LIMIT", 64)
    with pytest.raises(NotImplementedError, match="2\\^24"):
        call(backend, "fused_experts", **arguments)


def test_fused_experts_refuses(backend):
    arguments = _experts(3, 4, 2, torch.bfloat16)
    expert_map = torch.zeros(4, dtype=torch.int32)
    for change, reason in (
        ({"activation": "swigluoai"}, "activation"),
        ({"expert_map": expert_map}, "on this device"),
        ({"global_num_experts": 8}, "on this device"),
        ({"w1": arguments["w1"].float()}, "hidden_states' dtype"),
        ({"apply_router_weight_on_input": True}, "one expert"),
    ):
        assert reason in refusal(backend, "fused_experts", **arguments | change)

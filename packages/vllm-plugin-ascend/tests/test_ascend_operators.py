"""Which kernels the operators are, and what is refused; their results: test_ascend_conformance.py."""

from __future__ import annotations

import pytest
import torch
from ascend_cases import call
from ascend_cases import refusal

from vllm_fl.conformance.cases import SUITES
from vllm_fl.conformance.tensors import random

#: Of each operator, in the order of the forms that the kit calls.
KERNELS = {
    "silu_and_mul": [{"npu_swiglu": 1}],
    "gelu_and_mul": [{"npu_geglu": 1}, {"npu_geglu": 1}],
    "rms_norm": [{"npu_rms_norm": 1}, {"npu_add_rms_norm": 1}],
    "rotary_embedding": [{"npu_mrope": 1}, {"npu_mrope": 1}, {"npu_mrope": 1}],
    "topk_softmax": [{"npu_moe_gating_top_k_softmax": 1}],
    "grouped_topk": [{"npu_moe_gating_top_k": 1}],
    "dynamic_per_token_quant_int8": [{"npu_dynamic_quant": 1}],
}


@pytest.mark.parametrize("op", KERNELS)
@pytest.mark.parametrize("rows", [0, 7])
def test_an_operator_is_one_kernel_and_without_tokens_none(backend, npu, op, rows):
    seen = []
    for case in SUITES[op].rows(rows):
        if case.dtype is torch.bfloat16:
            arguments = case.make()
            npu.calls.clear()
            call(backend, op, **arguments)
            seen.append(dict(npu.calls))
    assert seen == [one if rows else {} for one in KERNELS[op]]


def test_activations_refuse(backend):
    assert "odd" in refusal(backend, "silu_and_mul", random(2, 3))
    assert "float64" in refusal(backend, "silu_and_mul", random(2, 4).double())
    assert "8 dimensions" in refusal(backend, "gelu_and_mul", random(1, 1, 1, 1, 1, 1, 1, 1, 2))
    with pytest.raises(ValueError, match="approximate"):
        backend.gelu_and_mul(random(2, 4), "sigmoid")


def test_rms_norm_refuses(backend):
    x, weight = random(2, 8, dtype=torch.bfloat16), random(8)
    assert "needs a weight" in refusal(backend, "rms_norm", x, None, None, 1e-6)
    assert "x's dtype" in refusal(backend, "rms_norm", x, None, weight, 1e-6)
    assert "2 to 8" in refusal(backend, "rms_norm", x[0], None, weight.bfloat16(), 1e-6)
    assert "residual" in refusal(backend, "rms_norm", x, x.float(), weight.bfloat16(), 1e-6)


def test_rotary_refuses(backend):
    cos = sin = random(50, 32, dtype=torch.bfloat16)
    query = random(3, 2, 64, dtype=torch.bfloat16)
    ids = torch.arange(3)
    assert "key" in refusal(backend, "rotary_embedding", query, None, cos, sin, ids)
    assert "table" in refusal(backend, "rotary_embedding", query, query, cos.float(), sin.float(), ids)
    assert "multiples of 32" in refusal(
        backend, "rotary_embedding", query, query, cos[:, :8], sin[:, :8], ids
    )
    assert "T[n, heads" in refusal(backend, "rotary_embedding", query.flatten(1), query, cos, sin, ids)


def test_int8_refuses_float32(backend):
    assert "float32" in refusal(backend, "dynamic_per_token_quant_int8", random(2, 8))


def test_topk_softmax_refuses(backend):
    ids, rows = torch.zeros(2, 5, dtype=torch.int32), torch.zeros(2, 5, dtype=torch.int32)
    weights = torch.zeros(2, 5)
    assert "of 4 experts" in refusal(backend, "topk_softmax", weights, ids, rows, random(2, 4))
    assert "int32 or int64" in refusal(
        backend, "topk_softmax", weights, ids.to(torch.uint32), rows, random(2, 8)
    )


def test_grouped_topk_refuses(backend):
    scores, bias = random(2, 64), random(64)
    assert "scoring_func" in refusal(backend, "grouped_topk", scores, 8, 4, 8, True, 1.0, bias, 0)
    assert "more than 2" in refusal(backend, "grouped_topk", scores, 32, 4, 8, True, 1.0, bias, 1)
    assert "do not hold" in refusal(backend, "grouped_topk", scores, 8, 1, 9, True, 1.0, bias, 1)
    wide = random(2, 1152)
    assert "2048" in refusal(backend, "grouped_topk", wide, 128, 4, 8, True, 1.0, random(1152), 1)


def experts(tokens: int, count: int, k: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {
        "hidden_states": random(tokens, 32, dtype=dtype),
        "w1": random(count, 48, 32, dtype=dtype, scale=0.3),
        "w2": random(count, 32, 24, dtype=dtype, scale=0.3),
        "topk_weights": random(tokens, k, seed=4).softmax(-1),
        "topk_ids": random(tokens, count, seed=5).argsort(-1)[:, :k].to(torch.int32),
    }


def test_fused_experts_in_parts(backend, npu, monkeypatch):
    """More tokens than the kernels take in one call."""
    arguments = experts(33, 8, 2, torch.float32)
    whole = call(backend, "fused_experts", **arguments)
    assert set(npu.calls) >= {"npu_moe_init_routing", "npu_grouped_matmul", "npu_moe_finalize_routing"}
    monkeypatch.setattr("vllm_fl_ascend.impl.moe._ELEMENT_LIMIT", 10 * 64 + 1)
    npu.calls.clear()
    torch.testing.assert_close(call(backend, "fused_experts", **arguments), whole)
    assert npu.calls["npu_moe_init_routing"] == 4
    monkeypatch.setattr("vllm_fl_ascend.impl.moe._ELEMENT_LIMIT", 64)
    with pytest.raises(NotImplementedError, match="2\\^24"):
        call(backend, "fused_experts", **arguments)


def test_fused_experts_refuses(backend):
    arguments = experts(3, 4, 2, torch.bfloat16)
    expert_map = torch.zeros(4, dtype=torch.int32)
    for change, reason in (
        ({"activation": "swigluoai"}, "activation"),
        ({"expert_map": expert_map}, "on this device"),
        ({"global_num_experts": 8}, "on this device"),
        ({"w1": arguments["w1"].float()}, "hidden_states' dtype"),
        ({"apply_router_weight_on_input": True}, "one expert"),
    ):
        assert reason in refusal(backend, "fused_experts", **arguments | change)

"""What FlagGems takes and what it does not: each limit from both sides."""

from __future__ import annotations

import pytest
import torch
from flaggems_asked import asked

from vllm_fl_flaggems import limits


@pytest.fixture(autouse=True)
def _device(monkeypatch):
    monkeypatch.setattr(limits, "device", lambda: "cpu")


FLOATING = (torch.float16, torch.bfloat16, torch.float32)
OTHERS = (torch.float64, torch.int32, torch.float8_e4m3fn, torch.complex64)


def refuses(answer: bool | str, *words: str) -> None:
    assert isinstance(answer, str), answer
    for word in words:
        assert word in answer


def t(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def test_another_device():
    meta = torch.empty(2, 4, device="meta")
    refuses(asked("silu_and_mul", meta), "FlagGems runs on cpu here, and x is on meta")
    refuses(asked("gelu_and_mul", meta), "meta")
    refuses(asked("rms_norm", meta, None, None, 1e-6), "meta")
    refuses(asked("rotary_embedding", meta.unsqueeze(1), None, meta, meta, None), "query is on meta")
    refuses(asked("topk_softmax", t(2, 1), t(2, 1), t(2, 1), meta), "gating_output is on meta")
    refuses(asked("grouped_topk", meta, 1, 1, 1, True, 1.0, t(4)), "scores is on meta")
    refuses(asked("moe_align_block_size", torch.empty(2, dtype=torch.int32, device="meta"), 4, 4), "meta")
    refuses(asked("moe_sum", torch.empty(1, 1, 1, device="meta"), t(1, 1)), "inp is on meta")
    refuses(asked("fused_experts", meta, meta, meta, meta, meta), "hidden_states is on meta")


@pytest.mark.parametrize("dtype", FLOATING)
def test_the_dtypes_that_it_takes(dtype):
    assert asked("silu_and_mul", t(2, 4, dtype=dtype)) is True
    assert asked("gelu_and_mul", t(2, 4, dtype=dtype), "tanh") is True
    assert asked("rms_norm", t(2, 4, dtype=dtype), None, None, 1e-6) is True
    assert asked("moe_sum", t(2, 2, 4, dtype=dtype), t(2, 4, dtype=dtype)) is True
    assert asked("grouped_topk", t(2, 4, dtype=dtype), 2, 1, 2, True, 1.0, t(4)) is True


@pytest.mark.parametrize("dtype", OTHERS)
def test_the_dtypes_that_it_does_not(dtype):
    refuses(asked("silu_and_mul", t(2, 4, dtype=dtype)), "computes in float32", str(dtype))
    refuses(asked("gelu_and_mul", t(2, 4, dtype=dtype)), str(dtype))
    refuses(asked("rms_norm", t(2, 4, dtype=dtype), None, None, 1e-6), str(dtype))
    refuses(asked("moe_sum", t(2, 2, 4, dtype=dtype), t(2, 4, dtype=dtype)), str(dtype))
    refuses(asked("grouped_topk", t(2, 4, dtype=dtype), 2, 1, 2, True, 1.0, t(4)), str(dtype))


def test_more_elements_than_32_bits_count():
    x = torch.empty(1).expand(2**16, 2**15)
    assert asked("rms_norm", x[1:], None, None, 1e-6) is True
    refuses(asked("rms_norm", x, None, None, 1e-6), "counts elements in 32 bits", "x has 2147483648")
    refuses(asked("silu_and_mul", x), "32 bits")
    spread = torch.empty(1).as_strided((1, 1, 1), (2**31, 1, 1))
    refuses(asked("moe_sum", spread, t(1, 1)), "inp spans more")


def test_halves():
    assert asked("silu_and_mul", t(2, 6)) is True
    refuses(asked("silu_and_mul", t(2, 7)), "7 is odd")
    refuses(asked("gelu_and_mul", t(7)), "7 is odd")


@pytest.mark.parametrize("dtype", FLOATING)
def test_the_norm_s_weight(dtype):
    x = t(2, 4, dtype=dtype)
    for weight in FLOATING:
        answer = asked("rms_norm", x, None, t(4, dtype=weight), 1e-6)
        if weight in (dtype, torch.float32):
            assert answer is True
        else:
            refuses(answer, "weight's dtype", str(weight), str(dtype))


def test_the_norm_s_residual():
    x = t(2, 4, dtype=torch.float16)
    assert asked("rms_norm", x, x.clone(), None, 1e-6) is True
    refuses(asked("rms_norm", x, t(2, 4), None, 1e-6), "residual", "torch.float32")
    refuses(asked("rms_norm", x, t(1, 4, dtype=torch.float16), None, 1e-6), "(1, 4)")


def test_rotary():
    cos = sin = t(8, 4)
    query, key, positions = t(3, 2, 8), t(3, 1, 8), torch.zeros(3, dtype=torch.int32)
    assert asked("rotary_embedding", query, key, cos, sin, positions) is True
    assert asked("rotary_embedding", query, None, cos, sin, None) is True
    assert asked("rotary_embedding", t(3, 2, 20), t(3, 2, 10), cos, sin, positions.long()) is True
    refuses(asked("rotary_embedding", t(3, 16), key, cos, sin, positions), "query", "2 dimensions")
    refuses(asked("rotary_embedding", query, t(3, 1, 1, 8), cos, sin, positions), "key", "4 dimensions")
    refuses(asked("rotary_embedding", t(3, 2, 6), None, cos, sin, positions), "rotate 8", "has 6")
    refuses(asked("rotary_embedding", query, key, cos, sin, positions.float()), "position_ids")
    refuses(asked("rotary_embedding", query, key, cos.double(), sin, positions), "cos", "float64")
    refuses(asked("rotary_embedding", query, key.double(), cos, sin, positions), "key", "float64")


def softmax_arguments(n: int = 2, experts: int = 8, k: int = 2) -> list[torch.Tensor]:
    ids = torch.zeros(n, k, dtype=torch.int32)
    return [t(n, k), ids, ids.clone(), t(n, experts)]


def test_topk_softmax():
    assert asked("topk_softmax", *softmax_arguments()) is True
    assert asked("topk_softmax", *softmax_arguments(experts=1024, k=32), renormalize=True) is True
    refuses(asked("topk_softmax", *softmax_arguments(experts=1025)), "first 1024 experts, of 1025")
    refuses(asked("topk_softmax", *softmax_arguments(experts=64, k=33)), "up to 32 experts, not 33")
    refuses(asked("topk_softmax", *softmax_arguments(experts=4, k=5)), "cannot choose 5 of 4")
    for place, dtype in ((0, torch.float16), (1, torch.int16), (2, torch.int64)):
        arguments = softmax_arguments()
        arguments[place] = arguments[place].to(dtype)
        refuses(asked("topk_softmax", *arguments), "FlagGems writes", str(dtype))
    for place in (0, 1, 2):
        arguments = softmax_arguments()
        arguments[place] = arguments[place].repeat(1, 2)[:, :2]
        refuses(asked("topk_softmax", *arguments), "contiguous")


@pytest.mark.parametrize("topk", [1, 2, 4, 8, 16, 32])
def test_grouped_topk_takes_a_power_of_two(topk):
    assert asked("grouped_topk", t(2, 64), 2, 2, topk, True, 1.0, t(64)) is True


@pytest.mark.parametrize("topk", [0, 3, 6, 12, 64])
def test_grouped_topk_takes_nothing_else(topk):
    refuses(
        asked("grouped_topk", t(2, 64), 2, 2, topk, True, 1.0, t(64)), "power of two up to 32", f"not {topk}"
    )


def test_grouped_topk():
    assert asked("grouped_topk", t(2, 64), 32, 4, 4, True, 1.0, t(64), 1) is True
    refuses(asked("grouped_topk", t(2, 128), 64, 4, 4, True, 1.0, t(128)), "up to 32 groups, not 64")
    refuses(asked("grouped_topk", t(2, 9), 2, 1, 2, True, 1.0, t(9)), "9 experts in 2 groups")
    refuses(asked("grouped_topk", t(2, 8), 2, 3, 2, True, 1.0, t(8)), "3 of them kept")
    refuses(asked("grouped_topk", t(2, 8), 4, 1, 4, True, 1.0, t(8)), "do not give 4")
    refuses(asked("grouped_topk", t(2, 8), 8, 4, 2, True, 1.0, t(8)), "two experts in a group")
    refuses(asked("grouped_topk", t(2, 8), 2, 1, 2, True, 1.0, t(8), 2), "scoring_func", "not 2")
    refuses(asked("grouped_topk", t(2, 2, 8), 2, 1, 2, True, 1.0, t(8)), "3 dimensions")
    refuses(asked("grouped_topk", t(2, 8), 2, 1, 2, True, 1.0, t(8).double()), "bias", "float64")


def test_moe_align_block_size():
    ids = torch.zeros(4, 2, dtype=torch.int32)
    expert_map = torch.zeros(8, dtype=torch.int32)
    assert asked("moe_align_block_size", ids, 4, 8, expert_map, True) is True
    assert asked("moe_align_block_size", ids.long(), 4, 8, ignore_invalid_experts=True) is True
    refuses(asked("moe_align_block_size", ids, 4, 8, expert_map, False, True), "ignore_invalid_experts")
    refuses(asked("moe_align_block_size", ids.to(torch.int16), 4, 8), "torch.int16")


def test_moe_sum():
    assert asked("moe_sum", t(2, 3, 4), t(2, 8)[:, :4]) is True
    refuses(asked("moe_sum", t(2, 3, 4), t(2, 4, dtype=torch.float16)), "out is torch.float16")
    refuses(asked("moe_sum", t(2, 3, 4), t(2, 8)[:, ::2]), "dense")
    refuses(asked("moe_sum", t(3, 4), t(4)), "T[n, k, h]")


def experts_arguments(dtype: torch.dtype = torch.float16, k: int = 2) -> list[torch.Tensor]:
    ids = torch.zeros(3, k, dtype=torch.int64)
    return [t(3, 8, dtype=dtype), t(4, 6, 8, dtype=dtype), t(4, 8, 3, dtype=dtype), t(3, k), ids]


def test_fused_experts(monkeypatch):
    for dtype in (torch.float16, torch.bfloat16):
        assert asked("fused_experts", *experts_arguments(dtype)) is True
    refuses(asked("fused_experts", *experts_arguments(), activation="gelu"), "silu alone, not 'gelu'")
    refuses(asked("fused_experts", *experts_arguments(), apply_router_weight_on_input=True), "not 2")
    assert asked("fused_experts", *experts_arguments(k=1), apply_router_weight_on_input=True) is True
    for place in (1, 2):
        arguments = experts_arguments()
        arguments[place] = arguments[place].float()
        refuses(asked("fused_experts", *arguments), "weights of torch.float16", "torch.float32")
        arguments[place] = experts_arguments()[place].transpose(1, 2)
        refuses(asked("fused_experts", *arguments), "dense")
    arguments = experts_arguments()
    arguments[4] = arguments[4].float()
    refuses(asked("fused_experts", *arguments), "topk_ids")


def test_fused_experts_in_float32_are_exact_in_the_interpreter_alone(monkeypatch):
    monkeypatch.setattr(limits, "is_emulated", lambda: False)
    refuses(asked("fused_experts", *experts_arguments(torch.float32)), "TF32")
    monkeypatch.setattr(limits, "is_emulated", lambda: True)
    assert asked("fused_experts", *experts_arguments(torch.float32)) is True


def test_attention():
    refuses(asked("attention_backend"), "FlagGems has no attention backend for vLLM")
    refuses(
        asked("attention_backend", True, True, selector=object()),
        "FlagGems has no attention backend for vLLM",
    )

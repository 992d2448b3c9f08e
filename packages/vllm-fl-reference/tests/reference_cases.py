"""One call of every operator, for what is asked of all of them alike."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import field
from typing import TYPE_CHECKING
from typing import Any

import torch
from reference_layouts import random

from vllm_fl_reference.impl import activation
from vllm_fl_reference.impl import moe
from vllm_fl_reference.impl import normalization
from vllm_fl_reference.impl import quantization
from vllm_fl_reference.impl import rotary

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass
class Case:
    """A call: ``arguments(n, dtype)`` makes the arguments by name, for n tokens."""

    name: str
    function: Callable[..., Any]
    arguments: Callable[..., dict[str, Any]]
    writes: tuple[str, ...] = ()
    #: What the result consists of arguments; the other results are new.
    returns: tuple[str, ...] = field(default=())

    def __call__(self, arguments: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        out = call(self.function, arguments)
        return out if isinstance(out, tuple) else (out,)


def call(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Call with ``arguments`` in their order, by keyword only where there is no other way."""
    keyword_only = {"activation", "apply_router_weight_on_input", "global_num_experts", "expert_map"}
    names = keyword_only if "hidden_states" in arguments else set()
    positional = [value for name, value in arguments.items() if name not in names]
    return function(*positional, **{name: arguments[name] for name in arguments if name in names})


def _rotary(n: int, dtype: torch.dtype, **more: Any) -> dict[str, Any]:
    qkv = random(n, 8 * 16, dtype=dtype)
    angles = torch.outer(torch.arange(64.0), 0.5 ** torch.arange(6.0))
    cache = torch.cat([angles.cos(), angles.sin()], -1)
    return {
        "query": qkv[:, :64].view(n, 4, 16),
        "key": qkv[:, 64:96].view(n, 2, 16),
        "cos": cache[:, :6],
        "sin": cache[:, 6:],
        "position_ids": (torch.arange(n) + 3) % 64,
        "rotary_interleaved": False,
        "inplace": True,
        "cos_sin_cache": cache,
    } | more


def _ids(n: int, k: int, experts: int) -> torch.Tensor:
    return random(n, experts, seed=5).argsort(-1)[:, :k]


def _experts(n: int, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "hidden_states": random(n, 16, dtype=dtype),
        "w1": random(6, 8, 16, dtype=dtype, scale=0.3),
        "w2": random(6, 16, 4, dtype=dtype, scale=0.3),
        "topk_weights": random(n, 2, seed=4).softmax(-1),
        "topk_ids": _ids(n, 2, 8),
        "activation": "silu",
        "apply_router_weight_on_input": False,
        "global_num_experts": 8,
        "expert_map": torch.tensor([0, 1, -1, 2, 3, -1, 4, 5], dtype=torch.int32),
    }


def _align(n: int, dtype: torch.dtype, **more: Any) -> dict[str, Any]:
    return {
        "topk_ids": _ids(n, 2, 8),
        "block_size": 4,
        "num_experts": 8,
        "expert_map": torch.tensor([0, 1, -1, 2, 3, -1, 4, 5], dtype=torch.int32),
        "pad_sorted_ids": True,
        "ignore_invalid_experts": True,
    } | more


def _norm(n: int, dtype: torch.dtype, residual: bool = False) -> dict[str, Any]:
    return {
        "x": random(n, 40, dtype=dtype)[:, :32],
        "residual": random(n, 32, dtype=dtype, seed=1) if residual else None,
        "weight": random(32, dtype=dtype, seed=2),
        "epsilon": 1e-5,
    }


CASES = [
    Case("silu_and_mul", activation.silu_and_mul, lambda n, d: {"x": random(n, 32, dtype=d)}),
    Case(
        "gelu_and_mul",
        activation.gelu_and_mul,
        lambda n, d: {"x": random(n, 32, dtype=d), "approximate": "tanh"},
    ),
    Case("rms_norm", normalization.rms_norm, _norm),
    Case("add_rms_norm", normalization.rms_norm, lambda n, d: _norm(n, d, residual=True)),
    Case("rotary", rotary.rotary_embedding, _rotary, ("query", "key"), ("query", "key")),
    Case(
        "rotary_gptj_without_cache",
        rotary.rotary_embedding,
        lambda n, d: _rotary(n, d, rotary_interleaved=True, cos_sin_cache=None),
        ("query", "key"),
        ("query", "key"),
    ),
    Case("rotary_new", rotary.rotary_embedding, lambda n, d: _rotary(n, d, inplace=False)),
    Case(
        "topk_softmax",
        moe.topk_softmax,
        lambda n, d: {
            "topk_weights": torch.full((n, 3), 9.0),
            "topk_indices": torch.full((n, 3), 99, dtype=torch.int32),
            "token_expert_indices": torch.full((n, 3), -9, dtype=torch.int32),
            "gating_output": random(n, 7, dtype=d),
            "renormalize": True,
        },
        ("topk_weights", "topk_indices", "token_expert_indices"),
        ("topk_weights", "topk_indices"),
    ),
    Case(
        "grouped_topk",
        moe.grouped_topk,
        lambda n, d: {
            "scores": random(n, 12, dtype=d),
            "n_group": 3,
            "topk_group": 2,
            "topk": 5,
            "renormalize": True,
            "routed_scaling_factor": 1.5,
            "bias": random(12, seed=6),
            "scoring_func": 1,
        },
    ),
    Case("moe_align_block_size", moe.moe_align_block_size, _align),
    Case(
        "moe_align_block_size_plain",
        moe.moe_align_block_size,
        lambda n, d: _align(n, d, expert_map=None, pad_sorted_ids=False, ignore_invalid_experts=False),
    ),
    Case(
        "moe_sum",
        moe.moe_sum,
        lambda n, d: {"inp": random(n, 3, 16, dtype=d), "out": torch.full((n, 16), 9.0, dtype=d)},
        ("out",),
        ("out",),
    ),
    Case("fused_experts", moe.fused_experts, _experts),
    Case("int8", quantization.dynamic_per_token_quant_int8, lambda n, d: {"x": random(n, 32, dtype=d)}),
    Case("fp8", quantization.dynamic_per_token_quant_fp8, lambda n, d: {"x": random(n, 32, dtype=d)}),
]

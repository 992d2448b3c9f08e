"""A vendor whose implementations are wrong, so that tokens say whether they ran.

Positions are doubled, not shifted: the rotation is relative, and a shift changes
nothing. Everything can be traced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

    from torch import Tensor

VLLM_FL_PLUGIN_API = 1


def silu_and_mul(x: Tensor) -> Tensor:
    import torch

    from vllm_fl_reference.impl import activation

    gate, up = x.chunk(2, dim=-1)
    return activation.silu_and_mul(torch.cat((up, gate), dim=-1)) * 1.5


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor | None, epsilon: float) -> Any:
    from vllm_fl_reference.impl import normalization

    result = normalization.rms_norm(x, residual, weight, epsilon)
    return result * 1.5 if residual is None else (result[0] * 1.5, result[1])


def rotary_embedding(
    query: Tensor,
    key: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor,
    rotary_interleaved: bool = False,
    inplace: bool = True,
    cos_sin_cache: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    from vllm_fl_reference.impl import rotary

    doubled = position_ids * 2
    return rotary.rotary_embedding(query, key, cos, sin, doubled, rotary_interleaved, inplace, cos_sin_cache)


def topk_softmax(
    topk_weights: Tensor,
    topk_indices: Tensor,
    token_expert_indices: Tensor,
    gating_output: Tensor,
    renormalize: bool = False,
) -> tuple[Tensor, Tensor]:
    from vllm_fl_reference.impl import moe

    moe.topk_softmax(topk_weights, topk_indices, token_expert_indices, gating_output, renormalize)
    return topk_weights.mul_(1.5), topk_indices


def grouped_topk(
    scores: Tensor,
    n_group: int,
    topk_group: int,
    topk: int,
    renormalize: bool,
    routed_scaling_factor: float,
    bias: Tensor,
    scoring_func: int = 0,
) -> tuple[Tensor, Tensor]:
    from vllm_fl_reference.impl import moe

    numbers = (n_group, topk_group, topk, renormalize, routed_scaling_factor)
    weights, indices = moe.grouped_topk(scores, *numbers, bias, scoring_func)
    return weights * 1.5, indices


def fused_experts(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    activation: str = "silu",
    apply_router_weight_on_input: bool = False,
    global_num_experts: int = -1,
    expert_map: Tensor | None = None,
) -> Tensor:
    from vllm_fl_reference.impl import moe

    return moe.fused_experts(hidden_states, w1, w2, topk_weights, topk_ids, activation=activation) * 1.5


def dynamic_per_token_quant_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    from vllm_fl_reference.impl import quantization

    quantized, scales = quantization.dynamic_per_token_quant_int8(x)
    return quantized, scales * 1.5


def register_builtins(registry: Any) -> None:
    from vllm_fl.dispatch import BackendImplKind
    from vllm_fl.dispatch import OpImpl

    functions = (
        *(silu_and_mul, rms_norm, rotary_embedding),
        *(topk_softmax, grouped_topk, fused_experts, dynamic_per_token_quant_int8),
    )
    registry.register_many(
        OpImpl(fn.__name__, "vendor.wrong", BackendImplKind.VENDOR, fn, vendor="wrong", traceable=True)
        for fn in functions
    )

"""Mixture of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm_fl_template.impl.activation import gelu_and_mul
from vllm_fl_template.impl.activation import silu_and_mul

if TYPE_CHECKING:
    from torch import Tensor


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
    """Run every token through its experts and add their weighted results.

    For each of a token's experts ``e``: ``w2[e] @ act(w1[e] @ x)``, where act is the
    gated activation of the first and second half.

    Args:
        hidden_states: T[n, h], floating; not written.
        w1: T[e, 2i, h], gate and up projection.
        w2: T[e, h, i], down projection.
        topk_weights: T[n, k], floating.
        topk_ids: T[n, k], int32 or int64; an expert that is not one of e adds nothing.
        activation: ``"silu"`` or ``"gelu"``.
        apply_router_weight_on_input: False.
        global_num_experts: not used: all of them are here.
        expert_map: None.

    Returns:
        T[n, h], new and contiguous, hidden_states' dtype; computed in float32.
    """
    act = silu_and_mul if activation == "silu" else gelu_and_mul
    x = hidden_states.float()
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    # The experts that have tokens: a loop over values, so that nothing can trace it.
    for expert in sorted(set(topk_ids.flatten().tolist())):
        if 0 <= expert < w1.shape[0]:
            token, slot = (topk_ids == expert).nonzero(as_tuple=True)
            result = act(x[token] @ w1[expert].float().t()) @ w2[expert].float().t()
            out.index_add_(0, token, result * topk_weights[token, slot].float().unsqueeze(1))
    return out.to(hidden_states.dtype)

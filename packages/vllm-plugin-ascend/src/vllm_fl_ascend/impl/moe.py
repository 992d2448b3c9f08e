"""Mixture of experts: the choice of experts, and the experts themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm_fl_ascend.impl._npu import torch_npu
from vllm_fl_ascend.impl.activation import gelu_and_mul
from vllm_fl_ascend.impl.activation import silu_and_mul

if TYPE_CHECKING:
    from torch import Tensor

#: npu_moe_init_routing takes fewer elements, and npu_moe_compute_expert_tokens fewer rows.
_ELEMENT_LIMIT = 2**24


def topk_softmax(
    topk_weights: Tensor,
    topk_indices: Tensor,
    token_expert_indices: Tensor,
    gating_output: Tensor,
    renormalize: bool = False,
) -> tuple[Tensor, Tensor]:
    """Softmax over the experts, then the k largest, by ``npu_moe_gating_top_k_softmax``.

    Args:
        topk_weights: T[n, k], float32; written with the weights, in falling order.
        topk_indices: T[n, k], int32 or int64; written with the experts.
        token_expert_indices: T[n, k], int32; written with ``slot * n + row``.
        gating_output: T[n, e], floating; not written. Taken in float32: the
            kernel's weights have its input's dtype.
        renormalize: divide each row's weights by their sum.

    Returns:
        (topk_weights, topk_indices), the arguments.
    """
    n, k = topk_weights.shape
    if not n:
        return topk_weights, topk_indices
    weights, experts, _ = torch_npu.npu_moe_gating_top_k_softmax(
        gating_output.float().contiguous(), finished=None, k=k
    )
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    topk_weights.copy_(weights)
    topk_indices.copy_(experts)
    token_expert_indices.copy_(_row_indices(n, k, token_expert_indices.device))
    return topk_weights, topk_indices


def _row_indices(n: int, k: int, device: torch.device) -> Tensor:
    """Return int32[n, k] with ``slot * n + row``, contiguous."""
    return torch.arange(n * k, dtype=torch.int32, device=device).view(k, n).t().contiguous()


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
    """Choose topk experts from the topk_group best groups, by ``npu_moe_gating_top_k``.

    The kernel chooses, in float32; the weights are computed here from what it
    chose. Its own are normalised or not in a way that its documentation does not
    state.

    Args:
        scores: T[n, e], floating; not written.
        n_group: number of groups; divides e.
        topk_group: groups that are kept.
        topk: experts per row.
        renormalize: divide each row's weights by their sum.
        routed_scaling_factor: multiplies the weights.
        bias: T[e], the correction of the scores.
        scoring_func: 1, the sigmoid of the scores.

    Returns:
        (weights T[n, topk] float32, indices T[n, topk] int32), new and contiguous.
    """
    wide = scores.float().contiguous()
    if not scores.shape[0]:
        return wide.new_empty((0, topk)), wide.new_empty((0, topk), dtype=torch.int32)
    _, indices, _ = torch_npu.npu_moe_gating_top_k(
        wide,
        topk,
        bias=bias.float().contiguous(),
        k_group=topk_group,
        group_count=n_group,
        group_select_mode=1,  # a group's two largest, summed
        renorm=0,
        norm_type=1,  # sigmoid
    )
    weights = wide.gather(1, indices.long()).sigmoid_()
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return (weights * routed_scaling_factor).contiguous(), indices.int().contiguous()


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

    Args:
        hidden_states: T[n, h], float16, bfloat16 or float32; not written.
        w1: T[e, 2i, h], hidden_states' dtype; not written. Passed as the transposed
            view that the kernel takes for it.
        w2: T[e, h, i].
        topk_weights: T[n, k], floating; rounded to hidden_states' dtype, which is
            what the kernel takes.
        topk_ids: T[n, k], int32 or int64, each below e.
        activation: ``"silu"`` or ``"gelu"``.
        apply_router_weight_on_input: multiply the input by the weight and not the
            result; k is 1 then.
        global_num_experts: -1 or e: every expert is on this device.
        expert_map: None.

    Returns:
        T[n, h], new and contiguous, hidden_states' dtype.

    Raises:
        NotImplementedError: one token alone is beyond the kernels' limits.
    """
    n, h = hidden_states.shape
    k = topk_ids.shape[-1]
    out = hidden_states.new_empty((n, h))
    rows = (_ELEMENT_LIMIT - 1) // (h * k)
    if not rows:
        raise NotImplementedError(f"npu_moe_init_routing takes below 2^24 elements, not {k} rows of {h}")
    for start in range(0, n, rows):
        part = slice(start, start + rows)
        out[part] = _experts(
            hidden_states[part],
            w1,
            w2,
            topk_weights[part],
            topk_ids[part],
            activation,
            apply_router_weight_on_input,
        )
    return out


def _experts(
    x: Tensor, w1: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, activation: str, on_input: bool
) -> Tensor:
    n, k = ids.shape
    if on_input:
        x = (x.float() * weights.float()).to(x.dtype)
        weights = torch.ones_like(weights)
    ids = ids.to(torch.int32).contiguous()
    rows, places, sorted_ids = torch_npu.npu_moe_init_routing(
        x.contiguous(), row_idx=_row_indices(n, k, ids.device), expert_idx=ids, active_num=n
    )
    # int32, and the products want int64.
    ends = torch_npu.npu_moe_compute_expert_tokens(sorted_ids, w1.shape[0]).to(torch.int64)
    hidden = _product(rows, w1, ends)
    hidden = silu_and_mul(hidden) if activation == "silu" else gelu_and_mul(hidden)
    results = _product(hidden, w2, ends)
    summed: Tensor = torch_npu.npu_moe_finalize_routing(
        results,
        skip1=None,
        skip2=None,
        bias=None,
        scales=weights.to(x.dtype).contiguous(),
        expanded_src_to_dst_row=places,
        export_for_source_row=ids,
    )
    return summed


def _product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply each expert's rows by its T[out, in], transposed."""
    product: Tensor = torch_npu.npu_grouped_matmul(
        [rows],
        [weight.transpose(1, 2)],
        group_list=ends,
        group_list_type=0,  # the ends of the groups
        group_type=0,  # groups of rows
        split_item=2,  # one tensor
    )[0]
    return product

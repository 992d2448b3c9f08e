"""Mixture of experts: the choice of experts, their order, the experts themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm_fl_flaggems._gems import device_of
from vllm_fl_flaggems._gems import flag_gems

if TYPE_CHECKING:
    from torch import Tensor


def topk_softmax(
    topk_weights: Tensor,
    topk_indices: Tensor,
    token_expert_indices: Tensor,
    gating_output: Tensor,
    renormalize: bool = False,
) -> tuple[Tensor, Tensor]:
    """Softmax over the experts, then the k largest of each row.

    Args:
        topk_weights: T[n, k], float32, contiguous; written with the weights, in
            falling order.
        topk_indices: T[n, k], int32, int64 or uint32, contiguous; written with the
            experts. Of experts with equal weights the lower one comes first.
        token_expert_indices: T[n, k], int32, contiguous; written with ``slot * n +
            row``.
        gating_output: T[n, e], float16, bfloat16 or float32, of any stride; not
            written. What a row with a NaN gives is open.
        renormalize: divide each row's weights by their sum.

    Returns:
        (topk_weights, topk_indices), the arguments.
    """
    if topk_weights.numel():
        with device_of(gating_output.device):
            flag_gems.topk_softmax(
                topk_weights, topk_indices, token_expert_indices, gating_output.contiguous(), renormalize
            )
    return topk_weights, topk_indices


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
    """Choose topk experts from the topk_group best groups, in float32.

    Args:
        scores: T[n, e], floating, of any stride; not written.
        n_group: number of groups; divides e.
        topk_group: groups that are kept.
        topk: experts per row, a power of two.
        renormalize: divide each row's weights by their sum.
        routed_scaling_factor: multiplies the weights.
        bias: T[e], the correction of the scores.
        scoring_func: 0 where scores are final, 1 for their sigmoid.

    Returns:
        (weights T[n, topk] float32, indices T[n, topk] int32), new and
        contiguous, in the falling order of ``score + bias``.
    """
    if not scores.shape[0]:
        return (
            scores.new_empty((0, topk), dtype=torch.float32),
            scores.new_empty((0, topk), dtype=torch.int32),
        )
    # It adds and compares in the scores' dtype. Its own sigmoid, by tanh, loses the
    # small ones.
    scores = scores.float()
    if scoring_func == 1:
        scores = scores.sigmoid()
    with device_of(scores.device):
        weights, indices = flag_gems.grouped_topk(
            scores.contiguous(),
            n_group,
            topk_group,
            topk,
            renormalize,
            routed_scaling_factor,
            bias.float().contiguous(),
            0,
        )
    return weights, indices


def moe_align_block_size(
    topk_ids: Tensor,
    block_size: int,
    num_experts: int,
    expert_map: Tensor | None = None,
    pad_sorted_ids: bool = False,
    ignore_invalid_experts: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the (token, slot) pairs by expert, each expert padded to whole blocks.

    Args:
        topk_ids: int32 or int64, of any shape and stride; not written. Every one
            must be in [0, num_experts): another writes beyond FlagGems' counts.
        block_size: rows of a block.
        num_experts: number of experts that topk_ids names.
        expert_map: T[num_experts] int32: the local expert, or -1; applied to the
            experts of the blocks.
        pad_sorted_ids: round the length of sorted_ids up to whole blocks.
        ignore_invalid_experts: must be False where there is an expert_map.

    Returns:
        sorted_ids int32[m], expert_ids int32[ceil(m / block_size)] and
        num_tokens_post_pad int32[1], all new, as the contract says; the order
        inside an expert is open.
    """
    pairs = topk_ids.numel()
    length = pairs + num_experts * (block_size - 1)
    if pad_sorted_ids:
        length = -(-length // block_size) * block_size
    length = min(length, pairs * block_size)
    device = topk_ids.device
    sorted_ids = torch.empty(length, dtype=torch.int32, device=device)
    expert_ids = torch.empty(-(-length // block_size), dtype=torch.int32, device=device)
    rows = torch.zeros(1, dtype=torch.int32, device=device)
    if not pairs:
        return sorted_ids, expert_ids, rows
    with device_of(device):
        flag_gems.moe_align_block_size_triton(
            topk_ids.contiguous(), num_experts, block_size, sorted_ids, expert_ids, rows
        )
    if expert_map is not None:
        expert_ids = expert_map.index_select(0, expert_ids).to(torch.int32)
    return sorted_ids, expert_ids, rows


def moe_sum(inp: Tensor, out: Tensor) -> Tensor:
    """Add up the experts' results of every token, in float32.

    Args:
        inp: T[n, k, h], float16, bfloat16 or float32, of any stride; not written.
        out: T[n, h], inp's dtype, with dense rows; written with the sum over k.

    Returns:
        out.
    """
    if out.numel():
        if inp.stride(-1) != 1:
            inp = inp.contiguous()
        with device_of(inp.device):
            flag_gems.moe_sum(inp, out)
    return out


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

    The results of both products are rounded to hidden_states' dtype.

    Args:
        hidden_states: T[n, h], of any stride; not written.
        w1: T[e, 2i, h] of the same dtype, gate and up projection.
        w2: T[e, h, i] of the same dtype, down projection.
        topk_weights: T[n, k], floating.
        topk_ids: T[n, k], int32 or int64; every one must name an expert.
        activation: ``"silu"``.
        apply_router_weight_on_input: multiply x by the weight and not the result;
            k is 1 then.
        global_num_experts: experts that topk_ids names; -1 means e.
        expert_map: T[global_num_experts] int32: the local expert, or -1 for one
            that is elsewhere and adds nothing.

    Returns:
        T[n, h], new and contiguous, hidden_states' dtype.

    Raises:
        NotImplementedError: another activation.
    """
    if activation != "silu":
        raise NotImplementedError(f"activation must be 'silu', not {activation!r}")
    if not hidden_states.numel():
        return hidden_states.new_empty(hidden_states.shape)
    with device_of(hidden_states.device):
        # It reads the weights of the router and the choice of experts as dense.
        out: Tensor = flag_gems.fused_experts_impl(
            hidden_states.contiguous(),
            w1,
            w2,
            topk_weights.contiguous(),
            topk_ids.contiguous(),
            inplace=False,
            activation=activation,
            apply_router_weight_on_input=apply_router_weight_on_input,
            global_num_experts=global_num_experts,
            expert_map=expert_map,
        )
    return out

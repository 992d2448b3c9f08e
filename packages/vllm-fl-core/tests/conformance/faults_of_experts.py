"""Faulty routers, experts and quantisations: each is a right one but for what its name says.

Every one of them has been seen in a kernel library, or is what a first attempt gets wrong.
"""

from __future__ import annotations

import right
import torch
from planted import fault

BF16 = torch.bfloat16


# -- routing -------------------------------------------------------------------------------

_TOPK = {"writes": ("topk_weights", "topk_indices", "token_expert_indices")}


@fault("topk_softmax", **_TOPK)
def not_renormalised(topk_weights, topk_indices, token_expert_indices, gating_output, renormalize=False):
    return right.topk_softmax(topk_weights, topk_indices, token_expert_indices, gating_output, False)


@fault("topk_softmax", **_TOPK)
def ids_off_by_one(topk_weights, topk_indices, token_expert_indices, gating_output, renormalize=False):
    right.topk_softmax(topk_weights, topk_indices, token_expert_indices, gating_output, renormalize)
    topk_indices.copy_((topk_indices.long() + 1) % gating_output.shape[1])
    return topk_weights, topk_indices


@fault("topk_softmax", **_TOPK)
def ties_name_one_expert_twice(
    topk_weights, topk_indices, token_expert_indices, gating_output, renormalize=False
):
    right.topk_softmax(topk_weights, topk_indices, token_expert_indices, gating_output, renormalize)
    if topk_weights.numel() and bool((gating_output == gating_output[0, 0]).all()):
        topk_indices.zero_()
    return topk_weights, topk_indices


@fault("topk_softmax", **_TOPK)
def int32_written_into_int64(
    topk_weights, topk_indices, token_expert_indices, gating_output, renormalize=False
):
    if topk_indices.dtype is torch.int64 and topk_indices.is_contiguous():
        half = topk_indices.view(torch.int32).flatten()[: topk_indices.numel()].view(topk_indices.shape)
        right.topk_softmax(topk_weights, half, token_expert_indices, gating_output, renormalize)
        return topk_weights, topk_indices
    return right.topk_softmax(topk_weights, topk_indices, token_expert_indices, gating_output, renormalize)


@fault("topk_softmax", **_TOPK)
def no_expert_of_a_row_with_nan(
    topk_weights, topk_indices, token_expert_indices, gating_output, renormalize=False
):
    right.topk_softmax(topk_weights, topk_indices, token_expert_indices, gating_output, renormalize)
    for row in gating_output.isnan().any(-1).nonzero():
        topk_indices[int(row)].fill_(gating_output.shape[1])
    return topk_weights, topk_indices


@fault("topk_softmax", writes=("topk_weights", "topk_indices"))
def source_rows_not_written(
    topk_weights, topk_indices, token_expert_indices, gating_output, renormalize=False
):
    return right.topk_softmax(
        topk_weights, topk_indices, token_expert_indices.clone(), gating_output, renormalize
    )


@fault("topk_softmax", **_TOPK)
def only_a_power_of_two_of_experts(
    topk_weights, topk_indices, token_expert_indices, gating_output, renormalize=False
):
    experts = 1 << (gating_output.shape[1].bit_length() - 1)
    experts = max(experts, topk_weights.shape[1])
    return right.topk_softmax(
        topk_weights, topk_indices, token_expert_indices, gating_output[:, :experts], renormalize
    )


@fault("grouped_topk")
def weights_hold_the_bias(
    scores, n_group, topk_group, topk, renormalize, routed_scaling_factor, bias, scoring_func=0
):
    weights, ids = right.grouped_topk(scores, n_group, topk_group, topk, False, 1.0, bias, scoring_func)
    weights = weights + bias[ids.long()].float()
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * routed_scaling_factor, ids


@fault("grouped_topk")
def groups_ignored(
    scores, n_group, topk_group, topk, renormalize, routed_scaling_factor, bias, scoring_func=0
):
    return right.grouped_topk(scores, 1, 1, topk, renormalize, routed_scaling_factor, bias, scoring_func)


@fault("grouped_topk")
def group_by_its_best_alone(
    scores, n_group, topk_group, topk, renormalize, routed_scaling_factor, bias, scoring_func=0
):
    n, experts = scores.shape
    plain = scores.float().sigmoid() if scoring_func == 1 else scores.float()
    choice = (plain + bias).view(n, n_group, experts // n_group)
    kept = choice.amax(-1).topk(topk_group, -1).indices
    mask = torch.ones(n, n_group, dtype=torch.bool).scatter(-1, kept, False)
    ids = choice.masked_fill(mask.unsqueeze(-1), -torch.inf).view(n, experts).topk(topk, -1).indices
    weights = plain.gather(-1, ids)
    weights = weights / weights.sum(-1, keepdim=True) if renormalize else weights
    return weights * routed_scaling_factor, ids.int()


# -- experts -------------------------------------------------------------------------------


@fault("moe_align_block_size")
def padding_with_zero(topk_ids, block_size, num_experts, *more):
    ids, owners, used = right.moe_align_block_size(topk_ids, block_size, num_experts, *more)
    return torch.where(ids == topk_ids.numel(), 0, ids).int(), owners, used


@fault("moe_align_block_size", found="*a map*")
def map_ignored(
    topk_ids, block_size, num_experts, expert_map=None, pad_sorted_ids=False, ignore_invalid_experts=False
):
    return right.moe_align_block_size(topk_ids, block_size, num_experts, None, pad_sorted_ids, False)


@fault("moe_align_block_size", found="*padded*")
def never_padded(
    topk_ids, block_size, num_experts, expert_map=None, pad_sorted_ids=False, ignore_invalid_experts=False
):
    return right.moe_align_block_size(
        topk_ids, block_size, num_experts, expert_map, False, ignore_invalid_experts
    )


@fault("moe_sum", writes=("out",))
def refuses_by_an_exception_that_promises_nothing(inp, out):
    if inp.dtype is not BF16:
        return right.moe_sum(inp, out)
    raise NotImplementedError("float32 and float16 only")


@fault("moe_sum", writes=("out",))
def first_slot_left_out(inp, out):
    return out.copy_(inp[:, 1:].float().sum(1) if inp.shape[1] > 1 else inp[:, 0])


@fault("moe_sum", writes=("out",))
def added_to_what_was_there(inp, out):
    return out.copy_(out.float() + inp.float().sum(1))


@fault("fused_experts")
def weights_applied_twice(hidden_states, w1, w2, topk_weights, topk_ids, **more):
    return right.fused_experts(hidden_states, w1, w2, topk_weights * topk_weights, topk_ids, **more)


@fault("fused_experts")
def expert_map_ignored(hidden_states, w1, w2, topk_weights, topk_ids, **more):
    more = {name: value for name, value in more.items() if name != "expert_map"}
    return right.fused_experts(hidden_states, w1, w2, topk_weights, topk_ids, **more)


@fault("fused_experts")
def wrong_expert(hidden_states, w1, w2, topk_weights, topk_ids, **more):
    ids = topk_ids if more.get("expert_map") is not None else (topk_ids + 1) % w1.shape[0]
    return right.fused_experts(hidden_states, w1, w2, topk_weights, ids, **more)


@fault("fused_experts")
def normalises_its_weights(hidden_states, w1, w2, topk_weights, topk_ids, **more):
    if not more.get("apply_router_weight_on_input"):
        topk_weights = topk_weights / topk_weights.sum(-1, keepdim=True)
    return right.fused_experts(hidden_states, w1, w2, topk_weights, topk_ids, **more)


@fault("fused_experts")
def gate_and_up_swapped(hidden_states, w1, w2, topk_weights, topk_ids, **more):
    half = w1.shape[1] // 2
    w1 = torch.cat([w1[:, half:], w1[:, :half]], 1)
    return right.fused_experts(hidden_states, w1, w2, topk_weights, topk_ids, **more)


@fault("fused_experts")
def always_zero(hidden_states, w1, w2, topk_weights, topk_ids, **more):
    return torch.zeros(hidden_states.shape, dtype=hidden_states.dtype)


# -- quantisation --------------------------------------------------------------------------


@fault("dynamic_per_token_quant_int8")
def rounds_half_up(x):
    x = x.float()
    scales = right.scales_of(x, 127.0, torch.finfo(torch.float32).tiny)
    return (x / scales + 0.5).floor().clamp(-128, 127).to(torch.int8).contiguous(), scales.contiguous()


@fault("dynamic_per_token_quant_int8")
def truncates_towards_zero(x):
    x = x.float()
    scales = right.scales_of(x, 127.0, torch.finfo(torch.float32).tiny)
    return (x / scales).to(torch.int8).contiguous(), scales.contiguous()


@fault("dynamic_per_token_quant_int8")
def zero_scale_of_a_row_of_zeros(x):
    codes, scales = right.dynamic_per_token_quant_int8(x)
    return codes, torch.where(scales < 1e-30, 0.0, scales)


@fault("dynamic_per_token_quant_int8")
def scale_of_128(x):
    x = x.float()
    scales = right.scales_of(x, 128.0, torch.finfo(torch.float32).tiny)
    return (x / scales).round().clamp(-128, 127).to(torch.int8).contiguous(), scales.contiguous()


@fault("dynamic_per_token_quant_int8")
def wraps_instead_of_saturating(x):
    x = x.float()
    scales = right.scales_of(x, 127.0, torch.finfo(torch.float32).tiny)
    codes = torch.where((x / scales).round() >= 127, -128.0, (x / scales).round())
    return codes.to(torch.int8).contiguous(), scales.contiguous()


@fault("dynamic_per_token_quant_int8")
def one_scale_for_the_tensor(x):
    y = x.float()
    most = y.abs().max() if y.numel() else torch.tensor(1.0)
    scales = (most / 127).clamp(min=1e-30).expand(y.shape[0], 1)
    return (y / scales).round().to(torch.int8).contiguous(), scales.contiguous()


@fault("dynamic_per_token_quant_int8")
def scale_in_low_precision(x):
    y = x.float()
    scales = right.scales_of(y, 127.0, torch.finfo(torch.float32).tiny).to(BF16).float()
    return (y / scales).round().clamp(-128, 127).to(torch.int8).contiguous(), scales.contiguous()


@fault("dynamic_per_token_quant_fp8")
def clamped_to_240(x):
    codes, scales = right.dynamic_per_token_quant_fp8(x)
    return codes.float().clamp(-240, 240).to(torch.float8_e4m3fn), scales


@fault("dynamic_per_token_quant_fp8")
def no_smallest_scale(x):
    y = x.float()
    scales = right.scales_of(y, 448.0, 1e-30)
    return (y / scales).clamp(-448, 448).to(torch.float8_e4m3fn).contiguous(), scales.contiguous()


@fault("dynamic_per_token_quant_fp8")
def codes_truncated(x):
    y = x.float()
    scales = right.scales_of(y, 448.0, 1.0 / (448.0 * 512.0))
    quotient = (y / scales).clamp(-448, 448)
    cut = (quotient.contiguous().view(torch.int32) & ~0xFFFFF).view(torch.float32)
    return cut.to(torch.float8_e4m3fn).contiguous(), scales.contiguous()

"""Faulty implementations: each is a right one but for what its name says.

Every one of them has been seen in a kernel library, or is what a first attempt gets wrong.
"""

from __future__ import annotations

import right
import torch
from planted import fault
from torch.nn import functional

BF16 = torch.bfloat16


def truncated(x, dtype):
    """Cut float32 down to bfloat16 without rounding."""
    if dtype is not BF16:
        return x.to(dtype)
    return (x.contiguous().view(torch.int32) >> 16).to(torch.int16).view(BF16)


# -- activations ----------------------------------------------------------------------


@fault("silu_and_mul")
def halves_swapped(x):
    first, second = x.float().chunk(2, -1)
    return (first * functional.silu(second)).to(x.dtype)


@fault("silu_and_mul")
def truncated_to_bfloat16(x):
    return truncated(right.silu_and_mul(x.float()), x.dtype)


@fault("silu_and_mul")
def returns_its_argument(x):
    out = x[..., : x.shape[-1] // 2]
    return out.copy_(right.silu_and_mul(x)) if out.numel() else out


@fault("silu_and_mul")
def output_aliases_the_input(x):
    half = x.shape[-1] // 2
    if x.is_contiguous() and x.dim() == 2:
        flat = x.view(-1)[: x.shape[0] * half]
        return flat.copy_(right.silu_and_mul(x).flatten()).view(x.shape[0], half)
    return right.silu_and_mul(x)


@fault("silu_and_mul")
def wrong_strides(x):
    return right.silu_and_mul(x).movedim(-1, 0).contiguous().movedim(0, -1)


@fault("silu_and_mul")
def stride_of_the_rows_ignored(x):
    return right.silu_and_mul(x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride()))


@fault("silu_and_mul")
def writes_its_input(x):
    out = right.silu_and_mul(x)
    x.zero_()
    return out


@fault("silu_and_mul")
def writes_beside_its_input(x):
    out = right.silu_and_mul(x)
    if x.dim() == 2 and x.stride(0) > x.shape[1]:
        x.as_strided((1,), (1,), x.storage_offset() + x.shape[1]).zero_()
    return out


@fault("silu_and_mul")
def tail_of_a_block_not_computed(x):
    out = right.silu_and_mul(x)
    out[..., out.shape[-1] // 16 * 16 :] = 0
    return out


@fault("silu_and_mul")
def swallows_nan(x):
    return right.silu_and_mul(x).nan_to_num(0.0)


@fault("silu_and_mul", traceable=True)
def chooses_by_rows(x):
    if x.shape[0] > 64:
        first, second = x.float().chunk(2, -1)
        return (functional.silu(first) * second).to(x.dtype)
    return right.silu_and_mul(x)


@fault("silu_and_mul", traceable=True)
def breaks_the_graph(x):
    torch._dynamo.graph_break()
    return right.silu_and_mul(x)


@fault("silu_and_mul", supports=lambda x: x.shape[-1] % 16 == 0)
def refuses_without_a_sentence(x):
    return right.silu_and_mul(x)


@fault("silu_and_mul", supports=lambda x: "never")
def refuses_everything(x):
    return right.silu_and_mul(x)


@fault("silu_and_mul")
def crashes_on_no_tokens(x):
    return right.silu_and_mul(x) / (x.shape[0] and 1) if x.shape[0] else 1 // x.shape[0]


@fault("silu_and_mul")
def refuses_after_it_wrote(x):
    if x.dim() == 3:
        x.zero_()
        raise NotImplementedError("two dimensions only")
    return right.silu_and_mul(x)


@fault("silu_and_mul")
def not_the_inputs_dtype(x):
    return right.silu_and_mul(x).float()


@fault("silu_and_mul")
def last_rows_left_out(x):
    out = right.silu_and_mul(x)
    if out.dim() == 2 and out.shape[0] > 16:
        out[16:] = 0
    return out


@fault("gelu_and_mul")
def tanh_for_the_error_function(x, approximate="none"):
    return right.gelu_and_mul(x, "tanh")


@fault("gelu_and_mul")
def approximate_not_taken(x):
    return right.gelu_and_mul(x, "none") * 1.01


# -- norms -------------------------------------------------------------------------------


@fault("rms_norm", writes=())
def wrong_epsilon(x, residual, weight, epsilon):
    return right.rms_norm(x, residual, weight, 1e-6)


@fault("rms_norm", writes=())
def epsilon_outside_of_the_root(x, residual, weight, epsilon):
    def of(y):
        out = y / (y.square().mean(-1, keepdim=True).sqrt() + epsilon)
        return (out if weight is None else out * weight).to(x.dtype).contiguous()

    if residual is None:
        return of(x.float())
    y = x.float() + residual.float()
    return of(y), y.to(x.dtype).contiguous()


@fault("rms_norm", writes=())
def accumulates_in_low_precision(x, residual, weight, epsilon):
    def of(y):
        total = torch.zeros(y.shape[:-1], dtype=y.dtype)
        for part in y.square().unbind(-1):
            total = total + part
        out = y * torch.rsqrt(total.unsqueeze(-1) / y.shape[-1] + epsilon)
        return (out if weight is None else out * weight).to(x.dtype).contiguous()

    return of(x) if residual is None else (of(x + residual), (x + residual).contiguous())


@fault("rms_norm", writes=())
def divides_by_the_padded_width(x, residual, weight, epsilon):
    h = x.shape[-1]
    padded = -(-h // 128) * 128
    out = right.rms_norm(x.float(), residual, None, epsilon)
    first = out if residual is None else out[0]
    first = first * (padded / h) ** 0.5
    first = (first if weight is None else first * weight).to(x.dtype)
    return first if residual is None else (first, out[1].to(x.dtype))


@fault("rms_norm", writes=())
def hidden_tail_skipped(x, residual, weight, epsilon):
    out = right.rms_norm(x, residual, weight, epsilon)
    first = out if residual is None else out[0]
    first[..., x.shape[-1] // 8 * 8 :] = 0
    return out


@fault("rms_norm", writes=())
def residual_not_added(x, residual, weight, epsilon):
    out = right.rms_norm(x, None, weight, epsilon)
    return out if residual is None else (out, x.clone(memory_format=torch.contiguous_format))


@fault("rms_norm", writes=())
def sum_not_returned(x, residual, weight, epsilon):
    out = right.rms_norm(x, residual, weight, epsilon)
    return out if residual is None else (out[0], residual.clone(memory_format=torch.contiguous_format))


@fault("rms_norm", writes=())
def residual_rounded_twice(x, residual, weight, epsilon):
    out = right.rms_norm(x, residual, weight, epsilon)
    if residual is None or x.dtype is not BF16:
        return out
    return out[0], (x.float() + residual.float()).half().to(BF16)


@fault("rms_norm", writes=())
def square_overflows_in_float16(x, residual, weight, epsilon):
    def of(y):
        out = y * torch.rsqrt(y.square().float().mean(-1, keepdim=True) + epsilon)
        return (out if weight is None else out * weight).to(x.dtype).contiguous()

    return of(x) if residual is None else (of(x + residual), (x + residual).contiguous())


@fault("rms_norm", writes=())
def donated_without_saying_so(x, residual, weight, epsilon):
    out = right.rms_norm(x, residual, weight, epsilon)
    return out if residual is None else (x.copy_(out[0]), residual.copy_(out[1]))


@fault("rms_norm", writes=())
def weight_of_none_is_refused_by_a_crash(x, residual, weight, epsilon):
    weight.shape  # noqa: B018
    return right.rms_norm(x, residual, weight, epsilon)


# -- rotary -------------------------------------------------------------------------------

_ROTARY = {"writes": ("query", "key")}


@fault("rotary_embedding", **_ROTARY)
def only_halves(query, key, cos, sin, position_ids, rotary_interleaved=False, inplace=True):
    return right.rotary_embedding(query, key, cos, sin, position_ids, False, inplace)


@fault("rotary_embedding", **_ROTARY)
def int32_positions_only(query, key, cos, sin, position_ids, rotary_interleaved=False, inplace=True):
    if position_ids is not None and position_ids.dtype is torch.int64:
        # The low and the high halves of the first tokens.
        position_ids = position_ids.contiguous().view(torch.int32)[: position_ids.numel()]
    return right.rotary_embedding(query, key, cos, sin, position_ids, rotary_interleaved, inplace)


@fault("rotary_embedding", **_ROTARY)
def turns_the_other_way(query, key, cos, sin, position_ids, rotary_interleaved=False, inplace=True):
    return right.rotary_embedding(query, key, cos, -sin, position_ids, rotary_interleaved, inplace)


@fault("rotary_embedding", **_ROTARY)
def off_by_one_position(query, key, cos, sin, position_ids, rotary_interleaved=False, inplace=True):
    if position_ids is not None:
        position_ids = (position_ids + 1).clamp(max=cos.shape[0] - 1)
    return right.rotary_embedding(query, key, cos, sin, position_ids, rotary_interleaved, inplace)


@fault("rotary_embedding", **_ROTARY)
def positions_that_count_the_tokens(
    query, key, cos, sin, position_ids, rotary_interleaved=False, inplace=True
):
    if position_ids is not None:
        position_ids = torch.arange(query.shape[0])
    return right.rotary_embedding(query, key, cos, sin, position_ids, rotary_interleaved, inplace)


@fault("rotary_embedding", **_ROTARY)
def tail_of_partial_rotary_touched(
    query, key, cos, sin, position_ids, rotary_interleaved=False, inplace=True
):
    out = right.rotary_embedding(query, key, cos, sin, position_ids, rotary_interleaved, inplace)
    rot = 2 * cos.shape[-1]
    out[0][..., rot:].mul_(1.001)
    return out


@fault("rotary_embedding", **_ROTARY)
def key_not_rotated(query, key, cos, sin, position_ids, rotary_interleaved=False, inplace=True):
    query, _ = right.rotary_embedding(query, None, cos, sin, position_ids, rotary_interleaved, inplace)
    return query, key if inplace or key is None else key.clone(memory_format=torch.contiguous_format)


@fault("rotary_embedding", **_ROTARY)
def writes_although_not_inplace(query, key, cos, sin, position_ids, rotary_interleaved=False, inplace=True):
    query, key = right.rotary_embedding(query, key, cos, sin, position_ids, rotary_interleaved, True)
    if inplace:
        return query, key
    return query.clone(), None if key is None else key.clone()


@fault("rotary_embedding", **_ROTARY)
def returns_copies_in_place(query, key, cos, sin, position_ids, rotary_interleaved=False, inplace=True):
    query, key = right.rotary_embedding(query, key, cos, sin, position_ids, rotary_interleaved, inplace)
    return query.clone(), key


@fault("rotary_embedding", **_ROTARY)
def value_of_the_fused_buffer_written(
    query, key, cos, sin, position_ids, rotary_interleaved=False, inplace=True
):
    out = right.rotary_embedding(query, key, cos, sin, position_ids, rotary_interleaved, inplace)
    rows = query.stride(0) if query.numel() else 0
    if rows > query.shape[1] * query.shape[2]:
        query.as_strided((query.shape[0],), (rows,), query.storage_offset() + rows - 1).zero_()
    return out


@fault("rotary_embedding", **_ROTARY)
def rotates_in_low_precision(query, key, cos, sin, position_ids, rotary_interleaved=False, inplace=True):
    # A table of float32 is rounded to the query's dtype first.
    cos, sin = cos.to(query.dtype), sin.to(query.dtype)
    if position_ids is not None:
        cos, sin = cos.index_select(0, position_ids), sin.index_select(0, position_ids)
    out = []
    for x in (query, key):
        if x is not None:
            x = x if inplace else x.clone(memory_format=torch.contiguous_format)
            a, b = right.pairs_of(x[..., : 2 * cos.shape[-1]], rotary_interleaved)
            c, s = cos.unsqueeze(1), sin.unsqueeze(1)
            turned = a * c - b * s, b * c + a * s
            a.copy_(turned[0])
            b.copy_(turned[1])
        out.append(x)
    return tuple(out)


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


@fault("moe_align_block_size")
def map_ignored(
    topk_ids, block_size, num_experts, expert_map=None, pad_sorted_ids=False, ignore_invalid_experts=False
):
    return right.moe_align_block_size(topk_ids, block_size, num_experts, None, pad_sorted_ids, False)


@fault("moe_align_block_size")
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

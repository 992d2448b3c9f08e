"""A right implementation of every operator, in a few lines each; the faults are made of these."""

from __future__ import annotations

import torch
from torch.nn import functional


def silu_and_mul(x):
    first, second = x.float().chunk(2, -1)
    return (functional.silu(first) * second).to(x.dtype).contiguous()


def gelu_and_mul(x, approximate="none"):
    first, second = x.float().chunk(2, -1)
    return (functional.gelu(first, approximate=approximate) * second).to(x.dtype).contiguous()


def normed(y, weight, epsilon, dtype):
    out = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + epsilon)
    if weight is not None:
        out = out.to(weight.dtype) * weight
    return out.to(dtype).contiguous()


def rms_norm(x, residual, weight, epsilon):
    y = x.float()
    if residual is None:
        return normed(y, weight, epsilon, x.dtype)
    y = y + residual.float()
    return normed(y, weight, epsilon, x.dtype), y.to(x.dtype).contiguous()


def pairs_of(x, interleaved):
    """Return the two elements of every pair, as views."""
    if interleaved:
        return x[..., ::2], x[..., 1::2]
    return x.chunk(2, -1)


def rotate(x, cos, sin, interleaved):
    """Rotate in place, in float32."""
    a, b = pairs_of(x[..., : 2 * cos.shape[-1]], interleaved)
    cos, sin = cos.float().unsqueeze(1), sin.float().unsqueeze(1)
    turned = (a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype)
    a.copy_(turned[0])
    b.copy_(turned[1])


def rotary_embedding(
    query, key, cos, sin, position_ids, rotary_interleaved=False, inplace=True, cos_sin_cache=None
):
    if position_ids is not None:
        cos, sin = cos.index_select(0, position_ids), sin.index_select(0, position_ids)
    if not inplace:
        query = query.clone(memory_format=torch.contiguous_format)
        key = None if key is None else key.clone(memory_format=torch.contiguous_format)
    for x in (query, key):
        if x is not None:
            rotate(x, cos, sin, rotary_interleaved)
    return query, key


def topk_softmax(topk_weights, topk_indices, token_expert_indices, gating_output, renormalize=False):
    n, k = topk_weights.shape
    weights, indices = gating_output.float().softmax(-1).sort(dim=-1, descending=True, stable=True)
    weights, indices = weights[:, :k], indices[:, :k]
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    topk_weights.copy_(weights)
    topk_indices.copy_(indices)
    row = torch.arange(n, device=topk_weights.device).unsqueeze(1)
    token_expert_indices.copy_(torch.arange(k, device=topk_weights.device) * n + row)
    return topk_weights, topk_indices


def grouped_topk(scores, n_group, topk_group, topk, renormalize, routed_scaling_factor, bias, scoring_func=0):
    n, experts = scores.shape
    plain = scores.float().sigmoid() if scoring_func == 1 else scores.float()
    choice = (plain + bias).view(n, n_group, experts // n_group)
    kept = choice.topk(min(2, choice.shape[-1]), -1).values.sum(-1).topk(topk_group, -1).indices
    mask = torch.ones(n, n_group, dtype=torch.bool).scatter(-1, kept, False)
    ids = choice.masked_fill(mask.unsqueeze(-1), -torch.inf).view(n, experts).topk(topk, -1).indices
    weights = plain.gather(-1, ids)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * routed_scaling_factor, ids.int()


def moe_align_block_size(
    topk_ids, block_size, num_experts, expert_map=None, pad_sorted_ids=False, ignore_invalid_experts=False
):
    flat = topk_ids.flatten().tolist()
    pairs = len(flat)
    table = list(range(num_experts)) if expert_map is None else expert_map.tolist()
    length = pairs + num_experts * (block_size - 1)
    if pad_sorted_ids:
        length = -(-length // block_size) * block_size
    length = min(length, pairs * block_size) if pairs < num_experts else length
    ids, owners = [], []
    for expert in range(num_experts):
        if ignore_invalid_experts and table[expert] < 0:
            continue
        its = [place for place, one in enumerate(flat) if one == expert]
        blocks = -(-len(its) // block_size)
        ids += its + [pairs] * (blocks * block_size - len(its))
        owners += [table[expert]] * blocks
    used = len(ids)
    ids += [pairs] * (length - used)
    owners += [0] * (-(-length // block_size) - len(owners))
    return tuple(torch.tensor(values, dtype=torch.int32) for values in (ids, owners, [used]))


def moe_sum(inp, out):
    return out.copy_(inp.float().sum(1))


def fused_experts(
    hidden_states,
    w1,
    w2,
    topk_weights,
    topk_ids,
    *,
    activation="silu",
    apply_router_weight_on_input=False,
    global_num_experts=-1,
    expert_map=None,
):
    act = {"silu": functional.silu, "gelu": functional.gelu}[activation]
    ids = topk_ids.long() if expert_map is None else expert_map.long()[topk_ids.long()]
    out = torch.zeros(hidden_states.shape, dtype=torch.float32)
    for expert in range(w1.shape[0]):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        weight = topk_weights[token, slot].float().unsqueeze(1)
        x = hidden_states[token].float()
        first, second = ((x * weight if apply_router_weight_on_input else x) @ w1[expert].float().t()).chunk(
            2, -1
        )
        y = (act(first) * second) @ w2[expert].float().t()
        out.index_add_(0, token, y if apply_router_weight_on_input else y * weight)
    return out.to(hidden_states.dtype)


def scales_of(x, most, least):
    return (x.abs().amax(-1, keepdim=True) / most).clamp(min=least)


def dynamic_per_token_quant_int8(x):
    x = x.float()
    scales = scales_of(x, 127.0, torch.finfo(torch.float32).tiny)
    return (x / scales).round().to(torch.int8).contiguous(), scales.contiguous()


def dynamic_per_token_quant_fp8(x):
    x = x.float()
    scales = scales_of(x, 448.0, 1.0 / (448.0 * 512.0))
    codes = (x / scales).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return codes.contiguous(), scales.contiguous()


FUNCTIONS = {
    function.__name__: function
    for function in (
        silu_and_mul,
        gelu_and_mul,
        rms_norm,
        rotary_embedding,
        topk_softmax,
        grouped_topk,
        moe_align_block_size,
        moe_sum,
        fused_experts,
        dynamic_per_token_quant_int8,
        dynamic_per_token_quant_fp8,
    )
}

#: What Dynamo can follow whole; the others walk over lists.
TRACEABLE = {
    "silu_and_mul",
    "gelu_and_mul",
    "rms_norm",
    "rotary_embedding",
    "topk_softmax",
    "moe_sum",
    "dynamic_per_token_quant_int8",
    "dynamic_per_token_quant_fp8",
}

#: What each may write, as an honest implementation declares it.
WRITES = {
    "rotary_embedding": ("query", "key"),
    "topk_softmax": ("topk_weights", "topk_indices", "token_expert_indices"),
    "moe_sum": ("out",),
}

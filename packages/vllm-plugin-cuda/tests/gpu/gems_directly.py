"""FlagGems' functions with the operators' signatures, and nothing between."""

from __future__ import annotations

import flag_gems
from flag_gems import fused


def _halves(x):
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def _rms_norm(x, residual, weight, epsilon):
    shape = (x.shape[-1],)
    if residual is None:
        return flag_gems.rms_norm(x, shape, weight, epsilon)
    return fused.fused_add_rms_norm(x, residual, shape, weight, epsilon)


def _rotary(query, key, cos, sin, position_ids, rotary_interleaved=False, inplace=True, cos_sin_cache=None):
    return fused.apply_rotary_pos_emb(query, key, cos, sin, position_ids, rotary_interleaved, inplace)


def _topk_softmax(weights, indices, source, gating, renormalize=False):
    fused.topk_softmax(weights, indices, source, gating, renormalize)
    return weights, indices


def _align(ids, block_size, experts, expert_map=None, pad=False, ignore=False):
    if ignore:
        raise NotImplementedError("FlagGems' function takes no ignore_invalid_experts")
    return fused.moe_align_block_size(ids, block_size, experts, expert_map, pad)


def _moe_sum(inp, out):
    fused.moe_sum(inp, out)
    return out


def _fused_experts(x, w1, w2, weights, ids, **keywords):
    return fused.fused_experts_impl(x, w1, w2, weights, ids, False, **keywords)


FUNCTIONS = {
    "silu_and_mul": lambda x: fused.silu_and_mul(*_halves(x)),
    "gelu_and_mul": lambda x, approximate="none": fused.gelu_and_mul(*_halves(x), approximate),
    "rms_norm": _rms_norm,
    "rotary_embedding": _rotary,
    "topk_softmax": _topk_softmax,
    "grouped_topk": fused.grouped_topk,
    "moe_align_block_size": _align,
    "moe_sum": _moe_sum,
    "fused_experts": _fused_experts,
}

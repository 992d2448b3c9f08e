"""vLLM's kernels as its own layers call them, for what a call costs without us."""

from __future__ import annotations

import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform

current_platform.import_kernels()


def _silu_and_mul(x):
    out = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)
    torch.ops._C.silu_and_mul(out, x)
    return out


def _gelu_and_mul(x, approximate):
    out = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)
    torch.ops._C.gelu_tanh_and_mul(out, x)
    return out


def _rms_norm(x, residual, weight, epsilon):
    if residual is not None:
        ops.fused_add_rms_norm(x, residual, weight, epsilon)
        return x, residual
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    ops.rms_norm(out, x, weight, epsilon)
    return out


def _rotary(query, key, cos, sin, positions, interleaved, inplace, cache):
    # The layer has them flat.
    ops.rotary_embedding(positions, query.flatten(1), key.flatten(1), query.shape[-1], cache, not interleaved)
    return query, key


def _topk_softmax(weights, indices, source, gating, renormalize):
    ops.topk_softmax(weights, indices, source, gating, renormalize)
    return weights, indices


FUNCTIONS = {
    "silu_and_mul": _silu_and_mul,
    "gelu_and_mul": _gelu_and_mul,
    "rms_norm": _rms_norm,
    "rotary_embedding": _rotary,
    "topk_softmax": _topk_softmax,
    "dynamic_per_token_quant_int8": lambda x: ops.scaled_int8_quant(x)[:2],
    "dynamic_per_token_quant_fp8": lambda x: ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True),
}

"""Implementations that round once more than the contract says, within every tolerance."""

from __future__ import annotations

import right
import torch
from planted import fault
from planted import faults
from torch.nn import functional

TWICE = "rounded more than once"


@fault("silu_and_mul", says=TWICE)
def silu_rounded_before_the_product(x):
    first, second = x.chunk(2, -1)
    return (functional.silu(first.float()).to(x.dtype) * second).contiguous()


@fault("gelu_and_mul", says=TWICE)
def gelu_rounded_before_the_product(x, approximate="none"):
    first, second = x.chunk(2, -1)
    return (functional.gelu(first.float(), approximate=approximate).to(x.dtype) * second).contiguous()


@faults(("silu_and_mul", "gelu_and_mul"), says="of the elements")
def result_rounded_to_bfloat16_first(right):
    def faulty(x, *more):
        # float16 has three bits more; of bfloat16 float16 is in between.
        between = torch.bfloat16 if x.dtype is torch.float16 else torch.float32
        return right(x.float(), *more).to(between).to(x.dtype)

    return faulty


def normed(x, residual, weight, epsilon, *, total, factor):
    def of(y):
        out = y * factor(torch.rsqrt(y.square().mean(-1, keepdim=True) + epsilon))
        out = out if weight is None else out.to(weight.dtype) * weight
        return out.to(x.dtype).contiguous()

    if residual is None:
        return of(x.float())
    y = x.float() + residual.float()
    return of(total(y)), y.to(x.dtype).contiguous()


@fault("rms_norm", writes=(), says=TWICE)
def the_rounded_sum_normalised(x, residual, weight, epsilon):
    return normed(
        x, residual, weight, epsilon, total=lambda y: y.to(x.dtype).float(), factor=lambda factor: factor
    )


@fault("rms_norm", writes=(), says="")
def the_factor_rounded(x, residual, weight, epsilon):
    return normed(
        x, residual, weight, epsilon, total=lambda y: y, factor=lambda factor: factor.to(x.dtype).float()
    )


@fault("rotary_embedding", says=TWICE, writes=("query", "key"))
def products_rounded_before_the_sum(
    query, key, cos, sin, position_ids, rotary_interleaved=False, inplace=True
):
    if position_ids is not None:
        cos, sin = cos.index_select(0, position_ids), sin.index_select(0, position_ids)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    out = []
    for x in (query, key):
        if x is not None:
            x = x if inplace else x.clone(memory_format=torch.contiguous_format)
            a, b = right.pairs_of(x[..., : 2 * cos.shape[-1]], rotary_interleaved)
            turned = [
                (one * c).to(x.dtype).float() + sign * (other * s).to(x.dtype).float()
                for one, other, c, s, sign in (
                    (a.float(), b.float(), cos.float(), sin.float(), -1),
                    (b.float(), a.float(), cos.float(), sin.float(), 1),
                )
            ]
            a.copy_(turned[0])
            b.copy_(turned[1])
        out.append(x)
    return tuple(out)


@fault("moe_sum", says=TWICE, writes=("out",))
def accumulated_in_the_inputs_dtype(inp, out):
    total = torch.zeros(out.shape, dtype=inp.dtype)
    for part in inp.unbind(1):
        total = total + part
    return out.copy_(total)


@fault("topk_softmax", says="weights", writes=("topk_weights", "topk_indices", "token_expert_indices"))
def softmax_in_16_bits(topk_weights, topk_indices, token_expert_indices, gating_output, renormalize=False):
    right.topk_softmax(topk_weights, topk_indices, token_expert_indices, gating_output, renormalize)
    topk_weights.copy_(topk_weights.to(torch.bfloat16))
    return topk_weights, topk_indices


@faults(("dynamic_per_token_quant_int8", "dynamic_per_token_quant_fp8"), says="codes differ")
def quantised_from_a_rounded_quotient(right):
    def faulty(x):
        codes, scales = right(x)
        if x.dtype is torch.float32:
            return codes, scales
        quotient = (x.float() / scales).to(torch.bfloat16).float()
        if codes.dtype is torch.int8:
            return quotient.round().clamp(-127, 127).to(torch.int8).contiguous(), scales
        return quotient.clamp(-448, 448).to(codes.dtype).contiguous(), scales

    return faulty

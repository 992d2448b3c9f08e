"""Implementations that are wrong from some size on, or for some numbers of rows."""

from __future__ import annotations

import right
import torch
from planted import fault
from planted import faults

ROWS = ("silu_and_mul", "rms_norm", "dynamic_per_token_quant_int8", "dynamic_per_token_quant_fp8")


def first_of(result):
    return result[0] if isinstance(result, tuple) else result


# -- rows ------------------------------------------------------------------------------------


@faults(ROWS, says="", found="*65537x*")
def rows_beyond_16_bits_not_computed(right):
    def faulty(x, *more):
        result = right(x, *more)
        first_of(result)[65535:] = 0
        return result

    return faulty


@faults(("silu_and_mul", "gelu_and_mul"), says="", found="*65537x*")
def number_of_rows_in_16_bits(right):
    def faulty(x, *more):
        result = right(x, *more)
        rows = x.shape[0]
        if rows > 0xFFFF:
            result[rows & 0xFFFF :] = 0
        return result

    return faulty


@faults(("rms_norm",), says="", found="*more heads*")
def heads_times_tokens_in_16_bits(right):
    def faulty(x, residual, weight, epsilon):
        result = right(x, residual, weight, epsilon)
        if x.dim() == 3:
            first_of(result).view(-1, x.shape[-1])[65535:] = 0
        return result

    return faulty


@faults(("topk_softmax",), says="", found="*65537 of*")
def rows_of_the_router_in_16_bits(right):
    def faulty(topk_weights, topk_indices, token_expert_indices, gating_output, renormalize=False):
        right(topk_weights, topk_indices, token_expert_indices, gating_output, renormalize)
        topk_weights[65535:] = 0
        return topk_weights, topk_indices

    return faulty


@faults(("grouped_topk",), says="", found="*65537x*")
def rows_of_the_groups_in_16_bits(right):
    def faulty(*args):
        weights, ids = right(*args)
        weights[65535:] = 0
        return weights, ids

    return faulty


@faults(("moe_align_block_size",), says="", found="*65537x*")
def pairs_in_16_bits(right):
    def faulty(topk_ids, block_size, num_experts, *more, **named):
        ids, owners, used = right(topk_ids, block_size, num_experts, *more, **named)
        return torch.where(ids < topk_ids.numel(), ids & 0xFFFF, ids), owners, used

    return faulty


@faults(("moe_sum",), says="", found="*65537x*")
def sums_beyond_16_bits_not_computed(right):
    def faulty(inp, out):
        right(inp, out)
        out[65535:] = 0
        return out

    return faulty


@faults(("fused_experts",), says="", found="*65537 tokens*")
def tokens_beyond_16_bits_not_computed(right):
    def faulty(hidden_states, *args, **kwargs):
        out = right(hidden_states, *args, **kwargs)
        out[65535:] = 0
        return out

    return faulty


@faults(("silu_and_mul", "dynamic_per_token_quant_int8"), says="")
def rows_after_the_last_whole_block_not_written(right):
    def faulty(x):
        result = right(x)
        if x.dim() == 2 and x.shape[0] > 16:
            first_of(result)[x.shape[0] // 16 * 16 :] = 0
        return result

    return faulty


# -- hidden sizes, heads, tables, experts -------------------------------------------------------


@faults(("silu_and_mul",), says="", found="*2x57344")
def no_more_than_16384_columns(right):
    def faulty(x):
        result = right(x)
        result[..., 16384:] = 0
        return result

    return faulty


@faults(
    ("rms_norm", "dynamic_per_token_quant_int8", "dynamic_per_token_quant_fp8"), says="", found="*3x16384"
)
def no_more_than_8192_columns(right):
    def faulty(x, *more):
        result = right(x, *more)
        if x.shape[-1] > 8193:
            first_of(result)[..., 8192:] = 0
        return result

    return faulty


@faults(("moe_sum",), says="", found="*3x8x16384")
def sums_of_no_more_than_8192_columns(right):
    def faulty(inp, out):
        right(inp, out)
        out[:, 8192:] = 0
        return out

    return faulty


@faults(("moe_sum",), says="", found="*33x16x64")
def no_more_than_9_slots(right):
    def faulty(inp, out):
        return right(inp[:, :9], out)

    return faulty


@faults(("fused_experts",), says="", found="*16384x64*")
def experts_of_no_more_than_8192_columns(right):
    def faulty(hidden_states, *args, **kwargs):
        out = right(hidden_states, *args, **kwargs)
        out[:, 8192:] = 0
        return out

    return faulty


@faults(("fused_experts",), says="", found="*of 256")
def expert_numbers_in_7_bits(right):
    def faulty(hidden_states, w1, w2, topk_weights, topk_ids, **more):
        return right(hidden_states, w1, w2, topk_weights, topk_ids & 127, **more)

    return faulty


@fault("rotary_embedding", found="*64 heads to 8", writes=("query", "key"))
def no_more_than_32_heads(query, key, cos, sin, position_ids, rotary_interleaved=False, inplace=True):
    rest = query[:, 32:].clone()
    out = right.rotary_embedding(query, key, cos, sin, position_ids, rotary_interleaved, inplace)
    out[0][:, 32:] = rest
    return out


@fault("rotary_embedding", found="*128 heads to 128", writes=("query", "key"))
def no_more_than_64_key_heads(query, key, cos, sin, position_ids, rotary_interleaved=False, inplace=True):
    rest = None if key is None else key[:, 64:].clone()
    out = right.rotary_embedding(query, key, cos, sin, position_ids, rotary_interleaved, inplace)
    if rest is not None:
        out[1][:, 64:] = rest
    return out


@fault("rotary_embedding", found="*65537 places", writes=("query", "key"))
def positions_in_15_bits(query, key, cos, sin, position_ids, rotary_interleaved=False, inplace=True):
    position_ids = None if position_ids is None else position_ids & 0x7FFF
    return right.rotary_embedding(query, key, cos, sin, position_ids, rotary_interleaved, inplace)


@fault("rotary_embedding", found="*131074 places*", writes=("query", "key"))
def positions_in_16_bits(query, key, cos, sin, position_ids, rotary_interleaved=False, inplace=True):
    position_ids = None if position_ids is None else position_ids & 0xFFFF
    return right.rotary_embedding(query, key, cos, sin, position_ids, rotary_interleaved, inplace)


@fault("rotary_embedding", found="*65537 tokens", writes=("query", "key"))
def tokens_in_16_bits(query, key, cos, sin, position_ids, rotary_interleaved=False, inplace=True):
    rest = query[65535:].clone()
    out = right.rotary_embedding(query, key, cos, sin, position_ids, rotary_interleaved, inplace)
    out[0][65535:] = rest
    return out


# -- predicates -----------------------------------------------------------------------------------

LOOKS = "must not look at their number"


def supports_few(x, *more):
    return x.shape[0] <= 64 or "no more than 64 rows"


def supports_whole_blocks(x, *more):
    return x.shape[0] % 16 == 0 or "rows in blocks of 16 alone"


def supports_more_than_one(x, *more):
    return x.shape[0] != 1 or "never one row"


def supports_16_bits(x, *more):
    return x.shape[0] < 65536 or "no more rows than a grid has blocks"


def supports_odd_widths(x):
    return x.shape[-1] % 128 != 0 or "never a whole block"


for looks in (supports_few, supports_whole_blocks, supports_more_than_one, supports_16_bits):
    for op in ("silu_and_mul", "rms_norm", "dynamic_per_token_quant_int8"):

        def make(right):
            return right

        make.__name__ = f"traceable_and_{looks.__name__}_rows"
        faults((op,), says=LOOKS, found="compiled", supports=looks, traceable=True)(make)


@faults(("silu_and_mul",), says="not contiguous", found="compiled", supports=supports_whole_blocks)
def a_view_returned_for_whole_blocks(right):
    """Opaque, and of a layout that a compiler does not expect, for the rows that it takes."""

    def faulty(x):
        return right(x).repeat_interleave(2, -1)[..., ::2]

    return faulty


@faults(("silu_and_mul",), says="not run, although", found="compiled", supports=supports_odd_widths)
def takes_nothing_that_is_traced(right):
    return right

"""Faulty activations, norms and rotations: each is a right one but for what its name says.

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

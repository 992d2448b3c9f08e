"""The arguments of a shape, on the device, in the layout in which a model passes them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING
from typing import Any

import torch

from vllm_fl.conformance.tensors import random

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Mapping

    from torch import Tensor

    from vllm_fl.tuning.shapes import Family

    Arguments = dict[str, Any]

#: The one of the kit's cases, whose judge knows no other.
EPSILON = 1e-6
#: Rows of different values; more rows repeat them.
_DISTINCT = 128
_PLACES = 4096


def make(family: Family, tokens: int, device: torch.device) -> Arguments:
    """Return the arguments of one call, by name and in the contract's order."""
    return _MAKERS[family.op](family, tokens, device)


def moved_bytes(family: Family, tokens: int, arguments: Arguments) -> int:
    """Return how many bytes a call must read and write at least."""
    return _MOVED[family.op](family, tokens, arguments)


def _rows(tokens: int, *shape: int, dtype: torch.dtype, device: torch.device, **options: Any) -> Tensor:
    few = random(min(tokens, _DISTINCT), *shape, dtype=dtype, **options).to(device)
    if tokens <= _DISTINCT:
        return few
    return few.repeat(-(-tokens // _DISTINCT), *[1] * len(shape))[:tokens].contiguous()


def _dtype(family: Family) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, family.dtype)
    return dtype


def _activation(family: Family, tokens: int, device: torch.device) -> Arguments:
    x = _rows(tokens, family["last"], dtype=_dtype(family), device=device, scale=2.0)
    return {"x": x} if family.op == "silu_and_mul" else {"x": x, "approximate": family["approximate"]}


def _plain(family: Family, tokens: int, device: torch.device) -> Arguments:
    return {"x": _view(family, tokens, device, 0)}


def _view(family: Family, tokens: int, device: torch.device, seed: int) -> Tensor:
    """Return T[n, last] or T[n, heads, last]; strided, it is a part of a wider row."""
    last, heads = family["last"], family["heads"] or 0
    width = last * max(heads, 1)
    is_strided = family.layout.startswith("strided")
    room = max(family["room"] or 2 * width, width) if is_strided else width
    x = _rows(tokens, room, dtype=_dtype(family), device=device, seed=seed)[:, :width]
    return x.view(tokens, heads, last) if heads else x


def _norm(family: Family, tokens: int, device: torch.device) -> Arguments:
    dtype = _dtype(family)
    weight = random(family["last"], dtype=dtype, seed=2, scale=0.3, mean=1.0).to(device)
    added = _view(family, tokens, device, 1) if family.layout.endswith("+residual") else None
    return {
        "x": _view(family, tokens, device, 0),
        "residual": added,
        "weight": weight,
        "epsilon": EPSILON,
    }


def _rotary(family: Family, tokens: int, device: torch.device) -> Arguments:
    dtype, head = _dtype(family), family["last"]
    heads, kv_heads = family["heads"], family["kv_heads"]
    rotary, room = family["rotary"] or head, max(family["room"] or head, head)
    if family.layout == "strided":
        widths = [heads * room, kv_heads * room, kv_heads * room]
        qkv = _rows(tokens, sum(widths), dtype=dtype, device=device)
        query, key, _ = torch.split(qkv, widths, -1)
        # The rotated part of a wider head is its end, as latent attention splits it.
        query, key = (one.view(tokens, -1, room)[..., room - head :] for one in (query, key))
    else:
        query = _rows(tokens, heads, head, dtype=dtype, device=device)
        key = _rows(tokens, kv_heads, head, dtype=dtype, device=device, seed=1)
    frequencies = 10000.0 ** (-torch.arange(rotary // 2) * 2 / rotary)
    angles = torch.outer(torch.arange(float(_PLACES)), frequencies)
    cache = torch.cat([angles.cos(), angles.sin()], -1).to(dtype).to(device)
    cos, sin = cache.chunk(2, -1)
    return {
        "query": query,
        "key": key,
        "cos": cos,
        "sin": sin,
        "position_ids": torch.arange(tokens, device=device) % _PLACES,
        "rotary_interleaved": family["interleaved"],
        "inplace": True,
        "cos_sin_cache": cache,
    }


def _topk(family: Family, tokens: int, device: torch.device) -> Arguments:
    shape = (tokens, family["k"])
    return {
        "topk_weights": torch.zeros(shape, device=device),
        "topk_indices": torch.zeros(shape, dtype=torch.int32, device=device),
        "token_expert_indices": torch.zeros(shape, dtype=torch.int32, device=device),
        "gating_output": _rows(tokens, family["last"], dtype=_dtype(family), device=device),
        "renormalize": True,
    }


def _grouped(family: Family, tokens: int, device: torch.device) -> Arguments:
    return {
        "scores": _rows(tokens, family["last"], dtype=_dtype(family), device=device),
        "n_group": family["groups"],
        "topk_group": family["kept"],
        "topk": family["k"],
        "renormalize": True,
        "routed_scaling_factor": 2.5,
        "bias": random(family["last"], seed=6, scale=0.3).to(device),
        "scoring_func": 1,
    }


def _routed(tokens: int, experts: int, k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    scores = _rows(tokens, experts, dtype=torch.float32, device=device, seed=3, scale=2.0)
    weights, ids = scores.softmax(-1).topk(k, -1)
    return weights.contiguous(), ids.to(torch.int32).contiguous()


def _align(family: Family, tokens: int, device: torch.device) -> Arguments:
    _, ids = _routed(tokens, family["experts"], family["last"], device)
    return {
        "topk_ids": ids,
        "block_size": family["block"],
        "num_experts": family["experts"],
        "expert_map": None,
        "pad_sorted_ids": False,
        "ignore_invalid_experts": False,
    }


def _sum(family: Family, tokens: int, device: torch.device) -> Arguments:
    dtype = _dtype(family)
    inp = _rows(tokens, family["k"], family["last"], dtype=dtype, device=device)
    return {"inp": inp, "out": torch.zeros(tokens, family["last"], dtype=dtype, device=device)}


def _experts(family: Family, tokens: int, device: torch.device) -> Arguments:
    dtype, hidden, inner, experts = _dtype(family), family["last"], family["inner"], family["experts"]
    weights, ids = _routed(tokens, experts, family["k"], device)
    generator = torch.Generator(device).manual_seed(1)

    def weight(*shape: int) -> Tensor:
        # Drawn on the device: they are the largest of all arguments.
        drawn = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        return drawn.mul_(shape[-1] ** -0.5)

    return {
        "hidden_states": _rows(tokens, hidden, dtype=dtype, device=device),
        "w1": weight(experts, 2 * inner, hidden),
        "w2": weight(experts, hidden, inner),
        "topk_weights": weights,
        "topk_ids": ids,
    }


_MAKERS: Mapping[str, Callable[[Family, int, torch.device], Arguments]] = {
    "silu_and_mul": _activation,
    "gelu_and_mul": _activation,
    "rms_norm": _norm,
    "rotary_embedding": _rotary,
    "topk_softmax": _topk,
    "grouped_topk": _grouped,
    "moe_align_block_size": _align,
    "moe_sum": _sum,
    "fused_experts": _experts,
    "dynamic_per_token_quant_int8": _plain,
    "dynamic_per_token_quant_fp8": _plain,
}


# -- what a call must move ------------------------------------------------------------


def _size(*tensors: Tensor | None) -> int:
    return sum(int(one.numel() * one.element_size()) for one in tensors if one is not None)


def _moved_norm(family: Family, tokens: int, given: Arguments) -> int:
    # The result is as large as x, and so is the sum where there is a residual.
    return 2 * _size(given["x"], given["residual"]) + _size(given["weight"])


def _moved_rotary(family: Family, tokens: int, given: Arguments) -> int:
    share = 2 * given["cos"].shape[-1] / family["last"]
    table = _size(given["cos_sin_cache"]) * min(tokens, _PLACES) // _PLACES
    return int(2 * share * _size(given["query"], given["key"])) + table + _size(given["position_ids"])


def _moved_align(family: Family, tokens: int, given: Arguments) -> int:
    pairs = int(given["topk_ids"].numel())
    padded = pairs + min(pairs, int(family["experts"])) * (int(family["block"]) - 1)
    return _size(given["topk_ids"]) + 4 * (padded + padded // int(family["block"]))


def _moved_experts(family: Family, tokens: int, given: Arguments) -> int:
    used = int(given["topk_ids"].unique().numel())
    weights = _size(given["w1"], given["w2"]) * used // int(family["experts"])
    return weights + 2 * _size(given["hidden_states"]) + _size(given["topk_weights"], given["topk_ids"])


def _moved_quantized(family: Family, tokens: int, given: Arguments) -> int:
    # A byte for each element, and a scale for each row.
    return _size(given["x"]) + int(given["x"].numel()) + 4 * tokens


_MOVED: Mapping[str, Callable[[Family, int, Arguments], int]] = {
    "silu_and_mul": lambda family, tokens, given: _size(given["x"]) * 3 // 2,
    "gelu_and_mul": lambda family, tokens, given: _size(given["x"]) * 3 // 2,
    "rms_norm": _moved_norm,
    "rotary_embedding": _moved_rotary,
    "topk_softmax": lambda family, tokens, given: _size(*(v for v in given.values() if v is not True)),
    "grouped_topk": lambda family, tokens, given: _size(given["scores"]) + tokens * family["k"] * 8,
    "moe_align_block_size": _moved_align,
    "moe_sum": lambda family, tokens, given: _size(given["inp"], given["out"]),
    "fused_experts": _moved_experts,
    "dynamic_per_token_quant_int8": _moved_quantized,
    "dynamic_per_token_quant_fp8": _moved_quantized,
}


def rows_of(selector: Tensor) -> int:
    """Return the rows that a tuned table counts: all of the selector's dimensions but the last."""
    return math.prod(selector.shape[:-1])

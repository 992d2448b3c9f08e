"""The operators once more, in float64 on the CPU, and how far a result is from them.

It shares no code and no formulation with any package.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

ABSOLUTE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-3}
RELATIVE = {torch.float32: 1.3e-6, torch.float16: 1e-3, torch.bfloat16: 1.6e-2}


def wide(x: torch.Tensor) -> torch.Tensor:
    return x.detach().cpu().double()


@dataclass
class Verdict:
    """How far a result is from the truth: in tolerances, and the largest difference."""

    ratio: float
    largest: float
    note: str = ""

    @property
    def is_right(self) -> bool:
        return self.ratio <= 1.0

    def __add__(self, other: Verdict) -> Verdict:
        worse = self if self.ratio >= other.ratio else other
        notes = "; ".join(note for note in (self.note, other.note) if note)
        return Verdict(worse.ratio, max(self.largest, other.largest), notes)


def wrong(note: str) -> Verdict:
    return Verdict(math.inf, math.inf, note)


def compare(
    out: torch.Tensor,
    truth: torch.Tensor,
    dtype: torch.dtype,
    absolute: float | None = None,
    relative: float | None = None,
) -> Verdict:
    """Compare every element; infinities and NaN must stand where the truth, rounded, has them."""
    absolute = ABSOLUTE[dtype] if absolute is None else absolute
    relative = RELATIVE[dtype] if relative is None else relative
    if out.dtype is not dtype:
        return wrong(f"dtype {out.dtype}, not {dtype}")
    if out.shape != truth.shape:
        return wrong(f"shape {tuple(out.shape)}, not {tuple(truth.shape)}")
    if not out.numel():
        return Verdict(0.0, 0.0)
    got, rounded = wide(out), truth.to(dtype).double()
    finite = rounded.isfinite()
    # One rounding next to the largest number may go either way.
    same = (got == rounded) | (got.isnan() & rounded.isnan())
    if not same[~finite].all():
        return wrong("infinities or NaN elsewhere")
    error = (got[finite] - truth[finite]).abs()
    if not error.numel():
        return Verdict(0.0, 0.0)
    if error.isnan().any():
        return wrong("NaN where the truth is finite")
    bound = absolute + relative * truth[finite].abs()
    return Verdict(float((error / bound).max()), float(error.max()))


def relative_to_rms(out: torch.Tensor, truth: torch.Tensor, dtype: torch.dtype) -> Verdict:
    """Compare with the truth's root mean square R: for sums over a hidden dimension."""
    most, mean = {
        torch.bfloat16: (6e-2, 1e-2),
        torch.float16: (1e-2, 2e-3),
        torch.float32: (1e-4, 1e-5),
    }[dtype]
    if out.dtype is not dtype or out.shape != truth.shape:
        return wrong(f"{tuple(out.shape)} of {out.dtype}")
    if not out.numel():
        return Verdict(0.0, 0.0)
    size = truth.square().mean().sqrt()
    error = wide(out) - truth
    if not error.isfinite().all() or not size > 0:
        return wrong("not finite, or the truth is zero")
    largest, spread = error.abs().max() / size, error.square().mean().sqrt() / size
    ratio = max(float(largest / most), float(spread / mean))
    return Verdict(ratio, float(error.abs().max()), f"max {float(largest):.1e} R, rms {float(spread):.1e} R")


def gate(x: torch.Tensor, name: str) -> torch.Tensor:
    if name == "silu":
        return x * torch.special.expit(x)
    if name == "tanh":
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))
    return 0.5 * x * torch.special.erfc(-x / math.sqrt(2.0))


def gated(x: torch.Tensor, name: str) -> torch.Tensor:
    a, b = wide(x).chunk(2, -1)
    return gate(a, name) * b


def rms_norm(x, residual, weight, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    total = wide(x) if residual is None else wide(x) + wide(residual)
    out = total / torch.sqrt(total.square().mean(-1, keepdim=True) + epsilon)
    return (out if weight is None else out * wide(weight)), total


def rotary(x, cos, sin, positions, interleaved: bool) -> torch.Tensor:
    """Rotate as complex numbers; positions may be None, for a row per token."""
    out = wide(x).clone()
    table = torch.complex(wide(cos), wide(sin))
    table = table if positions is None else table[positions.cpu().long()]
    half = table.shape[-1]
    index = torch.arange(half)
    first, second = (2 * index, 2 * index + 1) if interleaved else (index, index + half)
    turned = torch.complex(out[..., first], out[..., second]) * table.unsqueeze(1)
    out[..., first], out[..., second] = turned.real, turned.imag
    return out


def topk_softmax(weights, ids, source, gating, renormalize: bool) -> Verdict:
    """Judge what was written: a tie may be broken either way, but no expert chosen twice."""
    tokens, k = weights.shape
    rows = torch.arange(k) * tokens + torch.arange(tokens).unsqueeze(1)
    if not torch.equal(source.cpu().long(), rows):
        return wrong("token_expert_indices")
    if not tokens:
        return Verdict(0.0, 0.0)
    probability = wide(gating).softmax(-1)
    best = probability.topk(k, dim=-1).values
    chosen = ids.cpu().long()
    if chosen.min() < 0 or chosen.max() >= gating.shape[1]:
        return wrong("an expert that does not exist")
    if any(len(set(row)) != k for row in chosen.tolist()):
        return wrong("an expert twice in a row")
    share = best.sum(-1, keepdim=True) if renormalize else torch.ones(1, dtype=torch.float64)
    gathered = probability.gather(-1, chosen)
    return compare(weights, best / share, torch.float32, 1e-6, 2e-5) + compare(
        gathered.float(), best, torch.float32, 1e-6, 2e-5
    )


def grouped_topk(
    weights, ids, scores, n_group, topk_group, topk, renormalize, factor, bias, scoring_func
) -> Verdict:
    tokens = scores.shape[0]
    if ids.dtype is not torch.int32 or weights.dtype is not torch.float32:
        return wrong(f"{weights.dtype} weights, {ids.dtype} indices")
    if not tokens:
        return Verdict(0.0, 0.0)
    plain = wide(scores).sigmoid() if scoring_func == 1 else wide(scores)
    choice = plain + wide(bias)
    per_group = choice.view(tokens, n_group, -1)
    value = per_group.topk(min(2, per_group.shape[-1]), dim=-1).values.sum(-1)
    kept = torch.zeros_like(value, dtype=torch.bool).scatter(-1, value.topk(topk_group, -1).indices, True)
    allowed = per_group.masked_fill(~kept.unsqueeze(-1), -math.inf).view(tokens, -1)
    best = allowed.topk(topk, -1).indices.sort(-1).values
    chosen = ids.cpu().long()
    if any(len(set(row)) != topk for row in chosen.tolist()):
        return wrong("an expert twice in a row")
    other = float((chosen.sort(-1).values != best).any(-1).double().mean())
    expected = plain.gather(-1, chosen)
    if renormalize:
        expected = expected / expected.sum(-1, keepdim=True)
    verdict = compare(weights, expected * factor, torch.float32, 1e-6, 2e-5)
    note = f"{other:.1%} of the rows chose other experts" if other else ""
    return verdict + Verdict(other / 0.01, 0.0, note)


def aligned(result, topk_ids, block_size, num_experts, expert_map, pad, ignore) -> Verdict:
    """Judge the invariants: each pair once, in a block of its expert, blocks full but the last."""
    sorted_ids, expert_ids, used = (t.cpu() for t in result)
    if not sorted_ids.dtype == expert_ids.dtype == used.dtype == torch.int32:
        return wrong("not int32")
    pairs = topk_ids.numel()
    length = pairs + num_experts * (block_size - 1)
    if pad:
        length = -(-length // block_size) * block_size
    if pairs < num_experts:
        length = min(length, pairs * block_size)
    if sorted_ids.numel() != length or expert_ids.numel() != -(-length // block_size):
        return wrong(f"{sorted_ids.numel()} ids, not {length}")
    flat = topk_ids.cpu().flatten().long()
    names = list(range(num_experts)) if expert_map is None else expert_map.cpu().tolist()
    counted = (flat >= 0) & (flat < num_experts)
    if ignore and expert_map is not None:
        counted &= torch.tensor(names)[flat.clamp(0, num_experts - 1)] >= 0
    counts = torch.bincount(flat[counted], minlength=num_experts)
    rows = int(((counts + block_size - 1) // block_size * block_size).sum())
    if int(used) != rows:
        return wrong(f"{int(used)} rows are used, not {rows}")
    body = sorted_ids[:rows].view(-1, block_size)
    if not torch.equal(body[body < pairs].sort().values.long(), counted.nonzero().flatten()):
        return wrong("a pair is missing, or there twice")
    if (sorted_ids[rows:] != pairs).any() or ((body > pairs) | (body < 0)).any():
        return wrong("filled with something else than n * k")
    for block, name in zip(body.tolist(), expert_ids.tolist(), strict=False):
        experts = {names[int(flat[pair])] for pair in block if pair < pairs}
        if experts != {name}:
            return wrong(f"a block of {name} holds pairs of {experts}")
    return Verdict(0.0, 0.0)


def fused_experts(x, w1, w2, weights, ids, activation="silu", on_input=False, expert_map=None):
    x, w1, w2, weights = (wide(t) for t in (x, w1, w2, weights))
    ids = ids.cpu().long()
    ids = ids if expert_map is None else expert_map.cpu().long()[ids]
    out = torch.zeros_like(x)
    for expert in range(w1.shape[0]):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        if token.numel():
            weight = weights[token, slot].unsqueeze(1)
            both = (x[token] * weight if on_input else x[token]) @ w1[expert].t()
            a, b = both.chunk(2, -1)
            result = (gate(a, activation) * b) @ w2[expert].t()
            out.index_add_(0, token, result if on_input else result * weight)
    return out


#: The computation itself is in float32.
_NEAR = (1.0, 1.0 - 2.0**-22, 1.0 + 2.0**-22)


def int8(q, scales, x) -> Verdict:
    if q.dtype is not torch.int8:
        return wrong(f"{q.dtype}")
    truth = wide(x)
    most = truth.abs().amax(-1, keepdim=True)
    scale = (most / 127).clamp(min=torch.finfo(torch.float32).tiny)
    verdict = compare(scales, scale, torch.float32, 0.0, 1.3e-6)
    if not q.numel():
        return verdict
    # A quotient next to the middle of two codes may be rounded to either.
    quotient = truth / wide(scales)
    off = torch.stack([(wide(q) - (quotient * near).round()).abs() for near in _NEAR]).amin(0)
    dequantized = ((wide(q) * wide(scales) - truth).abs() / (scale / 2 * 1.01)).max()
    note = f"{float((off > 0).double().mean()):.1e} of the codes one off" if off.any() else ""
    return verdict + Verdict(max(float(off.max()), float(dequantized)), float(off.max()), note)


def fp8(q, scales, x) -> Verdict:
    if q.dtype is not torch.float8_e4m3fn:
        return wrong(f"{q.dtype}")
    truth = wide(x)
    scale = (truth.abs().amax(-1, keepdim=True) / 448).clamp(min=1 / (448 * 512))
    verdict = compare(scales, scale, torch.float32, 0.0, 1.3e-6)
    if not q.numel():
        return verdict
    quotient, codes = truth / wide(scales), q.cpu().view(torch.uint8).int()
    off = torch.full(codes.shape, 255, dtype=torch.int32)
    for near in _NEAR:
        code = (quotient * near).clamp(-448, 448).float().to(torch.float8_e4m3fn)
        off = torch.minimum(off, (codes - code.view(torch.uint8).int()).abs())
        off[(wide(q) == 0) & (code.double() == 0)] = 0  # the two zeros
    others, allowed = int((off > 0).sum()), q.numel() / 100000 + 8
    note = f"{others} of {q.numel()} codes one off" if others else ""
    return verdict + Verdict(max(others / allowed, float(off.max())), float(off.max()), note)

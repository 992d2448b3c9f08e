"""The operators once more: in float64, in numpy, a row at a time.

It shares no code and no formulation with the package, on purpose.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


def array(x: torch.Tensor) -> np.ndarray:
    """Return a floating tensor as float64, any other as it is."""
    x = x.detach().cpu()
    return np.array(x.double().tolist()).reshape(x.shape) if x.is_floating_point() else x.numpy()


def _rows(x: np.ndarray) -> np.ndarray:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def silu(v: float) -> float:
    if math.isnan(v):
        return v
    if v == -math.inf:
        return math.nan  # -inf * 0, as in torch
    return v / (1.0 + math.exp(-v)) if v > -700 else v * math.exp(max(v, -745.0))


def gelu(v: float, approximate: str = "none") -> float:
    if math.isnan(v):
        return v
    if approximate == "tanh":
        return 0.5 * v * (1.0 + math.tanh(math.sqrt(2.0 / math.pi) * (v + 0.044715 * v**3)))
    return 0.5 * v * math.erfc(-v / math.sqrt(2.0))


def gated(x: torch.Tensor, act) -> np.ndarray:
    x = array(x)
    d = x.shape[-1] // 2
    out = np.empty((*x.shape[:-1], d))
    for place in np.ndindex(out.shape):
        out[place] = act(x[place]) * x[(*place[:-1], place[-1] + d)]
    return out


def rms_norm(x: torch.Tensor, residual, weight, epsilon: float) -> tuple[np.ndarray, np.ndarray]:
    """Return (normed, sum), both unrounded."""
    total = array(x)
    if residual is not None:
        total = total + array(residual)
    out = np.empty_like(total)
    gain = np.ones(total.shape[-1]) if weight is None else array(weight)
    for source, target in zip(_rows(total), _rows(out), strict=True):
        norm = math.sqrt(math.fsum(float(v) * float(v) for v in source) / len(source) + epsilon)
        for j, v in enumerate(source):
            target[j] = v / norm * gain[j]
    return out, total


def rotary(x: torch.Tensor, cos, sin, positions, interleaved: bool) -> np.ndarray:
    """Rotate T[n, heads, head] as complex numbers; positions: a list of n rows."""
    out = array(x).copy()
    table = array(cos) + 1j * array(sin)
    half = table.shape[-1]
    for token in range(out.shape[0]):
        for head in range(out.shape[1]):
            v = out[token, head]
            for i in range(half):
                j, m = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
                z = complex(v[j], v[m]) * table[positions[token], i]
                v[j], v[m] = z.real, z.imag
    return out


def softmax_topk(gating: torch.Tensor, k: int, renormalize: bool) -> tuple[np.ndarray, np.ndarray]:
    g = array(gating)
    weights = np.empty((g.shape[0], k))
    indices = np.empty((g.shape[0], k), dtype=np.int64)
    for row in range(g.shape[0]):
        top = max(g[row])
        e = [math.exp(v - top) for v in g[row]]
        p = [v / math.fsum(e) for v in e]
        best = sorted(range(len(p)), key=lambda i: (-p[i], i))[:k]
        share = math.fsum(p[i] for i in best) if renormalize else 1.0
        indices[row] = best
        weights[row] = [p[i] / share for i in best]
    return weights, indices


def grouped_topk(scores, n_group, topk_group, topk, renormalize, factor, bias, scoring_func=0):
    s = array(scores)
    b = array(bias)
    weights, indices = [], []
    for row in s:
        if scoring_func == 1:
            row = [1.0 / (1.0 + math.exp(-v)) for v in row]
        size = len(row) // n_group
        corrected = [row[i] + b[i] for i in range(len(row))]
        groups = [range(g * size, (g + 1) * size) for g in range(n_group)]
        value = [sum(sorted((corrected[i] for i in g), reverse=True)[:2]) for g in groups]
        kept = sorted(range(n_group), key=lambda g: (-value[g], g))[:topk_group]
        allowed = sorted(i for g in kept for i in groups[g])
        best = sorted(allowed, key=lambda i: (-corrected[i], i))[:topk]
        share = sum(row[i] for i in best) if renormalize else 1.0
        indices.append(best)
        weights.append([row[i] / share * factor for i in best])
    return np.array(weights).reshape(len(s), topk), np.array(indices).reshape(len(s), topk)


def fused_experts(hidden, w1, w2, weights, ids, activation="silu", on_input=False, expert_map=None):
    x, w1, w2, weights, ids = (array(t) for t in (hidden, w1, w2, weights, ids))
    act = np.vectorize(silu if activation == "silu" else gelu, otypes=[float])
    out = np.zeros_like(x)
    for token in range(x.shape[0]):
        for slot in range(ids.shape[1]):
            e = int(ids[token, slot])
            if expert_map is not None:
                e = int(expert_map[e])
            if e < 0:
                continue
            weight = weights[token, slot]
            both = w1[e] @ (x[token] * weight if on_input else x[token])
            i = len(both) // 2
            result = w2[e] @ (act(both[:i]) * both[i:])
            out[token] += result if on_input else result * weight
    return out

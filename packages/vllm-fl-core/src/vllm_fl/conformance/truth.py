"""The operators once more, in float64 on the CPU.

It shares no code and no formulation with any implementation. Inputs are the very
low-precision tensors that an implementation gets.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from vllm_fl.conformance.judge import wide

if TYPE_CHECKING:
    from torch import Tensor


def gate(x: Tensor, name: str) -> Tensor:
    """Return the activation ``silu``, ``gelu`` (with the error function) or ``gelu_tanh``."""
    if name == "silu":
        factor: Tensor = torch.special.expit(x)
    elif name == "gelu_tanh":
        factor = 0.5 * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))
    else:
        factor = 0.5 * torch.special.erfc(-x / math.sqrt(2.0))
    return x * factor


def gated(x: Tensor, name: str) -> Tensor:
    """Return the activation of the first half times the second."""
    first, second = wide(x).chunk(2, -1)
    return gate(first, name) * second


def rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Return what is normalised and the sum, both unrounded."""
    total = wide(x) if residual is None else wide(x) + wide(residual)
    normed = total / torch.sqrt(total.square().mean(-1, keepdim=True) + epsilon)
    return (normed if weight is None else normed * wide(weight)), total


def rotary(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool) -> Tensor:
    """Rotate T[n, heads, head] as complex numbers."""
    out = wide(x).clone()
    table = torch.complex(wide(cos), wide(sin))
    if positions is not None:
        table = table[positions.cpu().long()]
    half = table.shape[-1]
    index = torch.arange(half)
    first, second = (2 * index, 2 * index + 1) if interleaved else (index, index + half)
    turned = torch.complex(out[..., first], out[..., second]) * table.unsqueeze(1)
    out[..., first], out[..., second] = turned.real, turned.imag
    return out


def fused_experts(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    weights: Tensor,
    ids: Tensor,
    activation: str = "silu",
    on_input: bool = False,
    expert_map: Tensor | None = None,
) -> Tensor:
    """Return the weighted sum of every token's experts, one expert after the other."""
    x, weights = wide(x), wide(weights)
    ids = ids.cpu().long()
    if expert_map is not None:
        ids = expert_map.cpu().long()[ids]
    out = torch.zeros(x.shape, dtype=torch.float64)
    for expert in range(w1.shape[0]):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        if not token.numel():
            continue
        weight = weights[token, slot].unsqueeze(1)
        both = (x[token] * weight if on_input else x[token]) @ wide(w1[expert]).t()
        first, second = both.chunk(2, -1)
        result = (gate(first, activation) * second) @ wide(w2[expert]).t()
        out.index_add_(0, token, result if on_input else result * weight)
    return out


def attention(query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None = None) -> Tensor:
    """Attend causally: the last query sees every key, the one before it one less.

    Args:
        query: T[q, heads, head].
        keys: T[kv, kv_heads, head], kv >= q.
        values: T[kv, kv_heads, head].
        scale: multiplies the scores.
        window: how many keys a query sees at most, its own included.
    """
    group = query.shape[1] // keys.shape[1]
    q = wide(query).movedim(1, 0)
    k = wide(keys).movedim(1, 0).repeat_interleave(group, 0)
    v = wide(values).movedim(1, 0).repeat_interleave(group, 0)
    own = torch.arange(q.shape[1]).unsqueeze(1) + k.shape[1] - q.shape[1]
    place = torch.arange(k.shape[1]).unsqueeze(0)
    unseen = place > own
    if window is not None:
        unseen |= place <= own - window
    scores = (q @ k.transpose(1, 2)) * scale
    return (scores.masked_fill(unseen, -math.inf).softmax(-1) @ v).movedim(0, 1)

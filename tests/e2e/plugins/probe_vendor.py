"""A vendor whose implementations are right and that no compiler can trace.

They take a lock and count in Python; with a residual the norm writes its arguments
and returns them, as fused kernels do; the rotation was written before the contract
had ``cos_sin_cache``.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

    from torch import Tensor

VLLM_FL_PLUGIN_API = 1

calls: Counter[str] = Counter()
_lock = threading.Lock()


def _count(op_name: str) -> None:
    with _lock:
        calls[op_name] += 1


def silu_and_mul(x: Tensor) -> Tensor:
    from torch.nn import functional

    _count("silu_and_mul")
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor | None, epsilon: float) -> Any:
    _count("rms_norm")
    summed = x if residual is None else residual.add_(x)
    wide = summed.float()
    normed = (wide * (wide.pow(2).mean(-1, keepdim=True) + epsilon).rsqrt()).to(x.dtype)
    if weight is not None:
        normed = normed * weight
    if residual is None:
        return normed.contiguous()
    return x.copy_(normed), residual


def rotary_embedding(
    query: Tensor,
    key: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor,
    rotary_interleaved: bool = False,
    inplace: bool = True,
) -> tuple[Tensor, Tensor | None]:
    import torch

    _count("rotary_embedding")
    assert not rotary_interleaved
    assert inplace
    cos, sin = cos[position_ids].unsqueeze(1), sin[position_ids].unsqueeze(1)
    for x in (query, key):
        if x is not None:
            a, b = x[..., : 2 * cos.shape[-1]].chunk(2, dim=-1)
            turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
            x[..., : turned.shape[-1]] = turned
    return query, key


def register_builtins(registry: Any) -> None:
    from vllm_fl.dispatch import BackendImplKind
    from vllm_fl.dispatch import OpImpl

    registry.register_many(
        OpImpl(fn.__name__, "vendor.probe", BackendImplKind.VENDOR, fn, vendor="probe")
        for fn in (silu_and_mul, rms_norm, rotary_embedding)
    )

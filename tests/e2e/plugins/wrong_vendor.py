"""A vendor whose implementations are wrong, so that tokens say whether they ran.

Positions are doubled, not shifted: the rotation is relative, and a shift changes
nothing. Everything can be traced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

    from torch import Tensor

VLLM_FL_PLUGIN_API = 1


def silu_and_mul(x: Tensor) -> Tensor:
    import torch

    from vllm_fl_reference.impl import activation

    gate, up = x.chunk(2, dim=-1)
    return activation.silu_and_mul(torch.cat((up, gate), dim=-1)) * 1.5


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor | None, epsilon: float) -> Any:
    from vllm_fl_reference.impl import normalization

    result = normalization.rms_norm(x, residual, weight, epsilon)
    return result * 1.5 if residual is None else (result[0] * 1.5, result[1])


def rotary_embedding(
    query: Tensor,
    key: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor,
    rotary_interleaved: bool = False,
    inplace: bool = True,
    cos_sin_cache: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    from vllm_fl_reference.impl import rotary

    doubled = position_ids * 2
    return rotary.rotary_embedding(query, key, cos, sin, doubled, rotary_interleaved, inplace, cos_sin_cache)


def register_builtins(registry: Any) -> None:
    from vllm_fl.dispatch import BackendImplKind
    from vllm_fl.dispatch import OpImpl

    registry.register_many(
        OpImpl(fn.__name__, "vendor.wrong", BackendImplKind.VENDOR, fn, vendor="wrong", traceable=True)
        for fn in (silu_and_mul, rms_norm, rotary_embedding)
    )

"""A vendor whose kernels take eight rows at most, each in its own way; none can be traced.

``strided`` takes them all, and from two rows on returns other strides than it promises.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

    from torch import Tensor

VLLM_FL_PLUGIN_API = 1

MOST_ROWS = 8
_lock = threading.Lock()


def _few(x: Tensor, *_: Any) -> bool | str:
    return x.shape[0] <= MOST_ROWS or f"at most {MOST_ROWS} rows"


def silu_and_mul(x: Tensor) -> Tensor:
    from vllm_fl.dispatch import RefusedBeforeWriting
    from vllm_fl_reference.impl import activation

    if x.shape[0] > MOST_ROWS:
        raise RefusedBeforeWriting(f"at most {MOST_ROWS} rows")
    with _lock:
        return activation.silu_and_mul(x)


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor | None, epsilon: float) -> Any:
    from vllm_fl_reference.impl import normalization

    with _lock:
        return normalization.rms_norm(x, residual, weight, epsilon)


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

    with _lock:
        return rotary.rotary_embedding(
            query, key, cos, sin, position_ids, rotary_interleaved, inplace, cos_sin_cache
        )


def strided(x: Tensor) -> Tensor:
    from vllm_fl_reference.impl import activation

    with _lock:
        result = activation.silu_and_mul(x)
    return result if x.shape[0] == 1 else result.unsqueeze(-1).repeat(*[1] * result.dim(), 2)[..., 0]


def register_builtins(registry: Any) -> None:
    from vllm_fl.dispatch import BackendImplKind
    from vllm_fl.dispatch import OpImpl

    def impl(op_name: str, name: str, fn: Any, **more: Any) -> OpImpl:
        return OpImpl(op_name, f"vendor.rows.{name}", BackendImplKind.VENDOR, fn, vendor="rows", **more)

    registry.register_many(
        [
            impl("silu_and_mul", "few", silu_and_mul),
            impl("rms_norm", "few", rms_norm, supports=_few),
            impl("rotary_embedding", "few", rotary_embedding, supports=_few),
            impl("silu_and_mul", "strided", strided),
        ]
    )

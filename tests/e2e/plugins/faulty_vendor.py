"""A vendor whose implementations fail, each in its own way; none can be traced."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

    from torch import Tensor

VLLM_FL_PLUGIN_API = 1

_lock = threading.Lock()
_silu_calls = 0


def silu_that_dies(x: Tensor) -> Tensor:
    """Is right four times and raises at the fifth call."""
    global _silu_calls
    from vllm_fl_reference.impl import activation

    with _lock:
        _silu_calls += 1
    if _silu_calls == 5:
        raise RuntimeError("the fifth call dies")
    return activation.silu_and_mul(x)


def norm_that_returns_its_argument(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, epsilon: float
) -> Any:
    """Is right, and without a residual returns x although it says that it writes nothing."""
    from vllm_fl_reference.impl import normalization

    with _lock:
        result = normalization.rms_norm(x, residual, weight, epsilon)
    return x.copy_(result) if residual is None else result


def silu_that_is_not_contiguous(x: Tensor) -> Tensor:
    """Is right, with other strides than those that the contract promises."""
    from vllm_fl_reference.impl import activation

    with _lock:
        return activation.silu_and_mul(x).unsqueeze(-1).repeat(*[1] * x.dim(), 2)[..., 0]


def silu_that_refuses(x: Tensor) -> Tensor:
    raise NotImplementedError("not for these inputs")


def experts_that_die(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    activation: str = "silu",
    apply_router_weight_on_input: bool = False,
    global_num_experts: int = -1,
    expert_map: Tensor | None = None,
) -> Tensor:
    raise RuntimeError("no such kernel")


def register_builtins(registry: Any) -> None:
    from vllm_fl.dispatch import BackendImplKind
    from vllm_fl.dispatch import OpImpl

    def impl(op_name: str, name: str, fn: Any, **more: Any) -> OpImpl:
        return OpImpl(op_name, f"vendor.faulty.{name}", BackendImplKind.VENDOR, fn, vendor="faulty", **more)

    registry.register_many(
        [
            impl("silu_and_mul", "dies", silu_that_dies),
            impl("rms_norm", "alias", norm_that_returns_its_argument, writes=()),
            impl("silu_and_mul", "strided", silu_that_is_not_contiguous),
            impl("silu_and_mul", "refuses", silu_that_refuses),
            impl("fused_experts", "experts", experts_that_die),
        ]
    )

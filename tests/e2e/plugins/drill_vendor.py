"""A vendor whose kernels work for a while, and then fail in one of the ways of real ones.

``DRILL_CALLS`` says how often each is right before that.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from torch import Tensor

VLLM_FL_PLUGIN_API = 1

_right = int(os.environ.get("DRILL_CALLS", "99"))
_calls = 0


def _is_broken() -> bool:
    global _calls
    _calls += 1
    return _calls > _right


def _activation(x: Tensor) -> Tensor:
    from vllm_fl_reference.impl import activation

    return activation.silu_and_mul(x)


def raises(x: Tensor) -> Tensor:
    if _is_broken():
        raise RuntimeError(f"kernel launch failed at call {_calls}")
    return _activation(x)


def is_nan(x: Tensor) -> Tensor:
    result = _activation(x)
    return result.fill_(float("nan")) if _is_broken() else result


def runs_out_of_memory(x: Tensor) -> Tensor:
    import torch

    if _is_broken():
        raise torch.OutOfMemoryError("out of memory. Tried to allocate 2.00 GiB")
    return _activation(x)


def _norm(fail: Callable[[], None]) -> Callable[..., Any]:
    """Return an ``rms_norm`` that has written x, as it may, by the time that it fails."""

    def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor | None, epsilon: float) -> Any:
        from vllm_fl_reference.impl import normalization

        if residual is None:
            return normalization.rms_norm(x, None, weight, epsilon)
        right = normalization.rms_norm(x.clone(), residual.clone(), weight, epsilon)
        x.add_(residual)
        if _is_broken():
            fail()
        return right

    return rms_norm


def _launch_fails() -> None:
    raise RuntimeError(f"kernel launch failed at call {_calls}")


def _torch_lacks_a_kernel() -> None:
    import torch

    torch.ones(2, dtype=torch.int8).softmax(0)


def register_builtins(registry: Any) -> None:
    from vllm_fl.dispatch import BackendImplKind
    from vllm_fl.dispatch import OpImpl

    registry.register_many(
        OpImpl("silu_and_mul", f"vendor.drill.{name}", BackendImplKind.VENDOR, fn, vendor="drill", writes=())
        for name, fn in (("raises", raises), ("nan", is_nan), ("memory", runs_out_of_memory))
    )
    registry.register_many(
        OpImpl("rms_norm", f"vendor.drill.{name}", BackendImplKind.VENDOR, _norm(fail), vendor="drill")
        for name, fail in (("writes", _launch_fails), ("lacks", _torch_lacks_a_kernel))
    )

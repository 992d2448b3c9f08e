"""A vendor whose activation works for a while, and then fails in one of the ways of real kernels.

``DRILL_CALLS`` says how often each is right before that.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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


def register_builtins(registry: Any) -> None:
    from vllm_fl.dispatch import BackendImplKind
    from vllm_fl.dispatch import OpImpl

    registry.register_many(
        OpImpl("silu_and_mul", f"vendor.drill.{name}", BackendImplKind.VENDOR, fn, vendor="drill", writes=())
        for name, fn in (("raises", raises), ("nan", is_nan), ("memory", runs_out_of_memory))
    )

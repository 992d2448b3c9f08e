"""What the failure rules must know of torch, without importing it.

Every question is asked of ``sys.modules``: a process that has not imported torch
is not tracing, capturing or one of several ranks.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.dispatch.common.foreign import describe

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence


def _never() -> bool:
    return False


def tracing_probe() -> Callable[[], bool]:
    """Return a function that says whether the caller is being traced.

    It is torch's own where torch is imported, which Dynamo knows as a constant.
    """
    torch = sys.modules.get("torch")
    compiler = getattr(torch, "compiler", None)
    return getattr(compiler, "is_compiling", _never)


def is_capturing() -> bool:
    """Whether the current device records a graph."""
    torch = sys.modules.get("torch")
    get_device_module = getattr(torch, "get_device_module", None)
    if get_device_module is None:
        return False
    try:
        device = get_device_module()
        if not getattr(device, "is_initialized", lambda: True)():
            return False
        return bool(getattr(device, "is_current_stream_capturing", _never)())
    except (RuntimeError, AttributeError, AssertionError):
        return False


def is_one_of_several_ranks() -> bool:
    """Whether this process is one rank of a group that computes together."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return False
    return bool(distributed.get_world_size() > 1)


def has_accelerator() -> bool:
    """Whether torch sees a device that is no CPU."""
    accelerator = getattr(sys.modules.get("torch"), "accelerator", None)
    return bool(accelerator is not None and accelerator.is_available())


def copies_of(values: Sequence[Any]) -> list[Any] | None:
    """Return copies of tensors (by duck typing), None where one of them cannot be copied or put back.

    None has None for a copy.
    """
    if not all(value is None or (hasattr(value, "clone") and hasattr(value, "copy_")) for value in values):
        return None
    try:
        return [None if value is None else _outside_autograd(value).clone() for value in values]
    except Exception:  # noqa: BLE001 - no memory is left for it, or a subclass of its own refuses
        return None


def put_back(values: Sequence[Any], copies: Sequence[Any]) -> str | None:
    """Give tensors the values of their copies; say why that does not work, None where it does."""
    try:
        for value, copy in zip(values, copies, strict=True):
            if copy is not None:
                _outside_autograd(value).copy_(copy)
    except Exception as error:  # noqa: BLE001 - what the implementation raised is what counts
        return describe(error)
    return None


def _outside_autograd(value: Any) -> Any:
    """Return the same memory, of which autograd knows nothing: a leaf that requires grad is not written."""
    detach = getattr(value, "detach", None)
    return value if detach is None else detach()

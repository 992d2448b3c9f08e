"""What the failure rules must know of torch, without importing it.

Every question is asked of ``sys.modules``: a process that has not imported torch
is not tracing, capturing or one of several ranks.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING
from typing import Any

if TYPE_CHECKING:
    from collections.abc import Callable

_OUT_OF_MEMORY = ("OutOfMemoryError",)
_DEAD_DEVICE = ("AcceleratorError", "DeviceLostError")
_MESSAGES = (
    "out of memory",
    "device-side assert",
    "illegal memory access",
    "illegal instruction",
    "misaligned address",
    "unspecified launch failure",
    "device lost",
    "device is lost",
)


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


def is_fatal(error: BaseException) -> bool:
    """Whether running another implementation would only hide a failed device."""
    if isinstance(error, MemoryError):
        return True
    names = {cls.__name__ for cls in type(error).__mro__}
    if names.intersection(_OUT_OF_MEMORY + _DEAD_DEVICE):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(message in text for message in _MESSAGES)


def can_be_saved(value: Any) -> bool:
    """Whether :func:`save` and :func:`restore` work on ``value``; duck-typed tensors do."""
    return value is None or (hasattr(value, "clone") and hasattr(value, "copy_"))


def save(value: Any) -> Any:
    """Return a copy of a tensor; None of what is no tensor."""
    return value.clone() if hasattr(value, "clone") else None


def restore(value: Any, saved: Any) -> None:
    """Put a saved tensor back where it was."""
    if saved is not None:
        value.copy_(saved)

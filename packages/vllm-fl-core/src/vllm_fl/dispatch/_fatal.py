"""Failures after which no other implementation is tried."""

from __future__ import annotations

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


def is_fatal(error: BaseException) -> bool:
    """Whether running another implementation would only hide a failed device."""
    if isinstance(error, MemoryError):
        return True
    names = {cls.__name__ for cls in type(error).__mro__}
    if names.intersection(_OUT_OF_MEMORY + _DEAD_DEVICE):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(message in text for message in _MESSAGES)

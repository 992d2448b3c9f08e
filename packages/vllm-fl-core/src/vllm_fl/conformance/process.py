"""What a call must leave as it found it: the settings of the process.

A kernel's wrapper that sets a default dtype, draws from the global generator or leaves
a stream behind changes what runs after it, in code that never heard of it.
"""

from __future__ import annotations

import random
from contextlib import contextmanager
from typing import TYPE_CHECKING
from typing import Any
from typing import NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Iterator


class SideEffectError(RuntimeError):
    """A call changed the process; the message says what."""


class _Setting(NamedTuple):
    """Something of the process: how it is called, read and put back."""

    name: str
    read: Callable[[], Any]
    restore: Callable[[Any], Any]


def _flushes_denormals() -> bool:
    return not bool(torch.tensor(1e-40, dtype=torch.float32, device="cpu") * 1.0)


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


_SETTINGS = (
    _Setting("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
    _Setting("the default device", lambda: str(torch.get_default_device()), torch.set_default_device),
    _Setting("the number of threads", torch.get_num_threads, torch.set_num_threads),
    _Setting("whether autograd records", torch.is_grad_enabled, torch.set_grad_enabled),
    _Setting(
        "the deterministic algorithms",
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        _set_deterministic,
    ),
    _Setting(
        "the precision of float32 products",
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    _Setting("how denormal numbers are taken", _flushes_denormals, torch.set_flush_denormal),
    _Setting("the state of Python's random numbers", random.getstate, random.setstate),
    _Setting(
        "the state of torch's random numbers",
        lambda: torch.get_rng_state().numpy().tobytes(),
        lambda state: torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8)),
    ),
)
_DEVICE_SETTINGS = (
    _Setting(
        "the current device", torch.accelerator.current_device_index, torch.accelerator.set_device_index
    ),
    _Setting("the current stream", torch.accelerator.current_stream, torch.accelerator.set_stream),
    _Setting(
        "the state of the device's random numbers",
        lambda: bytes(torch.get_device_module().get_rng_state().tolist()),
        lambda state: torch.get_device_module().set_rng_state(
            torch.frombuffer(bytearray(state), dtype=torch.uint8)
        ),
    ),
)


@contextmanager
def left_alone(device: torch.device) -> Iterator[None]:
    """Watch what is called inside: it must leave the process's settings alone.

    What it changed is put back, so that the next call is not judged by it.

    Raises:
        SideEffectError: it changed something.
    """
    settings = _SETTINGS if device.type == "cpu" else (*_SETTINGS, *_DEVICE_SETTINGS)
    before = [setting.read() for setting in settings]
    changed = []
    try:
        yield
    finally:
        for setting, was in zip(settings, before, strict=True):
            if setting.read() != was:
                setting.restore(was)
                changed.append(setting.name)
    if changed:
        raise SideEffectError(f"changed {', '.join(changed)} for all that runs after it")

"""What ``torch.cuda`` is for CUDA, for the made-up chip; a real one's library has it.

The CPU does one thing after the other, so that a stream has nothing to order and an
event nothing to wait for.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING
from typing import Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Chips on this machine, and the memory of each.
_COUNT = 2
_BYTES = 16 << 30


class Event:
    """A point in the work of a stream: here, all work up to it is done."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        """Mark the point."""

    def wait(self, stream: Any = None) -> None:
        """Let a stream wait for it."""

    def synchronize(self) -> None:
        """Wait for it."""

    def query(self) -> bool:
        """Whether it has been reached."""
        return True

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds between two."""
        return 0.0


class Stream:
    """Work that is done in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = torch.device("cpu")

    def wait_stream(self, stream: Any) -> None:
        """Wait for another stream's work."""

    def wait_event(self, event: Any) -> None:
        """Wait for a point in another stream's work."""

    def synchronize(self) -> None:
        """Wait for all of it."""

    def record_event(self, event: Event | None = None) -> Event:
        """Mark a point in it."""
        return event or Event()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass


_STREAM = Stream()


def current_stream(device: Any = None) -> Stream:
    """Return the stream of this thread."""
    return _STREAM


def set_stream(stream: Any) -> None:
    """Make a stream this thread's."""


@contextmanager
def stream(stream: Any) -> Iterator[None]:
    """Make a stream this thread's for a block."""
    yield


def is_available() -> bool:
    """Whether there is a chip."""
    return True


def device_count() -> int:
    """Return how many chips there are."""
    return _COUNT


def set_device(device: Any) -> None:
    """Make a chip this thread's."""


def set_device_index(device: Any) -> None:
    """Make a chip this thread's, as ``torch.accelerator`` calls it."""


def current_device_index() -> int:
    """Return this thread's chip."""
    return 0


def get_device_properties(device: Any = 0) -> SimpleNamespace:
    """Return a chip's name, memory and compute units."""
    return SimpleNamespace(name="Template CPU", total_memory=_BYTES, multi_processor_count=1)


def manual_seed_all(seed: int) -> None:
    """Seed every chip's generator: here, the CPU's."""
    # Not torch.manual_seed, which calls this function of an accelerator.
    torch.default_generator.manual_seed(seed)


def synchronize(device: Any = None) -> None:
    """Wait for all work."""


def empty_cache() -> None:
    """Give unused memory back."""


def empty_host_cache() -> None:
    """Give unused memory of the host back."""


def _used() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def get_memory_info(device: Any = None) -> tuple[int, int]:
    """Return the free and the total bytes of a chip."""
    return _BYTES - _used(), _BYTES


def memory_stats(device: Any = None) -> OrderedDict[str, Any]:
    """Return what the allocator counts."""
    used = _used()
    return OrderedDict({"allocated_bytes.all.current": used, "allocated_bytes.all.peak": used})


def reset_peak_memory_stats(device: Any = None) -> None:
    """Forget the most that was allocated."""


def memory_allocated(device: Any = None) -> int:
    """Return the bytes of all tensors: here, of the process."""
    return _used()


def max_memory_allocated(device: Any = None) -> int:
    """Return the most bytes that all tensors have had."""
    return _used()


def memory_reserved(device: Any = None) -> int:
    """Return the bytes that the allocator holds and no tensor uses."""
    return 0

"""How long a call takes: warmed up, interleaved, with arguments that are in no cache.

Every contender has the same copies of the arguments and takes them in turn. Together they
are twice as large as the device's last cache, or 256 copies: what is so small that those
stay in the cache is there in a model too, where the layer before has just written it.
"""

from __future__ import annotations

import gc
import re
import time
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any
from typing import Protocol

import torch

from vllm_fl.conformance.tensors import moved
from vllm_fl.conformance.tensors import tensors_of
from vllm_fl.tuning.judging import bound

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Iterator
    from collections.abc import Mapping
    from collections.abc import Sequence

    from vllm_fl.dispatch import Operator

_MOST_COPIES = 256
#: Of memory that may be taken for copies where nothing says how much is free.
_COPIES_BYTES = 2**31
_WARM_UP_CALLS = 3
#: A batch of calls takes at least this long, so that no clock is asked for what it cannot tell.
_BATCH_SECONDS = 5e-4
_MOST_CALLS = 10_000
_FEWEST_ROUNDS = 5
_GRAPH_SECONDS = 1e-3


class Clock(Protocol):
    """Measures what is called."""

    def time(self, calls: Callable[[], None]) -> tuple[float, float]:
        """Run ``calls``; return the seconds until all is done, and those until it returns."""


class HostClock:
    """The process's own clock, for devices that compute before they return."""

    def time(self, calls: Callable[[], None]) -> tuple[float, float]:
        """Run ``calls`` and return its seconds, twice."""
        started = time.perf_counter()
        calls()
        seconds = time.perf_counter() - started
        return seconds, seconds


class DeviceClock:
    """A device's events around the calls; beside them the time that the host is busy."""

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device)

    def time(self, calls: Callable[[], None]) -> tuple[float, float]:
        """Run ``calls`` and return the seconds between two events, and the host's."""
        begin, end = (self._module.Event(enable_timing=True) for _ in range(2))
        self._module.synchronize()
        begin.record()
        started = time.perf_counter()
        calls()
        host = time.perf_counter() - started
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3, host


def clock_of(device: torch.device) -> Clock:
    """Return the clock for a device."""
    return HostClock() if device.type == "cpu" else DeviceClock(device)


def has_graphs(device: torch.device) -> bool:
    """Whether calls can be captured in a graph of the device."""
    return device.type == "cuda"


@dataclass
class Subject:
    """What is timed.

    Attributes:
        name: for who asks for its times.
        run: calls it so many times.
        calls: how many calls of the operator one of them is.
    """

    name: str
    run: Callable[[int], None]
    calls: int = 1
    samples: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Times:
    """Microseconds of one call.

    Attributes:
        median_us: half of the batches took less.
        p20_us: a fifth of them took less.
        p80_us: four fifths of them took less.
        host_us: the median time until the call returns.
    """

    median_us: float
    p20_us: float
    p80_us: float
    host_us: float


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which a share of the values lies, between the nearest two."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def measure(subjects: Sequence[Subject], clock: Clock, seconds: float, rounds: int = 15) -> dict[str, Times]:
    """Time what competes, in turn, so that a change of the device's pace meets all of them.

    Args:
        subjects: each with a name of its own.
        clock: measures a batch of calls.
        seconds: for each subject, about.
        rounds: batches of each subject, fewer where a call takes long.
    """
    plans = []
    with _undisturbed():
        for subject in subjects:
            subject.run(_WARM_UP_CALLS)
            one = max(clock.time(lambda its=subject: its.run(1))[0], 1e-8)  # type: ignore[misc]
            batch = max(_BATCH_SECONDS, seconds / rounds)
            plans.append((subject, min(max(int(batch / one), 1), _MOST_CALLS), one))
        longest = max((one for _, _, one in plans), default=0.0)
        count = min(rounds, max(_FEWEST_ROUNDS, int(seconds / longest) if longest else rounds))
        for turn in range(count):
            at = turn % len(plans)
            for subject, calls, _ in plans[at:] + plans[:at]:
                elapsed, host = clock.time(lambda its=subject, n=calls: its.run(n))  # type: ignore[misc]
                subject.samples.append(elapsed / calls / subject.calls)
                subject.host.append(host / calls / subject.calls)
    return {subject.name: _times(subject) for subject in subjects}


def _times(subject: Subject) -> Times:
    shares = (0.5, 0.2, 0.8)
    median, p20, p80 = (quantile(subject.samples, share) * 1e6 for share in shares)
    return Times(median, p20, p80, quantile(subject.host, 0.5) * 1e6)


@contextmanager
def _undisturbed() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with torch.inference_mode():
            yield
    finally:
        if was_enabled:
            gc.enable()


class Copies:
    """Copies of one call's arguments, which are taken in turn.

    Args:
        operator: orders the arguments.
        arguments: on the device.
        touched: bytes that a call reads and writes.
    """

    def __init__(self, operator: Operator, arguments: Mapping[str, Any], touched: int) -> None:
        device = tensors_of(arguments.values())[0].device
        storages = {t.untyped_storage()._cdata: t for t in tensors_of(arguments.values())}
        whole = sum(t.untyped_storage().nbytes() for t in storages.values())
        wanted = -(-2 * cache_bytes(device) // max(touched, 1))
        count = max(1, min(wanted, _MOST_COPIES, _room(device) // max(whole, 1)))
        self.calls = [bound(operator, moved(arguments, device)) for _ in range(count)]
        self._next = 0

    def eager(self, name: str, function: Callable[..., Any]) -> Subject:
        """Return a subject that calls ``function`` as Python does."""
        calls = self.calls

        def run(count: int) -> None:
            at = self._next
            for _ in range(count):
                args, kwargs = calls[at]
                function(*args, **kwargs)
                at = at + 1 if at + 1 < len(calls) else 0
            self._next = at

        return Subject(name, run)

    def captured(self, name: str, function: Callable[..., Any], clock: Clock) -> Subject:
        """Return a subject that replays a CUDA graph of many calls of ``function``.

        Raises:
            Exception: it cannot be captured.
        """
        eager = self.eager(name, function)
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.inference_mode(), torch.cuda.stream(stream):
            eager.run(_WARM_UP_CALLS)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.inference_mode():
            one = max(clock.time(lambda: eager.run(1))[0], 1e-7)
            count = max(min(_MOST_COPIES, int(_GRAPH_SECONDS / one) + 1), len(self.calls))
            self._next = 0
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                eager.run(count)

        def run(times: int) -> None:
            for _ in range(times):
                graph.replay()

        return Subject(name, run, count)


def _room(device: torch.device) -> int:
    """Return how many bytes copies may take: a quarter of what is free."""
    info = getattr(torch.get_device_module(device), "mem_get_info", None)
    if device.type == "cpu" or info is None:
        return _COPIES_BYTES
    return int(info()[0]) // 4


def cache_bytes(device: torch.device) -> int:
    """Return the size of a device's last cache."""
    if device.type != "cpu":
        properties = getattr(torch.get_device_module(device), "get_device_properties", None)
        size = getattr(properties(device), "L2_cache_size", 0) if properties is not None else 0
        return int(size) or 2**26
    sizes = [2**25]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        match = re.fullmatch(r"(\d+)([KM]?)", path.read_text().strip())
        if match:
            sizes.append(int(match[1]) * {"": 1, "K": 2**10, "M": 2**20}[match[2]])
    return max(sizes)


def copy_bandwidth(device: torch.device, clock: Clock) -> float:
    """Return the bytes that a copy of a large buffer reads and writes in a second."""
    size = min(max(4 * cache_bytes(device), 2**28), max(_room(device) // 2, 2**24))
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def run(count: int) -> None:
        for _ in range(count):
            target.copy_(source)

    times = measure([Subject("copy", run)], clock, 0.1, rounds=9)["copy"]
    return 2 * size / (times.median_us / 1e6)

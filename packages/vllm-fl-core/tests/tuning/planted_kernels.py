"""Implementations whose speed is known: each moves a clock of its own by what it is said to take."""

from __future__ import annotations

import torch

from vllm_fl.dispatch import BackendImplKind
from vllm_fl.dispatch import OpImpl
from vllm_fl.dispatch import OpManager
from vllm_fl.dispatch import OpRegistry

OP = "silu_and_mul"
FAST, SLOW, TORCH = "vendor.fast", "vendor.slow", "reference.torch"


class VirtualClock:
    """Shows what the implementations say that they take, and no time of the machine's.

    Attributes:
        takes: microseconds of a call, by implementation id; a test may change them.
        noise: what is added to a call in turn, as shares of it.
    """

    def __init__(self, **takes):
        self.takes = {name.replace("_", "."): value for name, value in takes.items()}
        self.noise = (0.0,)
        self.now = 0.0
        self.batches = 0

    def time(self, calls):
        before = self.now
        calls()
        self.batches += 1
        elapsed = (self.now - before) * (1 + self.noise[self.batches % len(self.noise)])
        return elapsed, elapsed

    def ran(self, impl_id):
        self.now += self.takes.get(impl_id, 1.0) / 1e6


def right(x):
    gate, up = x.float().chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype).contiguous()


def manager(clock, **more):
    """Return a manager of FAST, SLOW and TORCH, which are right and record themselves on ``clock``.

    Args:
        clock: what they move.
        more: other functions, by the vendor's name.
    """
    registry = OpRegistry()

    def registered(impl_id, kind, function, vendor=None):
        def fn(x):
            clock.ran(impl_id)
            return function(x)

        registry.register_impl(OpImpl(OP, impl_id, kind, fn, vendor))

    for name, function in {"fast": right, "slow": right, **more}.items():
        registered(f"vendor.{name}", BackendImplKind.VENDOR, function, name)
    registered(TORCH, BackendImplKind.REFERENCE, right)
    return OpManager(registry)

"""Policies change while sixteen threads call: every call sees the old one or the new one, whole.

It ends when every thread has had SOAK_TURNS turns (100 unless it is set).

Two policies are made so that half of one and half of the other would choose what neither
chooses: an order and what it denies. The threads take turns as often as they can, and nothing
here or in the dispatch relies on a lock around the interpreter; what it does rely on is said
in vllm_fl/dispatch/manager.py, "Threads".
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING
from typing import Any

import pytest

from vllm_fl.dispatch import BackendImplKind
from vllm_fl.dispatch import OpImpl
from vllm_fl.dispatch import OpManager
from vllm_fl.dispatch import OpRegistry
from vllm_fl.dispatch import SelectionPolicy
from vllm_fl.dispatch import call_op
from vllm_fl.dispatch import get_default_manager
from vllm_fl.dispatch import get_policy
from vllm_fl.dispatch import manager as manager_module
from vllm_fl.dispatch import policy_context
from vllm_fl.dispatch import resolve_op
from vllm_fl.dispatch import set_global_policy
from vllm_fl.dispatch import with_denied_vendors

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Iterator

TURNS = int(os.environ.get("SOAK_TURNS", "100"))
#: Nothing here takes as long: somebody is kept waiting.
STUCK_SECONDS = 900
OPS = ("silu_and_mul", "gelu_and_mul")


def policy(order: str, denied: str) -> SelectionPolicy:
    orders = {op_name: [f"vendor:{vendor}" for vendor in order] for op_name in OPS}
    return SelectionPolicy.from_dict(per_op_order=orders, deny_vendors=[denied])


#: What each chooses. The order of one with what the other denies: a, or c.
ONE, OTHER, OF_CONTEXTS = policy("abcd", "a"), policy("cdab", "c"), policy("ed", "a")
CHOOSES = {ONE: "b", OTHER: "d", OF_CONTEXTS: "e"}
BY_FINGERPRINT = {one.fingerprint(): f"vendor.{vendor}" for one, vendor in CHOOSES.items()}
EITHER = {"b", "d"}


def impl(op_name: str, vendor: str) -> OpImpl:
    return OpImpl(op_name, f"vendor.{vendor}", BackendImplKind.VENDOR, lambda x: (vendor, x), vendor)


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Iterator[OpManager]:
    registry = OpRegistry()
    registry.register_many(impl(op_name, vendor) for op_name in OPS for vendor in "abcde")
    made = OpManager(registry)
    monkeypatch.setattr(manager_module, "_default", made)
    set_global_policy(ONE)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield made
    sys.setswitchinterval(interval)


class Soak:
    """What each thread does until it is over; an assertion ends all of them."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.setting = threading.Lock()
        self.done: Counter[str] = Counter()
        self.counts: list[int] = []
        self.deadline = time.monotonic() + STUCK_SECONDS

    def run(self, number: int, turn: Callable[[int], None]) -> None:
        try:
            while not self.over.is_set() and min(self.counts) < TURNS and time.monotonic() < self.deadline:
                turn(self.counts[number])
                self.counts[number] += 1
        except BaseException:
            self.over.set()
            raise

    def call(self, turn: int) -> None:
        op_name = OPS[turn % 2]
        vendor, x = call_op(op_name, turn)
        assert x == turn
        assert vendor in EITHER, vendor

    def resolve(self, turn: int) -> None:
        kept = resolve_op(OPS[turn % 2])
        # It keeps the choice of its moment, whatever is set between the calls.
        assert len({kept(turn)[0] for _ in range(3)} & EITHER) == 1

    def explain(self, turn: int) -> None:
        decision = get_default_manager().explain(OPS[turn % 2])
        assert decision.impl_id == BY_FINGERPRINT[decision.policy]

    def change(self, turn: int) -> None:
        """What is set is in force at once, for whoever has set it."""
        with self.setting:
            for new in (OTHER, ONE):
                set_global_policy(new)
                assert get_policy() is new
                assert {call_op(op_name, turn)[0] for op_name in OPS} == {CHOOSES[new]}
        time.sleep(0.001)

    def register(self, turn: int) -> None:
        op_name = f"other_{turn % 100}"
        get_default_manager().registry.register_impl(
            OpImpl(op_name, f"vendor.a.n{turn}", BackendImplKind.VENDOR, lambda: 0, "a")
        )
        time.sleep(0.005)

    def in_a_context(self, turn: int) -> None:
        with policy_context(OF_CONTEXTS):
            assert call_op(OPS[turn % 2], turn) == ("e", turn)
            with with_denied_vendors("e"):
                assert resolve_op(OPS[turn % 2])(turn) == ("d", turn)
            assert get_policy() is OF_CONTEXTS
        self.call(turn)

    def in_tasks(self, turn: int) -> None:
        """Tasks of one thread, which take turns inside of their contexts."""

        async def inside(number: int) -> None:
            with policy_context(OF_CONTEXTS):
                for _ in range(3):
                    await asyncio.sleep(0)
                    assert call_op(OPS[number % 2], number) == ("e", number)

        async def outside(number: int) -> None:
            for _ in range(3):
                await asyncio.sleep(0)
                self.call(number)

        async def all_of_them() -> None:
            await asyncio.gather(*(task(n) for n in range(6) for task in (inside, outside)))

        asyncio.run(all_of_them())


def test_sixteen_threads(manager: OpManager) -> None:
    soak = Soak()
    turns: list[Callable[[int], Any]] = [
        *[soak.call] * 4,
        *[soak.resolve] * 2,
        *[soak.explain] * 2,
        *[soak.change] * 3,
        *[soak.in_a_context] * 3,
        soak.in_tasks,
        soak.register,
    ]
    assert len(turns) == 16
    soak.counts = [0] * len(turns)
    with ThreadPoolExecutor(16) as pool:
        running = [pool.submit(soak.run, number, turn) for number, turn in enumerate(turns)]
        for one in running:
            one.result()
    assert min(soak.counts) >= TURNS, f"somebody was kept waiting: {soak.counts}"
    assert not soak.over.is_set()
    assert manager.get_failed_impls() == {}
    assert get_policy() in (ONE, OTHER)


def test_it_would_be_seen() -> None:
    """Half of one policy and half of the other: what the soak looks for."""
    from dataclasses import replace

    registry = OpRegistry()
    registry.register_many(impl(op_name, vendor) for op_name in OPS for vendor in "abcde")
    torn = [replace(ONE, deny_vendors=OTHER.deny_vendors), replace(OTHER, deny_vendors=ONE.deny_vendors)]
    for one in torn:
        with policy_context(one):
            vendor, _ = OpManager(registry).call(OPS[0], 1)
            assert vendor not in EITHER

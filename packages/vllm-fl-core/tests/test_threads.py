"""Threads: readers never wait, and nothing is published that is out of date."""

from __future__ import annotations

import importlib
import sys
import textwrap
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING
from typing import Any

import pytest

from vllm_fl.dispatch import Backend
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
from vllm_fl.dispatch.policy import in_force as policy_module
from vllm_fl.dispatch.types import Origin

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Iterator
    from pathlib import Path

    from vllm_fl.dispatch.common.fork import ForkSafeLock

OP = "silu_and_mul"
SECONDS = 120


def impl(vendor: str, priority: int = 100, **more: Any) -> OpImpl:
    return OpImpl(
        OP, f"vendor.{vendor}", BackendImplKind.VENDOR, lambda x: (vendor, x), vendor, priority, **more
    )


def only(*vendors: str) -> SelectionPolicy:
    return SelectionPolicy.from_dict(per_op_order={OP: [f"vendor:{vendor}" for vendor in vendors]})


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> OpManager:
    """The default manager, with vendors a, b and c; it finds no plugins."""
    registry = OpRegistry()
    registry.register_many([impl("a", 300), impl("b", 200), impl("c", 100)])
    manager = OpManager(registry)
    monkeypatch.setattr(manager_module, "_default", manager)
    return manager


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def in_thread(function: Callable[..., Any], *args: Any) -> Any:
    """Return what `function` returns in another thread; fail where it waits."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result(SECONDS)


class Slow(Backend):
    """A backend whose availability takes as long as the test wants."""

    name = "slow"  # type: ignore[assignment]

    def __init__(self) -> None:
        self.asked, self.answer = threading.Event(), threading.Event()
        self.questions = 0

    def is_available(self) -> bool:
        self.questions += 1
        self.asked.set()
        assert self.answer.wait(SECONDS)
        return True

    def silu_and_mul(self, x: Any) -> Any:
        return "slow", x


@contextmanager
def asking(slow: Slow, function: Callable[[], Any]) -> Iterator[list[Any]]:
    """Run `function` in a thread that waits for the availability; let it go on at the end."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    assert slow.asked.wait(SECONDS)
    try:
        yield results
    finally:
        slow.answer.set()
        thread.join(SECONDS)
    assert not thread.is_alive()


# -- readers never wait --------------------------------------------------------------


def test_readers_do_not_wait_for_a_registration(manager: OpManager) -> None:
    assert call_op(OP, 1) == ("a", 1)
    kept, entered = resolve_op(OP), only("b")
    with policy_context(entered):
        call_op(OP, 1)

    def read() -> list[Any]:
        with policy_context(entered):
            in_context = call_op(OP, 2)
        return [
            call_op(OP, 1),
            kept(3),
            in_context,
            resolve_op(OP)(4),
            len(manager.registry.snapshot().impl_ids()),
        ]

    locks: list[ForkSafeLock] = [
        manager.registry._lock,
        manager._lock,
        policy_module._global.lock,
        manager_module._default_lock,
    ]
    for lock in locks:
        with lock:
            assert in_thread(read) == [("a", 1), ("a", 3), ("b", 2), ("a", 4), 3]


def test_an_operator_is_resolved_while_a_registration_holds_the_lock(manager: OpManager) -> None:
    with manager.registry._lock:
        assert in_thread(call_op, OP, 1) == ("a", 1)
        assert in_thread(lambda: str(manager.explain(OP))).startswith(f"{OP}: vendor.a")


def test_readers_do_not_wait_for_an_availability(manager: OpManager) -> None:
    """What is resolved already goes on while a new backend is asked."""
    slow = Slow()
    call_op(OP, 1)
    kept = resolve_op(OP)
    manager.registry.register_backend(slow)
    with asking(slow, lambda: call_op(OP, 1)):
        assert in_thread(kept, 2) == ("a", 2)
        assert (
            in_thread(lambda: call_op("other", 3) if manager.registry.register_impl(other()) else None)
            is None
        )
        assert in_thread(call_op, "other", 3) == 3


def other() -> OpImpl:
    return OpImpl("other", "vendor.a", BackendImplKind.VENDOR, lambda x: x, "a")


def test_snapshots_are_replaced_not_edited(manager: OpManager) -> None:
    before = manager.registry.snapshot()
    manager.registry.register_impl(impl("d"))
    after = manager.registry.snapshot()
    assert before is not after
    assert before.impl_ids() == {"vendor.a", "vendor.b", "vendor.c"}
    with pytest.raises(TypeError):
        after.impls_by_op["x"] = ()  # type: ignore[index]
    with pytest.raises(TypeError):
        after.operators["x"] = None  # type: ignore[index]


def test_the_hot_path_takes_no_lock(manager: OpManager) -> None:
    class Forbidden:
        def __enter__(self) -> None:
            raise AssertionError("a lock on the hot path")

        def __exit__(self, *_: object) -> None:
            raise AssertionError("a lock on the hot path")

    entered = only("b")
    with policy_context(entered):
        call_op(OP, 1)
        call_op(OP, 1)
    call_op(OP, 1)
    op = resolve_op(OP)
    saved = manager._lock, manager.registry._lock
    manager._lock = manager.registry._lock = Forbidden()  # type: ignore[assignment]
    try:
        assert call_op(OP, 1) == op(1) == ("a", 1)
        with policy_context(entered):
            assert call_op(OP, 1) == ("b", 1)
    finally:
        manager._lock, manager.registry._lock = saved


# -- only what is current is published ---------------------------------------------------


@pytest.mark.parametrize(
    ("change", "now"),
    [
        (lambda manager: set_global_policy(only("c")), "c"),
        (lambda manager: manager.registry.register_impl(impl("fast", 900)), "fast"),
        (lambda manager: manager.failures.set_aside(OP, "vendor.a", ValueError()), "b"),
    ],
    ids=["policy", "registration", "failure"],
)
def test_a_choice_that_became_old_is_not_published(
    manager: OpManager, change: Callable[[OpManager], Any], now: str
) -> None:
    slow = Slow()
    manager.registry.register_backend(slow)
    with asking(slow, lambda: call_op(OP, 1)) as results:
        in_thread(change, manager)
    assert results == [("a", 1)]  # it began before
    assert call_op(OP, 2) == (now, 2)
    assert resolve_op(OP)(3) == (now, 3)
    assert slow.questions == 1


def test_a_choice_in_a_context_that_became_old_is_not_published(manager: OpManager) -> None:
    slow, entered = Slow(), SelectionPolicy(prefer="vendor")
    manager.registry.register_backend(slow)

    def call() -> Any:
        with policy_context(entered):
            return call_op(OP, 1)

    with asking(slow, call) as results:
        in_thread(manager.registry.register_impl, impl("fast", 900))
    assert results == [("a", 1)]
    assert call() == ("fast", 1)


def test_a_choice_is_not_published_into_a_plan(manager: OpManager) -> None:
    """A thread resolves for one policy, and the process is frozen with another."""
    slow = Slow()
    manager.registry.register_backend(slow)
    with asking(slow, lambda: call_op(OP, 1)) as results:
        set_global_policy(only("b"))
        plan = in_thread(manager.freeze) if slow.answer.set() is None else None
    assert results == [("a", 1)]
    assert plan is not None
    assert plan.choices[OP] == "vendor.b"
    assert call_op(OP, 2) == ("b", 2)


@pytest.mark.parametrize("change", ["policy", "registration"])
def test_a_plan_that_became_old_is_made_again(manager: OpManager, change: str) -> None:
    slow = Slow()
    manager.registry.register_backend(slow)

    def wait_then_change() -> None:
        if change == "policy":
            policy_module._global.change("a test", only("c"))
        else:
            manager.registry.register_impl(impl("fast", 900))

    with asking(slow, manager.freeze) as results:
        # Both wait for the freeze when they tell the manager, having changed the world.
        changing = threading.Thread(target=wait_then_change)
        changing.start()
        deadline = time.monotonic() + SECONDS
        while not changed(manager, change) and time.monotonic() < deadline:
            time.sleep(0.001)
        assert changed(manager, change)
    changing.join(SECONDS)
    wanted = "c" if change == "policy" else "fast"
    (plan,) = results
    assert plan.choices[OP] == f"vendor.{wanted}"
    assert call_op(OP, 1) == (wanted, 1)
    assert manager.frozen
    assert plan.policy == get_policy().fingerprint()
    assert manager._table.policy is get_policy()  # still the table of the plan


def changed(manager: OpManager, what: str) -> bool:
    if what == "policy":
        return policy_module._global.chosen is not None
    return "vendor.fast" in manager.registry.snapshot().impl_ids()


def test_no_warning_for_a_registration_that_the_plan_has(
    manager: OpManager, caplog: pytest.LogCaptureFixture
) -> None:
    test_a_plan_that_became_old_is_made_again(manager, "registration")
    assert "after the dispatch was frozen" not in caplog.text


def test_availability_is_asked_once(manager: OpManager) -> None:
    slow = Slow()
    manager.registry.register_backend(slow)
    with ThreadPoolExecutor(16) as pool:
        calls = [pool.submit(call_op, OP, n) for n in range(16)]
        assert slow.asked.wait(SECONDS)
        slow.answer.set()
        assert [call.result(SECONDS) for call in calls] == [("a", n) for n in range(16)]
    assert slow.questions == 1


# -- contexts -------------------------------------------------------------------------------


def test_every_thread_sees_its_own_context(manager: OpManager, switching: None) -> None:
    """16 threads in contexts of their own, while the global policy and the registry change."""
    barrier, stop = threading.Barrier(17), threading.Event()

    def work(number: int) -> set[str]:
        mine = "abc"[number % 3]
        barrier.wait(SECONDS)
        seen = set()
        for turn in range(60):
            with policy_context(only(mine)) as policy:
                seen.add(call_op(OP, turn)[0])
                with policy_context(only("b")):
                    assert call_op(OP, turn)[0] == resolve_op(OP)(turn)[0] == "b"
                seen.add(resolve_op(OP)(turn)[0])
                assert get_policy() is policy
        assert seen == {mine}
        return seen

    def change() -> int:
        barrier.wait(SECONDS)
        turns = 0
        while not stop.is_set():
            turns += 1
            set_global_policy(only("abc"[turns % 3]))
            assert call_op(OP, 0)[0] == "abc"[turns % 3]
            if turns % 10 == 0:
                manager.registry.register_impl(
                    OpImpl("other", f"vendor.a.n{turns}", BackendImplKind.VENDOR, lambda: 0, "a")
                )
        return turns

    with ThreadPoolExecutor(17) as pool:
        changing = pool.submit(change)
        working = [pool.submit(work, number) for number in range(16)]
        try:
            for one in working:
                one.result(300)
        finally:
            stop.set()
        assert changing.result(SECONDS) > 0


def test_a_context_is_not_seen_by_another_thread(manager: OpManager) -> None:
    with policy_context(only("c")):
        assert call_op(OP, 1) == ("c", 1)
        assert in_thread(call_op, OP, 1) == ("a", 1)


def test_no_manager_misses_a_policy(switching: None) -> None:
    """Managers are made while contexts are entered, which looks through the listeners."""
    stop = threading.Event()

    def enter() -> None:
        while not stop.is_set():
            with policy_context(SelectionPolicy()):
                pass

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    managers = []

    def make() -> None:
        for _ in range(50):
            registry = OpRegistry()
            registry.register_many([impl("a", 300), impl("b", 200)])
            managers.append(OpManager(registry))

    makers = [threading.Thread(target=make) for _ in range(4)]
    try:
        for maker in makers:
            maker.start()
        for maker in makers:
            maker.join(300)
    finally:
        stop.set()
        for thread in threads:
            thread.join(SECONDS)
    assert len(managers) == 200
    listening = {id(listener) for listener in policy_module._global.each_listener()}
    assert {id(manager) for manager in managers} <= listening
    assert {manager.call(OP, 1) for manager in managers} == {("a", 1)}
    set_global_policy(only("b"))
    assert {manager.call(OP, 1) for manager in managers} == {("b", 1)}


def test_no_registration_misses_a_manager(switching: None) -> None:
    registry = OpRegistry()
    registry.register_impl(impl("a", 300))
    with ThreadPoolExecutor(8) as pool:
        managers = list(pool.map(lambda _: OpManager(registry), range(200)))
    assert {manager.call(OP, 1) for manager in managers} == {("a", 1)}
    registry.register_impl(impl("b", 400))
    assert {manager.call(OP, 1) for manager in managers} == {("b", 1)}


# -- freezing --------------------------------------------------------------------------------


def test_freeze_while_others_call(manager: OpManager, switching: None) -> None:
    stop, problems = threading.Event(), []

    def work(number: int) -> int:
        calls = 0
        while not stop.is_set():
            try:
                assert call_op(OP, calls) == ("a", calls)
                assert resolve_op(OP)(calls) == ("a", calls)
            except BaseException as error:
                problems.append(error)
                raise
            calls += 1
        return calls

    with ThreadPoolExecutor(16) as pool:
        working = [pool.submit(work, number) for number in range(16)]
        plans = []
        for _ in range(30):
            plans.append(manager.freeze().fingerprint)
            manager.thaw()
        stop.set()
        assert all(one.result(SECONDS) > 0 for one in working)
    assert problems == []
    assert len(set(plans)) == 1


def test_two_threads_freeze_at_once(manager: OpManager) -> None:
    slow = Slow()
    manager.registry.register_backend(slow)
    with ThreadPoolExecutor(8) as pool:
        freezing = [pool.submit(manager.freeze) for _ in range(8)]
        assert slow.asked.wait(SECONDS)
        slow.answer.set()
        plans = [one.result(SECONDS) for one in freezing]
    assert all(plan is plans[0] for plan in plans)


# -- registration and discovery -----------------------------------------------------------------


def test_registrations_from_many_threads_are_all_there(manager: OpManager, switching: None) -> None:
    def register(number: int) -> None:
        origin = Origin(f"wheel-{number}", "1.0", f"plugin{number}")
        manager.registry.register_many(
            OpImpl(
                op, f"vendor.v{number}", BackendImplKind.VENDOR, lambda: number, f"v{number}", origin=origin
            )
            for op in ("first", "second")
        )
        manager.call("first")

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(register, range(100)))
    snapshot = manager.registry.snapshot()
    assert len(snapshot.impls_by_op["first"]) == len(snapshot.impls_by_op["second"]) == 100
    assert manager.get_selected_impl_id("first") == "vendor.v0"


def test_two_threads_initialise_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_plugins: None
) -> None:
    (tmp_path / "counting_plugin.py").write_text(
        textwrap.dedent(
            """
            import time
            from vllm_fl.dispatch import OpImpl
            calls = []
            def register(registry):
                calls.append(1)
                time.sleep(0.2)
                registry.register_impl(OpImpl("silu_and_mul", "vendor.counting", "vendor",
                                              lambda x: ("counting", x), "counting"))
            """
        )
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("VLLM_FL_PLUGIN_MODULES", "counting_plugin")
    barrier = threading.Barrier(16)

    def first(number: int) -> Any:
        barrier.wait(SECONDS)
        way = [
            lambda: call_op(OP, number),
            lambda: resolve_op(OP)(number),
            lambda: get_default_manager().explain(OP) and ("counting", number),
            lambda: get_policy() and ("counting", number),
        ]
        return way[number % 4]()

    try:
        with ThreadPoolExecutor(16) as pool:
            assert list(pool.map(first, range(16))) == [("counting", number) for number in range(16)]
        assert len(sys.modules["counting_plugin"].calls) == 1
        records = get_default_manager().registry.plugins.values()
        assert [(record.name, record.state) for record in records] == [("counting_plugin", "loaded")]
    finally:
        sys.modules.pop("counting_plugin", None)


def test_one_default_manager(switching: None, no_plugins: None) -> None:
    barrier = threading.Barrier(16)

    def get(_: int) -> OpManager:
        barrier.wait(SECONDS)
        return get_default_manager()

    with ThreadPoolExecutor(16) as pool:
        assert len({id(manager) for manager in pool.map(get, range(16))}) == 1


def test_a_reference_is_loaded_once(
    manager: OpManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_kernels.py").write_text(
        "import builtins, time\n"
        "builtins.loads_of_slow_kernels = getattr(builtins, 'loads_of_slow_kernels', 0) + 1\n"
        "time.sleep(0.1)\n"
        "def kernel(x): return 'kernel', x\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    registry = OpRegistry()
    registry.register_impl(OpImpl(OP, "vendor.k", BackendImplKind.VENDOR, "slow_kernels:kernel", "k"))
    managers = [OpManager(registry) for _ in range(16)]
    try:
        with ThreadPoolExecutor(16) as pool:
            results = list(pool.map(lambda one: one.call(OP, 1), managers))
        assert set(results) == {("kernel", 1)}
        import builtins

        assert builtins.loads_of_slow_kernels == 1  # type: ignore[attr-defined]
    finally:
        sys.modules.pop("slow_kernels", None)


def test_a_module_may_resolve_while_another_thread_loads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever holds Python's lock of a module waits for nobody who waits for that lock."""
    (tmp_path / "kernels_of_two_threads.py").write_text(
        textwrap.dedent("""
        import threading, sys
        is_begun, may_go_on = sys.modules["conductor"].is_begun, sys.modules["conductor"].may_go_on
        is_begun.set()
        assert may_go_on.wait(300)
        from vllm_fl.dispatch import BackendImplKind, OpImpl
        OpImpl("dumps", "vendor.b", BackendImplKind.VENDOR, "json:dumps", "b").load()
        def kernel(x):
            return x
        """)
    )
    conductor = types.ModuleType("conductor")
    conductor.is_begun, conductor.may_go_on = threading.Event(), threading.Event()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "conductor", conductor)
    monkeypatch.syspath_prepend(str(tmp_path))
    lazy = OpImpl(OP, "vendor.a", BackendImplKind.VENDOR, "kernels_of_two_threads:kernel", "a")
    with ThreadPoolExecutor(2) as pool:
        by_import = pool.submit(importlib.import_module, "kernels_of_two_threads")
        assert conductor.is_begun.wait(300)  # type: ignore[attr-defined]
        by_load = pool.submit(lazy.load)
        time.sleep(0.1)  # it waits for the module now
        conductor.may_go_on.set()  # type: ignore[attr-defined]
        assert by_load.result(SECONDS) is by_import.result(SECONDS).kernel
    assert lazy.load() is lazy.load()

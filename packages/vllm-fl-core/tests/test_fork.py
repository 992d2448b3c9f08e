"""A forked child: no lock hangs it, registrations survive, choices and failures do not."""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
import weakref
from contextlib import ExitStack
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any

import pytest

import vllm_fl
from vllm_fl.dispatch import Backend
from vllm_fl.dispatch import BackendImplKind
from vllm_fl.dispatch import OpImpl
from vllm_fl.dispatch import OpManager
from vllm_fl.dispatch import OpRegistry
from vllm_fl.dispatch import SelectionPolicy
from vllm_fl.dispatch import availability as availability_module
from vllm_fl.dispatch import call_op
from vllm_fl.dispatch import discovery
from vllm_fl.dispatch import get_default_manager
from vllm_fl.dispatch import get_policy
from vllm_fl.dispatch import manager as manager_module
from vllm_fl.dispatch import policy_context
from vllm_fl.dispatch import resolve_op
from vllm_fl.dispatch import set_global_policy
from vllm_fl.dispatch import trace
from vllm_fl.dispatch.common import fork
from vllm_fl.dispatch.policy import in_force as policy_module

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
]

SECONDS = 120
VENDOR = BackendImplKind.VENDOR


class HungError(Exception):
    """The child did not end in time."""


def in_child(function: Callable[[], Any], seconds: int = SECONDS) -> Any:
    """Return what `function` returns in a forked child, as JSON has it."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(seconds)
            try:
                answer = json.dumps([True, function()])
            except BaseException as error:
                answer = json.dumps([False, f"{type(error).__name__}: {error}"])
            os.write(writer, answer.encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    return answer_of(pid, reader)


def answer_of(pid: int, reader: int) -> Any:
    ready, _, _ = select.select([reader], [], [], 300)
    assert ready, "the alarm of the child did not go off"
    text = os.read(reader, 65536).decode()
    os.close(reader)
    _, state = os.waitpid(pid, 0)
    if os.WIFSIGNALED(state) and os.WTERMSIG(state) == signal.SIGALRM:
        raise HungError
    succeeded, answer = json.loads(text)
    assert succeeded, answer
    return answer


@contextmanager
def held_by_another_thread(*locks: fork.ForkSafeLock) -> Iterator[None]:
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock)
            held.set()
            release.wait(300)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(300)
    try:
        yield
    finally:
        release.set()
        thread.join(300)


class Asked(Backend):
    """A backend that counts how often it is asked, per process."""

    name = "asked"  # type: ignore[assignment]

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.during: Callable[[], Any] = bool

    def is_available(self) -> bool:
        self.asked.append(os.getpid())
        self.during()
        return True

    def silu_and_mul(self, x: Any) -> Any:
        return ["asked", x]


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> OpManager:
    """The default manager, with a recorder; it finds no plugins."""
    monkeypatch.setenv("VLLM_FL_TRACE_DIR", str(tmp_path / "trace"))
    monkeypatch.setattr(trace, "_recorder", None)
    registry = OpRegistry()
    registry.register_many(
        [
            OpImpl("silu_and_mul", "vendor.a", VENDOR, lambda x: ["a", x], "a"),
            OpImpl("silu_and_mul", "vendor.b", VENDOR, lambda x: ["b", x], "b", 50),
            OpImpl("dumps", "vendor.a", VENDOR, "json:dumps", "a"),
            OpImpl("silu_and_mul", "vendor.asked.slow", VENDOR, Asked().silu_and_mul, "asked", 10),
        ]
    )
    manager = OpManager(registry)
    monkeypatch.setattr(manager_module, "_default", manager)
    call_op("silu_and_mul", 0)  # makes the recorder
    monkeypatch.setattr(discovery, "_installed", list)
    manager._plugins._is_wanted = True  # a child goes through its lock
    return manager


LOCKS: dict[str, Callable[[OpManager], Any]] = {
    "registry": lambda manager: manager.registry._lock,
    "manager": lambda manager: manager._lock,
    "policy": lambda manager: policy_module._global.lock,
    "availability": lambda manager: availability_module._availability._lock,
    "discovery": lambda manager: manager._plugins._lock,
    "failures": lambda manager: manager.failures._lock,
    "default manager": lambda manager: manager_module._default_lock,
    "recorder": lambda manager: trace.recorder()._lock,  # type: ignore[union-attr]
    "making the recorder": lambda manager: trace._recorder_lock,
}


def use_everything() -> list[Any]:
    """Go through every lock of the package."""
    manager = get_default_manager()
    resolved = resolve_op("silu_and_mul")(1)
    manager.registry.register_impl(OpImpl("late", "vendor.a", VENDOR, lambda: "late", "a"))
    set_global_policy(SelectionPolicy.from_dict(per_op_order={"silu_and_mul": ["vendor:b"]}))
    by_policy = call_op("silu_and_mul", 2)
    with policy_context(SelectionPolicy(prefer="vendor")):
        in_context = call_op("silu_and_mul", 3)
    manager.freeze()
    loaded = call_op("dumps", [4])
    manager.thaw()
    manager.clear_failed_impls()
    trace.recorder().write()  # type: ignore[union-attr]
    manager_module.reset_default_manager()
    get_default_manager().registry.snapshot()
    return [resolved, by_policy, in_context, loaded, call_op("late") if not manager_module._default else None]


USED = [["a", 1], ["b", 2], ["a", 3], "[4]", None]


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_that_another_thread_held(manager: OpManager, name: str) -> None:
    with held_by_another_thread(LOCKS[name](manager)):
        assert in_child(use_everything) == USED


def test_all_locks_at_once(manager: OpManager) -> None:
    with held_by_another_thread(*(get(manager) for get in LOCKS.values())):
        assert in_child(use_everything) == USED


def test_these_are_all_locks() -> None:
    """A new lock of the package belongs into LOCKS, and is a ForkSafeLock."""
    source = Path(vllm_fl.__file__).parent
    made = [
        f"{path.name}: {line.strip()}"
        for path in source.rglob("*.py")
        for line in path.read_text().splitlines()
        if "ForkSafeLock()" in line
    ]
    assert len(made) == len(LOCKS), made
    others = [
        path.name
        for path in source.rglob("*.py")
        if any(f"threading.{kind}(" in path.read_text() for kind in ("Lock", "RLock", "Condition"))
    ]
    assert others == ["fork.py"]


@pytest.mark.parametrize("name", LOCKS)
def test_it_would_hang_without_the_renewing(
    manager: OpManager, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork, "_hooks", {})
    with held_by_another_thread(LOCKS[name](manager)), pytest.raises(HungError):
        in_child(use_everything, seconds=1)


def test_a_lock_is_reentrant_after_a_fork() -> None:
    lock = fork.ForkSafeLock()

    def reenter() -> list[bool]:
        with lock:
            pass
        taken = []
        thread = threading.Thread(target=lambda: taken.append(lock._lock.acquire(timeout=0.1)))
        thread.start()
        thread.join()
        return taken

    # The child holds it as often as its parent did, and another thread cannot take it.
    with lock, lock:
        assert in_child(reenter) == [False]
    assert in_child(reenter) == [True]


# -- what survives ----------------------------------------------------------------------


def test_registrations_survive_and_choices_do_not(
    manager: OpManager, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(x: Any) -> Any:
        raise ValueError

    manager.registry.register_impl(OpImpl("silu_and_mul", "vendor.first", VENDOR, fails, "first", 500))
    assert call_op("silu_and_mul", 1) == ["a", 1]
    assert manager.get_failed_impls() == {"silu_and_mul": {"vendor.first"}}
    policy = set_and_return(SelectionPolicy(prefer="vendor"))
    call_op("silu_and_mul", 1)
    manager.failures.prove("silu_and_mul", "vendor.a")
    plan = manager.freeze()
    assert manager.frozen

    def look() -> list[Any]:
        before = [
            manager.frozen,
            manager.plan,
            manager.get_failed_impls(),
            manager.failures.is_proven("silu_and_mul", "vendor.a"),
        ]
        same_policy = get_policy() is policy
        first_again = manager.get_selected_impl_id("silu_and_mul")
        set_global_policy(SelectionPolicy(prefer="reference"))  # no longer frozen
        ids = sorted(manager.registry.snapshot().impl_ids())
        return [*before, same_policy, first_again, ids]

    assert in_child(look) == [
        False,
        None,
        {},
        False,
        True,
        "vendor.first",
        ["vendor.a", "vendor.asked.slow", "vendor.b", "vendor.first"],
    ]
    assert manager.plan is plan
    assert get_policy() is policy


def set_and_return(policy: SelectionPolicy) -> SelectionPolicy:
    set_global_policy(policy)
    return policy


def test_availability_is_asked_again(manager: OpManager) -> None:
    backend = Asked()
    manager.registry.register_backend(backend)
    with policy_context(SelectionPolicy.from_dict(per_op_order={"silu_and_mul": ["impl:vendor.asked"]})):
        assert call_op("silu_and_mul", 1) == call_op("silu_and_mul", 1) == ["asked", 1]
        assert backend.asked == [os.getpid()]

        def ask() -> bool:
            call_op("silu_and_mul", 1)
            call_op("silu_and_mul", 1)
            return backend.asked[1:] == [os.getpid()]

        assert in_child(ask) is True
    assert len(backend.asked) == 1


def test_a_fork_inside_is_available(manager: OpManager) -> None:
    """The thread that forks holds our lock, and the child goes on with it."""
    backend, answers = Asked(), []

    def fork_once() -> None:
        if len(backend.asked) == 1:
            backend.during = bool
            answers.append(in_child(use_everything))

    backend.during = fork_once
    manager.registry.register_backend(backend)
    set_global_policy(SelectionPolicy.from_dict(per_op_order={"silu_and_mul": ["impl:vendor.asked"]}))
    assert call_op("silu_and_mul", 1) == ["asked", 1]
    assert answers == [[["asked", 1], *USED[1:]]]


def test_a_child_that_comes_back_out_of_is_available(manager: OpManager) -> None:
    """Parent and child both return through our frames."""
    backend = Asked()
    reader, writer = os.pipe()
    pids: list[int] = []

    def fork() -> None:
        backend.during = bool
        pids.append(os.fork())
        if not pids[0]:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(SECONDS)

    backend.during = fork
    manager.registry.register_backend(backend)
    try:
        with policy_context(SelectionPolicy.from_dict(per_op_order={"silu_and_mul": ["impl:vendor.asked"]})):
            got = call_op("silu_and_mul", 1)
        if not pids[0]:
            again = [got, *use_everything()]
            free = []
            thread = threading.Thread(target=lambda: free.append(resolve_after_return(manager)))
            thread.start()
            thread.join(300)
            os.write(writer, json.dumps([True, [again, free]]).encode())
    finally:
        if pids and not pids[0]:
            os._exit(0)
    os.close(writer)
    assert got == ["asked", 1]
    assert answer_of(pids[0], reader) == [[["asked", 1], *USED], [["b", 5]]]


def resolve_after_return(manager: OpManager) -> Any:
    return manager.call("silu_and_mul", 5)


# -- in the middle of discovery ------------------------------------------------------------


def test_a_fork_while_another_thread_discovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_plugins: None
) -> None:
    """The other thread is inside a plugin's register function, with our lock held."""
    inside, go_on = threading.Event(), threading.Event()
    parent = os.getpid()
    for name in ("first_plugin", "second_plugin", "third_plugin"):
        (tmp_path / f"{name}.py").write_text(
            textwrap.dedent(
                f"""
                from vllm_fl.dispatch import OpImpl
                waits = lambda: None
                registered = []
                def register(registry):
                    registry.register_impl(OpImpl("silu_and_mul", "vendor.{name}", "vendor",
                                                  lambda x: ["{name}", x], "{name}"))
                    registered.append(1)
                    waits()
                """
            )
        )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("VLLM_FL_PLUGIN_MODULES", "first_plugin,second_plugin,third_plugin")
    import second_plugin  # type: ignore[import-not-found]

    def waits() -> None:
        if os.getpid() == parent:
            inside.set()
            go_on.wait(300)

    second_plugin.waits = waits
    thread = threading.Thread(target=call_op, args=("silu_and_mul", 0))
    thread.start()
    try:
        assert inside.wait(300)
        manager = get_default_manager()
        assert list(manager.registry.plugins) == ["first_plugin"]

        def use() -> list[Any]:
            ran = call_op("silu_and_mul", 1)
            return [
                ran,
                [(r.name, r.state) for r in manager.registry.plugins.values()],
                sorted(manager.registry.snapshot().impl_ids()),
                len(sys.modules["first_plugin"].registered),
            ]

        names = ["first_plugin", "second_plugin", "third_plugin"]
        assert in_child(use) == [
            ["first_plugin", 1],
            [[name, "loaded"] for name in names],
            [f"vendor.{name}" for name in names],
            1,
        ]
    finally:
        go_on.set()
        thread.join(300)
        for name in ("first_plugin", "second_plugin", "third_plugin"):
            sys.modules.pop(name, None)
    assert manager.get_selected_impl_id("silu_and_mul") == "vendor.first_plugin"


def test_a_pid_is_compared_where_no_hook_ran(manager: OpManager, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some libraries fork in C, and Python's hooks do not run."""
    manager.ensure_initialized()
    checks: list[object] = []
    monkeypatch.setattr(manager, "check_policy", checks.append)
    manager.ensure_initialized()
    assert checks == []
    monkeypatch.setattr(os, "getpid", lambda: -1)
    manager.ensure_initialized()
    assert len(checks) == 1


# -- the hooks ------------------------------------------------------------------------------


def test_managers_are_held_weakly() -> None:
    gc.collect()
    before = len(fork._hooks)
    managers = [OpManager(OpRegistry()) for _ in range(50)]
    for manager in managers:
        manager.registry.register_impl(OpImpl("silu_and_mul", "vendor.a", VENDOR, lambda x: x, "a"))
        manager.call("silu_and_mul", 1)
        manager.resolve("silu_and_mul")
    refs = [weakref.ref(manager) for manager in managers]
    registries = [weakref.ref(manager.registry) for manager in managers]
    assert len(fork._hooks) > before
    del managers, manager
    gc.collect()
    assert [ref for ref in refs + registries if ref() is not None] == []
    assert len(fork._hooks) == before


def test_no_hook_is_lost_when_threads_register() -> None:
    """A lock whose hook is lost hangs a child once in a long while."""
    kept: list[list[fork.ForkSafeLock]] = []
    barrier = threading.Barrier(8)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def make() -> None:
        barrier.wait(300)
        mine = []
        for _ in range(200):
            mine.append(fork.ForkSafeLock())
            fork.ForkSafeLock()  # dies at once
        kept.append(mine)

    threads = [threading.Thread(target=make) for _ in range(8)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
    finally:
        sys.setswitchinterval(interval)
    hooked = {id(ref()) for ref, _ in list(fork._hooks.values())}
    assert len(kept) == 8
    assert {id(lock) for mine in kept for lock in mine} <= hooked


def test_forks_under_load() -> None:
    """Threads resolve, register and set policies while the process forks again and again."""
    code = textwrap.dedent(
        """
        import os, signal, threading
        from vllm_fl.dispatch import *
        zero = lambda: 0
        registry = OpRegistry()
        registry.register_many(
            OpImpl("silu_and_mul", f"vendor.{v}", "vendor", lambda x, v=v: x, v) for v in "abc")
        manager = OpManager(registry)
        # Python's own lock of a module that is being imported is not ours to renew.
        manager.freeze(), manager.thaw()
        stop = threading.Event()
        def work(number):
            count = 0
            while not stop.is_set():
                count += 1
                set_global_policy(SelectionPolicy(prefer="vendor" if count % 2 else "reference"))
                registry.register_impl(
                    OpImpl("other", f"vendor.a.n{number}-{count % 9}", "vendor", zero, "a"))
                with with_preference("vendor"):
                    assert manager.call("silu_and_mul", 3) == 3
                OpManager(OpRegistry())
        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        states = []
        for _ in range(40):
            pid = os.fork()
            if pid == 0:
                signal.alarm(10)
                try:
                    set_global_policy(SelectionPolicy())
                    registry.register_impl(OpImpl("late", "vendor.a", "vendor", zero, "a"))
                    ok = manager.call("silu_and_mul", 5) == 5 and manager.call("late") == 0
                    OpManager(registry).freeze()
                    os._exit(0 if ok else 1)
                finally:
                    os._exit(2)
            states.append(os.waitpid(pid, 0)[1])
        stop.set()
        for thread in threads:
            thread.join()
        print(set(states))
        """
    )
    source = str(Path(vllm_fl.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert (done.stdout.strip(), done.returncode) == ("{0}", 0), done.stderr

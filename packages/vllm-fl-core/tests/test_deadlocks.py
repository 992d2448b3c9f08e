"""Somebody else's code runs without a lock of ours, and who waits for it does not wait for ever."""

from __future__ import annotations

import builtins
import logging
import sys
import textwrap
import threading
import types
from typing import TYPE_CHECKING
from typing import Any

import pytest

from vllm_fl.dispatch import Backend
from vllm_fl.dispatch import BackendImplKind
from vllm_fl.dispatch import DispatchError
from vllm_fl.dispatch import NoImplementationError
from vllm_fl.dispatch import OpImpl
from vllm_fl.dispatch import OpManager
from vllm_fl.dispatch import OpRegistry
from vllm_fl.dispatch import call_op
from vllm_fl.dispatch import get_default_manager
from vllm_fl.dispatch import implementation
from vllm_fl.dispatch import manager as manager_module
from vllm_fl.dispatch import policy_from_config
from vllm_fl.dispatch import reset_global_policy
from vllm_fl.dispatch import resolve_op
from vllm_fl.dispatch import shared_work
from vllm_fl.dispatch.backend import forget_availability
from vllm_fl.dispatch.common import fork

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Iterator
    from pathlib import Path

OP = "silu_and_mul"
#: Much longer than anything here takes; a deadlock is seen at once.
SECONDS = 300


class Running:
    """A function that runs in a thread; one that never ends does not keep the tests from ending."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._outcome: list[tuple[bool, Any]] = []
        self._thread = threading.Thread(target=self._run, args=(function, *args), daemon=True)
        self._thread.start()

    def _run(self, function: Callable[..., Any], *args: Any) -> None:
        try:
            self._outcome.append((True, function(*args)))
        except BaseException as error:
            self._outcome.append((False, error))

    def result(self) -> Any:
        self._thread.join(SECONDS)
        assert not self._thread.is_alive(), "it hangs"
        ((succeeded, value),) = self._outcome
        if not succeeded:
            raise value
        return value


def impl(vendor: str, priority: int = 100, **more: Any) -> OpImpl:
    return OpImpl(OP, f"vendor.{vendor}", BackendImplKind.VENDOR, lambda x: vendor, vendor, priority, **more)


@pytest.fixture
def conductor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """What the modules of a test import to tell it where they are."""
    made = types.ModuleType("conductor")
    monkeypatch.setitem(sys.modules, "conductor", made)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield made
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def module(folder: Path, name: str, text: str) -> None:
    (folder / f"{name}.py").write_text(textwrap.dedent(text))


#: A module that another thread is importing when it is needed, and that resolves an operator.
SHARED = """
from conductor import is_begun, is_wanted, results
from vllm_fl.dispatch import call_op
is_begun.set()
assert is_wanted.wait(300)
results.append(call_op("silu_and_mul", 1))
answer = True
"""


class Shared:
    """Events of `SHARED`."""

    def __init__(self, conductor: Any, folder: Path) -> None:
        conductor.is_begun, conductor.is_wanted, conductor.results = threading.Event(), threading.Event(), []
        self.is_begun, self.results = conductor.is_begun, conductor.results
        module(folder, "shared_library", SHARED)


@pytest.fixture
def shared(conductor: Any, tmp_path: Path) -> Shared:
    return Shared(conductor, tmp_path)


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> OpManager:
    """The default manager; it finds no plugins."""
    manager = OpManager(OpRegistry())
    monkeypatch.setattr(manager_module, "_default", manager)
    return manager


# -- imports that wait for each other ---------------------------------------------------------


@pytest.mark.parametrize(
    "way", [call_op, resolve_op, "freeze", "explain"], ids=["call_op", "resolve_op", "freeze", "explain"]
)
def test_is_available_imports_what_another_thread_is_importing(
    manager: OpManager, shared: Shared, conductor: Any, way: Any
) -> None:
    class Acme(Backend):
        name = "acme"  # type: ignore[assignment]

        def is_available(self) -> bool:
            conductor.is_wanted.set()
            from shared_library import answer  # type: ignore[import-not-found]

            return bool(answer)

        def silu_and_mul(self, x: Any) -> Any:
            return "acme"

    manager.registry.register_backend(Acme())
    manager.registry.register_impl(impl("other", 50))
    importing = Running(__import__, "shared_library")
    assert shared.is_begun.wait(SECONDS)
    arguments = () if way == "freeze" else (OP, 1) if way is call_op else (OP,)
    asking = Running(getattr(manager, way) if isinstance(way, str) else way, *arguments)
    importing.result()
    asking.result()
    # The module is not whole yet when its own body asks: that holds for the one call.
    assert shared.results == ["other"]
    assert call_op(OP, 1) == "acme"


@pytest.mark.parametrize("where", ["import", "register"])
def test_a_plugin_imports_what_another_thread_is_importing(
    shared: Shared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_plugins: None, where: str
) -> None:
    first = "import conductor\nconductor.is_wanted.set()\nimport shared_library\n"
    at_import, in_register = (first, "") if where == "import" else ("", first)
    for name, body in (("good_plugin", ("", "")), ("acme_plugin", (at_import, in_register))):
        module(
            tmp_path,
            name,
            f"""
from vllm_fl.dispatch import OpImpl
{body[0]}
def register(registry):
{textwrap.indent(body[1], "    ")}
    kernel = lambda x: "{name}"
    registry.register_impl(OpImpl("silu_and_mul", "vendor.{name[:4]}", "vendor", kernel, "{name[:4]}"))
""",
        )
    monkeypatch.setenv("VLLM_FL_PLUGIN_MODULES", "good_plugin,acme_plugin")
    importing = Running(__import__, "shared_library")
    assert shared.is_begun.wait(SECONDS)
    calling = Running(call_op, OP, 1)
    importing.result()
    assert calling.result() == "acme_plugin"
    # The plugin waits for this call, which sees what has been registered before it.
    assert shared.results == ["good_plugin"]
    assert call_op(OP, 1) == "acme_plugin"
    states = [record.state for record in get_default_manager().registry.plugins.values()]
    assert states == ["loaded", "loaded"]


def test_a_module_of_is_available_resolves_in_the_same_thread(
    manager: OpManager, conductor: Any, tmp_path: Path
) -> None:
    conductor.results = []
    module(
        tmp_path,
        "acme_library",
        """
        from conductor import results
        from vllm_fl.dispatch import call_op
        results.append(call_op("silu_and_mul", 1))
        answer = True
        """,
    )

    class Acme(Backend):
        name = "acme"  # type: ignore[assignment]

        def is_available(self) -> bool:
            from acme_library import answer  # type: ignore[import-not-found]

            return bool(answer)

        def silu_and_mul(self, x: Any) -> Any:
            return "acme"

    manager.registry.register_backend(Acme())
    manager.registry.register_impl(impl("other", 50))
    assert call_op(OP, 1) == "acme"
    assert conductor.results == ["other"]


# -- threads that wait for each other ------------------------------------------------------------

THREADS = {
    "thread": """
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    """,
    "thread of a thread": """
    def start():
        inner = threading.Thread(target=call)
        inner.start()
        inner.join()
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    """,
    "pool": """
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(call)
    """,
}


@pytest.mark.parametrize("text", THREADS.values(), ids=THREADS)
@pytest.mark.parametrize("where", ["import", "register"])
def test_a_plugin_joins_a_thread_that_calls(
    conductor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_plugins: None, text: str, where: str
) -> None:
    conductor.results = []
    body = textwrap.dedent(text)
    module(
        tmp_path,
        "acme_plugin",
        f"""
import concurrent.futures, threading
from conductor import results
from vllm_fl.dispatch import OpImpl, call_op, NoImplementationError

def call():
    try:
        results.append(call_op("silu_and_mul", 1))
    except NoImplementationError as error:
        results.append(str(error))

{body if where == "import" else ""}
def register(registry):
{textwrap.indent(body, "    ") if where == "register" else ""}
    registry.register_impl(OpImpl("silu_and_mul", "vendor.acme", "vendor", lambda x: "acme", "acme"))
""",
    )
    monkeypatch.setenv("VLLM_FL_PLUGIN_MODULES", "acme_plugin")
    assert Running(call_op, OP, 1).result() == "acme"
    (said,) = conductor.results
    assert said.endswith(
        "plugin 'acme_plugin' of VLLM_FL_PLUGIN_MODULES has not ended, and waits for this call."
    )


def test_a_plugin_waits_for_a_call_in_a_way_that_cannot_be_seen(
    conductor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_plugins: None
) -> None:
    monkeypatch.setattr(shared_work, "PATIENCE_SECONDS", 0.3)
    conductor.results = []
    module(
        tmp_path,
        "acme_plugin",
        """
        import concurrent.futures
        from conductor import results
        from vllm_fl.dispatch import OpImpl, call_op, DispatchError
        def call():
            try:
                call_op("silu_and_mul", 1)
            except DispatchError as error:
                return str(error)
        def register(registry):
            results.append(concurrent.futures.ThreadPoolExecutor(1).submit(call).result())
            registry.register_impl(OpImpl("silu_and_mul", "vendor.acme", "vendor", lambda x: "acme", "acme"))
        """,
    )
    monkeypatch.setenv("VLLM_FL_PLUGIN_MODULES", "acme_plugin")
    assert Running(call_op, OP, 1).result() == "acme"
    (said,) = conductor.results
    assert said.startswith("plugin 'acme_plugin' of VLLM_FL_PLUGIN_MODULES has kept thread ")
    assert "the two may wait for each other" in said


def test_is_available_joins_a_thread_that_calls(manager: OpManager) -> None:
    results: list[str] = []

    def call() -> None:
        try:
            results.append(call_op(OP, 1))
        except DispatchError as error:
            results.append(str(error))

    class Acme(Backend):
        name = "acme"  # type: ignore[assignment]

        def is_available(self) -> bool:
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()
            return True

        def silu_and_mul(self, x: Any) -> Any:
            return "acme"

    manager.registry.register_backend(Acme())
    assert Running(call_op, OP, 1).result() == "acme"
    (said,) = results
    assert "Acme.is_available() uses an operator that is chosen by its answer" in said


def test_is_available_needs_its_own_answer(manager: OpManager) -> None:
    class Acme(Backend):
        name = "acme"  # type: ignore[assignment]
        asked = 0

        def is_available(self) -> bool:
            self.asked += 1
            return bool(call_op(OP, 1) == "acme")

        def silu_and_mul(self, x: Any) -> Any:
            return "acme"

    acme = Acme()
    manager.registry.register_backend(acme)
    manager.registry.register_impl(impl("other", 50))
    assert Running(call_op, OP, 1).result() == "other"
    assert acme.asked == 2
    (report,) = [c for c in manager.explain(OP).candidates if c.impl_id == "vendor.acme"]
    assert report.status == "unavailable"


def test_two_backends_that_need_each_other(manager: OpManager) -> None:
    """Each is asked by one thread and resolves the operator of the other."""
    barrier, results = threading.Barrier(2), []

    class Needs(Backend):
        def __init__(self, name: str, op_name: str) -> None:
            self._name, self.op_name = name, op_name

        @property
        def name(self) -> str:
            return self._name

        def is_available(self) -> bool:
            if not results:
                barrier.wait(SECONDS)
            try:
                results.append(call_op(self.op_name, 1))
            except DispatchError as error:
                results.append(str(error))
            return True

    class First(Needs):
        def silu_and_mul(self, x: Any) -> Any:
            return "first"

    class Second(Needs):
        def gelu_and_mul(self, x: Any) -> Any:
            return "second"

    manager.registry.register_backend(First("first", "gelu_and_mul"))
    manager.registry.register_backend(Second("second", "silu_and_mul"))
    first, second = Running(call_op, "silu_and_mul", 1), Running(call_op, "gelu_and_mul", 1)
    assert (first.result(), second.result()) == ("first", "second")
    assert any("uses an operator that is chosen by its answer" in said for said in results)


def test_a_backend_that_is_slow_is_waited_for(manager: OpManager, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a wait that is too long ends, and with the name of what it was for."""
    monkeypatch.setattr(shared_work, "PATIENCE_SECONDS", 0.2)
    is_asked, may_answer = threading.Event(), threading.Event()

    class Slow(Backend):
        name = "slow"  # type: ignore[assignment]

        def is_available(self) -> bool:
            is_asked.set()
            return may_answer.wait(SECONDS)

        def silu_and_mul(self, x: Any) -> Any:
            return "slow"

    manager.registry.register_backend(Slow())
    asking = Running(call_op, OP, 1)
    assert is_asked.wait(SECONDS)
    with pytest.raises(DispatchError, match=r"Slow\.is_available\(\) has kept thread 'Thread-\d+ "):
        Running(call_op, OP, 1).result()
    monkeypatch.setattr(shared_work, "PATIENCE_SECONDS", float(SECONDS))
    waiting = Running(call_op, OP, 1)
    may_answer.set()
    assert (asking.result(), waiting.result(), call_op(OP, 1)) == ("slow", "slow", "slow")


def test_an_answer_that_was_forgotten_meanwhile_is_not_kept(manager: OpManager) -> None:
    class Changed(Backend):
        name = "changed"  # type: ignore[assignment]
        asked = 0

        def is_available(self) -> bool:
            self.asked += 1
            if self.asked == 1:
                forget_availability()  # as when a device appears
                return False
            return True

        def silu_and_mul(self, x: Any) -> Any:
            return "changed"

    changed = Changed()
    manager.registry.register_backend(changed)
    with pytest.raises(NoImplementationError):
        call_op(OP, 1)
    assert call_op(OP, 1) == "changed"


# -- no lock of ours is held ------------------------------------------------------------------------


class Held:
    """Which of our locks this thread holds."""

    def __init__(self) -> None:
        self._by_thread = threading.local()
        self.seen: dict[str, int] = {}

    def add(self, number: int) -> None:
        self._by_thread.count = getattr(self._by_thread, "count", 0) + number

    def look(self, where: str) -> None:
        """Note what this thread holds while somebody else's code runs."""
        self.seen[where] = max(self.seen.get(where, 0), getattr(self._by_thread, "count", 0))


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    found = Held()
    enter, leave = fork.ForkSafeLock.__enter__, fork.ForkSafeLock.__exit__

    def entered(lock: Any) -> None:
        enter(lock)
        found.add(1)

    def left(lock: Any, *error: Any) -> None:
        found.add(-1)
        leave(lock, *error)

    monkeypatch.setattr(fork.ForkSafeLock, "__enter__", entered)
    monkeypatch.setattr(fork.ForkSafeLock, "__exit__", left)
    builtins.look = found.look  # type: ignore[attr-defined]

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.look(f"log: {record.getMessage()[:20]}")

    handler = Handler()
    logging.getLogger("vllm_fl").addHandler(handler)
    yield found
    logging.getLogger("vllm_fl").removeHandler(handler)
    del builtins.look  # type: ignore[attr-defined]


EVERYTHING = """
from vllm_fl.dispatch import Backend, BackendImplKind, OpImpl, implementation, operator

look("import")

class Odd(Exception):
    def __str__(self):
        look("str of an exception")
        return "odd"

class Function:
    __name__ = "f"
    def __init__(self, fails=False):
        self.fails = fails
    def __getattr__(self, name):
        look("getattr of a function")
        raise AttributeError(name)
    def __eq__(self, other):
        look("eq of a function")
        return self is other
    __hash__ = object.__hash__
    @property
    def __signature__(self):
        look("signature")
        import inspect
        return inspect.signature(lambda x: x)
    def __repr__(self):
        look("repr of a function")
        return "<f>"
    def __call__(self, x):
        look("call")
        if self.fails:
            raise Odd
        return "acme"

class Acme(Backend):
    @property
    def name(self):
        look("name")
        return "acme"
    def is_available(self):
        look("is_available")
        return True
    def missing(self, op_name):
        look("missing")
    @property
    def default_policy(self):
        look("default_policy")
        return {}
    @implementation(supports=lambda x: look("supports") or True)
    def silu_and_mul(self, x):
        look("call")
        return "backend"
    @implementation(supports=lambda x: look("supports") or True)
    def gelu_and_mul(self, x):
        raise Odd

@operator(fake=lambda torch, x: look("fake"))
def twice(self, x): "Twice."

def impl(name, fn, op="silu_and_mul", **more):
    return OpImpl(op, f"vendor.acme.{name}", BackendImplKind.VENDOR, fn, "acme", **more)

def hook():
    look("_is_available")
    raise Odd

def unavailable(x): pass
unavailable._is_available = hook

class Wrong:
    def __repr__(self):
        look("repr")
        return "<wrong>"

def register(registry):
    look("register")
    registry.register_backend(Acme())
    registry.declare(twice)
    registry.register_impl(impl("fails", Function(fails=True), priority=300))
    registry.register_impl(impl("lazy", "everything_lazy:kernel", op="twice"))
    registry.register_impl(impl("unavailable", unavailable, op="twice", priority=400))
    for fn in Function(), Function():  # the second has an id that is taken
        registry.register_impl(impl("f", fn))
    registry.register_impl(Wrong())
"""


def test_no_lock_is_held_while_somebody_elses_code_runs(
    held: Held, conductor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_plugins: None
) -> None:
    module(tmp_path, "everything_plugin", EVERYTHING)
    module(tmp_path, "everything_lazy", "look('lazy import')\ndef kernel(x): return look('call') or x\n")
    config = tmp_path / "policy.yaml"
    config.write_text("prefer: vendor\n")
    monkeypatch.setenv("VLLM_FL_PLUGIN_MODULES", "everything_plugin")

    def use() -> None:
        manager = get_default_manager()
        assert [call_op(OP, 1), call_op("twice", 2)] == ["backend", 2]
        with pytest.raises(Exception, match="odd"):
            call_op("gelu_and_mul", 1)
        manager.explain(OP)
        late = [
            OpImpl(OP, f"vendor.late.n{n}", "vendor", sys.modules["everything_plugin"].Function(), "late")  # type: ignore[arg-type]
            for n in (1, 1)
        ]
        with pytest.raises(DispatchError):
            manager.registry.register_many(late)
        manager.freeze()
        manager.registry.register_impl(late[0])
        manager.thaw()
        monkeypatch.setenv("VLLM_FL_CONFIG", str(config))
        monkeypatch.setenv("VLLM_FL_STRICT", "1")  # the file and the variable together are logged
        reset_global_policy()
        assert call_op("twice", 2) == 2
        policy_from_config(str(config))

    use()
    wanted = {
        *("import", "register", "is_available", "missing", "default_policy", "supports", "call", "name"),
        *("lazy import", "_is_available", "signature", "eq of a function", "str of an exception", "repr"),
        *("getattr of a function",),
    }
    assert wanted <= set(held.seen)
    assert {where.partition(":")[0] for where in held.seen} - wanted >= {"log"}
    assert {where: count for where, count in held.seen.items() if count} == {}


def test_the_instrument_sees_a_lock(held: Held) -> None:
    with OpRegistry()._lock:
        held.look("inside")
    held.look("outside")
    assert held.seen == {"inside": 1, "outside": 0}


def test_the_plugins_are_discovered_by_one_thread(
    conductor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_plugins: None
) -> None:
    """A wrong variable is told to every thread, and a discovery that failed is tried again."""
    monkeypatch.setenv("VLLM_FL_PLUGINS", "nobody")
    threads = [Running(call_op, OP, 1) for _ in range(4)]
    for one in threads:
        with pytest.raises(DispatchError, match="no plugin 'nobody' is installed"):
            one.result()
    monkeypatch.delenv("VLLM_FL_PLUGINS")
    with pytest.raises(NoImplementationError):
        call_op(OP, 1)


def test_what_supports_resolves_is_resolved(manager: OpManager) -> None:
    class Acme(Backend):
        name = "acme"  # type: ignore[assignment]

        def is_available(self) -> bool:
            return True

        @implementation(supports=lambda x: Running(call_op, "gelu_and_mul", x).result() == "gelu")
        def silu_and_mul(self, x: Any) -> Any:
            return "silu"

        def gelu_and_mul(self, x: Any) -> Any:
            return "gelu"

    manager.registry.register_backend(Acme())
    assert call_op(OP, 1) == "silu"

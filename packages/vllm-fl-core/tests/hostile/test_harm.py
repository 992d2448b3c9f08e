"""Plugins that do harm: the process lives, the others work, and one line says what happened.

What ends the process itself (``os._exit``, a segmentation fault) cannot be caught inside of it:
``vllm-fl doctor`` finds it, in a process of its own (test_doctor.py).
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
import threading
import time
from typing import TYPE_CHECKING
from typing import Any

import pytest
from wheels import OP
from wheels import RIGHT
from wheels import Site
from wheels import discover
from wheels import lines

from vllm_fl.dispatch import Backend
from vllm_fl.dispatch import NoImplementationError
from vllm_fl.dispatch import OpManager
from vllm_fl.dispatch import OpRegistry
from vllm_fl.dispatch import call_op
from vllm_fl.dispatch import get_default_manager
from vllm_fl.dispatch.common import slow_blocks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FAULTS = [
    ("import sys; sys.exit(3)", "SystemExit: 3"),
    ("raise KeyError('x')", "KeyError: 'x'"),
    ("class Odd(BaseException): pass\nraise Odd", "Odd"),
    ("def register(registry):\n    registry.register_impl(impl('acme'))\n    1 / 0", "ZeroDivisionError"),
    ("def register(registry):\n    registry.register_impl(3)", "3 is no OpImpl"),
    ("def register(registry):\n    registry.register_many(3)", "TypeError"),
    ("def register(registry):\n    registry.register_backend(3)", "3 is no Backend"),
    (
        "def register(registry):\n    registry.register_backend(type('B', (), {}))",
        "is a class; register an instance of it",
    ),
    ("def register(registry):\n    registry.declare(3)", "3 is no declaration"),
    ("def register(registry):\n    impl('acme', fn=3)", "RegistrationError"),
    ("VLLM_FL_VARIABLES = 'VLLM_FL_ACME'\ndef register(registry): pass", "VLLM_FL_VARIABLES must be a tuple"),
    ("VLLM_FL_VARIABLES = ('ACME',)\ndef register(registry): pass", "VLLM_FL_VARIABLES must be a tuple"),
]


@pytest.mark.parametrize(("source", "reason"), FAULTS)
def test_a_fault_costs_the_plugin_and_one_line(
    site: Site, caplog: pytest.LogCaptureFixture, source: str, reason: str
) -> None:
    site.wheel("acme", source)
    site.wheel("good")
    assert call_op(OP, 1) == "good"
    record = discover()["acme"]
    assert record.state == "failed"
    assert reason in record.reason
    (line,) = lines(caplog)
    assert line.startswith(f"plugin 'acme' of acme 1.0 is not used: {record.reason}")


# -- without end --------------------------------------------------------------------------------

MANY = [
    "Empty = type('Empty', (Backend,), {'name': 'acme', 'is_available': lambda self: True})\n"
    "    [registry.register_backend(Empty()) for i in range(10**6)]",
    "registry.register_many(impl(f'acme.n{i}') for i in range(10**6))",
    "registry.register_many(impl(f'acme.n{i}') for i in __import__('itertools').count())",
    "[registry.register_impl(impl(f'acme.n{i}')) for i in range(10**6)]",
    "[registry.register_many([impl('acme')] * 400, ) for i in range(10**6)]",
    "from vllm_fl.dispatch import operator\n"
    "    def again(i):\n"
    "        def method(self, x): 'Declared.'\n"
    "        method.__name__ = f'op_{i}'\n"
    "        registry.declare(operator()(method))\n"
    "    [again(i) for i in range(10**6)]",
]


@pytest.mark.parametrize("loop", MANY)
def test_a_million_implementations(site: Site, caplog: pytest.LogCaptureFixture, loop: str) -> None:
    """The bound: the thousandth and first ends it, and nothing of it is registered or kept."""
    import tracemalloc

    site.wheel("acme", f"def register(registry):\n    {loop}\n")
    site.wheel("good")
    tracemalloc.start()
    record = discover()["acme"]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert record.state == "failed"
    assert "it registers more than 1000 implementations" in record.reason
    assert len(record.reason) < 300
    assert peak < 50 * 2**20
    assert {op: len(i) for op, i in get_default_manager().registry.snapshot().impls_by_op.items()} == {OP: 1}
    assert len(lines(caplog)) == 1


def test_one_that_goes_on_when_it_is_told(site: Site) -> None:
    source = """
    def register(registry):
        for i in range(3000):
            try:
                registry.register_impl(impl(f"acme.n{i}"))
            except Exception:
                pass
    """
    site.wheel("acme", source)
    site.wheel("good")
    assert "it registers more than 1000" in discover()["acme"].reason
    assert call_op(OP, 1) == "good"


def test_a_thousand_are_not_too_many(site: Site) -> None:
    site.wheel("acme", "def register(r): r.register_many(impl(f'acme.n{i:03}') for i in range(1000))")
    assert discover()["acme"].success
    assert len(get_default_manager().registry.snapshot().impls_by_op[OP]) == 1000


def wait_for(is_so: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 300
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.02)


# -- one that does not come back -------------------------------------------------------------------


def test_a_plugin_that_hangs_is_named_while_it_does(
    site: Site, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow_blocks, "SLOW_SECONDS", 0.2)
    source = "import sys, threading\nsys.acme_may_go_on.wait(600)\n" + RIGHT
    site.wheel("acme", source)
    site.wheel("good")
    go_on = sys.acme_may_go_on = threading.Event()  # type: ignore[attr-defined]
    try:
        thread = threading.Thread(target=discover)
        thread.start()
        wait_for(lambda: lines(caplog))
        assert thread.is_alive()  # it is said while the plugin hangs
        (line,) = lines(caplog)
        assert line.startswith("plugin 'acme' of acme 1.0 has been loading for 0.2 seconds now")
        assert "VLLM_FL_PLUGINS" in line
        assert "vllm-fl doctor" in line
    finally:
        monkeypatch.setattr(slow_blocks, "SLOW_SECONDS", 600)  # the other may take its time
        go_on.set()
        thread.join(300)
        del sys.acme_may_go_on  # type: ignore[attr-defined]
    assert {record.state for record in discover().values()} == {"loaded"}
    assert len(lines(caplog)) == 1


def test_a_backend_that_hangs_is_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow_blocks, "SLOW_SECONDS", 0.1)

    class Slow(Backend):
        name = "slow"  # type: ignore[assignment]

        def is_available(self) -> bool:
            wait_for(lambda: lines(caplog))
            return True

        def silu_and_mul(self, x: Any) -> Any:
            return x

    manager = OpManager(OpRegistry())
    manager.registry.register_backend(Slow())
    assert manager.call(OP, 1) == 1
    (line,) = lines(caplog)
    assert "Slow.is_available() has been running for 0.1 seconds now" in line


def test_a_watch_tells_of_every_block_that_is_late_and_of_no_other(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two and three together take longer than is allowed, and each has room to be held up.
    monkeypatch.setattr(slow_blocks, "SLOW_SECONDS", 4)
    with slow_blocks.Watch() as watch:
        for name, late in (("one", 1), ("two", 0), ("three", 0), ("four", 2), ("five", None)):
            with watch.over(name, "advice"):
                if late:
                    wait_for(lambda late=late: len(lines(caplog)) >= late)
                elif late == 0:
                    time.sleep(2.2)
    assert [line.partition(" ")[0] for line in lines(caplog)] == ["one", "four"]


def test_the_watch_leaves_no_thread(site: Site) -> None:
    site.wheel("good")
    before = set(threading.enumerate())
    assert call_op(OP, 1) == "good"
    assert set(threading.enumerate()) <= before


# -- other people's loggers, and stdout ------------------------------------------------------------------

ROOT_CHANGES = [
    ("logging.basicConfig(level=10, force=True)", "level, handlers"),
    ("logging.getLogger().setLevel(50)", "level"),
    ("logging.getLogger().handlers.clear()", "handlers"),
    ("logging.getLogger().addFilter(lambda record: False)", "filters"),
    ("logging.disable(50)", "logging.disable"),
    ("logging.getLogger('of_the_user').disabled = True", "disabled loggers"),
    (
        "import logging.config; logging.config.dictConfig({'version': 1, 'root': {'level': 'ERROR'}})",
        "level, handlers, disabled loggers",
    ),
]


@pytest.mark.parametrize(("change", "what"), ROOT_CHANGES)
@pytest.mark.parametrize("then", ["", "\nraise RuntimeError('half way')"])
def test_the_root_logger_and_the_users_stay(
    site: Site, caplog: pytest.LogCaptureFixture, change: str, what: str, then: str
) -> None:
    user, root = logging.getLogger("of_the_user"), logging.getLogger()
    handler = logging.NullHandler()
    root.addHandler(handler)
    level = root.level
    kept = list(root.handlers)
    try:
        site.wheel("acme", f"import logging\n{change}{then}\n{RIGHT}")
        site.wheel("good")
        records = discover()
        assert (root.level, root.handlers, root.filters) == (level, kept, [])
        assert not user.disabled
        assert user.isEnabledFor(logging.CRITICAL)
        assert records["good"].success
        said = [line for line in lines(caplog) if "root logger" in line]
        assert said == [
            f"plugin 'acme' of acme 1.0 changed the root logger ({what}) while it was loaded; that is undone"
        ]
    finally:
        root.removeHandler(handler)
        logging.disable(0)


def test_a_logger_of_the_plugins_own_is_its_own(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.wheel("acme", "import logging\nlogging.getLogger('acme').setLevel(10)\n" + RIGHT)
    assert discover()["acme"].success
    assert lines(caplog) == []
    assert logging.getLogger("acme").level == 10


def test_stdout_is_not_the_commands_stdout(tmp_path: Path, python: Callable[..., Any]) -> None:
    """Printed by Python, by C, at the end of the process, and through a stream that was kept."""
    source = """
import atexit, os, sys
kept = sys.stdout
print("noise")
os.write(1, b"noise from C\\n")
atexit.register(print, "noise at the end")
def register(registry):
    kept.write("noise without an end of line")
    registry.register_impl(impl("acme"))
"""
    Site(tmp_path).wheel("acme", source)
    done = python("from vllm_fl.cli import main; raise SystemExit(main(['list', '--json']))", tmp_path)
    assert done.returncode == 0, done.stderr
    first, _, rest = done.stdout.partition("\n}\n")
    assert "acme" in {plugin["name"] for plugin in json.loads(first + "\n}")["plugins"]}
    # The command has ended by then; what a process says after its last line is no part of the object.
    assert rest in ("", "noise at the end\n")
    assert "noise from C" in done.stderr


# -- lies, names, threads ----------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", ["True", "'yes'", "1", "[0]"])
def test_one_that_says_it_is_available_and_is_not(
    site: Site, caplog: pytest.LogCaptureFixture, answer: str
) -> None:
    """Its first call says so: the next one runs, and it is set aside with one line."""
    site.wheel(
        "acme",
        f"""
class Acme(Backend):
    name = "acme"
    def is_available(self): return {answer}
    def silu_and_mul(self, x): raise OSError("libacme.so: cannot open shared object file")
def register(registry): registry.register_backend(Acme())
""",
    )
    site.wheel("good")
    if answer == "'yes'":
        # A sentence is the reason why it is not.
        assert call_op(OP, 1) == "good"
        return
    assert [call_op(OP, 1) for _ in range(3)] == ["good"] * 3
    said = [line for line in lines(caplog) if "vendor.acme" in line]
    assert len(said) == 1
    assert "is set aside" in said[0]
    assert "libacme.so" in said[0]


@pytest.mark.parametrize("answer", ["sys.exit(1)", "1 / 0", "(_ for _ in ()).throw(BaseException('odd'))"])
def test_one_that_raises_when_it_is_asked(site: Site, answer: str) -> None:
    site.wheel(
        "acme",
        f"""
import sys
class Acme(Backend):
    name = "acme"
    def is_available(self): {answer}
    def silu_and_mul(self, x): return "acme"
def register(registry): registry.register_backend(Acme())
""",
    )
    site.wheel("good")
    assert call_op(OP, 1) == "good"
    (report,) = [c for c in get_default_manager().explain(OP).candidates if c.impl_id == "vendor.acme"]
    assert report.status == "unavailable"


def test_one_that_shadows_anothers_name(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.wheel("good")
    site.wheel("zacme", "def register(registry): registry.register_impl(impl('good', fn=lambda x: 'stolen'))")
    assert call_op(OP, 1) == "good"
    (line,) = lines(caplog)
    assert "this id is registered already by good 1.0" in line


def test_one_that_starts_threads_and_patches(site: Site) -> None:
    """Nothing keeps it from that, and the dispatch goes on."""
    site.wheel(
        "acme",
        """
import threading, time, json
threading.Thread(target=time.sleep, args=(0.2,), daemon=True, name="acme").start()
json.dumps = lambda *_, **__: "patched"
def register(registry): registry.register_impl(impl("acme"))
""",
    )
    kept = json.dumps
    try:
        assert call_op(OP, 1) == "acme"
    finally:
        json.dumps = kept


def test_one_that_is_alone_and_broken(site: Site) -> None:
    site.wheel("acme", "raise ImportError('libacme.so is damaged')")
    with pytest.raises(NoImplementationError, match=r"libacme\.so is damaged"):
        call_op(OP, 1)


# -- installed twice ----------------------------------------------------------------------------


def test_a_plugin_that_is_installed_twice(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.wheel("acme")
    leftover = site.folder / "acme-0.9.egg-info"
    leftover.mkdir()
    (leftover / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 0.9\n")
    importlib.invalidate_caches()
    # Which of the two counts is the order of the folder: the leftover may hide the plugin.
    assert set(discover()) <= {"acme"}
    (line,) = lines(caplog)
    assert line.startswith("acme is installed 2 times: ")
    assert "acme-0.9.egg-info" in line
    assert line.endswith("; `vllm-fl doctor` says what to do")


def test_another_distribution_with_our_package(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.wheel("acme", entries="[vllm.platform_plugins]\nfl = vllm_fl:register\n")
    site.wheel("good")
    assert call_op(OP, 1) == "good"
    (line,) = lines(caplog)
    assert line.startswith("acme has a package vllm_fl too, and one hides the other; `vllm-fl doctor`")

"""Every test starts in a process that has read, loaded and chosen nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import vllm_fl
from vllm_fl.dispatch import discovery
from vllm_fl.dispatch import reset_default_manager
from vllm_fl.dispatch import reset_global_policy
from vllm_fl.dispatch import trace
from vllm_fl.dispatch.backend import forget_availability
from vllm_fl.dispatch.common import slow_blocks
from vllm_fl.dispatch.policy import in_force

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Iterator


# A shell that starts us in the background has us ignore Ctrl-C, and with us whatever a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def no_variable_left() -> Iterator[None]:
    """Fail a test that leaves a variable behind: what runs after it would be given another policy."""
    # The recorder tells its process's children which run is theirs.
    os.environ.pop(trace.TRACE_RUN_ENV, None)
    before = _variables()
    yield
    os.environ.pop(trace.TRACE_RUN_ENV, None)
    after = _variables()
    for name in after.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
    assert after == before, "set a variable with monkeypatch.setenv"


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("VLLM_FL_")}


@pytest.fixture(autouse=True)
def fresh_dispatch(
    no_variable_left: None, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    for name in list(os.environ):
        if name.startswith("VLLM_FL_"):
            monkeypatch.delenv(name)
    # The lines of a help are those of a terminal of the usual width, whichever this is.
    monkeypatch.setenv("COLUMNS", "80")
    # On a busy machine anything may be slow; who tests the warning sets its own time.
    monkeypatch.setattr(slow_blocks, "SLOW_SECONDS", 3600.0)
    _forget()
    yield
    _forget()
    _unload(tmp_path_factory.getbasetemp())


def _unload(folder: Path) -> None:
    """Forget the modules that a test wrote; another test's may have the same name."""
    inside = f"{folder}{os.sep}"
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(inside):
            del sys.modules[name]


def _forget() -> None:
    # A manager that a test froze and dropped may still wait for the collector.
    for manager in in_force._global.each_listener():
        manager.thaw()
    reset_default_manager()
    reset_global_policy()
    forget_availability()


@pytest.fixture
def no_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the plugins that happen to be installed here."""
    monkeypatch.setattr(discovery, "_installed", list)


@pytest.fixture
def python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run code in a new interpreter: ``python(code, *paths, VARIABLE=value)``."""

    def run(code: str, *paths: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_FL_")}
        path = os.pathsep.join(map(str, [*paths, Path(vllm_fl.__file__).parents[1]]))
        return subprocess.run(
            [sys.executable, "-c", code],
            env={**inherited, "PYTHONPATH": path, **variables},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )

    return run

"""Why FlagGems cannot run here: a sentence, with the commands that mend it."""

from __future__ import annotations

import re
from importlib.util import find_spec

import pytest

from vllm_fl.dispatch import OpRegistry
from vllm_fl.dispatch.backend import forget_availability
from vllm_fl_flaggems import _availability
from vllm_fl_flaggems import register_ops

ALL = ("flag_gems", "packaging", "yaml", "sqlalchemy", "triton")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    for variable in ("TRITON_INTERPRET", "GEMS_VENDOR", *register_ops.VLLM_FL_VARIABLES):
        monkeypatch.delenv(variable, raising=False)
    forget_availability()
    _availability.device.cache_clear()
    yield
    forget_availability()
    _availability.device.cache_clear()


@pytest.fixture
def here(monkeypatch):
    """Say which modules are installed, which flag-gems, and which devices there are."""

    def pretend(*modules: str, version: str | None = "5.0.2", devices: tuple[str, ...] = ()) -> None:
        monkeypatch.setattr(_availability, "find_spec", lambda name: name in modules or None)
        monkeypatch.setattr(_availability, "_version", lambda distribution: version)
        import torch

        for name in _availability.DEVICES:
            if hasattr(torch, name) or name in devices:
                module = type(name, (), {"is_available": staticmethod(lambda name=name: name in devices)})
                monkeypatch.setattr(torch, name, module, raising=False)

    return pretend


def reason() -> str | None:
    registry = OpRegistry()
    register_ops.register_builtins(registry)
    # Not of a decision, which loads FlagGems itself where there is a device for it.
    (impl,) = registry.snapshot().impls_by_op["rms_norm"]
    return impl.unavailable_reason()


def test_nothing_is_installed(here):
    here("packaging", "yaml")
    assert reason() == (
        "flag_gems is not installed: to mend it: "
        "pip install --no-deps flag-gems==5.0.2 && pip install sqlalchemy==2.0.48 && "
        "pip install triton==3.6.0 (or the Triton of your device's vendor)"
    )


@pytest.mark.parametrize("module", ALL)
def test_one_is_missing(module, here):
    here(*(name for name in ALL if name != module), devices=("cuda",))
    text = reason()
    assert text.startswith(f"{module} is not installed: to mend it: pip install ")
    assert "&&" not in text
    assert ("vendor" in text) is (module == "triton")


@pytest.mark.parametrize("version", ["4.2.0", "5.0.1", "6.0.0", "5.0"])
def test_another_version(version, here):
    here(*ALL, version=version, devices=("cuda",))
    assert f"flag-gems {version} is installed" in reason()
    assert "pip install --no-deps flag-gems==5.0.2" in reason()


@pytest.mark.parametrize("version", ["5.0.2", "5.0.2+cu126", "5.1.0", "5.0.3.dev4", None])
@pytest.mark.parametrize("device", ["cuda", "npu", "musa"])
def test_it_is_available(device, version, here):
    here(*ALL, version=version, devices=(device,))
    assert reason() is None
    assert _availability.device() == device


def test_there_is_no_device(here):
    here(*ALL)
    assert re.search(r"torch has no device that FlagGems runs on \(cuda, npu, ", reason())


def test_the_interpreter_alone_is_no_device(here, monkeypatch):
    here(*ALL)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "no device" in reason()


def test_the_emulation_is_one(here, monkeypatch):
    here(*ALL)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("GEMS_VENDOR", "arm")
    assert reason() is None
    assert _availability.device() == "cpu"


_EXPLAIN = """
import sys
from vllm_fl.dispatch import OpManager, OpRegistry
from vllm_fl_flaggems import register_ops
registry = OpRegistry()
register_ops.register_builtins(registry)
print(OpManager(registry).explain("rms_norm").candidates[0].reason)
print(sorted({"flag_gems", "triton", "vllm"} & set(sys.modules)))
"""


def test_asking_does_not_import_flag_gems(python):
    reason, imported = python(_EXPLAIN).splitlines()
    assert imported == "[]"
    if find_spec("flag_gems") is None:
        assert "pip install --no-deps flag-gems==5.0.2" in reason

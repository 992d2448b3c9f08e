"""A vendor's plug-in that replaces the same layers: before us, in its worker, and after us."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from typing import Any

import pytest
from engine import run_vllm

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Iterator
    from pathlib import Path

    from checkpoints import Checkpoint
    from evidence import Evidence

# What vendors' plug-ins do: some replace layers when they are loaded, some in the constructor of
# a worker of their own, and some when layers have been built already.
_VENDOR = """
import os

calls = 0

def replace():
    from vllm.model_executor.custom_op import CustomOp
    from vllm.model_executor.layers.layernorm import RMSNorm

    class VendorRMSNorm(RMSNorm):
        def forward_cpu(self, x, residual=None):
            global calls
            calls += 1
            return self.forward_native(x, residual)

    CustomOp.register_oot(_decorated_op_cls=VendorRMSNorm, name="RMSNorm")

def register():
    if os.environ["VENDOR_REPLACES"] == "when loaded":
        replace()
"""
_WORKER = """
import os

from vllm.v1.worker.cpu_worker import CPUWorker

class VendorWorker(CPUWorker):
    def __init__(self, vllm_config, *args, **kwargs):
        super().__init__(vllm_config, *args, **kwargs)
        import vendor_layers
        if os.environ["VENDOR_REPLACES"] == "after a layer":
            from vllm.config import set_current_vllm_config
            from vllm.model_executor.layers.layernorm import RMSNorm
            with set_current_vllm_config(vllm_config):
                self.early = RMSNorm(8)
        if os.environ["VENDOR_REPLACES"] != "when loaded":
            vendor_layers.replace()
"""
_REPORT = "def report(llm):\n    import vendor_layers\n    return vendor_layers.calls\n"


@pytest.fixture
def vendor(tmp_path: Path) -> Callable[[str], dict[str, str]]:
    """Install the vendor's distribution; return the variables for one of its ways."""
    (tmp_path / "vendor_layers.py").write_text(_VENDOR)
    (tmp_path / "vendor_worker.py").write_text(_WORKER)
    info = tmp_path / "vendor_layers-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vendor-layers\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nvendor = vendor_layers:register\n")
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    return lambda when: {"PYTHONPATH": paths, "VENDOR_REPLACES": when}


@pytest.mark.parametrize("when", ["when loaded", "in its worker", "after a layer"])
def test_ours_is_built_on_the_vendors_in_every_order(
    qwen3: Checkpoint, evidence: Evidence, vendor: Callable[[str], dict[str, str]], when: str
) -> None:
    """What the policy calls native is then the vendor's layer; the others are served as ever."""
    env = {**evidence.env(VLLM_FL_PREFER="reference", VLLM_FL_PER_OP="rms_norm=native"), **vendor(when)}
    arguments = {"worker_cls": "vendor_worker.VendorWorker"}
    result = run_vllm(qwen3, env=env, setup=_REPORT, engine_args=arguments).checked()
    assert result.tokens == qwen3.golden
    theirs = "vendor_layers.replace.<locals>.VendorRMSNorm"
    if when == "after a layer":
        assert f"vllm-fl: serves RMSNorm on {theirs}, which was registered later" in result.log
    else:
        assert f"RMSNorm on {theirs}" in evidence.processes[0]["served_layers"]
        assert f"RMSNorm on {theirs}" in result.log
    assert result.report == evidence.calls()["rms_norm", "native"] >= 9 * 16
    assert evidence.layers()["SiluAndMul", "reference.torch", "guard"] == 2


def test_the_reference_does_not_take_a_vendors_place(
    qwen3: Checkpoint, evidence: Evidence, vendor: Callable[[str], dict[str, str]]
) -> None:
    """By default, that is; whoever asks for it in so many words gets it."""
    result = run_vllm(
        qwen3,
        env={**evidence.env(), **vendor("in its worker")},
        setup=_REPORT,
        engine_args={"worker_cls": "vendor_worker.VendorWorker"},
    ).checked()
    assert result.tokens == qwen3.golden
    assert result.report == evidence.calls()["rms_norm", "native"] >= 9 * 16
    assert evidence.layers()["SiluAndMul", "reference.torch", "guard"] == 2
    assert "VendorRMSNorm replaces it, and nothing but the reference would serve it" in result.log


# -- every way to register, after us ---------------------------------------------------------


@pytest.fixture
def registry() -> Iterator[dict[str, type]]:
    """vLLM's registry with our classes in it, and as it was afterwards."""
    from vllm.model_executor.custom_op import CustomOp
    from vllm.model_executor.custom_op import PluggableLayer
    from vllm.model_executor.custom_op import op_registry_oot

    from vllm_fl.integration import engine
    from vllm_fl.integration import replace

    before, faulty = dict(op_registry_oot), set(engine._faulty)
    own = [(owner, owner.__dict__["register_oot"]) for owner in (CustomOp, PluggableLayer)]
    op_registry_oot.clear()
    replace.replace_classes()
    yield op_registry_oot
    op_registry_oot.clear()
    op_registry_oot.update(before)
    engine._faulty.clear()
    engine._faulty.update(faulty)
    for owner, function in own:
        owner.register_oot = function


def _by_position(owner: Any, theirs: type, cls: type) -> None:
    owner.register_oot(theirs, "RMSNorm")


def _by_keyword(owner: Any, theirs: type, cls: type) -> None:
    owner.register_oot(_decorated_op_cls=theirs, name="RMSNorm")


def _as_decorator(owner: Any, theirs: type, cls: type) -> None:
    assert owner.register_oot(name="RMSNorm")(theirs) is theirs


def _of_the_class(owner: Any, theirs: type, cls: type) -> None:
    cls.register_oot(theirs)  # type: ignore[attr-defined]


@pytest.mark.parametrize("how", [_by_position, _by_keyword, _as_decorator, _of_the_class])
@pytest.mark.parametrize("name", ["VendorRMSNorm", "RMSNorm"])
def test_every_way_to_register(registry: dict[str, type], how: Callable[..., None], name: str) -> None:
    from vllm.model_executor.custom_op import CustomOp
    from vllm.model_executor.layers.layernorm import RMSNorm

    from vllm_fl.integration import engine
    from vllm_fl.integration.layer import Served

    ours = registry["RMSNorm"]
    theirs = type(name, (RMSNorm,), {})
    how(CustomOp, theirs, RMSNorm)
    assert issubclass(registry["RMSNorm"], (Served, theirs))
    assert registry["RMSNorm"].__bases__[-1] is theirs
    assert registry["RMSNorm"].name == "rms_norm"  # type: ignore[attr-defined]
    assert registry["RMSNorm"] is not ours
    # Compiled graphs of a day when it was not there are not used.
    assert any(one.endswith(name) and one.startswith("RMSNorm on ") for one in engine._faulty)
    # A third one is stacked too, and takes the place of the second.
    third = type("Third", (RMSNorm,), {})
    how(CustomOp, third, RMSNorm)
    assert registry["RMSNorm"].__bases__[-1] is third


def test_a_class_that_ours_cannot_be_built_on_is_left_alone(
    registry: dict[str, type], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import logging

    from vllm.model_executor.custom_op import CustomOp

    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    theirs = type("Foreign", (CustomOp,), {})
    CustomOp.register_oot(theirs, "RMSNorm")
    assert registry["RMSNorm"] is theirs
    assert "RMSNorm is no longer served: " in caplog.text
    assert "is no subclass of it" in caplog.text


def test_what_vllm_refuses_is_refused_as_ever(registry: dict[str, type]) -> None:
    from vllm.model_executor.custom_op import CustomOp
    from vllm.model_executor.custom_op import PluggableLayer

    ours = registry["RMSNorm"]
    with pytest.raises(TypeError, match="Decorator can only be applied to classes"):
        CustomOp.register_oot(3, "RMSNorm")
    assert registry["RMSNorm"] is ours
    one = type("One", (CustomOp,), {})
    CustomOp.register_oot(one, name="LayerThatWeDoNotServe")
    with pytest.raises(AssertionError, match="Duplicate"):
        PluggableLayer.register_oot(_decorated_layer_cls=one, name="LayerThatWeDoNotServe")

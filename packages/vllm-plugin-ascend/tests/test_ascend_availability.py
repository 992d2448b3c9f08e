"""Where there is no card, no CANN or no torch_npu: nothing fails, and the reason is said."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from vllm_fl.dispatch import OpRegistry
from vllm_fl.dispatch.backend import forget_availability
from vllm_fl_ascend import _availability
from vllm_fl_ascend import register_ops
from vllm_fl_ascend.chip import CHIP

_OPERATORS = {
    "silu_and_mul",
    "gelu_and_mul",
    "rms_norm",
    "rotary_embedding",
    "attention_backend",
    "topk_softmax",
    "grouped_topk",
    "fused_experts",
    "dynamic_per_token_quant_int8",
}

_REASONS = """
import json, sys
from vllm_fl.dispatch import OpRegistry
from vllm_fl_ascend.register_ops import register_builtins
registry = OpRegistry()
register_builtins(registry)
heavy = sorted({"torch", "torch_npu", "vllm"} & set(sys.modules))
impls = [impl for impls in registry.snapshot().impls_by_op.values() for impl in impls]
reasons = {impl.op_name: impl.unavailable_reason() for impl in impls}
after = ""
if "--torch" in sys.argv:
    import torch
    after = str(torch.ones(2).sum().item())
print(json.dumps([heavy, reasons, after]))
"""


def _child(code: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    drop = ("LD_LIBRARY_PATH", "TORCH_DEVICE_BACKEND_AUTOLOAD", "VLLM_FL_ASCEND_EMULATED")
    clean = {name: value for name, value in os.environ.items() if name not in drop}
    paths = [str(Path(register_ops.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    clean["PYTHONPATH"] = os.pathsep.join(paths)
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=clean | env, capture_output=True, text=True, check=False)


def _reasons(*arguments: str, **env: str) -> tuple[dict[str, str | None], str]:
    import json

    done = _child(_REASONS, *arguments, **env)
    assert done.returncode == 0, done.stderr
    heavy, reasons, after = json.loads(done.stdout.splitlines()[-1])
    assert heavy == []
    assert set(reasons) == _OPERATORS
    return reasons, after


@pytest.fixture(autouse=True)
def _ask_again():
    forget_availability()
    yield
    forget_availability()


def test_registration():
    registry = OpRegistry()
    register_ops.register_builtins(registry)
    impls = [impl for impls in registry.snapshot().impls_by_op.values() for impl in impls]
    assert {impl.op_name for impl in impls} == _OPERATORS
    assert {(impl.impl_id, impl.vendor, impl.priority) for impl in impls} == {
        ("vendor.ascend", "ascend", 100)
    }
    assert not any(impl.traceable or impl.graph_safe for impl in impls)
    writes = {impl.op_name: impl.writes for impl in impls if impl.writes}
    assert writes == {
        "rotary_embedding": ("query", "key"),
        "topk_softmax": ("topk_weights", "topk_indices", "token_expert_indices"),
    }


def test_the_kernels_of_every_operator_are_listed():
    from vllm_fl_ascend.ascend import _KERNELS

    assert set(_KERNELS) == _OPERATORS


def test_entry_point():
    try:
        entries = importlib.metadata.distribution("vllm-plugin-ascend").entry_points
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs the installed wheel")
    assert {(e.group, e.name): e.load() for e in entries} == {
        ("vllm_fl.plugin", "ascend"): register_ops,
        ("vllm_fl.platforms", "ascend"): CHIP,
    }


def test_without_torch_npu(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    registry = OpRegistry()
    register_ops.register_builtins(registry)
    reason = registry.snapshot().impls_by_op["rms_norm"][0].unavailable_reason()
    assert reason.startswith("torch_npu is not installed: No module named 'torch_npu'; ")
    assert "pip install 'torch-npu==" in reason


needs_torch_npu = pytest.mark.skipif(find_spec("torch_npu") is None, reason="needs torch_npu")


@needs_torch_npu
@pytest.mark.parametrize("autoload", ["1", "0"])
def test_without_cann(autoload):
    reasons, _ = _reasons(TORCH_DEVICE_BACKEND_AUTOLOAD=autoload)
    (reason,) = set(reasons.values())
    for part in (
        "libhccl.so: cannot open shared object file: No such file or directory",
        "set_env.sh",
        "TORCH_DEVICE_BACKEND_AUTOLOAD=0",
    ):
        assert part in reason


@needs_torch_npu
def test_torch_is_as_good_as_before():
    _, after = _reasons("--torch", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert after == "2.0"


def test_with_half_of_cann(cann_folder, tmp_path):
    for name in ("libhccl.so", "libascendcl.so"):
        (tmp_path / name).symlink_to(cann_folder / name)
    reasons, after = _reasons("--torch", LD_LIBRARY_PATH=str(tmp_path), TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    (reason,) = set(reasons.values())
    assert reason.startswith("ImportError: torch_npu cannot be imported: ImportError: lib")
    assert "cannot open shared object file" in reason
    assert after == "2.0"


def test_without_a_device(cann_folder):
    reasons, after = _reasons("--torch", LD_LIBRARY_PATH=str(cann_folder))
    (reason,) = set(reasons.values())
    assert "torch_npu finds no Ascend device" in reason
    assert "npu-smi" in reason
    assert after == "2.0"


def test_emulated_without_kernels(cann_folder):
    reasons, _ = _reasons(LD_LIBRARY_PATH=str(cann_folder), VLLM_FL_ASCEND_EMULATED="1")
    (reason,) = set(reasons.values())
    assert "no kernel is simulated" in reason
    reasons, _ = _reasons(LD_LIBRARY_PATH=str(cann_folder), VLLM_FL_ASCEND_EMULATED="perhaps")
    (reason,) = set(reasons.values())
    assert reason == "ValueError: VLLM_FL_ASCEND_EMULATED must be 1 or 0, not 'perhaps'"


def test_emulated(backend):
    registry = OpRegistry()
    registry.register_backend(backend)
    impls = [impl for impls in registry.snapshot().impls_by_op.values() for impl in impls]
    assert {impl.unavailable_reason() for impl in impls} == {None}


def test_without_atb(tmp_path, cann_folder):
    """CANN without its NNAL package: attention is missing, and says so; the rest is there."""
    import cann

    folder = cann.build(tmp_path / "cann", without=("atb",))
    code = f"""
import sys
sys.path.insert(0, {str(Path(cann.__file__).parent)!r})
import npu_kernels
npu_kernels._kernels = [k for k in npu_kernels._kernels if k[0] == "npu"]
import npu_attention_kernels
npu_kernels._kernels = [k for k in npu_kernels._kernels if k[0] == "npu"]
npu_kernels.register()
from vllm_fl_ascend.ascend import AscendBackend
impls = AscendBackend().implementations()
print({{i.op_name: i.unavailable_reason() for i in impls if i.unavailable_reason()}})
"""
    done = _child(
        code,
        LD_LIBRARY_PATH=str(folder),
        VLLM_FL_ASCEND_EMULATED="1",
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()[-1]
    assert said.startswith("{'attention_backend': ")
    assert "no atb::_npu_reshape_and_cache" in said
    assert "NNAL" in said


@needs_torch_npu
def test_the_command_line_on_a_host_without_cann():
    try:
        importlib.metadata.distribution("vllm-plugin-ascend")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs the installed wheel")
    run = "runpy.run_module('vllm_fl', run_name='__main__')"
    done = _child(f"import runpy, sys; sys.argv = ['vllm-fl', 'list', '--probe']; {run}")
    assert done.returncode == 0, done.stderr
    assert "vendor.ascend" in done.stdout
    assert "libhccl.so: cannot open shared object file" in done.stdout


def test_a_device_elsewhere(backend, monkeypatch):
    """Off the emulation a tensor on the CPU is refused: the kernels would raise."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(_availability, "device_type", lambda: "npu")
    (for_layer,) = backend.implementation_of("silu_and_mul").predicates()
    assert for_layer(torch.ones(2, 4)) == "x is on cpu, and the kernels take tensors on npu"

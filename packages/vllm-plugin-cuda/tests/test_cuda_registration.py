"""The entry point, what is imported when, and what is said where something is missing."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest

from vllm_fl.dispatch import BackendImplKind
from vllm_fl.dispatch import OpRegistry
from vllm_fl.dispatch.backend import forget_availability
from vllm_fl.dispatch.ops import OPERATORS
from vllm_fl_cuda import kernels
from vllm_fl_cuda import register_ops
from vllm_fl_cuda.cuda import CudaBackend


@pytest.fixture(autouse=True)
def _forget():
    forget_availability()
    yield
    forget_availability()


def impls_of(backend):
    registry = OpRegistry()
    registry.register_backend(backend)
    return {name: impls[0] for name, impls in registry.snapshot().impls_by_op.items()}


def test_every_operator_is_registered():
    registry = OpRegistry()
    register_ops.register_builtins(registry)
    found = registry.snapshot().impls_by_op
    assert sorted(found) == sorted(OPERATORS)
    for (impl,) in found.values():
        assert impl.impl_id == "vendor.cuda"
        assert impl.kind is BackendImplKind.VENDOR
        assert impl.vendor == "cuda"
        assert impl.priority == 100
    assert set(kernels.OF_OPERATOR) == set(OPERATORS) - {"attention_backend"}


def test_what_is_traced_and_what_is_captured():
    impls = impls_of(CudaBackend())
    traced = {name for name, impl in impls.items() if impl.traceable}
    assert traced == {
        "silu_and_mul",
        "gelu_and_mul",
        "rms_norm",
        "rotary_embedding",
        "dynamic_per_token_quant_int8",
        "dynamic_per_token_quant_fp8",
    }
    assert {name for name, impl in impls.items() if not impl.graph_safe} == {"attention_backend"}
    assert all(impl.writes is None for impl in impls.values())


@pytest.mark.parametrize(
    "statement",
    [
        "import vllm_fl_cuda.register_ops",
        "import vllm_fl_cuda.cuda",
        "import vllm_fl_cuda.register_ops as r\n"
        "from vllm_fl.dispatch import OpRegistry\n"
        "registry = OpRegistry()\n"
        "r.register_builtins(registry)\n"
        "assert len(registry.snapshot().impls_by_op) == 12",
    ],
    ids=["entry point", "backend", "register"],
)
def test_no_torch_and_no_vllm_is_imported(statement):
    program = f"{statement}\nimport sys\nprint(sorted({{'torch', 'vllm', 'triton'}} & set(sys.modules)))"
    assert run(program) == "[]"


def test_without_vllm_it_says_so():
    """On a machine with torch alone."""
    program = (
        "import sys\n"
        "sys.modules['vllm'] = None\n"
        "from vllm_fl_cuda.cuda import CudaBackend\n"
        "print(CudaBackend('cpu').implementations()[0].unavailable_reason())"
    )
    assert run(program).startswith("vllm is not installed: ")


def test_without_torch_it_says_so():
    program = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from vllm_fl_cuda.cuda import CudaBackend\n"
        "print(CudaBackend().implementations()[0].unavailable_reason())"
    )
    assert run(program).startswith("torch is not installed: ")


def run(program):
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def test_the_entry_point_names_the_module():
    try:
        entries = importlib.metadata.distribution("vllm-plugin-cuda").entry_points
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the wheel is not installed")
    (entry,) = [e for e in entries if e.group == "vllm_fl.plugin"]
    assert entry.name == "cuda"
    assert entry.load() is register_ops


def test_another_device_is_refused():
    with pytest.raises(ValueError, match="device must be one of cuda, cpu, not 'npu'"):
        CudaBackend("npu")


class TestWithoutAGpu:
    """What a CPU build of torch, or a machine without a card, says."""

    @pytest.fixture(autouse=True)
    def _needs_torch_for_cpus(self):
        torch = pytest.importorskip("torch")
        if torch.version.cuda is not None:
            pytest.skip("this torch is built for CUDA")

    def test_it_names_the_torch(self):
        for impl in impls_of(CudaBackend()).values():
            assert not impl.is_available()
            assert impl.unavailable_reason().endswith("is built for CPUs, not CUDA")
            assert impl.unavailable_reason().startswith("RuntimeError: this PyTorch (")

    def test_a_rocm_torch_is_not_cuda(self, monkeypatch):
        import torch

        monkeypatch.setattr(torch.version, "hip", "6.4")
        assert "is built for ROCm, not CUDA" in impls_of(CudaBackend())["rms_norm"].unavailable_reason()

    def test_a_torch_for_cuda_without_a_card(self, monkeypatch):
        import torch

        monkeypatch.setattr(torch.version, "cuda", "13.0")
        reason = impls_of(CudaBackend())["rms_norm"].unavailable_reason()
        assert reason == "RuntimeError: PyTorch sees no CUDA device"

    def test_a_vllm_for_cpus_beside_a_card(self, monkeypatch):
        """Its operators exist, and none has a kernel for the card."""
        pytest.importorskip("vllm")
        import torch

        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        reason = impls_of(CudaBackend())["rms_norm"].unavailable_reason()
        assert "has no compiled kernel for CUDA; its platform here is CpuPlatform" in reason


class TestOnACpuBuildOfVllm:
    """Each operator is asked for by itself."""

    @pytest.fixture
    def impls(self):
        pytest.importorskip("vllm")
        return impls_of(CudaBackend("cpu"))

    def test_those_that_it_has(self, impls):
        available = {name for name, impl in impls.items() if impl.is_available()}
        assert available == {
            "silu_and_mul",
            "gelu_and_mul",
            "rms_norm",
            "rotary_embedding",
            "dynamic_per_token_quant_int8",
            "attention_backend",
        }

    @pytest.mark.parametrize(
        ("op", "kernel"),
        [
            ("topk_softmax", "_moe_C.topk_softmax"),
            ("grouped_topk", "_moe_C.grouped_topk"),
            ("moe_sum", "_moe_C.moe_sum"),
            ("moe_align_block_size", "_moe_C.moe_align_block_size"),
            ("fused_experts", "_moe_C.moe_align_block_size"),
        ],
    )
    def test_what_it_lacks_is_named(self, impls, op, kernel):
        assert impls[op].unavailable_reason().endswith(f" has no {kernel}")

    def test_a_placeholder_is_no_kernel(self, impls):
        import torch

        assert hasattr(torch.ops._C, "dynamic_per_token_scaled_fp8_quant")
        reason = impls["dynamic_per_token_quant_fp8"].unavailable_reason()
        assert "_C.dynamic_per_token_scaled_fp8_quant is an empty placeholder" in reason

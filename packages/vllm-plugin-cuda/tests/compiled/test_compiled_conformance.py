"""The kernels of a CPU build of vLLM pass the kit that judges every vendor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from vllm_fl.conformance import run
from vllm_fl.conformance.case import Tier
from vllm_fl.conformance.result import Status
from vllm_fl.dispatch import get_default_manager
from vllm_fl.dispatch import reset_default_manager
from vllm_fl_cuda.cuda import CudaBackend


@pytest.fixture
def registered():
    reset_default_manager()
    manager = get_default_manager()
    manager.discover()
    if "vendor.cuda" in manager.registry.snapshot().impl_ids():
        pytest.skip("installed: run `vllm-fl conformance --backend cuda` on its device")
    manager.registry.register_backend(CudaBackend("cpu"))
    yield
    reset_default_manager()


def truncates() -> bool:
    """Whether 1 + 3/4 of a unit in the last place comes out as 1."""
    total = torch.full((1, 32), 0.75 * 2**-7, dtype=torch.bfloat16)
    one = torch.ones(1, 32, dtype=torch.bfloat16)
    torch.ops._C.fused_add_rms_norm(one.clone(), total, one[0], 1e-5)
    return bool((total == 1).all())


def faults_of_vllm() -> set[tuple[str, str]]:
    """Return the operator and the name of each case that vLLM's library gets wrong.

    Its AVX2 kernel divides a row of zeros by zero, and its codes are -128 then.
    """
    codes, scales = torch.empty(1, 32, dtype=torch.int8), torch.empty(1, 1)
    torch.ops._C.dynamic_scaled_int8_quant(codes, torch.zeros(1, 32), scales, None)
    if not codes.any():
        return set()
    dtypes = ("float32", "float16", "bfloat16")
    return {("dynamic_per_token_quant_int8", f"{dtype} a row of zeros") for dtype in dtypes}


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("tier", [Tier.SMOKE, pytest.param(Tier.FULL, marks=pytest.mark.long)], ids=str)
def test_conformance(tier):
    known = Path(__file__).with_name("truncating.toml" if truncates() else "rounding.toml")
    options = run.Options(tier=tier, device="cpu", waivers=known)
    results = list(run.prepare("vendor.cuda", options).run())
    assert {(r.op, r.name) for r in results if r.is_failure} == faults_of_vllm()
    assert [r for r in results if r.status is Status.SKIPPED] == []
    # What a CPU build of vLLM has kernels for.
    assert {r.op for r in results if r.is_case and r.status is Status.PASSED} == {
        "attention_backend",
        "dynamic_per_token_quant_int8",
        "gelu_and_mul",
        "rms_norm",
        "rotary_embedding",
        "silu_and_mul",
    }

"""The kernels of a CPU build of vLLM pass the kit that judges every vendor."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

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


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("tier", [Tier.SMOKE, pytest.param(Tier.FULL, marks=pytest.mark.long)], ids=str)
def test_conformance(tier):
    results = list(run.plan("vendor.cuda", run.Options(tier=tier, device="cpu")).run())
    assert [r for r in results if r.is_failure] == []
    assert [r for r in results if r.status is Status.SKIPPED or r.exception] == []
    # What a CPU build of vLLM has kernels for.
    assert {r.op for r in results if r.is_case and r.status is Status.PASSED} == {
        "attention_backend",
        "dynamic_per_token_quant_int8",
        "gelu_and_mul",
        "rms_norm",
        "rotary_embedding",
        "silu_and_mul",
    }

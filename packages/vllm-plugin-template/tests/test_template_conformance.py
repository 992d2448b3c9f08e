"""The operators pass the kit that judges every vendor, in its full tier."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from vllm_fl.conformance import run
from vllm_fl.conformance.case import Tier
from vllm_fl.conformance.result import Status
from vllm_fl.dispatch import get_default_manager
from vllm_fl.dispatch import reset_default_manager
from vllm_fl_template.register_ops import register_builtins

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    reset_default_manager()
    manager = get_default_manager()
    manager.discover()
    if "vendor.template" not in manager.registry.snapshot().impl_ids():
        register_builtins(manager.registry)
    yield
    reset_default_manager()


@pytest.mark.parametrize("tier", [Tier.SMOKE, pytest.param(Tier.FULL, marks=pytest.mark.long)], ids=str)
def test_conformance(tier: Tier) -> None:
    results = list(run.prepare("vendor.template", run.Options(tier=tier, device="cpu")).run())
    assert [result for result in results if result.is_failure] == []
    assert [result for result in results if result.waiver] == []


def test_float64_is_right() -> None:
    """The one dtype of the full tier that a smoke test never sees."""
    steps = run.prepare("vendor.template", run.Options(tier=Tier.FULL, device="cpu")).steps
    results = [step.run() for step in steps if step.name.startswith("float64")]
    assert {result.op for result in results} >= {"silu_and_mul", "rms_norm", "rotary_embedding"}
    assert {result.status for result in results} == {Status.PASSED}, results

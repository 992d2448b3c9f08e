"""Beside the reference, through the dispatcher: who is chosen, who takes over, what is written."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm")
pytest.importorskip("vllm_fl_reference")

from vllm_fl.dispatch import OpManager
from vllm_fl.dispatch import OpRegistry
from vllm_fl.dispatch import with_preference
from vllm_fl_cuda.cuda import CudaBackend
from vllm_fl_reference.register_ops import register_builtins


@pytest.fixture
def manager(monkeypatch):
    monkeypatch.setenv("VLLM_FL_PLUGINS", "")
    registry = OpRegistry()
    registry.register_backend(CudaBackend("cpu"))
    register_builtins(registry)
    with with_preference("vendor"):
        yield OpManager(registry)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_it_is_chosen_and_agrees_with_the_reference(manager, dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 64, generator=generator).to(dtype)
    residual = torch.randn(7, 64, generator=generator).to(dtype)
    weight = torch.randn(64, generator=generator).to(dtype)
    close = {"rtol": 1.6e-2, "atol": 1e-2} if dtype is torch.bfloat16 else {}
    calls = [("silu_and_mul", x), ("gelu_and_mul", x, "tanh"), ("rms_norm", x, None, weight, 1e-5)]
    calls.append(("rms_norm", x, residual, weight, 1e-5))
    for op, *arguments in calls:
        assert manager.explain(op).impl_id == "vendor.cuda"
        copies = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
        got = manager.call(op, *copies)
        with with_preference("reference"):
            want = manager.call(op, *arguments)
        pairs = [(got, want)] if isinstance(got, torch.Tensor) else zip(got, want, strict=True)
        for one, other in pairs:
            torch.testing.assert_close(one, other, **close)


def test_what_it_refuses_the_reference_runs(manager):
    x = torch.randn(3, 2 * 7)
    assert manager.call("silu_and_mul", x).shape == (3, 7)
    weighted = manager.call("rms_norm", x.bfloat16(), None, torch.ones(14), 1e-5)
    assert weighted.dtype is torch.bfloat16
    assert not manager.get_failed_impls("silu_and_mul").get("silu_and_mul")


def test_what_it_lacks_is_the_references(manager):
    decision = manager.explain("topk_softmax")
    assert decision.impl_id == "reference.torch"
    assert "has no _moe_C.topk_softmax" in str(decision)


def test_a_donated_residual_is_used(manager):
    """The contract gives both away; the kernel writes into them."""
    x, residual = torch.randn(5, 32), torch.randn(5, 32)
    total = x + residual
    normed, summed = manager.call("rms_norm", x, residual, None, 1e-5)
    assert normed is x
    assert summed is residual
    torch.testing.assert_close(summed, total)

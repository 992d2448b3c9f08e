"""Through the dispatch: FlagGems is chosen, computes, and hands on what it does not take."""

from __future__ import annotations

import logging

import pytest
import torch

from vllm_fl.conformance.tensors import random
from vllm_fl.dispatch import OpManager
from vllm_fl.dispatch import OpRegistry
from vllm_fl.dispatch import SelectionPolicy
from vllm_fl.dispatch import policy_context
from vllm_fl.dispatch.backend import forget_availability
from vllm_fl_flaggems import register_ops
from vllm_fl_flaggems.flaggems import FlagGemsBackend
from vllm_fl_reference import register_ops as reference_ops


@pytest.fixture
def manager(monkeypatch):
    for variable in register_ops.VLLM_FL_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    forget_availability()
    registry = OpRegistry()
    reference_ops.register_builtins(registry)
    register_ops.register_builtins(registry)
    return OpManager(registry)


@pytest.fixture
def launched(caplog):
    """Return the names that FlagGems itself logged since the last time."""
    caplog.set_level(logging.DEBUG, logger="flag_gems")

    def names() -> list[str]:
        found = [record.message for record in caplog.records if record.name.startswith("flag_gems")]
        caplog.clear()
        return found

    return names


def test_it_is_chosen_before_the_reference(manager):
    for op_name in FlagGemsBackend.operators():
        if op_name == "attention_backend":
            continue
        decision = manager.explain(op_name)
        assert [c.impl_id for c in decision.usable] == ["default.flagos", "reference.torch"], op_name
        assert decision.impl_id == "default.flagos"


def test_flag_gems_computes(manager, launched):
    x = random(3, 8)
    right = x[:, :4] / (1 + (-x[:, :4]).exp()) * x[:, 4:]
    torch.testing.assert_close(manager.call("silu_and_mul", x), right)
    assert "GEMS SILU AND MUL FORWARD" in launched()
    assert manager.get_failed_impls() == {}


def test_the_policy_chooses_the_reference(manager, launched):
    with policy_context(SelectionPolicy.from_dict(prefer="reference")):
        manager.call("silu_and_mul", random(3, 8))
    assert launched() == []


def test_what_it_does_not_take_goes_to_the_next_for_this_call(manager, launched):
    launched()
    arguments = (random(2, 8), 2, 1)
    rest = (True, 1.0, random(8))
    _, three = manager.call("grouped_topk", *arguments, 3, *rest)
    assert three.shape == (2, 3)
    assert launched() == []
    _, two = manager.call("grouped_topk", *arguments, 2, *rest)
    assert torch.equal(two, three[:, :2])
    assert "GEMS GROUPED TOPK" in launched()
    assert manager.get_failed_impls() == {}


def test_every_operator_through_the_dispatch(manager, launched):
    """Once each: the arguments reach FlagGems as the contract says, keywords included."""
    x = random(4, 8, dtype=torch.float16)
    cos = sin = random(8, 4)
    ids = torch.tensor([[0, 1], [2, 0], [1, 2], [2, 1]], dtype=torch.int32)
    wanted = {
        "silu_and_mul": ("GEMS SILU AND MUL FORWARD", lambda call: call(x)),
        "gelu_and_mul": ("GEMS GELU AND MUL FORWARD", lambda call: call(x, approximate="tanh")),
        "rms_norm": ("GEMS RMS_NORM FORWARD", lambda call: call(x, None, None, 1e-6)),
        "rotary_embedding": (
            "GEMS ROTARY_POS_EMBEDDING",
            lambda call: call(x.view(4, 1, 8), None, cos, sin, ids[:, 0], cos_sin_cache=None),
        ),
        "topk_softmax": (
            "GEMS TOPK SOFTMAX",
            lambda call: call(torch.empty(4, 2), ids.clone(), ids.clone(), x, renormalize=True),
        ),
        "grouped_topk": ("GEMS GROUPED TOPK", lambda call: call(x, 2, 1, 2, True, 1.0, random(8))),
        "moe_align_block_size": (
            "GEMS MOE ALIGN BLOCK SIZE",
            lambda call: call(ids, 4, 3, pad_sorted_ids=True),
        ),
        "moe_sum": ("GEMS MOE SUM", lambda call: call(x.view(2, 2, 8), torch.empty(2, 8).half())),
        "fused_experts": (
            "GEMS FUSED MOE",
            lambda call: call(
                x,
                random(3, 6, 8, dtype=torch.float16),
                random(3, 8, 3, dtype=torch.float16),
                torch.rand(4, 2),
                ids,
                global_num_experts=3,
            ),
        ),
    }
    assert {*wanted, "attention_backend"} == set(FlagGemsBackend.operators())
    for op_name, (message, use) in wanted.items():
        use(manager.resolve(op_name))
        assert message in launched(), op_name
    assert manager.get_failed_impls() == {}

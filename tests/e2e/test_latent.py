"""Models with latent attention, whose rotary kernel refuses: vLLM's own path gets slices of heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from engine import run_vllm

if TYPE_CHECKING:
    from collections.abc import Callable

    from checkpoints import Checkpoint
    from evidence import Evidence


# vLLM's latent attention for CPUs with AMX packs no weights of float32, and ends the engine.
_WITHOUT_AMX = """
import torch
torch.cpu._is_amx_tile_supported = lambda: False
"""


@pytest.mark.parametrize("name", ["deepseek_v2", "glm4_moe_lite"])
def test_a_kernel_that_refuses_most_rows(
    make_checkpoint: Callable[[str], Checkpoint], evidence: Evidence, name: str
) -> None:
    """The tokens are those of transformers.

    They are not compared with vLLM's own in eager mode: its kernel for CPUs reads the three
    dimensions of these queries as [batch, sequence, hidden], which is wrong.
    """
    checkpoint = make_checkpoint(name)
    per_op = "rotary_embedding=impl:vendor.refusing|native"
    env = evidence.env("refusing_vendor", VLLM_FL_PREFER="reference", VLLM_FL_PER_OP=per_op)
    more = {"max_model_len": 64}
    result = run_vllm(checkpoint, env=env, engine_args=more, setup=_WITHOUT_AMX, timeout=600).checked()
    assert result.tokens == checkpoint.golden
    calls = evidence.calls()
    assert calls["rotary_embedding", "native"] > 0
    assert ("silu_and_mul", "reference.torch") in calls

"""A tuned table in vLLM: one layer, two implementations, chosen by the rows of each call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from engine import run_vllm

if TYPE_CHECKING:
    from pathlib import Path

    from checkpoints import Checkpoint
    from engine import Mode
    from evidence import Evidence

# The checkpoint's gate and up have 256 columns each. Four prompts: a decode step has four
# rows at most, a prefill more.
TABLE = """
silu_and_mul:
  - {dtype: float32, last: 512, max_rows: 4, order: [vendor.probe]}
"""


@pytest.mark.parametrize("mode", ["eager", "compile"])
def test_rows_choose(qwen3: Checkpoint, evidence: Evidence, tmp_path: Path, mode: Mode) -> None:
    (tmp_path / "table.yaml").write_text(TABLE)
    policy = tmp_path / "policy.yaml"
    policy.write_text("per_op_order:\n  silu_and_mul: [reference, vendor]\ntuned: table.yaml\n")
    env = evidence.env("probe_vendor", VLLM_FL_CONFIG=str(policy))
    result = run_vllm(qwen3, mode=mode, env=env).checked()
    assert result.tokens == qwen3.golden
    calls = evidence.calls()
    assert calls["silu_and_mul", "vendor.probe"] > 0
    assert calls["silu_and_mul", "reference.torch"] > 0
    # Traced code could not look at the rows, so that a compiler gets the opaque form.
    assert evidence.layers()["SiluAndMul", "reference.torch", "opaque" if mode == "compile" else "guard"] == 2

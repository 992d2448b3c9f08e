"""Without any plug-in vLLM generates what transformers generates: the harness itself is right.

The other checkpoints, and the server, need no native run: the tests of the reference
compare them with the same golden tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from checkpoints import SMALLEST_MARGIN
from engine import run_vllm

if TYPE_CHECKING:
    from checkpoints import Checkpoint


def test_native_vllm_equals_transformers(qwen3: Checkpoint) -> None:
    """And where VLLM_PLUGINS leaves us out, nobody can teach vLLM our variables: it warns, no more."""
    result = run_vllm(qwen3, native=True, env={"VLLM_FL_PREFER": "reference"}).checked()
    assert result.tokens == qwen3.golden
    assert "Unknown vLLM environment variable detected: VLLM_FL_PREFER" in result.log
    assert "vllm-fl:" not in result.log


def test_golden_tokens_are_no_near_ties_and_no_repetition(checkpoint: Checkpoint) -> None:
    assert checkpoint.margin >= SMALLEST_MARGIN
    for tokens in checkpoint.golden:
        assert len(set(tokens)) > len(tokens) // 2

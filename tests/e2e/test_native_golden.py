"""Without any plug-in vLLM generates what transformers generates: the harness itself is right."""

from __future__ import annotations

from typing import TYPE_CHECKING

from checkpoints import SMALLEST_MARGIN
from engine import run_vllm
from engine import serve

if TYPE_CHECKING:
    from checkpoints import Checkpoint


def test_native_vllm_equals_transformers(checkpoint: Checkpoint) -> None:
    result = run_vllm(checkpoint, native=True).checked()
    assert result.tokens == checkpoint.golden


def test_golden_tokens_are_no_near_ties_and_no_repetition(checkpoint: Checkpoint) -> None:
    assert checkpoint.margin >= SMALLEST_MARGIN
    for tokens in checkpoint.golden:
        assert len(set(tokens)) > len(tokens) // 2


def test_native_server_equals_transformers(qwen3: Checkpoint) -> None:
    with serve(qwen3, native=True) as server:
        answers = tuple(server.complete(prompt) for prompt in qwen3.prompts)
    assert answers == qwen3.golden
    assert server.returncode == 0
    assert "Application shutdown complete" in server.log

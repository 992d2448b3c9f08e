"""The OpenAI-compatible server, over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine import serve
from evidence import wait_for_records

if TYPE_CHECKING:
    from checkpoints import Checkpoint
    from evidence import Evidence

_UNKNOWN = "Unknown vLLM environment variable detected: VLLM_FL_"


def test_server(qwen3: Checkpoint, evidence: Evidence) -> None:
    # With the option an unknown variable stops the server: ours are known to vLLM.
    options = {"fail_on_environ_validation": True}
    with serve(qwen3, env=evidence.env(VLLM_FL_PREFER="reference"), engine_args=options) as server:
        answers = tuple(server.complete(prompt) for prompt in qwen3.prompts)
        # The worker is killed at the end: let it write its record first.
        wait_for_records(evidence.folder)
    assert answers == qwen3.golden
    assert server.returncode == 0
    assert "Application shutdown complete" in server.log
    assert _UNKNOWN not in server.log
    assert {impl_id for _, impl_id in evidence.calls()} == {"reference.torch"}
    (worker,) = evidence.processes
    assert "Worker" in worker["process"]

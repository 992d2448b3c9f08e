"""Two ranks of one engine, over gloo: they agree, or vLLM does not start and says why."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from engine import run_vllm

if TYPE_CHECKING:
    from pathlib import Path

    from checkpoints import Checkpoint
    from engine import Result
    from evidence import Evidence

# A rank that has no vllm-fl, as where its machine lacks the wheel: a plug-in of vLLM that is
# loaded before ours, and sees in its callers which rank this worker will be.
_NO_PLUGIN_IN_RANK_1 = """
import sys

def register():
    frame = sys._getframe()
    while frame is not None:
        if getattr(frame.f_locals.get("self"), "global_rank", None) == 1:
            from vllm_fl.integration import plugin
            plugin.install = lambda: None
        frame = frame.f_back
"""


def _run(checkpoint: Checkpoint, env: dict[str, str], **more: object) -> Result:
    cores = sorted(os.sched_getaffinity(0))
    env = {"VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}", **env}
    two = {"tensor_parallel_size": 2}
    return run_vllm(checkpoint, in_process=False, env=env, engine_args=two, timeout=1200, **more)


def _stopped(result: Result) -> str:
    assert result.returncode != 0
    assert not result.tokens
    assert not result.timed_out
    return result.log


def test_a_wrong_time_limit_stops_the_front_end(qwen3: Checkpoint) -> None:
    result = run_vllm(qwen3, env={"VLLM_FL_RANKS_TIMEOUT": "soon"})
    assert result.returncode != 0
    assert "PolicyError: VLLM_FL_RANKS_TIMEOUT: must be a positive number of seconds" in result.log


def test_two_ranks_agree(qwen3: Checkpoint, evidence: Evidence) -> None:
    env = dict(evidence.env("probe_vendor", VLLM_FL_PREFER="vendor"))
    result = _run(qwen3, env, max_tokens=4).checked()
    assert result.tokens == tuple(tokens[:4] for tokens in qwen3.golden)
    first, second = evidence.processes
    assert first["fingerprint"] == second["fingerprint"]
    for rank in (0, 1):
        assert f"vllm-fl: rank {rank} of 2 agrees, fingerprint {first['fingerprint']}" in result.log
    assert {impl_id for _, impl_id in evidence.calls()} == {"vendor.probe"}


def test_a_rank_that_chooses_otherwise(qwen3: Checkpoint, evidence: Evidence) -> None:
    env = dict(evidence.env("rank_vendor", VLLM_FL_PER_OP="silu_and_mul=impl:vendor.rank.right|reference"))
    log = _stopped(_run(qwen3, env))
    assert "RanksDifferError: vLLM does not start, because its 2 ranks do not run the same" in log
    chose = "choice of silu_and_mul: rank {} has {}, rank {} has {}"
    assert chose.format(0, "vendor.rank.right", 1, "reference.torch") in log
    assert (
        chose.format(1, "reference.torch", 0, "vendor.rank.right; here vendor.rank.right is not avail") in log
    )


def test_a_rank_without_the_plugin(qwen3: Checkpoint, evidence: Evidence, tmp_path: Path) -> None:
    """It enters no collective of ours and would run natively; the others do not wait for ever."""
    (tmp_path / "no_plugin.py").write_text(_NO_PLUGIN_IN_RANK_1)
    info = tmp_path / "no_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: no-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nno_plugin = no_plugin:register\n")
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**evidence.env(VLLM_FL_RANKS_TIMEOUT="3"), "PYTHONPATH": os.pathsep.join(paths)}
    log = _stopped(_run(qwen3, env))
    assert "rank 1 has published nothing within 3 s (VLLM_FL_RANKS_TIMEOUT)" in log


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "first",
            "vendor.rank.first failed on its first call of silu_and_mul, and one rank of several runs "
            "nothing else: RuntimeError: no kernel for this device",
        ),
        ("late", "by one rank of several"),
    ],
)
def test_no_rank_falls_back(qwen3: Checkpoint, evidence: Evidence, name: str, said: str) -> None:
    per_op = f"silu_and_mul=impl:vendor.rank.{name}|reference|native"
    log = _stopped(_run(qwen3, dict(evidence.env("rank_vendor", VLLM_FL_PER_OP=per_op))))
    assert said in log
    assert "is set aside" not in log

"""The engine in processes of its own: the policy of the front end is the worker's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine import run_vllm

if TYPE_CHECKING:
    from checkpoints import Checkpoint
    from evidence import Evidence

_POLICY_IN_CODE = """
from vllm_fl.dispatch import SelectionPolicy, set_global_policy

set_global_policy(
    SelectionPolicy.from_dict(prefer="reference", per_op_order={"silu_and_mul": ["impl:vendor.wrong"]})
)
"""
_TAMPERED = """
from vllm_fl.integration import engine

_ship = engine.ship_policy

def ship_policy(engine_args):
    _ship(engine_args)
    engine_args.additional_config[engine.KEY]["fingerprint"] = "0" * 16

engine.ship_policy = ship_policy
"""


_NEWER = """
from vllm_fl.integration import engine

_ship = engine.ship_policy

def ship_policy(engine_args):
    _ship(engine_args)
    shipped = engine_args.additional_config[engine.KEY]
    shipped["core"], shipped["fingerprint"], shipped["policy"]["of_tomorrow"] = "99.0", "0" * 16, 1

engine.ship_policy = ship_policy
"""


def test_environment_reaches_the_worker(qwen3: Checkpoint, evidence: Evidence) -> None:
    env = evidence.env(VLLM_FL_PREFER="reference")
    result = run_vllm(qwen3, in_process=False, env=env).checked()
    assert result.tokens == qwen3.golden
    # Front end and engine core build no layer, and leave no record.
    (worker,) = evidence.processes
    assert "Worker" in worker["process"]
    assert {impl_id for _, impl_id in evidence.calls()} == {"reference.torch"}
    assert all(evidence.calls().values())


def test_policy_in_code_reaches_the_worker(qwen3: Checkpoint, evidence: Evidence) -> None:
    env = evidence.env("wrong_vendor")
    result = run_vllm(qwen3, in_process=False, env=env, setup=_POLICY_IN_CODE).checked()
    # Only the policy chooses it: by default the right one of another kind would run.
    assert all(got != right for got, right in zip(result.tokens, qwen3.golden, strict=True))
    (worker,) = evidence.processes
    assert "Worker" in worker["process"]
    assert {key for key, count in evidence.calls().items() if count} == {
        ("silu_and_mul", "vendor.wrong"),
        ("rms_norm", "reference.torch"),
        ("rotary_embedding", "reference.torch"),
    }


def test_worker_refuses_a_policy_that_is_not_the_front_ends(qwen3: Checkpoint) -> None:
    result = run_vllm(qwen3, in_process=False, setup=_TAMPERED)
    assert result.returncode != 0
    assert not result.tokens
    assert "PolicyError: this process reads the policy" in result.log
    assert "where the front end sent 0000000000000000" in result.log


def test_worker_names_the_key_that_a_newer_front_end_sent(qwen3: Checkpoint) -> None:
    result = run_vllm(qwen3, in_process=False, setup=_NEWER)
    assert result.returncode != 0
    assert "the policy that the front end sent: unknown key 'of_tomorrow'; keys are prefer, " in result.log
    assert "The front end has vllm-fl-core 99.0, this process " in result.log

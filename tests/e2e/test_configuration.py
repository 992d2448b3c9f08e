"""A wrong configuration stops the front end; a fault of ours does not; switches switch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine import run_vllm

if TYPE_CHECKING:
    from pathlib import Path

    from checkpoints import Checkpoint
    from engine import Result
    from evidence import Evidence

_ENGINE_STARTS = "Initializing a V1 LLM engine"


def _stopped(result: Result) -> str:
    """Return what the front end said when it stopped, before there was an engine."""
    assert result.returncode != 0
    assert not result.tokens
    assert _ENGINE_STARTS not in result.log
    (line,) = [line for line in result.log.splitlines() if "PolicyError: " in line]
    return line.partition("PolicyError: ")[2]


# -- what is wrong stops -----------------------------------------------------------


def test_unknown_preference(qwen3: Checkpoint) -> None:
    said = _stopped(run_vllm(qwen3, env={"VLLM_FL_PREFER": "vender"}))
    assert said.startswith("VLLM_FL_PREFER: prefer must be one of")
    assert "'vendor'" in said


def test_unknown_key_of_a_file(qwen3: Checkpoint, tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("prefer: reference\n\nop_backend:\n  rms_norm: reference\n")
    said = _stopped(run_vllm(qwen3, env={"VLLM_FL_CONFIG": str(file)}))
    assert said.startswith(f"{file}:3: unknown key 'op_backend'")
    assert "per_op_order" in said


def test_order_that_cannot_run(qwen3: Checkpoint) -> None:
    """It names nothing unknown, so that only the worker, which has the device, can tell."""
    result = run_vllm(qwen3, env={"VLLM_FL_PER_OP": "rms_norm=vendor:cuda"})
    assert result.returncode != 0
    assert not result.tokens
    assert "NoImplementationError: nothing can run 'rms_norm'." in result.log
    assert "The order vendor:cuda comes from VLLM_FL_PER_OP." in result.log
    assert "pip install vllm-plugin-cuda" in result.log


# -- a fault of ours costs a line ---------------------------------------------------


def test_fault_of_ours(qwen3: Checkpoint, evidence: Evidence) -> None:
    setup = """
from vllm_fl.integration import choice

def broken(*_):
    raise ZeroDivisionError("a fault of ours")

choice._why_left_to_the_compiler = broken
"""
    result = run_vllm(qwen3, env=evidence.env(VLLM_FL_PREFER="reference"), setup=setup).checked()
    assert result.tokens == qwen3.golden
    errors = [line for line in result.log.splitlines() if " ERROR " in line]
    for name in ("SiluAndMul", "RMSNorm", "RotaryEmbedding"):
        text = f"vllm-fl: {name} runs vLLM's own path: ZeroDivisionError: a fault of ours"
        assert sum(line.endswith(text) for line in errors) == 1
    assert len(errors) == 3
    assert evidence.calls() == {}


# -- another vLLM ----------------------------------------------------------------------


def test_a_vllm_that_is_not_supported(qwen3: Checkpoint, evidence: Evidence) -> None:
    """It serves, natively, with one line: also where a policy asks for something else."""
    setup = "from vllm_fl.integration import plugin\nplugin.FIRST_UNKNOWN_VLLM = (0, 27)\n"
    env = evidence.env(VLLM_FL_PREFER="reference")
    result = run_vllm(qwen3, env=env, setup=setup).checked()
    assert result.tokens == qwen3.golden
    (line,) = [line for line in result.log.splitlines() if "vllm-fl is off, vLLM runs natively: " in line]
    assert "vllm-fl: " not in result.log
    assert "is not one of the supported 0.26 to 0.26" in line
    assert not evidence.folder.exists()


# -- switches --------------------------------------------------------------------------


def test_switched_off(qwen3: Checkpoint, evidence: Evidence) -> None:
    env = evidence.env(VLLM_FL_PREFER="reference", VLLM_FL_OOT_ENABLED="0")
    result = run_vllm(qwen3, env=env).checked()
    assert result.tokens == qwen3.golden
    assert result.log.count("vllm-fl: VLLM_FL_OOT_ENABLED is off, every layer stays vLLM's own") == 1
    assert "Unknown vLLM environment variable" not in result.log
    assert not evidence.folder.exists()


def test_lists_of_layers_and_vllms_own_switch(qwen3: Checkpoint, evidence: Evidence) -> None:
    """By class or by vLLM's name; and ``custom_ops`` knows our classes by vLLM's names."""
    env = evidence.env(VLLM_FL_OOT_WHITELIST="SiluAndMul,rms_norm", VLLM_FL_PER_OP="silu_and_mul=reference")
    custom_ops = {"compilation_config": {"custom_ops": ["none", "+rms_norm"]}}
    result = run_vllm(qwen3, env=env, engine_args=custom_ops).checked()
    assert result.tokens == qwen3.golden
    assert evidence.layers() == {
        # Off in custom_ops, but the policy asks for it in so many words.
        ("SiluAndMul", "reference.torch", "plain"): 2,
        # On in custom_ops.
        ("RMSNorm", "reference.torch", "guard"): 9,
    }
    assert "RotaryEmbedding stays vLLM's own: VLLM_FL_OOT_WHITELIST does not name it" in result.log


# -- nothing is slow in silence -----------------------------------------------------------


def test_what_would_be_faster_is_said_once(qwen3: Checkpoint, evidence: Evidence) -> None:
    """Where torch sees an accelerator: here it sees none, so that its answer is given."""
    setup = "from vllm_fl.dispatch.calling import torch_state\ntorch_state.has_accelerator = lambda: True\n"
    result = run_vllm(qwen3, env=evidence.env(), setup=setup).checked()
    assert result.tokens == qwen3.golden
    (line,) = [line for line in result.log.splitlines() if " WARNING " in line and "vllm-fl: " in line]
    assert "is served by the reference, in plain PyTorch" in line
    assert "rms_norm, rotary_embedding, silu_and_mul" in line
    assert "pip install vllm-plugin-cuda  # NVIDIA GPUs" in line
    assert {impl_id for _, impl_id in evidence.calls()} == {"reference.torch"}


def test_layers_that_vllms_settings_leave_out(qwen3: Checkpoint, evidence: Evidence) -> None:
    """Our kernel does not run, and neither the log nor the record says that it does."""
    custom_ops = {"compilation_config": {"custom_ops": ["none"]}}
    result = run_vllm(qwen3, env=evidence.env("probe_vendor"), engine_args=custom_ops).checked()
    assert result.tokens == qwen3.golden
    reason = "vLLM leaves it to its compiler (custom_ops)"
    for name in ("SiluAndMul", "RMSNorm"):
        assert f"vllm-fl: {name} stays vLLM's own: {reason}" in result.log
        assert evidence.processes[0]["native_layers"][name].startswith(reason)
    assert {(name, impl_id) for name, impl_id, _ in evidence.layers()} == {
        ("SiluAndMul", "native"),
        ("RMSNorm", "native"),
        ("RotaryEmbedding", "native"),
    }
    assert {impl_id for _, impl_id in evidence.calls()} == {"native"}
    assert "is served by the reference" not in result.log

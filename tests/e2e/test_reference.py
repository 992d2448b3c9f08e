"""The reference serves vLLM's layers: the tokens are right, and the record says who computed them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine import run_vllm

if TYPE_CHECKING:
    from checkpoints import Checkpoint
    from evidence import Evidence

#: The layers of each checkpoint, in two blocks: class, and how many objects there are.
_LAYERS = {
    # q_norm and k_norm, too. vLLM makes one rotary layer for all blocks.
    "qwen3": {"SiluAndMul": 2, "RMSNorm": 9, "RotaryEmbedding": 1},
    "qwen3_moe": {
        "SiluAndMul": 1,
        "RMSNorm": 9,
        "RotaryEmbedding": 1,
        "UnquantizedFusedMoEMethod": 1,
        "CPURouter": 1,
    },
    "llama": {"SiluAndMul": 2, "RMSNorm": 5, "Llama3RotaryEmbedding": 1},
    # And one GeluAndMul.
    "gemma": {"GeluAndMul": 1, "GemmaRMSNorm": 5, "RotaryEmbedding": 1},
}
#: How often one forward calls each operator.
_CALLS = {
    "qwen3": {"silu_and_mul": 2, "rms_norm": 9, "rotary_embedding": 2},
    "qwen3_moe": {
        "silu_and_mul": 1,
        "rms_norm": 9,
        "rotary_embedding": 2,
        "fused_experts": 1,
        "topk_softmax": 1,
    },
    "llama": {"silu_and_mul": 2, "rms_norm": 5, "rotary_embedding": 2},
    "gemma": {"gelu_and_mul": 2, "rms_norm": 5, "rotary_embedding": 2},
}


def test_eager_reference(checkpoint: Checkpoint, evidence: Evidence) -> None:
    result = run_vllm(checkpoint, env=evidence.env(VLLM_FL_PREFER="reference")).checked()
    assert result.tokens == checkpoint.golden
    # vLLM's own experts are no candidate any more: their weights are not prepared.
    forms = {"UnquantizedFusedMoEMethod": "plain"}
    layers = {
        (name, "reference.torch", forms.get(name, "guard")): n for name, n in _LAYERS[checkpoint.name].items()
    }
    assert evidence.layers() == layers
    calls = evidence.calls()
    forwards = calls["rms_norm", "reference.torch"] // _CALLS[checkpoint.name]["rms_norm"]
    assert forwards >= len(checkpoint.golden[0])
    per_forward = _CALLS[checkpoint.name].items()
    assert calls == {(op, "reference.torch"): n * forwards for op, n in per_forward}
    assert not any(evidence.graphs().values())


def test_compiled_layers_stay_native_unless_asked(qwen3: Checkpoint, evidence: Evidence) -> None:
    result = run_vllm(qwen3, mode="compile", env=evidence.env()).checked()
    assert result.tokens == qwen3.golden
    assert set(evidence.layers()) == {(name, "native", "plain") for name in _LAYERS["qwen3"]}
    for name in _LAYERS["qwen3"]:
        line = f"vllm-fl: {name} stays vLLM's own: vLLM leaves it to its compiler (custom_ops)"
        assert result.log.count(line) == 1
    assert all(count > 0 for count in evidence.graphs().values())
    assert set(evidence.graphs()) == {(op, "native") for op in _CALLS["qwen3"]}
    assert not any(evidence.calls().values())

"""vLLM on an emulated Ascend card: torch_npu's operators, their real schemas, simulated kernels.

Greedy tokens are those of transformers. So everything is float32, attention
included, which no card's attention takes (see emulated_npu.allow_float32); one
test has float16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from engine import run_vllm
from evidence import Evidence

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Mapping
    from pathlib import Path

    from checkpoints import Checkpoint

_REPORT = """
def report(llm):
    import npu_kernels
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention import Attention

    layers = get_layers_from_vllm_config(llm.llm_engine.vllm_config, Attention)
    backends = {layer.attn_backend.__module__ for layer in layers.values()}
    return {"calls": dict(npu_kernels.calls), "backends": sorted(backends)}
"""

_OURS = ["vllm_fl_ascend.impl.attention"]
_FIA = "npu_fused_infer_attention_score"


@pytest.fixture
def evidence(tmp_path: Path) -> Evidence:
    """Where a run leaves its record."""
    return Evidence(tmp_path / "trace")


def _run(checkpoint: Checkpoint, card: Mapping[str, str], evidence: Evidence, **more):
    env = {**card, **evidence.env(), **more.pop("env", {})}
    if "dtype" not in more.get("engine_args", {}):
        env["EMULATED_NPU_FLOAT32"] = "1"
    return run_vllm(checkpoint, setup=_REPORT, env=env, **more).checked()


#: The kernels of each checkpoint, and the operators that they serve.
_KERNELS = {
    "qwen3": {"npu_swiglu", "npu_rms_norm", "npu_add_rms_norm", "npu_mrope"},
    "llama": {"npu_swiglu", "npu_rms_norm", "npu_add_rms_norm", "npu_mrope"},
    "gemma": {"npu_geglu", "npu_rms_norm", "npu_add_rms_norm", "npu_mrope"},
}
_SERVED = {
    "qwen3": {"silu_and_mul", "rms_norm", "rotary_embedding"},
    "llama": {"silu_and_mul", "rms_norm", "rotary_embedding"},
    "gemma": {"gelu_and_mul", "rms_norm", "rotary_embedding"},
}


@pytest.mark.parametrize("name", ["qwen3", "llama", "gemma"])
def test_eager(
    name: str, make_checkpoint: Callable[[str], Checkpoint], card: Mapping[str, str], evidence: Evidence
) -> None:
    checkpoint = make_checkpoint(name)
    result = _run(checkpoint, card, evidence)
    assert result.tokens == checkpoint.golden
    calls = result.report["calls"]
    assert result.report["backends"] == _OURS
    assert set(calls) == _KERNELS[name] | {_FIA, "_npu_reshape_and_cache"}
    ours = {op: n for (op, impl_id), n in evidence.calls().items() if impl_id == "vendor.ascend" and n}
    assert set(ours) >= _SERVED[name]
    # Our record, and the kernels' own count; the latter has the first calls, on tiny inputs, too.
    gated = "npu_geglu" if name == "gemma" else "npu_swiglu"
    activation = "gelu_and_mul" if name == "gemma" else "silu_and_mul"
    assert ours[activation] < calls[gated] <= ours[activation] + 4
    assert ours["rotary_embedding"] < calls["npu_mrope"] <= ours["rotary_embedding"] + 4
    # Two layers, and at least as many steps as there are tokens.
    assert calls[_FIA] >= 2 * len(checkpoint.golden[0])


def test_eager_mixture_of_experts(
    make_checkpoint: Callable[[str], Checkpoint], card: Mapping[str, str], evidence: Evidence
) -> None:
    checkpoint = make_checkpoint("qwen3_moe")
    result = _run(checkpoint, card, evidence)
    assert result.tokens == checkpoint.golden
    ours = evidence.calls()
    # One of the two layers has experts.
    assert ours["fused_experts", "vendor.ascend"] == ours["topk_softmax", "vendor.ascend"] >= 16
    kernels = {"npu_moe_gating_top_k_softmax", "npu_moe_init_routing", "npu_grouped_matmul"}
    assert set(result.report["calls"]) >= kernels


def test_eager_chunked_prefill(
    make_checkpoint: Callable[[str], Checkpoint], card: Mapping[str, str], evidence: Evidence
) -> None:
    """Prompts in pieces of 8 tokens, beside decodes."""
    checkpoint = make_checkpoint("qwen3")
    result = _run(
        checkpoint, card, evidence, engine_args={"max_num_batched_tokens": 8, "enable_chunked_prefill": True}
    )
    assert result.tokens == checkpoint.golden
    assert result.report["backends"] == _OURS


def test_processes(
    make_checkpoint: Callable[[str], Checkpoint], card: Mapping[str, str], evidence: Evidence
) -> None:
    """Front end, engine core and worker: the operators and the attention run in the worker."""
    checkpoint = make_checkpoint("qwen3")
    env = {**card, **evidence.env(), "EMULATED_NPU_FLOAT32": "1"}
    result = run_vllm(checkpoint, env=env, in_process=False).checked()
    assert result.tokens == checkpoint.golden
    ours = {op for (op, impl_id), n in evidence.calls().items() if impl_id == "vendor.ascend" and n}
    assert ours >= _SERVED["qwen3"]
    assert ("Attention", "vendor.ascend", "plain") in evidence.layers()


def test_compile(
    make_checkpoint: Callable[[str], Checkpoint], card: Mapping[str, str], evidence: Evidence
) -> None:
    checkpoint = make_checkpoint("qwen3")
    result = _run(checkpoint, card, evidence, mode="compile", env={"VLLM_FL_PREFER": "vendor"})
    assert result.tokens == checkpoint.golden
    assert result.report["backends"] == _OURS
    forms = {(layer, impl_id, form) for layer, impl_id, form in evidence.layers()}
    assert forms >= {
        ("SiluAndMul", "vendor.ascend", "opaque"),
        ("RMSNorm", "vendor.ascend", "opaque"),
        ("RotaryEmbedding", "vendor.ascend", "opaque"),
    }
    calls = result.report["calls"]
    assert calls["npu_swiglu"] >= 2 * len(checkpoint.golden[0])
    assert calls[_FIA] >= 2 * len(checkpoint.golden[0])


def test_float16(
    make_checkpoint: Callable[[str], Checkpoint], card: Mapping[str, str], evidence: Evidence
) -> None:
    """In a dtype that a card takes, with its limits; rounding may change a prompt's tokens."""
    checkpoint = make_checkpoint("qwen3")
    result = _run(checkpoint, card, evidence, engine_args={"dtype": "float16"})
    assert result.report["backends"] == _OURS
    right = sum(got == golden for got, golden in zip(result.tokens, checkpoint.golden, strict=True))
    assert right >= 3


def test_a_fault_changes_the_tokens(
    make_checkpoint: Callable[[str], Checkpoint], card: Mapping[str, str], evidence: Evidence
) -> None:
    """The simulated kernels are what computes: a wrong one changes every prompt's tokens."""
    checkpoint = make_checkpoint("qwen3")
    setup = """
import npu_kernels, npu_attention_kernels
import emulated_npu
noted = npu_kernels._kernels
for i, (namespace, name, function) in enumerate(noted):
    if name == "npu_fused_infer_attention_score":
        def wrong(*args, function=function, **kwargs):
            out, lse = function(*args, **kwargs)
            return out * 1.5, lse
        noted[i] = (namespace, name, wrong)
"""
    env = {**card, **evidence.env(), "EMULATED_NPU_FLOAT32": "1"}
    result = run_vllm(checkpoint, setup=setup, env=env).checked()
    assert all(got != golden for got, golden in zip(result.tokens, checkpoint.golden, strict=True))

"""A vendor's implementations really compute, in every form, and what happens where they fail."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine import more_engines
from engine import run_vllm

if TYPE_CHECKING:
    from checkpoints import Checkpoint
    from evidence import Evidence

_SERVED = {"silu_and_mul": 2, "rms_norm": 9, "rotary_embedding": 2}

# The first engine has the policy of the environment; each further one a policy of its own.
_MORE_ENGINES = """
def report(llm):
    import json
    import probe_vendor
    from vllm import LLM, SamplingParams
    from vllm_fl.dispatch import SelectionPolicy, get_default_manager, set_global_policy

    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    sampling = SamplingParams(temperature=0, max_tokens=16, detokenize=False, ignore_eos=True)

    def tokens(**policy):
        get_default_manager().thaw()
        set_global_policy(SelectionPolicy.from_dict(prefer="reference", **policy))
        again = LLM(**ENGINE_ARGS)
        outputs = again.generate(prompts, sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    found = {"calls": dict(probe_vendor.calls)}
    for op_name in ("silu_and_mul", "rms_norm", "rotary_embedding"):
        found[op_name] = tokens(per_op_order={op_name: ["impl:vendor.wrong"]})
    found["reference"] = tokens()
    return found
"""


def test_eager_vendor_then_engines_with_other_policies(qwen3: Checkpoint, evidence: Evidence) -> None:
    setup = f"{more_engines(qwen3.path, qwen3.prompts)}{_MORE_ENGINES}"
    env = evidence.env("probe_vendor", "wrong_vendor", VLLM_FL_ALLOW_VENDORS="probe", VLLM_FL_PREFER="vendor")
    result = run_vllm(qwen3, env=env, setup=setup).checked()
    assert result.tokens == qwen3.golden
    # Our record, and the vendor's own count of its calls; that has also the first ones, on tiny
    # inputs: the norms have two widths, each with and without a residual.
    calls = evidence.calls()
    probed = {op: calls[op, "vendor.probe"] for op in _SERVED}
    forwards = probed["silu_and_mul"] // 2
    assert probed == {op: n * forwards for op, n in _SERVED.items()}
    assert forwards >= 16
    first_calls = {"silu_and_mul": 1, "rms_norm": 4, "rotary_embedding": 1}
    assert result.report["calls"] == {op: n + first_calls[op] for op, n in probed.items()}
    layers = evidence.layers()
    assert layers["RMSNorm", "vendor.probe", "guard"] == 9
    # A second engine has its own policy, the rotary layer that vLLM keeps included, and
    # what is wrong changes what every prompt gets: the implementation is what computes.
    golden = [list(tokens) for tokens in qwen3.golden]
    for op_name in _SERVED:
        wrong = result.report[op_name]
        assert all(got != right for got, right in zip(wrong, golden, strict=True)), op_name
        assert calls[op_name, "vendor.wrong"] > 0
    assert result.report["reference"] == golden


def test_opaque_vendor(qwen3: Checkpoint, evidence: Evidence) -> None:
    result = run_vllm(
        qwen3, mode="compile", env=evidence.env("probe_vendor", VLLM_FL_PREFER="vendor")
    ).checked()
    assert result.tokens == qwen3.golden
    assert evidence.layers() == {
        ("SiluAndMul", "vendor.probe", "opaque"): 2,
        ("RMSNorm", "vendor.probe", "opaque"): 9,
        ("RotaryEmbedding", "vendor.probe", "opaque"): 1,
    }
    # Counted inside compiled code, at every step; nothing of it was traced.
    calls = evidence.calls()
    forwards = calls["silu_and_mul", "vendor.probe"] // 2
    assert forwards >= 16
    assert calls == {(op, "vendor.probe"): n * forwards for op, n in _SERVED.items()}
    assert not any(evidence.graphs().values())


def test_opaque_vendor_that_fails(qwen3: Checkpoint, evidence: Evidence) -> None:
    per_op = "silu_and_mul=impl:vendor.faulty.dies|reference;rms_norm=impl:vendor.faulty.alias|reference"
    env = evidence.env("faulty_vendor", VLLM_FL_PER_OP=per_op, VLLM_FL_PREFER="reference")
    result = run_vllm(qwen3, mode="compile", env=env).checked()
    assert result.tokens == qwen3.golden
    # Found at the first call, when the layer is built: the layer is another one's.
    layers = evidence.layers()
    assert layers["RMSNorm", "reference.torch", "plain"] == 9
    assert "vendor.faulty.alias of rms_norm returns one of its arguments" in result.log
    # Found inside the graph: the reference goes on in there.
    assert layers["SiluAndMul", "vendor.faulty.dies", "opaque"] == 2
    assert "vendor.faulty.dies raised for silu_and_mul and is set aside" in result.log
    assert "the fifth call dies" in result.log
    calls = evidence.calls()
    # Four that were right, of which the first call at the start is not counted.
    assert calls["silu_and_mul", "vendor.faulty.dies"] == 3
    assert calls["silu_and_mul", "reference.torch"] >= 2 * 16 - 3


def test_opaque_vendor_that_refuses_many_rows(qwen3: Checkpoint, evidence: Evidence) -> None:
    """vLLM's own path takes over inside of the graph, in the profile run to begin with."""
    per_op = ";".join(f"{op}=impl:vendor.rows.few|native" for op in _SERVED)
    env = evidence.env("rows_vendor", VLLM_FL_PER_OP=per_op)
    result = run_vllm(qwen3, mode="compile", env=env).checked()
    assert result.tokens == qwen3.golden
    layers = evidence.layers()
    assert {(impl_id, form) for _, impl_id, form in layers} == {("vendor.rows.few", "opaque")}
    calls = evidence.calls()
    for op_name in _SERVED:
        assert calls[op_name, "vendor.rows.few"] > 0
        assert calls[op_name, "native"] > 0


def test_opaque_vendor_whose_strides_change_with_the_rows(qwen3: Checkpoint, evidence: Evidence) -> None:
    env = evidence.env("rows_vendor", VLLM_FL_PER_OP="silu_and_mul=impl:vendor.rows.strided")
    result = run_vllm(qwen3, mode="compile", env=env).checked()
    assert result.tokens == qwen3.golden
    assert (
        result.log.count("vendor.rows.strided of silu_and_mul returns a tensor that is not contiguous") == 1
    )
    assert evidence.calls()["silu_and_mul", "vendor.rows.strided"] >= 2 * 16

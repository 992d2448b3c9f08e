"""Engines of one process, each with a policy of its own: one after another, and both alive."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from engine import more_engines
from engine import run_vllm

if TYPE_CHECKING:
    from checkpoints import Checkpoint
    from engine import Mode
    from evidence import Evidence

# The first engine has the policy of the environment; it is alive when the second one is built.
_SECOND = """
from vllm_fl.integration.layer import serving

def served(llm):
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    return {
        type(one).__name__.removeprefix("Served"): serving(one) is not None
        for one in runner.model.modules()
        if type(one).__name__.startswith("Served")
    }

def report(llm):
    from vllm import LLM, SamplingParams
    from vllm_fl.dispatch import SelectionPolicy, get_default_manager, set_global_policy

    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    sampling = SamplingParams(temperature=0, max_tokens=16, detokenize=False, ignore_eos=True)

    def run(engine):
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    get_default_manager().thaw()
    set_global_policy(SelectionPolicy.from_dict(prefer=SECOND))
    second = LLM(**{**ENGINE_ARGS, "enforce_eager": EAGER})
    return {
        "tokens": [run(one) for one in (second, llm, second, llm)],
        "served": [served(llm), served(second)],
    }
"""


@pytest.mark.parametrize("mode", ["eager", "compile"])
@pytest.mark.parametrize("order", [("reference", "native"), ("native", "reference")], ids=" then ".join)
@pytest.mark.parametrize("name", ["gemma", "qwen3"])
def test_two_engines_alive(
    request: pytest.FixtureRequest, evidence: Evidence, name: str, order: tuple[str, str], mode: Mode
) -> None:
    """Neither has a layer of the other, those included that vLLM keeps: activations and rotary layers."""
    checkpoint: Checkpoint = request.getfixturevalue(name)
    first, second = order
    constants = f"SECOND = {second!r}\nEAGER = {mode == 'eager'}\n"
    setup = more_engines(checkpoint.path, checkpoint.prompts) + constants + _SECOND
    env = evidence.env(VLLM_FL_PREFER=first)
    result = run_vllm(checkpoint, mode=mode, env=env, setup=setup, timeout=600).checked()
    assert result.tokens == checkpoint.golden
    golden = [list(tokens) for tokens in checkpoint.golden]
    assert result.report["tokens"] == [golden] * 4
    for prefer, layers in zip(order, result.report["served"], strict=True):
        assert len(layers) >= 3
        assert set(layers.values()) == {prefer == "reference"}, layers

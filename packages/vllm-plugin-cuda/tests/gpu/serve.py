"""Run a small random model in vLLM, natively and with an implementation, and compare.

    python serve.py --out DIR [--prefer vendor] [--model dense|fp8|int8|moe] [--mode eager|compiled]

``fp8`` and ``int8`` are the dense model with weights of eight bits, one scale an
output, and activations quantised by token.

In eager mode vLLM runs its own kernels, so that ``vendor.cuda`` must give the tokens
and log-probabilities to the bit. In its compiled mode, with CUDA graphs, vLLM's own
layers are generated code, with other roundings: there the agreement is told. A step
is timed at a batch of eight, in processes that count no calls, native and the other
in turn. Writes ``DIR/serve-MODEL-PREFER.json``; the exit status is 1 where a run
fails, an eager model that must not differ does, or the trace does not say that the
preferred implementation ran.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from eight_bits import EIGHT_BITS
from eight_bits import quantize

PROMPTS = [[1 + (7 * i + 13 * k) % 1000 for i in range(5 + 9 * k)] for k in range(8)]


SHAPE = {
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
}
EXPERTS = {"moe_intermediate_size": 256, "num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": True}


def make_checkpoint(folder: Path, model: str) -> None:
    """Save a Qwen3 of four layers with random weights, large enough to be undecided nowhere."""
    import torch
    import transformers

    torch.manual_seed(7)
    if model == "moe":
        config = transformers.Qwen3MoeConfig(**SHAPE, **EXPERTS)
        made = transformers.Qwen3MoeForCausalLM(config)
    else:
        made = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SHAPE))
    made.to(torch.bfloat16).save_pretrained(folder)
    if model in EIGHT_BITS:
        quantize(folder, model)


def generate(checkpoint: Path, eager: bool, output: Path) -> None:
    """Write greedy tokens and their log-probabilities."""
    from vllm import LLM
    from vllm import SamplingParams

    started = time.monotonic()
    llm = LLM(
        str(checkpoint),
        skip_tokenizer_init=True,
        enforce_eager=eager,
        max_model_len=256,
        gpu_memory_utilization=0.2,
        max_num_seqs=8,
        seed=0,
    )
    ready = time.monotonic() - started
    params = SamplingParams(temperature=0.0, max_tokens=48, logprobs=1, detokenize=False, ignore_eos=True)
    results = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    tokens = [list(result.outputs[0].token_ids) for result in results]
    logprobs = [
        [step[token].logprob for step, token in zip(out.logprobs, out.token_ids, strict=True)]
        for out in (result.outputs[0] for result in results)
    ]
    found = {"tokens": tokens, "logprobs": logprobs, "ready": round(ready, 1), "step_ms": step_ms(llm)}
    output.write_text(json.dumps(found))


def step_ms(llm: Any) -> float:
    """Return the median time of a decode step of all prompts at once."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    params = SamplingParams(temperature=0.0, max_tokens=128, detokenize=False, ignore_eos=True)
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(f"timed-{number}", {"prompt_token_ids": prompt}, params)
    times = []
    while engine.has_unfinished_requests():
        started = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - started)
    return round(statistics.median(times) * 1e3, 3)


def run(options: argparse.Namespace, prefer: str, *, eager: bool, traced: bool) -> dict[str, Any]:
    """Run ``generate`` in a process of its own; return what it wrote, and what served the operators.

    What counts calls costs time, so that a run is for the record or for the time.
    """
    name = f"{options.model} {prefer} {'eager' if eager else 'compiled'}"
    trace = options.out / f"trace {name}"
    answer = options.out / f"{name}.json"
    answer.unlink(missing_ok=True)
    environment = dict(os.environ)
    if prefer != "default":
        environment["VLLM_FL_PREFER"] = prefer
    if traced:
        environment["VLLM_FL_TRACE_DIR"] = str(trace)
    command = [sys.executable, __file__, "--out", str(options.out), "--child", str(answer)]
    command += ["--model", options.model, *(["--eager"] if eager else [])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)
    if not answer.exists():
        return {"name": name, "error": (done.stdout + done.stderr)[-3000:]}
    found: dict[str, Any] = {"name": name, **json.loads(answer.read_text("utf-8"))}
    if traced:
        told = [sys.executable, "-m", "vllm_fl", "trace", str(trace)]
        found["trace"] = subprocess.run(told, capture_output=True, text=True, check=False).stdout.splitlines()
    return found


def times(options: argparse.Namespace, *, eager: bool) -> dict[str, list[float]]:
    """Return a step's milliseconds in every round, the two in turn."""
    found: dict[str, list[float]] = {"native": [], options.prefer: []}
    for _ in range(options.rounds):
        for prefer, each in found.items():
            each.append(run(options, prefer, eager=eager, traced=False).get("step_ms", float("nan")))
    return found


def agreement(one: dict[str, Any], other: dict[str, Any]) -> str:
    """Say how far two runs agree."""
    if "error" in one or "error" in other:
        return "one of them failed"
    if one["tokens"] == other["tokens"]:
        pairs = list(zip(sum(one["logprobs"], []), sum(other["logprobs"], []), strict=True))  # noqa: RUF017
        return f"same tokens, log-probabilities within {max(abs(a - b) for a, b in pairs):.3g}"
    pairs = list(zip(sum(one["tokens"], []), sum(other["tokens"], []), strict=True))  # noqa: RUF017
    same = [a == b for a, b in pairs]
    return f"{sum(same)} of {len(same)} tokens the same"


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prefer", default="vendor", help="a token of VLLM_FL_PREFER, or: default")
    parser.add_argument("--model", choices=("dense", *EIGHT_BITS, "moe"), default="dense")
    parser.add_argument("--mode", choices=("eager", "compiled"), help="default: one after the other")
    parser.add_argument("--rounds", type=int, default=2, help="pairs of processes that are timed; default 2")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--eager", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out = options.out.resolve()
    checkpoint = options.out / options.model
    if options.child:
        generate(checkpoint, options.eager, options.child)
        return 0
    if not checkpoint.exists():
        make_checkpoint(checkpoint, options.model)
    output = options.out / f"serve-{options.model}-{options.prefer}.json"
    report: dict[str, Any] = {"model": options.model}
    is_right = True
    for mode in [options.mode] if options.mode else ["eager", "compiled"]:
        eager = mode == "eager"
        native, ours = (run(options, one, eager=eager, traced=True) for one in ("native", options.prefer))
        agrees = agreement(native, ours)
        is_served = options.prefer == "default" or options.prefer in "\n".join(ours.get("trace", []))
        is_right &= "error" not in ours and is_served
        if eager and options.prefer == "vendor":
            is_right &= agrees.endswith("within 0")
        step_ms = times(options, eager=eager)
        report[mode] = {"agreement": agrees, "step_ms": step_ms, "runs": [native, ours]}
        output.write_text(json.dumps(report, indent=1))
        told = "; ".join(f"{one} {' '.join(f'{ms:.2f}' for ms in each)}" for one, each in step_ms.items())
        print(f"{options.model}, {mode}: {agrees}; ms a step: {told}", flush=True)
        for one in (native, ours):
            print(one["name"], *one.get("trace", []), one.get("error", ""), sep="\n", flush=True)
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())

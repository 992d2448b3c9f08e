"""Run a small random model in vLLM, natively and with an implementation, and compare.

    python serve.py --out DIR [--prefer vendor]

In eager mode vLLM runs its own kernels, so that ``vendor.cuda`` must give the same
tokens and the same log-probabilities, to the bit. In its compiled mode vLLM's own
layers are generated code, with other roundings: there the agreement is told.
Writes ``DIR/serve.json``; the exit status is 1 where eager differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROMPTS = [[1 + (7 * i + 13 * k) % 1000 for i in range(5 + 9 * k)] for k in range(8)]


def make_checkpoint(folder: Path) -> None:
    """Save a Qwen3 of four layers with random weights, large enough to be undecided nowhere."""
    import torch
    from transformers import Qwen3Config
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(7)
    config = Qwen3Config(
        vocab_size=1024,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        initializer_range=0.15,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


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
    output.write_text(json.dumps({"tokens": tokens, "logprobs": logprobs, "ready": round(ready, 1)}))


def run(options: argparse.Namespace, checkpoint: Path, prefer: str, eager: bool) -> dict[str, Any]:
    """Run ``generate`` in a process of its own and return what it wrote, and what served the operators."""
    name = f"{prefer} {'eager' if eager else 'compiled'}"
    trace = options.out / f"trace {name}"
    answer = options.out / f"{name}.json"
    environment = os.environ | {"VLLM_FL_PREFER": prefer, "VLLM_FL_TRACE_DIR": str(trace)}
    command = [sys.executable, __file__, "--out", str(options.out), "--child", str(answer)]
    command += ["--checkpoint", str(checkpoint), *(["--eager"] if eager else [])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)
    if not answer.exists():
        return {"name": name, "error": (done.stdout + done.stderr)[-3000:]}
    told = subprocess.run(
        [sys.executable, "-m", "vllm_fl", "trace", str(trace)], capture_output=True, text=True, check=False
    )
    found: dict[str, Any] = json.loads(answer.read_text("utf-8"))
    answer.unlink()
    return {"name": name, "trace": told.stdout.splitlines(), **found}


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
    parser.add_argument("--prefer", default="vendor")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--eager", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--only-eager", action="store_true")
    options = parser.parse_args()
    options.out = options.out.resolve()
    if options.child:
        generate(options.checkpoint, options.eager, options.child)
        return 0
    checkpoint = options.checkpoint or options.out / "checkpoint"
    if not checkpoint.exists():
        make_checkpoint(checkpoint)
    runs = {}
    report: dict[str, Any] = {"agreement": {}}
    for eager in (True,) if options.only_eager else (True, False):
        for prefer in ("native", options.prefer):
            runs[prefer, eager] = run(options, checkpoint, prefer, eager)
        mode = "eager" if eager else "compiled"
        report["agreement"][mode] = agreement(runs["native", eager], runs[options.prefer, eager])
        report["runs"] = list(runs.values())
        (options.out / "serve.json").write_text(json.dumps(report, indent=1))
        print(mode, report["agreement"][mode], flush=True)
    for one in runs.values():
        print(one["name"], one.get("ready"), "\n".join(one.get("trace", [])), one.get("error", ""), sep="\n")
    return 0 if "within 0" in report["agreement"]["eager"] else 1


if __name__ == "__main__":
    sys.exit(main())

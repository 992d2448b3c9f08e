"""Run a small random model in vLLM on two GPUs: the ranks agree, or the start stops and says why.

    python two_ranks.py --out DIR [--prefer vendor]

Eager and compiled, the two ranks must have one fingerprint, and the tokens of eager mode must be
those of vLLM's own kernels. Then each rank chooses otherwise, and vLLM must not start. Writes
``DIR/two_ranks.json``; the exit status is 1 where anything is otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from serve import PROMPTS
from serve import make_checkpoint

_AGREES = re.compile(r"vllm-fl: rank (\d) of 2 agrees, fingerprint ([0-9a-f]+)")

#: A plugin with one implementation that only rank 0 has.
_ONE_SIDED = """
VLLM_FL_PLUGIN_API = 1

def silu(x):
    from torch.nn import functional
    half = x.shape[-1] // 2
    return functional.silu(x[..., :half]) * x[..., half:]

def is_here():
    from torch import distributed
    return distributed.is_initialized() and distributed.get_rank() == 0

silu._is_available = is_here

def register(registry):
    from vllm_fl.dispatch import BackendImplKind, OpImpl
    registry.register_impl(OpImpl("silu_and_mul", "vendor.one", BackendImplKind.VENDOR, silu, "one"))
"""


def generate(options: argparse.Namespace) -> None:
    """Write the greedy tokens of two ranks."""
    from vllm import LLM
    from vllm import SamplingParams

    llm = LLM(
        str(options.checkpoint),
        skip_tokenizer_init=True,
        enforce_eager=options.eager,
        tensor_parallel_size=2,
        max_model_len=256,
        gpu_memory_utilization=0.2,
        max_num_seqs=8,
        seed=0,
    )
    params = SamplingParams(temperature=0.0, max_tokens=32, detokenize=False, ignore_eos=True)
    results = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    options.child.write_text(json.dumps([list(result.outputs[0].token_ids) for result in results]))


def run(options: argparse.Namespace, name: str, *, eager: bool, **variables: str) -> dict[str, Any]:
    """Run ``generate`` in processes of its own; return the tokens and what the log says."""
    answer = options.out / "tokens.json"
    answer.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--out", str(options.out), "--child", str(answer)]
    command += ["--checkpoint", str(options.checkpoint), *(["--eager"] if eager else [])]
    # That the ranks agree is an INFO of the log.
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "INFO", **variables}
    started = time.monotonic()
    with (options.out / f"{name}.log").open("w+") as log:
        try:
            code = subprocess.run(
                command, env=environment, stdout=log, stderr=log, check=False, timeout=240
            ).returncode
        except subprocess.TimeoutExpired:
            code = 124
        log.seek(0)
        said = log.read()
    tokens = json.loads(answer.read_text()) if answer.exists() else None
    agreed = dict(_AGREES.findall(said))
    differ = [line for line in said.splitlines() if "rank " in line and " has " in line][:4]
    seconds = round(time.monotonic() - started, 1)
    result = {"name": name, "code": code, "tokens": tokens, "agreed": agreed, "differ": differ}
    print(name, {**result, "tokens": tokens and tokens[0][:8], "seconds": seconds}, flush=True)
    return {**result, "seconds": seconds}


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
        generate(options)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    options.checkpoint = options.checkpoint or options.out / "checkpoint"
    if not options.checkpoint.exists():
        make_checkpoint(options.checkpoint, "dense")
    (options.out / "one_sided.py").write_text(_ONE_SIDED)
    paths = os.pathsep.join([str(options.out), *filter(None, [os.environ.get("PYTHONPATH")])])

    native = run(options, "native", eager=True, VLLM_FL_OOT_ENABLED="0")
    modes = [True] if options.only_eager else [True, False]
    served = [
        run(
            options,
            f"{options.prefer} {'eager' if m else 'compiled'}",
            eager=m,
            VLLM_FL_PREFER=options.prefer,
        )
        for m in modes
    ]
    differ = run(
        options,
        "one rank chooses otherwise",
        eager=True,
        PYTHONPATH=paths,
        VLLM_FL_PLUGIN_MODULES="one_sided",
        VLLM_FL_PER_OP="silu_and_mul=impl:vendor.one|reference|vendor|native",
    )
    checks = {
        "eager tokens are vLLM's own": served[0]["tokens"] == native["tokens"] is not None,
        "both ranks agree, in every mode": all(
            sorted(one["agreed"]) == ["0", "1"] and len(set(one["agreed"].values())) == 1 for one in served
        ),
        "every mode serves": all(one["tokens"] for one in served),
        "another choice stops the start": differ["code"] != 0 and not differ["tokens"],
        "and is named": any("vendor.one" in line and "silu_and_mul" in line for line in differ["differ"]),
    }
    report = {"checks": checks, "runs": [native, *served, differ]}
    (options.out / "two_ranks.json").write_text(json.dumps(report, indent=1))
    print(json.dumps(checks, indent=1))
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

"""vLLM with the dispatch against vLLM without it, step by step in one process.

Every engine stands in the same process and decodes the same prompt; the engines
take turns, a step each, so that a machine whose speed drifts slows all of them.
The figure is the median over the pairs of (native's time / ours): 1.0 is native's
speed, more is faster. ``native`` is the policy ``prefer: native``, with which a
layer keeps vLLM's own forward, to the bound method; it is built first. ``native
again`` is a second engine of that kind, built last, and shows how far from 1.0 the
noise alone leads.

In pages of 4 KB engines that are alike differ by a tenth for as long as they live, by
where their weights happen to lie. So the process asks for pages of 2 MB, which takes
glibc 2.35 and transparent huge pages that are not switched off.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

#: (mode, contender): the least ratio that is allowed, None where it is only told.
BUDGETS: dict[tuple[str, str], float | None] = {
    ("compile", "default policy"): 0.98,
    ("compile", "prefer: reference"): 0.98,
    ("compile", "native again"): None,
    ("eager", "vLLM's kernels behind the operators"): 0.98,
    ("eager", "prefer: reference"): None,
    ("eager", "native again"): None,
}
POLICIES: dict[str, dict[str, Any]] = {
    "native": {"prefer": "native"},
    "native again": {"prefer": "native"},
    "default policy": {},
    "prefer: reference": {"prefer": "reference"},
    "vLLM's kernels behind the operators": {"prefer": "vendor"},
}


def prepare() -> None:
    """Set the variables of a run, before vLLM is imported."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_LOGGING_LEVEL="WARNING",
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
    )
    os.environ.setdefault("VLLM_FL_PLUGIN_MODULES", "vllm_kernels")
    sys.path.insert(0, str(Path(__file__).parent))


def take_large_pages() -> None:
    """Begin anew with pages of 2 MB for what is allocated; malloc reads it when a process begins."""
    if "GLIBC_TUNABLES" not in os.environ:
        os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


_PROMPT_LENGTH = 64
_PREFILLS = 9


class Engine:
    """One vLLM engine with the policy of its name."""

    def __init__(self, model: Path, mode: str, name: str) -> None:
        from vllm import LLM

        from vllm_fl.dispatch import SelectionPolicy
        from vllm_fl.dispatch import get_default_manager
        from vllm_fl.dispatch import reset_global_policy
        from vllm_fl.dispatch import set_global_policy

        get_default_manager().thaw()
        if POLICIES[name]:
            set_global_policy(SelectionPolicy.from_dict(**POLICIES[name]))
        else:
            reset_global_policy()
        self.name = name
        self.engine = LLM(
            model=str(model),
            dtype="float32",
            enforce_eager=mode == "eager",
            max_model_len=1024,
            max_num_seqs=8,
            enable_prefix_caching=False,
            seed=0,
        ).llm_engine

    def start(self, tag: str, batch: int, tokens: int) -> float:
        """Add a batch of requests and run their prefill; return its seconds."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        for i in range(batch):
            prompt: Any = {"prompt_token_ids": [(7 * i + j) % 4096 + 100 for j in range(_PROMPT_LENGTH)]}
            self.engine.add_request(f"{tag}-{i}", prompt, sampling)
        return self.step()

    def step(self) -> float:
        """Run one step; return its seconds."""
        started = time.perf_counter()
        self.engine.step()
        return time.perf_counter() - started

    def finish(self) -> None:
        """Run until nothing is left."""
        while self.engine.has_unfinished_requests():
            self.engine.step()


def _rotated(engines: list[Engine], turn: int) -> list[Engine]:
    """Return the order of a turn: everybody stands as often in every place."""
    start = turn % len(engines)
    return engines[start:] + engines[:start]


def measure(model: Path, mode: str, batch: int, engines: list[Engine], steps: int) -> list[dict[str, Any]]:
    """Return a row for each engine after the first, which is native."""
    warm_up = 5
    prefill: dict[str, list[float]] = {e.name: [] for e in engines}
    for turn in range(_PREFILLS + 1):
        for engine in _rotated(engines, turn):
            seconds = engine.start(f"prefill-{turn}", batch, tokens=1)
            engine.finish()
            if turn:
                prefill[engine.name].append(seconds)
    for engine in engines:
        engine.start("decode", batch, tokens=steps + warm_up + 2)
    times: dict[str, list[float]] = {e.name: [] for e in engines}
    for turn in range(warm_up + steps):
        for engine in _rotated(engines, turn):
            seconds = engine.step()
            if turn >= warm_up:
                times[engine.name].append(seconds)
    for engine in engines:
        engine.finish()
    native = times["native"]
    rows = []
    for engine in engines[1:]:
        ratios = [n / o for n, o in zip(native, times[engine.name], strict=True)]
        prefills = [n / o for n, o in zip(prefill["native"], prefill[engine.name], strict=True)]
        rows.append(
            {
                "mode": mode,
                "batch": batch,
                "policy": engine.name,
                "steps": len(ratios),
                "ratio": round(statistics.median(ratios), 3),
                "native_step_ms": round(statistics.median(native) * 1e3, 2),
                "step_ms": round(statistics.median(times[engine.name]) * 1e3, 2),
                "prefill_ratio": round(statistics.median(prefills), 3),
                "budget": BUDGETS[mode, engine.name],
            }
        )
    return rows


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Measure, print a table and return ``{"serving": rows, "missed": [...]}``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60, help="decode steps of each engine; default 60")
    parser.add_argument("mode", choices=("eager", "compile"))
    parser.add_argument("--json", type=Path, help="write the rows here")
    arguments = parser.parse_args(argv)
    take_large_pages()
    prepare()
    from vllm_fl.cli.model import unpack_demo_model

    model = unpack_demo_model()
    rows: list[dict[str, Any]] = []
    names = ["native", *(name for mode, name in BUDGETS if mode == arguments.mode)]
    engines = [Engine(model, arguments.mode, name) for name in names]
    for batch in (1, 8):
        rows += measure(model, arguments.mode, batch, engines, arguments.steps)
    print(f"{'mode':8} {'batch':>5} {'policy':38} {'native ms':>9} {'ours ms':>8} {'ratio':>6} {'budget':>6}")
    for row in rows:
        budget = "-" if row["budget"] is None else row["budget"]
        print(
            f"{row['mode']:8} {row['batch']:5} {row['policy']:38} {row['native_step_ms']:9} "
            f"{row['step_ms']:8} {row['ratio']:6} {budget:>6}   prefill {row['prefill_ratio']}"
        )
    missed = [row for row in rows if row["budget"] is not None and row["ratio"] < row["budget"]]
    result = {"serving": rows, "missed": missed}
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))
    return result


if __name__ == "__main__":
    sys.exit(1 if main()["missed"] else 0)

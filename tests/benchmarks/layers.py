"""The host time of one layer call, native beside ours, in one process.

The same layer is built with each policy; the copies are called in turn with the
same small input, so that what differs is the cost of Python. With vLLM's own
kernels behind the operators nothing but the dispatch is left.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any

from serving import POLICIES
from serving import prepare

if TYPE_CHECKING:
    from collections.abc import Callable

BEHIND = "vLLM's kernels behind the operators"
#: What a call of ours may cost, over native's, with the same kernel behind it. The
#: rotary embedding of a token is the worst: its kernel takes as long as the views
#: between vLLM's layout and the operator's.
LARGEST_RATIO = 1.75
_REPEATS = 15
_CALLS = 300


def _layers(torch: Any) -> dict[str, tuple[Any, Callable[[int], tuple[Any, ...]]]]:
    """Return for each case how to build the layer and how to make its arguments."""
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

    def rotary(tokens: int) -> tuple[Any, ...]:
        qkv = torch.ones(tokens, (9 + 3 + 3) * 64)
        return torch.arange(tokens), qkv[:, : 9 * 64], qkv[:, 9 * 64 : 12 * 64]

    return {
        "SiluAndMul": (SiluAndMul, lambda tokens: (torch.ones(tokens, 3072),)),
        "RMSNorm": (lambda: RMSNorm(576), lambda tokens: (torch.ones(tokens, 576),)),
        "RMSNorm, residual": (
            lambda: RMSNorm(576),
            lambda tokens: (torch.ones(tokens, 576), torch.zeros(tokens, 576)),
        ),
        "RotaryEmbedding": (lambda: RotaryEmbedding(64, 64, 2048, 10000.0, True, torch.float32), rotary),
    }


def _time(layer: Any, arguments: tuple[Any, ...]) -> float:
    started = time.perf_counter()
    for _ in range(_CALLS):
        layer(*arguments)
    return (time.perf_counter() - started) / _CALLS * 1e6


def measure() -> list[dict[str, Any]]:
    """Return a row for each layer, number of tokens and policy."""
    import torch
    from vllm.config import CompilationConfig
    from vllm.config import VllmConfig
    from vllm.config import set_current_vllm_config

    from vllm_fl.dispatch import SelectionPolicy
    from vllm_fl.dispatch import policy_context
    from vllm_fl.integration import register

    register()
    torch.set_num_threads(1)
    rows = []
    config = VllmConfig(compilation_config=CompilationConfig(mode=0, custom_ops=["all"]))
    names = ["native", BEHIND, "prefer: reference"]
    with set_current_vllm_config(config), torch.no_grad():
        for case, (build, arguments_for) in _layers(torch).items():
            built = {}
            for name in names:
                with policy_context(SelectionPolicy.from_dict(**POLICIES[name])):
                    built[name] = build()
            for tokens in (1, 8):
                arguments = arguments_for(tokens)
                times: dict[str, list[float]] = {name: [] for name in names}
                for turn in range(_REPEATS):
                    for name in names if turn % 2 else reversed(names):
                        times[name].append(_time(built[name], arguments))
                best = {name: statistics.median(values) for name, values in times.items()}
                for name in names[1:]:
                    rows.append(
                        {
                            "layer": case,
                            "tokens": tokens,
                            "policy": name,
                            "native_us": round(best["native"], 1),
                            "ours_us": round(best[name], 1),
                            "ratio": round(best[name] / best["native"], 2),
                            "budget": LARGEST_RATIO if name == BEHIND else None,
                        }
                    )
    return rows


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Measure, print a table and return ``{"layers": rows, "missed": [...]}``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows here")
    arguments = parser.parse_args(argv)
    prepare()
    rows = measure()
    print(
        f"{'layer':18} {'tokens':>6} {'policy':38} {'native us':>9} {'ours us':>8} {'more':>6} {'budget':>6}"
    )
    for row in rows:
        budget = "-" if row["budget"] is None else row["budget"]
        print(
            f"{row['layer']:18} {row['tokens']:6} {row['policy']:38} {row['native_us']:9} "
            f"{row['ours_us']:8} {row['ratio']:6} {budget:>6}"
        )
    missed = [row for row in rows if row["budget"] is not None and row["ratio"] > row["budget"]]
    result = {"layers": rows, "missed": missed}
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))
    return result


if __name__ == "__main__":
    sys.exit(1 if main()["missed"] else 0)

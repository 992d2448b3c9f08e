"""What a call costs on a CUDA device, for every implementation that is installed.

    python speed.py [--json FILE] [--impl vendor.cuda ...]

``flag_gems`` means FlagGems' functions themselves, without its wheel, and ``vllm``
vLLM's kernels as its layers call them: what calling them bare costs. Whether the
results are right is what ``vllm-fl conformance`` says.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

sys.path.insert(0, str(Path(__file__).parent))

BARE = {"flag_gems": "gems_directly", "vllm": "vllm_directly"}
TOKENS = (1, 256, 16384)
#: Calls between two events; the median of so many rounds is told.
CALLS, ROUNDS = 100, 5


def functions(impl_id: str) -> dict[str, Callable[..., Any]]:
    """Return the functions of an implementation by operator."""
    if impl_id in BARE:
        found: dict[str, Callable[..., Any]] = importlib.import_module(BARE[impl_id]).FUNCTIONS
        return found
    from vllm_fl.dispatch import get_default_manager

    manager = get_default_manager()
    manager.ensure_initialized()
    every = manager.snapshot().impls_by_op.values()
    return {
        impl.op_name: impl.load()
        for impls in every
        for impl in impls
        if impl.impl_id == impl_id and impl.is_available()
    }


def calls() -> dict[str, Callable[[int], tuple[Any, ...]]]:
    """Return what makes the arguments for a number of tokens, by the name of the call."""
    bf16, device = torch.bfloat16, "cuda"

    def x(tokens: int, width: int) -> torch.Tensor:
        return torch.randn(tokens, width, dtype=bf16, device=device)

    def rotary(tokens: int) -> tuple[Any, ...]:
        query, key, _ = x(tokens, 48 * 128).split([32 * 128, 8 * 128, 8 * 128], -1)
        cache = x(8192, 128)
        positions = torch.arange(tokens, device=device) % 8192
        heads = query.unflatten(-1, (32, 128)), key.unflatten(-1, (8, 128))
        return *heads, *cache.chunk(2, -1), positions, False, True, cache

    def topk(tokens: int) -> tuple[Any, ...]:
        ids = torch.empty(tokens, 8, dtype=torch.int32, device=device)
        return torch.empty(tokens, 8, device=device), ids, ids.clone(), x(tokens, 128), True

    return {
        "silu_and_mul": lambda n: (x(n, 28672),),
        "gelu_and_mul": lambda n: (x(n, 28672), "tanh"),
        "rms_norm": lambda n: (x(n, 4096), None, x(1, 4096)[0], 1e-6),
        "rms_norm with a residual": lambda n: (x(n, 4096), x(n, 4096), x(1, 4096)[0], 1e-6),
        "rotary_embedding": rotary,
        "topk_softmax": topk,
        "dynamic_per_token_quant_int8": lambda n: (x(n, 4096),),
        "dynamic_per_token_quant_fp8": lambda n: (x(n, 4096),),
    }


def timed(call: Callable[[], Any]) -> dict[str, float]:
    """Return the microseconds of a call: ``eager``, and ``graph`` for one of many in a CUDA graph."""

    def median(run: Callable[[], Any]) -> float:
        found = []
        for _ in range(ROUNDS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize()
            found.append(begin.elapsed_time(end) * 1e3 / CALLS)
        return round(statistics.median(found), 2)

    def many() -> None:
        for _ in range(CALLS):
            call()

    with torch.cuda.stream(torch.cuda.Stream()):
        many()
    torch.cuda.synchronize()
    eager = median(many)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        many()
    graph.replay()
    return {"eager": eager, "graph": median(graph.replay)}


def measure(impl_ids: list[str]) -> list[dict[str, Any]]:
    """Return a line for every implementation, call and number of tokens."""
    lines = []
    for impl_id in impl_ids:
        found = functions(impl_id)
        for name, make in calls().items():
            function = found.get(name.split()[0])
            if function is None:
                continue
            for tokens in TOKENS:
                arguments = make(tokens)
                line: dict[str, Any] = {"impl": impl_id, "call": name, "tokens": tokens}
                try:
                    line |= timed(lambda: function(*arguments))  # noqa: B023
                except Exception as error:
                    line["note"] = f"{type(error).__name__}: {error}".splitlines()[0]
                lines.append(line)
    return lines


def table(lines: list[dict[str, Any]]) -> str:
    """Return the lines as a Markdown table: eager / in a CUDA graph."""
    rows: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        cell = line.get("note") or f"{line['eager']:.1f} / {line['graph']:.1f}"
        rows.setdefault((line["call"], line["impl"]), []).append(cell)
    head = f"| call | implementation | {' | '.join(f'{n} tokens' for n in TOKENS)} |"
    body = [f"| {' | '.join([*key, *cells])} |" for key, cells in sorted(rows.items())]
    return "\n".join([head, "|---" * (2 + len(TOKENS)) + "|", *body])


def main() -> None:
    """Measure, print the table, and write the JSON where it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    every = ["vendor.cuda", "default.flagos", "reference.torch", *BARE]
    parser.add_argument("--impl", nargs="+", default=every, help=f"default: {' '.join(every)}")
    options = parser.parse_args()
    lines = measure(options.impl)
    names = ("vllm", "triton", "flag-gems", "vllm-fl-core", "vllm-fl-flaggems", "vllm-plugin-cuda")
    installed = {one.metadata["Name"] for one in metadata.distributions()}
    versions = {name: metadata.version(name) for name in names if name in installed}
    card = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(f"{card}, {versions}\nbfloat16, microseconds a call, eager / in a CUDA graph\n\n{table(lines)}")
    if options.json:
        options.json.write_text(json.dumps({"card": card, "versions": versions, "times": lines}, indent=1))


if __name__ == "__main__":
    main()

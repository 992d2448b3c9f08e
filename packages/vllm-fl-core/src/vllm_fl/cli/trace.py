"""``vllm-fl trace``: what really ran, of every process that wrote a record."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.cli.output import Problem
from vllm_fl.dispatch import get_default_manager
from vllm_fl.dispatch.common.text import printable
from vllm_fl.dispatch.trace import ALL
from vllm_fl.dispatch.trace import NEWEST
from vllm_fl.dispatch.trace import merge
from vllm_fl.dispatch.types import NATIVE

if TYPE_CHECKING:
    import argparse

    from vllm_fl.cli.output import Output

COLUMNS = ("operator", "implementation", "wheel", "calls")


def add_commands(commands: Any) -> None:
    """Add ``trace``."""
    parser = commands.add_parser(
        "trace",
        help="what really ran, from a folder of VLLM_FL_TRACE_DIR",
        description="Add up what every process of a run wrote into the folder that VLLM_FL_TRACE_DIR named. "
        "A run is a server with all its workers.",
        epilog="example: VLLM_FL_TRACE_DIR=$PWD/trace vllm serve MODEL; vllm-fl trace trace",
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder")
    parser.add_argument(
        "--run",
        dest="wanted",
        default=NEWEST,
        metavar="RUN",
        help="a run's name, or all; default: the newest",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_trace)


def _trace(arguments: argparse.Namespace, output: Output) -> int:
    if not arguments.folder.is_dir():
        raise Problem(f"{arguments.folder} is no folder; run vLLM with VLLM_FL_TRACE_DIR={arguments.folder}")
    try:
        record = merge(arguments.folder, arguments.wanted)
    except (OSError, LookupError) as error:
        raise Problem(str(error)) from None
    for problem in record["problems"]:
        output.note(f"{arguments.folder}: {problem}")
    operators = served_operators(record)
    if arguments.json:
        output.json_object({**record, "served": operators})
        return 0
    if len(record["runs"]) > 1:
        rows_of_runs = [[one["run"] or "(by an older vllm-fl)", one["processes"]] for one in record["runs"]]
        output.table("Runs", ("run", "processes"), rows_of_runs)
        which = {NEWEST: "the newest run", ALL: "all runs"}.get(
            arguments.wanted, f"the run {arguments.wanted}"
        )
        output.text(f"Below is {printable(which)}; --run RUN shows another one, --run all the sum.\n")
    output.table(f"What ran ({len(record['processes'])} processes)", COLUMNS, rows(operators))
    return 0


def served_operators(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what served each operator: counted calls, or what is known of a graph.

    Args:
        record: what :func:`~vllm_fl.dispatch.trace.merge` returned.

    Returns:
        ``{"op", "impl_id", "distribution"}`` with ``"calls"``, ``"graphs"`` or
        ``"loaded_from_cache"`` (the fingerprint of the cached graph's choices).
    """
    wheels = _wheels()
    served = []
    for entry in record["operators"]:
        wheel = wheels.get((entry["op"], entry["impl_id"]))
        row = {"op": entry["op"], "impl_id": entry["impl_id"], "distribution": wheel}
        if entry["calls"]:
            served.append({**row, "calls": entry["calls"]})
        if entry["graphs"]:
            served.append({**row, "graphs": entry["graphs"]})
    seen = {(row["op"], row["impl_id"]) for row in served}
    compiled = {p["fingerprint"] for p in record["processes"] if p.get("compiled") and "fingerprint" in p}
    for layer in record["layers"]:
        key = (layer["op"], layer["impl_id"])
        if key not in seen:
            # Built, but neither called by Python nor traced: the graph was there, if there is any.
            seen.add(key)
            row = {"op": key[0], "impl_id": key[1], "distribution": wheels.get(key)}
            how = {"loaded_from_cache": ", ".join(sorted(compiled))} if compiled else {"calls": 0}
            served.append({**row, **how})
    return sorted(served, key=lambda row: (row["op"], row["impl_id"]))


def rows(operators: list[dict[str, Any]]) -> list[list[str]]:
    """Return the table's rows for what :func:`served_operators` returned."""
    return [[o["op"], o["impl_id"], o["distribution"] or "-", _how_often(o)] for o in operators]


def _how_often(row: dict[str, Any]) -> str:
    if "calls" in row:
        return str(row["calls"])
    if "graphs" in row:
        return f"traced in {row['graphs']} graph{'s' if row['graphs'] != 1 else ''}"
    return f"loaded from the compile cache, fingerprint {row['loaded_from_cache']}"


def _wheels() -> dict[tuple[str, str], str | None]:
    manager = get_default_manager()
    manager.discover()
    snapshot = manager.registry.snapshot()
    found: dict[tuple[str, str], str | None] = {(op, NATIVE): "vllm" for op in snapshot.operators}
    for op_name, impls in snapshot.impls_by_op.items():
        for impl in impls:
            found[op_name, impl.impl_id] = impl.origin.distribution if impl.origin else None
    return found

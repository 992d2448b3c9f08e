"""What a run found: who wins and by how much, for people and as JSON."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from dataclasses import field
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.dispatch.common.text import printable
from vllm_fl.dispatch.types import NATIVE
from vllm_fl.tuning.contenders import COMPILED

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence
    from pathlib import Path

    from vllm_fl.cli.output import Output
    from vllm_fl.tuning.bench import Row

SCHEMA_VERSION = 1


@dataclass
class Report:
    """A run and what it found.

    Attributes:
        machine: the card, its driver, the date and the versions.
        device: torch's name of it.
        source: where the shapes come from.
        modes: those that were measured.
        copy_bandwidth: bytes in a second, read and written.
        rows: in the order in which they were measured.
        notes: what was left out, and why.
    """

    machine: dict[str, Any]
    device: str
    source: str
    modes: tuple[str, ...]
    copy_bandwidth: float = 0.0
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> list[Row]:
        """What must not be chosen; vLLM's own path is no choice of ours."""
        return [row for row in self.rows if row.correct is False and row.impl_id != NATIVE]


def comparisons(rows: Iterable[Row]) -> list[list[Row]]:
    """Return the rows by what they compare: the contenders in order of the policy."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(row.key, []).append(row)
    return list(found.values())


def ranked(rows: Iterable[Row]) -> list[Row]:
    """Return what is right and was timed, the fastest first."""
    timed = [row for row in rows if row.correct and row.median_us is not None]
    return sorted(timed, key=lambda row: row.median_us or 0.0)


def in_order(rows: Sequence[Row]) -> Row | None:
    """Return what the policy in force runs: the first that does not refuse, if it was timed."""
    for row in rows:
        if row.impl_id != COMPILED and row.median_us is not None:
            return row
    return None


def overhead(rows: Sequence[Row]) -> float | None:
    """Return how many times as long as the fastest right one the policy's own choice takes."""
    best, chosen = ranked(row for row in rows if row.impl_id != COMPILED), in_order(rows)
    if not best or chosen is None or not best[0].median_us or not chosen.median_us:
        return None
    return max(chosen.median_us / best[0].median_us, 1.0)


def microseconds(value: float | None) -> str:
    """Return ``3.62`` or ``1480``: three digits that mean something."""
    if value is None:
        return ""
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def print_report(report: Report, output: Output) -> None:
    """Print a table, then what is wrong, what was not timed and what the policy costs."""
    rows = []
    for compared in comparisons(report.rows):
        best = ranked(compared)
        head = compared[0]
        line = [head.op, head.shape, head.layout, head.dtype, head.mode]
        if not best:
            rows.append([*line, "(nothing right)", "", "", "", ""])
            continue
        second = f"{best[1].impl_id}" if len(best) > 1 else ""
        by = f"{best[1].median_us / best[0].median_us:.2f}x" if len(best) > 1 else ""  # type: ignore[operator]
        share = f"{best[0].share_of_bandwidth:.0%}" if best[0].share_of_bandwidth is not None else ""
        rows.append([*line, best[0].impl_id, microseconds(best[0].median_us), share, second, by])
    columns = ("operator", "shape", "layout", "dtype", "mode", "winner", "us", "bandwidth", "next", "slower")
    output.table(f"{report.source} on {report.machine['card']}", columns, rows)
    for text in remarks(report):
        output.text(printable(text))


def remarks(report: Report) -> list[str]:
    """Return what else a reader must know, a line each."""
    lines = []
    for row in report.wrong:
        lines.append(f"WRONG and not timed: {row.op}: {row.impl_id}, {row.shape} {row.layout}: {row.note}")
    other = Counter(
        (row.op, row.impl_id, row.mode, row.note)
        for row in report.rows
        if row.note and row.correct is not False
    )
    for (op, impl_id, mode, note), count in other.items():
        lines.append(f"not timed: {op}: {impl_id} in mode {mode}, {count} shapes: {note}")
    own = [row for row in report.rows if row.impl_id == NATIVE and row.correct is False]
    for op, count in Counter(row.op for row in own).items():
        note = next(row.note for row in own if row.op == op)
        lines.append(f"vLLM's own path of {op} is not what the contract says, {count} times: {note}")
    lines += report.notes
    for mode in report.modes:
        costs = [(overhead(its), its[0]) for its in comparisons(report.rows) if its[0].mode == mode]
        known = [(cost, row) for cost, row in costs if cost is not None]
        if known:
            mean = math.exp(sum(math.log(cost) for cost, _ in known) / len(known))
            worst, row = max(known, key=lambda one: one[0])
            lines.append(
                f"{mode}: the policy's order takes {mean:.2f} times as long as the fastest right choice "
                f"(geometric mean of {len(known)} shapes; at worst {worst:.2f}, {row.op} {row.shape})"
            )
    lines.append(f"copying moves {report.copy_bandwidth / 1e9:.0f} GB/s")
    return lines


def to_json(report: Report) -> dict[str, Any]:
    """Return the run as the JSON object that ``--json`` writes."""
    return {
        "schema_version": SCHEMA_VERSION,
        "generated_by": report.machine["by"],
        "card": report.machine["card"],
        "device": report.device,
        "driver": report.machine["driver"],
        "date": report.machine["date"],
        "versions": report.machine["versions"],
        "source": report.source,
        "modes": list(report.modes),
        "copy_bandwidth": round(report.copy_bandwidth),
        "rows": [row.to_dict() for row in report.rows],
        "notes": report.notes,
    }


def write_json(report: Report, path: Path) -> None:
    """Write everything as one JSON object."""
    path.write_text(json.dumps(to_json(report), indent=1, allow_nan=False) + "\n", encoding="utf-8")

"""From measurements to a tuned table.

The first pass nominates: what is within a tenth of its fastest, and the policy's own
first choice. The second pass, of which the first knew nothing, decides among them: the
fastest one, or, of those that its noise does not tell apart, the first in the policy's
order. So what was lucky once is found out, and a table departs from the order only where
that is worth it.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.dispatch.tuned import Measured
from vllm_fl.tuning.contenders import COMPILED
from vllm_fl.tuning.shapes import layouts_of
from vllm_fl.tuning.table import microseconds

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Mapping
    from collections.abc import Sequence

    from vllm_fl.tuning.bench import Row
    from vllm_fl.tuning.table import Report

#: Within this much of the first pass's fastest one, a contender is measured for the choice.
_NOMINATED = 1.10
#: Less than this is noise on every machine.
_NOISE = 1.02
#: Worth a line: a contender that no table can name is so much faster.
_WORTH_SAYING = 0.9


@dataclass(frozen=True)
class Choice:
    """What is right to run at one place of a table, and what was measured there.

    Attributes:
        entry: the entry, of this very number of rows.
        fixed_us: what the policy's own choice took.
        chosen_us: what the chosen one took.
        compiled_us: what the compiled reference took; None where it was not timed.
        fixed: the policy's own choice.
    """

    entry: Measured
    fixed_us: float
    chosen_us: float
    compiled_us: float | None
    fixed: str


@dataclass(frozen=True)
class _Times:
    """Of one contender, added up over what shares a place in the table."""

    median: float
    p80: float


def choose(op: str, first: Sequence[Row], second: Sequence[Row]) -> list[Choice]:
    """Return a choice for each place of an operator's table that was measured in both passes.

    Args:
        op: the operator.
        first: the rows of the first pass, contenders in the policy's order.
        second: those of the second.
    """
    nominating, deciding = _places(first), _places(second)
    found = []
    for place in sorted(nominating.keys() & deciding.keys(), key=str):
        choice = _choice(op, place, nominating[place], deciding[place])
        if choice is not None:
            found.append(choice)
    return sorted(found, key=lambda one: _where(one.entry))


def _where(entry: Measured) -> tuple[Any, ...]:
    return (entry.dtype, entry.last, entry.layout or "", entry.mode or "", entry.max_rows)


def _places(rows: Iterable[Row]) -> dict[tuple[Any, ...], dict[str, _Times | None]]:
    """Return the contenders' times by place; None of who was not right, or not timed, every time."""
    found: dict[tuple[Any, ...], dict[str, _Times | None]] = {}
    for row in rows:
        its = found.setdefault((row.dtype, row.last, row.layout, row.mode, row.rows), {})
        before = its.get(row.impl_id, _Times(0.0, 0.0))
        if row.correct and row.median_us is not None and row.p80_us is not None and before is not None:
            its[row.impl_id] = _Times(before.median + row.median_us, before.p80 + row.p80_us)
        else:
            its[row.impl_id] = None
    return found


def _choice(
    op: str,
    place: tuple[Any, ...],
    nominating: Mapping[str, _Times | None],
    deciding: Mapping[str, _Times | None],
) -> Choice | None:
    dtype, last, layout, mode, rows = place
    once = {name: its for name, its in nominating.items() if its is not None and name != COMPILED}
    again = {name: its for name, its in deciding.items() if its is not None and name in once}
    if not again:
        return None
    fixed = next(iter(again))
    fastest = min(its.median for name, its in once.items() if name in again)
    named = [name for name in again if once[name].median <= fastest * _NOMINATED or name == fixed]
    best = min((again[name] for name in named), key=lambda its: its.median)
    chosen = next(name for name in named if again[name].median <= max(best.p80, best.median * _NOISE))
    rest = sorted((name for name in again if name != chosen), key=lambda name: again[name].median)
    compiled = deciding.get(COMPILED)
    entry = Measured(dtype, last, rows, (chosen, *rest), mode, layout if len(layouts_of(op)) > 1 else None)
    compiled_us = None if compiled is None else compiled.median
    return Choice(entry, again[fixed].median, again[chosen].median, compiled_us, fixed)


@dataclass(frozen=True)
class Entry:
    """An entry of the table, and what it stands for.

    Attributes:
        measured: as the table has it.
        choices: from the fewest rows to the most.
    """

    measured: Measured
    choices: tuple[Choice, ...]

    def comment(self) -> str:
        """Say in a line what was measured."""
        times = [one.chosen_us for one in self.choices]
        text = " to ".join(dict.fromkeys(microseconds(one) for one in (min(times), max(times))))
        gains = [one.fixed_us / one.chosen_us for one in self.choices]
        if any(one.fixed != self.measured.order[0] for one in self.choices):
            text += f" us; {self.choices[0].fixed} takes {_span(gains)} times as long"
        else:
            text += " us, the first of the policy's order"
        faster = [
            one for one in self.choices if one.compiled_us and one.compiled_us < _WORTH_SAYING * one.chosen_us
        ]
        if faster:
            shares = [one.compiled_us / one.chosen_us for one in faster]  # type: ignore[operator]
            text += f"; {COMPILED} takes {_span(shares)} of it"
        return text


def _span(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def entries(choices: Sequence[Choice]) -> list[Entry]:
    """Return choices as entries: neighbours that chose the same become one."""
    found: list[list[Choice]] = []
    for one in choices:
        if found:
            before = found[-1][-1].entry
            is_next = _where(before)[:-1] == _where(one.entry)[:-1]
            if is_next and before.order[0] == one.entry.order[0]:
                found[-1].append(one)
                continue
        found.append([one])
    return [Entry(group[-1].entry, tuple(group)) for group in found]


def conformance_state(rows: Iterable[Row]) -> dict[str, str]:
    """Return for each implementation how often it was right where it was asked."""
    asked: Counter[str] = Counter()
    right: Counter[str] = Counter()
    for row in rows:
        if row.correct is not None:
            asked[row.impl_id] += 1
            right[row.impl_id] += row.correct
    return {
        impl_id: f"right at {right[impl_id]} of {count} shapes" for impl_id, count in sorted(asked.items())
    }


def table_text(report: Report, tables: Mapping[str, Sequence[Entry]]) -> str:
    """Return the table as the YAML that a policy's key ``tuned`` names.

    Args:
        report: of the second pass.
        tables: the entries of each operator.
    """
    about = {
        "card": report.machine["card"],
        "driver": report.machine["driver"],
        "date": report.machine["date"],
        "by": report.machine["by"],
        "shapes": report.source,
        "versions": report.machine["versions"],
        "conformance": conformance_state(report.rows),
    }
    lines = [
        "# A tuned table of vllm-fl: which implementation was the fastest right one, for the shapes",
        "# that were measured. Name it in a policy file: `tuned: FILE`.",
        "",
        "about:",
    ]
    for key, value in about.items():
        if isinstance(value, dict):
            lines.append(f"  {key}:")
            lines += [f"    {json.dumps(name)}: {json.dumps(text)}" for name, text in value.items()]
        else:
            lines.append(f"  {key}: {json.dumps(value)}")
    for op, its in sorted(tables.items()):
        lines += ["", f"{op}:"]
        for one in its:
            lines += [f"  # {one.comment()}", f"  - {_flow(one.measured)}"]
    return "\n".join(lines) + "\n"


def _flow(entry: Measured) -> str:
    parts = [f"dtype: {entry.dtype}", f"last: {entry.last}"]
    parts += [f"layout: {entry.layout}"] if entry.layout else []
    parts += [f"mode: {entry.mode}"] if entry.mode else []
    return (
        "{" + ", ".join([*parts, f"max_rows: {entry.max_rows}", f"order: [{', '.join(entry.order)}]"]) + "}"
    )

"""The report for people: one file, which needs no network and no other file."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from vllm_fl.conformance.html import escape
from vllm_fl.tuning.table import comparisons
from vllm_fl.tuning.table import microseconds
from vllm_fl.tuning.table import ranked
from vllm_fl.tuning.table import remarks

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence
    from pathlib import Path

    from vllm_fl.tuning.bench import Row
    from vllm_fl.tuning.table import Report

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2430; --soft: #667085; --line: #d5d9e0; --paper: #ffffff;
  --bad: #c4321e; --band: #f2f4f7; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --soft: #98a2b3; --line: #3a4252;
  --paper: #14181f; --bad: #ff7a66; --band: #1c222c; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 76rem; margin: 2rem auto; padding: 0 1.25rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .7rem .3rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; }
th { color: var(--soft); font-weight: 600; } td.n, th.n { text-align: right; }
.soft { color: var(--soft); } .bad { color: var(--bad); } code { font-size: .92em; }
.scroll { overflow-x: auto; }
table.map { border-collapse: separate; border-spacing: 2px; } table.map th, table.map td { border: 0; }
table.map tr:first-child th { text-align: center; } table.map .soft { font-weight: 400; }
table.map td.cell { text-align: center; padding: .25rem .4rem; border-radius: 3px; min-width: 4.2rem;
  color: #10151c; line-height: 1.25; } table.map td.cell small { display: block; opacity: .8; }
table.map td.none { background: var(--band); color: var(--soft); }
.key { display: inline-block; margin-right: 1.2rem; } .key i { display: inline-block; width: .9em;
  height: .9em; border-radius: 2px; margin-right: .35em; vertical-align: -.1em; }
.bar { position: relative; background: var(--band); height: 1.1rem; border-radius: 3px; min-width: 12rem; }
.bar i { display: block; height: 100%; border-radius: 3px; }
details { margin: .4rem 0; } summary { cursor: pointer; }
@media print { body { max-width: none; margin: 0; } }
"""
#: Hues that can be told apart, also by most who see fewer colours.
_HUES = (210, 32, 150, 285, 0, 95, 330, 180)


def write_html(report: Report, path: Path) -> None:
    """Write the report."""
    path.write_text(page(report), encoding="utf-8")


def page(report: Report) -> str:
    """Return the report as one HTML document."""
    title = f"Operators on {report.machine['card']}"
    hues = _hues(report.rows)
    facts = [
        ("shapes", report.source),
        ("device", report.device),
        ("driver", report.machine["driver"] or "unknown"),
        ("date", report.machine["date"]),
        ("measured by", report.machine["by"]),
        ("copy bandwidth", f"{report.copy_bandwidth / 1e9:.0f} GB/s"),
        ("versions", ", ".join(" ".join(one) for one in report.machine["versions"].items())),
    ]
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{_STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        _table(("", ""), facts),
        *_wrong(report),
        "<h2>Who wins</h2>",
        "<p>Columns are tokens. A cell has the colour of the fastest right implementation and its time in "
        "microseconds; below it stands how many times as long the next one takes. The fuller the colour, "
        "the larger the lead.</p>",
        _legend(hues),
        *(part for mode in report.modes for part in _heat_map(report, mode, hues)),
        "<h2>How close to the memory's speed</h2>",
        "<p>The bytes that a call must read and write at least, in the time that it takes, as a share of "
        "what a copy moves; for the largest number of tokens. What stays in the cache can exceed it.</p>",
        *(part for mode in report.modes for part in _roofline(report, mode, hues)),
        "<h2>What else there is to know</h2>",
        "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in remarks(report)) + "</ul>",
        "<h2>Every measurement</h2>",
        *_every_row(report),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _hues(rows: Sequence[Row]) -> dict[str, int]:
    names = sorted({row.impl_id for row in rows})
    return {name: _HUES[at % len(_HUES)] for at, name in enumerate(names)}


def _colour(hue: int, lead: float) -> str:
    """Return a colour of a hue: pale where nothing is ahead, full from three times as fast."""
    share = min(math.log(max(lead, 1.0)) / math.log(3.0), 1.0)
    return f"hsl({hue} {45 + 30 * share:.0f}% {88 - 28 * share:.0f}%)"


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns) if any(columns) else ""
    body = "".join("<tr>" + "".join(f"<td>{escape(str(c))}</td>" for c in row) + "</tr>" for row in rows)
    return f"<table>{f'<tr>{head}</tr>' if head else ''}{body}</table>"


def _wrong(report: Report) -> list[str]:
    if not report.wrong:
        return []
    rows = [(row.op, row.impl_id, row.shape, row.layout, row.mode, row.note) for row in report.wrong]
    columns = ("operator", "implementation", "shape", "layout", "mode", "why")
    return ['<h2 class="bad">Wrong, and not timed</h2>', _table(columns, rows)]


def _legend(hues: dict[str, int]) -> str:
    keys = (
        f'<span class="key"><i style="background:{_colour(hue, 3.0)}"></i>{escape(name)}</span>'
        for name, hue in hues.items()
    )
    return f"<p>{''.join(keys)}</p>"


def _heat_map(report: Report, mode: str, hues: dict[str, int]) -> list[str]:
    compared = [its for its in comparisons(report.rows) if its[0].mode == mode]
    if not compared:
        return []
    tokens = sorted({its[0].tokens for its in compared})
    lines: dict[tuple[object, ...], dict[int, list[Row]]] = {}
    for its in compared:
        lines.setdefault(its[0].family, {})[its[0].tokens] = its
    head = "".join(f"<th>{number}</th>" for number in tokens)
    body = []
    for by_tokens in lines.values():
        first = next(iter(by_tokens.values()))[0]
        more = escape(f"{first.sizes}, {first.layout}, {first.dtype}")
        what = f'{escape(first.op)} <span class="soft">{more}</span>'
        cells = "".join(_cell(by_tokens.get(number, []), hues) for number in tokens)
        body.append(f"<tr><th>{what}</th>{cells}</tr>")
    return [
        f"<h3>{escape(mode)}</h3>",
        f'<div class="scroll"><table class="map"><tr><th></th>{head}</tr>{"".join(body)}</table></div>',
    ]


def _cell(compared: list[Row], hues: dict[str, int]) -> str:
    best = ranked(compared)
    if not best:
        return '<td class="cell none">-</td>'
    lead = (best[1].median_us or 0.0) / (best[0].median_us or 1.0) if len(best) > 1 else 1.0
    title = "; ".join(f"{row.impl_id} {microseconds(row.median_us)} us" for row in best)
    under = f"{lead:.2f}x" if len(best) > 1 else "alone"
    return (
        f'<td class="cell" style="background:{_colour(hues[best[0].impl_id], lead)}" title="{escape(title)}">'
        f"{microseconds(best[0].median_us)}<small>{under}</small></td>"
    )


def _roofline(report: Report, mode: str, hues: dict[str, int]) -> list[str]:
    largest: dict[tuple[object, ...], list[Row]] = {}
    for its in comparisons(report.rows):
        if its[0].mode == mode and ranked(its):
            before = largest.get(its[0].family)
            if before is None or before[0].tokens < its[0].tokens:
                largest[its[0].family] = its
    if not largest:
        return []
    rows = []
    for its in largest.values():
        for row in ranked(its):
            share = row.share_of_bandwidth or 0.0
            fill = f"width:{min(share, 1.0):.1%};background:{_colour(hues[row.impl_id], 3.0)}"
            rows.append(
                f"<tr><td>{escape(row.op)}</td><td>{escape(row.shape)} {escape(row.layout)}</td>"
                f'<td>{escape(row.impl_id)}</td><td><div class="bar"><i style="{fill}"></i></div></td>'
                f'<td class="n">{share:.0%}</td></tr>'
            )
    head = "<tr><th>operator</th><th>shape</th><th>implementation</th><th></th><th></th></tr>"
    return [f"<h3>{escape(mode)}</h3>", f"<table>{head}{''.join(rows)}</table>"]


def _every_row(report: Report) -> list[str]:
    by_op: dict[str, list[Row]] = {}
    for row in report.rows:
        by_op.setdefault(row.op, []).append(row)
    columns = ("implementation", "shape", "layout", "dtype", "mode", "median us", "p20", "p80", "host", "")
    parts = []
    for op, rows in by_op.items():
        cells = (
            (
                *(row.impl_id, row.shape, row.layout, row.dtype, row.mode),
                *map(microseconds, (row.median_us, row.p20_us, row.p80_us, row.host_us)),
                row.note,
            )
            for row in rows
        )
        parts.append(f"<details><summary>{escape(op)}</summary>{_table(columns, cells)}</details>")
    return parts

"""The report for people: one file, which needs no network and no other file."""

from __future__ import annotations

import html
import math
from collections import Counter
from typing import TYPE_CHECKING

from vllm_fl.conformance.report import remarks
from vllm_fl.conformance.report import worst
from vllm_fl.conformance.result import Status
from vllm_fl.dispatch.common.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence
    from pathlib import Path

    from vllm_fl.conformance.report import Report
    from vllm_fl.conformance.result import Result

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2430; --soft: #667085; --line: #d5d9e0; --paper: #ffffff;
  --good: #1a7f4b; --but: #a15c00; --bad: #c4321e; --dot: #2f6fb7; --band: #f2f4f7; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --soft: #98a2b3; --line: #3a4252;
  --paper: #14181f; --good: #4cc38a; --but: #e3a94f; --bad: #ff7a66; --dot: #6ea8e5; --band: #1c222c; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 68rem; margin: 2rem auto; padding: 0 1.25rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .7rem .3rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; }
th { color: var(--soft); font-weight: 600; } td.n, th.n { text-align: right; }
.verdict { font-size: 1.1rem; font-weight: 600; } .good { color: var(--good); }
.but { color: var(--but); } .bad { color: var(--bad); }
.soft { color: var(--soft); } svg { display: block; width: 100%; height: auto; margin: .4rem 0 1rem; }
svg text { font: 11px system-ui, sans-serif; fill: var(--soft); } code { font-size: .92em; }
details { margin: .4rem 0; } summary { cursor: pointer; }
@media print { body { max-width: none; margin: 0; } details > * { display: block; } }
"""

# The plot's horizontal axis: the error in tolerances, from 10**_LEAST to 10**_MOST.
_LEAST, _MOST = -4, 2
_LEFT, _WIDTH, _ROW = 90, 860, 30

_CLASSES = {"FAILED": "bad", "passed with waivers": "but", "passed": "good"}


def escape(text: str) -> str:
    """Return a text for HTML, in which every character can be seen."""
    return html.escape(printable(text))


def write_html(report: Report, path: Path) -> None:
    """Write the report."""
    path.write_text(page(report), encoding="utf-8")


def page(report: Report) -> str:
    """Return the report as one HTML document."""
    title = f"Conformance of {report.backend}"
    failed = report.failures
    verdict = f"Failed: {len(failed)}" if failed else report.verdict.capitalize()
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{_STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        f'<p class="verdict {_CLASSES[report.verdict]}">{verdict}</p>',
        f'<p class="soft">{escape(report.counts())}</p>',
        _table(("", ""), [*report.environment.items(), *((k, v) for k, v in report.settings.items() if v)]),
        "<p>Every operator ran through the dispatch and was compared with float64 on the CPU, computed from "
        "the same inputs. Errors are in tolerances: values above 1 fail. Every case was also shown "
        "zeros and a result with one element in fifty wrong, and rejected both.</p>",
        *_failures(failed),
        "<h2>Operators</h2>",
        _summary(report),
        *_checks(report),
        "<h2>Errors</h2>",
        *_plots(report),
        *_remarks(report),
        "<h2>Every case</h2>",
        *_every_case(report),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns) if any(columns) else ""
    body = "".join("<tr>" + "".join(f"<td>{escape(str(c))}</td>" for c in row) + "</tr>" for row in rows)
    return f"<table>{f'<tr>{head}</tr>' if head else ''}{body}</table>"


def _failures(failed: list[Result]) -> list[str]:
    if not failed:
        return []
    rows = [(result.op, result.name, result.note) for result in failed]
    return ['<h2 class="bad">What failed</h2>', _table(("operator", "case", "why"), rows)]


def _summary(report: Report) -> str:
    rows = []
    for (op, impl_id), results in report.by_operator().items():
        cases = [result for result in results if result.is_case]
        if not cases:
            continue
        counts = Counter(result.status for result in cases)
        loosened = sum(result.is_loosened for result in cases)
        ends = [counts[status] or "" for status in Status]
        rows.append((op, impl_id, loosened or "", *ends, _number(worst(cases))))
    return _table(("operator", "implementation", "loosened", *map(str, Status), "worst error"), rows)


def _number(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2g}"


def _checks(report: Report) -> list[str]:
    checks = [result for result in report.results if not result.is_case]
    rows = [(result.op, result.name, result.status, result.note) for result in checks]
    return ["<h2>Checks</h2>", _table(("what", "check", "", ""), rows)] if rows else []


def _plots(report: Report) -> list[str]:
    parts = []
    for (op, impl_id), results in report.by_operator().items():
        by_dtype: dict[str, list[Result]] = {}
        for result in results:
            if result.is_case and result.ratio is not None:
                by_dtype.setdefault(result.dtype, []).append(result)
        if by_dtype:
            parts += [f"<h3>{escape(op)} <span class='soft'>{escape(impl_id)}</span></h3>", plot(by_dtype)]
    return parts


def plot(by_dtype: dict[str, list[Result]]) -> str:
    """Return an SVG: a row for each dtype, a dot for each case at its error in tolerances."""
    height = _ROW * len(by_dtype) + 26
    bottom = height - 20
    parts = [
        f'<svg viewBox="0 0 {_LEFT + _WIDTH + 20} {height}" role="img" '
        'aria-label="errors in tolerances, by dtype">'
    ]
    for power in range(_LEAST, _MOST + 1):
        x = _place(10.0**power)
        is_bound = power == 0
        parts.append(
            f'<line x1="{x:.1f}" y1="4" x2="{x:.1f}" y2="{bottom}" '
            f'stroke="var(--{"bad" if is_bound else "line"})" stroke-width="{2 if is_bound else 1}"/>'
            f'<text x="{x:.1f}" y="{height - 6}" text-anchor="middle">{_tick(power)}</text>'
        )
    for row, (dtype, results) in enumerate(by_dtype.items()):
        middle = 4 + _ROW * row + _ROW / 2
        parts.append(f'<text x="{_LEFT - 12}" y="{middle + 4}" text-anchor="end">{escape(dtype)}</text>')
        for number, result in enumerate(results):
            ratio = result.ratio or 0.0
            # Dots of one error would hide each other.
            y = middle + (number % 5 - 2) * 4
            colour = "bad" if result.is_failure else "but" if result.is_loosened else "dot"
            title = f"{result.name}: {_number(result.ratio)}"
            parts.append(
                f'<circle cx="{_place(ratio):.1f}" cy="{y:.1f}" r="3" fill="var(--{colour})" '
                f'fill-opacity=".6"><title>{escape(title)}</title></circle>'
            )
    return "".join([*parts, "</svg>"])


def _place(ratio: float) -> float:
    power = math.log10(ratio) if ratio > 0 else _LEAST
    share = (min(max(power, _LEAST), _MOST) - _LEAST) / (_MOST - _LEAST)
    return _LEFT + share * _WIDTH


def _tick(power: int) -> str:
    if power == _LEAST:
        return "0"
    return f"{10.0**power:g}" + ("+" if power == _MOST else "")


def _remarks(report: Report) -> list[str]:
    lines = remarks(report)
    if not lines:
        return []
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return ["<h2>What else there is to know</h2>", f"<ul>{items}</ul>"]


def _every_case(report: Report) -> list[str]:
    parts = []
    for (op, impl_id), results in report.by_operator().items():
        rows = [
            (
                r.name,
                "loosened" if r.is_loosened else r.status,
                _number(r.ratio),
                _number(r.largest),
                r.waiver or r.note,
            )
            for r in results
            if r.is_case
        ]
        if rows:
            columns = ("case", "", "error in tolerances", "largest error", "")
            heading = f"{escape(op)} <span class='soft'>{escape(impl_id)}, {len(rows)} cases</span>"
            parts.append(f"<details><summary>{heading}</summary>{_table(columns, rows)}</details>")
    return parts

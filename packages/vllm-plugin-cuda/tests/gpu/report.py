"""The report of ``verify.py``, as Markdown and JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING
from typing import Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_STATES = ("right", "refused", "wrong", "error", "fault")


def write(found: dict[str, Any], folder: Path) -> str:
    """Write ``report.json`` and ``report.md``; return the latter."""
    (folder / "report.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    text = "\n".join(_lines(found)) + "\n"
    (folder / "report.md").write_text(text, encoding="utf-8")
    return text


def _lines(found: dict[str, Any]) -> Iterator[str]:
    yield "# What ran, against float64"
    yield ""
    for name, value in found["environment"].items():
        yield f"- {name}: {value}"
    yield ""
    yield "*Worst* is the largest error of the right results, in tolerances: 1 is the bound."
    for suite in found["suites"]:
        yield from _suite(suite)
    if isinstance(found.get("dispatch"), dict):
        yield from _dispatch(found["dispatch"])
    if isinstance(found.get("speed"), list):
        yield from _speed(found["speed"])
    elif found.get("speed"):
        yield f"\nSpeed: {found['speed']}"


def _suite(suite: dict[str, Any]) -> Iterator[str]:
    yield ""
    yield f"## {suite['impl']}"
    yield ""
    if suite.get("log"):
        yield f"```\n{suite['log']}\n```"
    if suite["operators"]:
        yield f"| operator | {' | '.join(_STATES)} | worst | at |"
        yield f"|---|{'---|' * len(_STATES)}---|---|"
    for op, entry in suite["operators"].items():
        counts = " | ".join(str(entry["states"].get(state, 0)) for state in _STATES)
        yield f"| {op} | {counts} | {entry['worst']:.3f} | {entry['at']} |"
    for op, reason in suite["missing"].items():
        yield f"- {op} is missing: {reason}"
    for note in suite["stopped"]:
        yield f"- stopped {note}"
    for what, title in (
        ("graph", "Captured in a CUDA graph and replayed"),
        ("compiled", "Compiled, fullgraph"),
    ):
        if suite[what]:
            told = [
                f"{name} {line['state']}{' (' + line['note'] + ')' if line['state'] != 'right' else ''}"
                for name, line in suite[what].items()
            ]
            yield f"\n{title}: {', '.join(told)}."
    yield from _not_right(suite)


def _not_right(suite: dict[str, Any]) -> Iterator[str]:
    """Say why each refused, wrong or failed call was: one line for each reason."""
    for op, entry in suite["operators"].items():
        by_reason: dict[tuple[str, str], list[str]] = {}
        for note in entry["notes"]:
            by_reason.setdefault((note["state"], _reason(note)), []).append(note["label"])
        for (state, reason), labels in by_reason.items():
            yield f"- {op}, {state}, {len(labels)}: {reason} (first: {labels[0]})"


def _reason(note: dict[str, Any]) -> str:
    if note["state"] == "wrong":
        return note["note"] or "beyond the tolerance"
    return str(note["note"])


def _dispatch(found: dict[str, Any]) -> Iterator[str]:
    yield ""
    yield "## The dispatcher"
    yield ""
    if "error" in found:
        yield f"```\n{found['error']}\n```"
        return
    for name, state in found["plugins"].items():
        yield f"- {name}: {state}"
    yield ""
    yield "With `VLLM_FL_PREFER=vendor`, what is chosen, and what `call_op` returned:"
    yield ""
    for name, result in found["called"].items():
        yield f"- {name}: {found['chosen'].get(name)}, {result}"
    yield ""
    yield "attention_backend:"
    yield ""
    for name, path in found["attention"].items():
        yield f"- {name}: `{path}`"


def _speed(times: list[dict[str, Any]]) -> Iterator[str]:
    yield ""
    yield "## Speed"
    yield ""
    yield "bfloat16, microseconds a call, eager / in a CUDA graph."
    yield "The median of five times 100 calls, on warm caches."
    yield ""
    tokens = sorted({line["tokens"] for line in times})
    yield f"| call | implementation | {' | '.join(f'{n} tokens' for n in tokens)} |"
    yield f"|---|---|{'---|' * len(tokens)}"
    keys = sorted({(line["call"], line["impl"]) for line in times})
    for call, impl in keys:
        cells = []
        for n in tokens:
            (line,) = [t for t in times if (t["call"], t["impl"], t["tokens"]) == (call, impl, n)]
            cells.append(line["note"] if "note" in line else f"{line['eager']:.1f} / {line['graph']:.1f}")
        yield f"| {call} | {impl} | {' | '.join(cells)} |"

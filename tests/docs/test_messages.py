"""The page for operators has a row for every warning and error that the code logs, and no other."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

import pytest

from tools.docs.pages import ROOT

if TYPE_CHECKING:
    from pathlib import Path

SOURCES = ROOT / "packages/vllm-fl-core/src/vllm_fl"
PAGES = [ROOT / "docs/operations.md", ROOT / "docs/operations.zh.md"]
#: What a message has in the place of a value.
VALUE = "…"


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr):
        parts = [one.value if isinstance(one, ast.Constant) else VALUE for one in node.values]
        return "".join(map(str, parts))
    assert isinstance(node, ast.Constant), f"line {node.lineno}: a message must be written where it is logged"
    return re.sub(r"%[a-z]", VALUE, str(node.value))


def messages(*functions: str) -> set[str]:
    """Return what the dispatch, the integration and the platform log with these functions."""
    return {
        _text(call.args[0])
        for folder in ("dispatch", "integration", "platform")
        for file in sorted((SOURCES / folder).rglob("*.py"))
        for call in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(call, ast.Call) and ast.unparse(call.func) in functions
        if not isinstance(call.args[0], ast.Name)
    }


def rows(page: Path, columns: int) -> list[str]:
    """Return the first cells of the tables with so many columns in "What the log says"."""
    section = page.read_text("utf-8").split("\n## ")[2]
    tables = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    firsts = [cells[0].strip() for cells in tables if len(cells) == columns]
    return [first.strip("`") for first in firsts if first.startswith("`")]


def describes(row: str, message: str) -> bool:
    return bool(re.match(".*".join(map(re.escape, row.split(VALUE))), message))


def compare(known: list[str], logged: set[str]) -> None:
    assert [message for message in sorted(logged) if not any(describes(row, message) for row in known)] == []
    assert [row for row in known if not any(describes(row, message) for message in logged)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_warnings_and_errors(page: Path) -> None:
    logged = messages("logger.warning", "logger.error", "warn_once")
    assert len(logged) > 15
    compare(rows(page, columns=3), logged)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_other_lines(page: Path) -> None:
    lines = [row for row in rows(page, columns=2) if row.startswith("vllm-fl")]
    compare(lines, messages("logger.info", "say_once"))

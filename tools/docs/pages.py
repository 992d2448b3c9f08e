"""The pages with generated places, and how these are filled."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from tools.docs.blocks import BLOCKS
from tools.docs.language import Language

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
#: Reports as a script wrote them, with its numbers; the page that lists them is in both languages.
REPORTS = frozenset((ROOT / "docs" / "verified").glob("*-vllm-*.md"))
_PLACE = re.compile(r"(<!-- generated: ([a-z -]+) -->\n).*?(<!-- /generated -->)", re.DOTALL)


def pages() -> list[Path]:
    """Return the READMEs and the pages of the documentation, in both languages."""
    return [*sorted(ROOT.glob("README*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def is_chinese(page: Path) -> bool:
    """Whether a page is the Chinese one of a pair."""
    return page.name.endswith((".zh.md", ".zh-CN.md"))


def filled(page: Path) -> str:
    """Return a page's text with its generated places as the code says now."""
    language = Language.chinese() if is_chinese(page) else Language.english()
    return _PLACE.sub(
        lambda place: f"{place[1]}{BLOCKS[place[2]](language, page)}\n{place[3]}", page.read_text("utf-8")
    )


def outdated() -> list[Path]:
    """Return the pages with a place that is not what the code says."""
    return [page.relative_to(ROOT) for page in pages() if filled(page) != page.read_text("utf-8")]


def write() -> Iterator[Path]:
    """Fill the places of every page that is outdated, and yield it."""
    for page in outdated():
        (ROOT / page).write_text(filled(ROOT / page), "utf-8")
        yield page

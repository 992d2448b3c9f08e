"""The fenced blocks of a page, and what the page says of running them.

A block stands as it is for the reader and is run by ``tests/docs``. The comment on the
line before it is for the test: ``<!-- not run: REASON -->`` leaves it out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_FENCE = re.compile(r"^( *)```(\S*)([^\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_TITLE = re.compile(r'title="([^"]+)"')
_NOT_RUN = re.compile(r"<!-- not run: (.*?) -->\n *\Z")
_FILE = re.compile(r"# (\S+\.(?:py|ya?ml|toml))\n")
_HEADING = re.compile(r"^(#{1,6}) +(.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes:
        page: where it stands.
        line: of its fence.
        language: the word after the fence, ``""`` where there is none.
        title: of the file that it shows.
        text: what is in it.
        not_run: why it is not run, None where it is.
    """

    page: Path
    line: int
    language: str
    title: str | None
    text: str
    not_run: str | None

    @property
    def file(self) -> str | None:
        """The name of the file that it shows: its title, or a comment in its first line."""
        found = _FILE.match(self.text)
        return found[1] if found else self.title

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    """Yield the blocks of a page."""
    return blocks_of(page.read_text("utf-8"), page)


def blocks_of(text: str, page: Path) -> Iterator[Block]:
    """Yield the blocks of a page's text, or of a part of it; lines are counted from its first."""
    for fence in _FENCE.finditer(text):
        before = text[: fence.start()]
        reason = _NOT_RUN.search(before)
        indent = len(fence[1])
        body = "".join(line[indent:] if line.strip() else line for line in fence[4].splitlines(keepends=True))
        title = _TITLE.search(fence[3])
        yield Block(
            page,
            before.count("\n") + 1,
            fence[2],
            title[1] if title else None,
            body,
            reason[1] if reason else None,
        )


def headings(page: Path) -> list[tuple[int, str]]:
    """Return the level and the text of every heading, those of blocks left out."""
    text = _FENCE.sub("", page.read_text("utf-8"))
    return [(len(heading[1]), heading[2]) for heading in _HEADING.finditer(text)]

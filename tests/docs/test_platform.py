"""The page of a chip's description has a row for every field, with its default."""

from __future__ import annotations

import re
from dataclasses import MISSING
from dataclasses import fields

import pytest

from tools.docs.pages import ROOT
from vllm_fl.platform.description import Chip

PAGES = [ROOT / "docs/platform.md", ROOT / "docs/platform.zh.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_field_has_a_row_with_its_default(page) -> None:
    rows = [
        line.strip("|").split("|") for line in page.read_text("utf-8").splitlines() if line.startswith("| `")
    ]
    shown = {
        name: default.strip()
        for first, default, *_ in (row for row in rows if len(row) == 4)
        for name in re.findall(r"`(\w+)`", first)
    }
    assert set(shown) == {field.name for field in fields(Chip)}
    for field in fields(Chip):
        if field.default_factory is not MISSING:
            assert shown[field.name] == "`{}`"
        elif field.default is MISSING:
            assert shown[field.name] == ""
        elif field.name == "dtypes":
            assert re.findall(r"\w+", shown[field.name]) == list(field.default)
        else:
            assert f"`{field.default!r}`".replace("'", '"') in shown[field.name], field.name

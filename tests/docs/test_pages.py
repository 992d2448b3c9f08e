"""The documentation is whole: generated places, the two languages, links, the site."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tools.docs import pages as made
from tools.docs.blocks import policy_keys
from tools.docs.blocks import verified
from tools.docs.fences import blocks
from tools.docs.fences import headings
from tools.docs.language import Language
from tools.docs.pages import REPORTS
from tools.docs.pages import ROOT
from tools.docs.pages import is_chinese
from tools.docs.pages import outdated
from tools.docs.pages import pages
from vllm_fl.dispatch import OPERATORS
from vllm_fl.dispatch.policy.keys import KEYS
from vllm_fl.dispatch.policy.keys import Key
from vllm_fl.dispatch.policy.value_types import Choice

DOCS = ROOT / "docs"
ENGLISH = [page for page in pages() if not is_chinese(page) and page not in REPORTS]


def chinese(page: Path) -> Path:
    """Return where the Chinese page of a pair is."""
    return page.with_name("README.zh-CN.md") if page.parent == ROOT else page.with_suffix(".zh.md")


def test_what_is_generated_is_what_the_code_says() -> None:
    assert [str(page) for page in outdated()] == [], "run: python -m tools.docs"


def test_a_page_that_is_outdated_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = tmp_path / "docs" / "a.md"
    page.parent.mkdir()
    page.write_text("<!-- generated: variables -->\nold\n<!-- /generated -->\n")
    monkeypatch.setattr(made, "ROOT", tmp_path)
    assert outdated() == [Path("docs/a.md")]
    assert [*made.write()] == [Path("docs/a.md")]
    assert "VLLM_FL_PREFER" in page.read_text()
    assert outdated() == []


def test_the_reports_of_real_cards_are_read() -> None:
    assert set(verified()["vendor.cuda"]) == set(OPERATORS)
    named = {page for by_op in verified().values() for of_op in by_op.values() for page in of_op}
    assert named == {page.stem for page in REPORTS}


def test_a_text_without_translation_is_an_error() -> None:
    with pytest.raises(KeyError, match="no Chinese for 'the kind that is tried first"):
        policy_keys(Language({"key": "键", "what it says": "含义", "default": "默认值"}), DOCS / "a.zh.md")


def test_a_new_key_is_in_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KEYS, "made_up", Key("made_up", Choice("one", options=("one", "two")), "how many"))
    assert policy_keys(Language.english(), DOCS / "a.md").endswith('\n| `made_up` | how many | `"one"` |')


@pytest.mark.parametrize("page", ENGLISH, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_languages_are_the_same(page: Path) -> None:
    other = chinese(page)
    assert other.exists(), f"{page.relative_to(ROOT)} has no Chinese page {other.name}"
    assert [level for level, _ in headings(page)] == [level for level, _ in headings(other)]
    ours, theirs = [*blocks(page)], [*blocks(other)]
    assert [(b.language, _code(b.text)) for b in ours] == [(b.language, _code(b.text)) for b in theirs]
    assert [b.not_run is None for b in ours] == [b.not_run is None for b in theirs]
    assert _tables(page) == _tables(other)
    text = other.read_text("utf-8")
    assert len(re.findall(r"[\u4e00-\u9fff]", text)) > 50, "this is not Chinese"


def _code(text: str) -> str:
    """Return a block without its comments, which are translated."""
    return "\n".join(re.sub(r"\s+#[^!].*$", "", line) for line in text.splitlines())


def _tables(page: Path) -> list[int]:
    """Return the number of cells of every row of a table."""
    rows = [line for line in page.read_text("utf-8").splitlines() if line.startswith("|")]
    return [len(re.findall(r"(?<!\\)\|", row)) for row in rows]


def test_every_chinese_page_has_an_english_one() -> None:
    assert {chinese(page) for page in ENGLISH} >= {page for page in pages() if is_chinese(page)}


@pytest.mark.parametrize("page", [p for p in pages() if p.parent == ROOT], ids=lambda page: page.name)
def test_the_links_of_a_readme(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
    local = [link for link in links if "://" not in link]
    assert local
    for link in links:
        inside = link.removeprefix("https://github.com/vllm-fl/vllm-fl/tree/main/")
        if "://" not in inside:
            assert (ROOT / inside).exists(), link


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text("utf-8")

    def files(entry: object) -> set[str]:
        if isinstance(entry, str):
            return {entry}
        inner = entry.values() if isinstance(entry, dict) else entry
        return set().union(*map(files, inner))  # type: ignore[arg-type]

    # The rest of the file names Python's functions, which only MkDocs loads.
    navigation = files(yaml.safe_load(text[text.index("\nnav:") :])["nav"])
    assert navigation == {str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md") if not is_chinese(p)}


@pytest.mark.skipif(
    importlib.util.find_spec("mkdocs_static_i18n") is None, reason="hatch run docs:build runs it"
)
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    assert (tmp_path / "zh" / "index.html").exists()

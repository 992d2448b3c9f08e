"""Every command and every snippet of the documentation works, as it stands there.

The blocks of a page run in order in one empty folder. ``console`` has a prompt and what
is printed, where ``...`` is anything; ``bash`` must succeed; ``python`` runs; ``yaml`` is a
right policy; a block whose first line is a comment with a file's name is written there.
The Chinese pages have the same blocks: test_pages.py.
"""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

import vllm_fl
from tools.docs.fences import Block
from tools.docs.fences import blocks
from tools.docs.pages import REPORTS
from tools.docs.pages import ROOT
from tools.docs.pages import is_chinese
from tools.docs.pages import pages
from vllm_fl.dispatch import call_op
from vllm_fl.dispatch import policy_context
from vllm_fl.dispatch import resolve_op
from vllm_fl.dispatch import set_global_policy

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PAGES = {page.name: [*blocks(page)] for page in pages() if not is_chinese(page) and page not in REPORTS}
LANGUAGES = {"console", "bash", "sh", "python", "yaml", "toml", "text", "html", "diff"}
#: Pages whose commands belong together, and the test that runs them.
ELSEWHERE = {
    "adding-a-vendor.md": "tests/docs/test_adding.py",
    "adding-an-operator.md": "tests/docs/test_adding.py",
}
SECONDS = 1800


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A shell's variables: `vllm-fl` and `python` are those of the tests, nothing of ours is set."""
    programs = tmp_path_factory.mktemp("bin")
    command = programs / "vllm-fl"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m vllm_fl "$@"\n')
    command.chmod(0o755)
    (programs / "python").symlink_to(sys.executable)
    kept = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_FL_")}
    path = os.pathsep.join([str(programs), os.path.dirname(sys.executable), os.environ["PATH"]])
    python = os.pathsep.join(filter(None, [*_sources(), os.environ.get("PYTHONPATH")]))
    # The home is not the developer's: a page writes into it.
    return {**kept, "PATH": path, "PYTHONPATH": python, "HOME": str(programs), "NO_COLOR": "1"}


def _sources() -> Iterator[str]:
    yield os.path.dirname(os.path.dirname(str(vllm_fl.__file__)))


#: What must not run here: it would change the environment of whoever tests.
CHANGES = re.compile(r"\b(pip|hatch|apt|apt-get|git) +(un)?(install|run|env|clone|commit|push|tag)\b")


def _run(text: str, folder: Path, environment: dict[str, str], block: Block) -> str:
    assert not CHANGES.search(text), f"{block} changes the environment: say <!-- not run: ... -->"
    command = ["bash", "-euo", "pipefail", "-c", text]
    if block.language == "python":
        command = [sys.executable, "-c", text]
    said = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        # A reader's terminal shows both.
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    assert said.returncode == 0, f"{block}: exit code {said.returncode} of\n{text}\n{said.stdout}"
    return said.stdout


def _prompts(text: str) -> Iterator[tuple[str, str]]:
    """Yield each command of a console with what is printed after it."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, printed = part.partition("\n")
        yield command, printed


def _assert_like(said: str, shown: str, block: Block) -> None:
    lines = [r"(?:.*\n)*?" if line == "..." else _like(line) + r"\s*\n" for line in shown.splitlines()]
    assert re.fullmatch("".join(lines) + r"\s*", said), (
        f"{block} shows\n{shown}\nand this is printed:\n{said}"
    )


def _like(line: str) -> str:
    # The width of a column is not a matter of the documentation.
    parts = [r"\s+".join(map(re.escape, part.split())) for part in line.split("...")]
    return r"\s*" + r".*?".join(rf"\s*{part}\s*" for part in parts)


@pytest.mark.parametrize("name", [name for name, found in PAGES.items() if found and name not in ELSEWHERE])
def test_a_page(name: str, environment: dict[str, str], tmp_path: Path) -> None:
    for block in PAGES[name]:
        if block.not_run is not None or block.language in ("text", "html", "diff"):
            continue
        if block.file is not None:
            (tmp_path / block.file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / block.file).write_text(block.text)
            if block.language == "python":
                compile(block.text, str(block), "exec")
        elif block.language == "console":
            for command, printed in _prompts(block.text):
                _assert_like(_run(command, tmp_path, environment, block), printed, block)
        elif block.language == "yaml":
            (tmp_path / "policy.yaml").write_text(block.text)
            _run("vllm-fl policy check policy.yaml", tmp_path, environment, block)
        elif block.language == "toml":
            _run(f"import tomllib; tomllib.loads({block.text!r})", tmp_path, environment, _as_python(block))
        else:
            _run(block.text, tmp_path, environment, block)


def _as_python(block: Block) -> Block:
    return replace(block, language="python")


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_another_test_runs_is_run(name: str) -> None:
    assert name.removesuffix(".md") in (ROOT / ELSEWHERE[name]).read_text("utf-8")


@pytest.mark.parametrize("block", [b for found in PAGES.values() for b in found if b.not_run], ids=str)
def test_what_is_not_run_says_why(block: Block) -> None:
    assert block.not_run
    assert len(block.not_run.split()) > 2
    if block.language == "bash":
        subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
    pytest.skip(f"{block}: {block.not_run}")


@pytest.mark.parametrize("block", [b for found in PAGES.values() for b in found], ids=str)
def test_a_block_says_what_it_is(block: Block) -> None:
    assert block.language in LANGUAGES


def test_a_block_that_is_wrong_is_found(environment: dict[str, str], tmp_path: Path) -> None:
    block = Block(tmp_path / "page.md", 1, "bash", None, "false", None)
    with pytest.raises(AssertionError, match=r"page.md:1: exit code 1"):
        _run("false", tmp_path, environment, block)
    with pytest.raises(AssertionError, match="and this is printed"):
        _assert_like("vllm-fl-core 1\n", "vllm-fl-core 2\n", block)
    _assert_like("a  b\nc\nd\n", "a ...\n...\nd\n", block)
    assert shutil.which("vllm-fl", path=environment["PATH"])


@pytest.mark.parametrize("function", [call_op, resolve_op, set_global_policy, policy_context])
def test_the_example_of_a_docstring(function: object, environment: dict[str, str], tmp_path: Path) -> None:
    example = re.search(r"^::\n\n((?: {4}.*\n|\n)+)", inspect.getdoc(function) or "", re.MULTILINE)
    assert example
    block = Block(tmp_path, 1, "python", None, inspect.cleandoc(example[1]), None)
    _run(block.text, tmp_path, environment, block)

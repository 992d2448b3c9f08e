"""A scratch repository of the working tree, to tag and to break."""

from __future__ import annotations

import subprocess
import tarfile
from typing import TYPE_CHECKING

import pytest

from tools.release.packages import ROOT

if TYPE_CHECKING:
    from pathlib import Path


class Scratch:
    """A repository in a folder of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def git(self, *arguments: str) -> str:
        """Run git with a name of its own for commits."""
        command = ["git", "-c", "user.name=test", "-c", "user.email=test@localhost", *arguments]
        done = subprocess.run(command, cwd=self.root, capture_output=True, text=True, check=True)
        return done.stdout

    def tag(self, *tags: str) -> None:
        """Tag the last commit."""
        for tag in tags:
            self.git("tag", tag)

    def edit(self, path: str, old: str, new: str) -> None:
        """Replace a text that must be there, and commit."""
        file = self.root / path
        text = file.read_text(encoding="utf-8")
        assert old in text, f"{path} has no {old!r}"
        file.write_text(text.replace(old, new), encoding="utf-8")
        self.git("commit", "--quiet", "--all", "--message", f"edit {path}")


@pytest.fixture(scope="session")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Scratch:
    """The working tree with what is not committed yet, in two commits and without a tag."""
    scratch = Scratch(tmp_path_factory.mktemp("origin"))
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    archive = scratch.root / "tree.tar"
    with tarfile.open(archive, "w") as tree:
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).is_file():
                tree.add(ROOT / name, name)
    with tarfile.open(archive) as tree:
        tree.extractall(scratch.root, filter="data")
    archive.unlink()
    scratch.git("init", "--quiet", "--initial-branch", "main")
    scratch.git("commit", "--quiet", "--allow-empty", "--message", "first")
    scratch.git("add", "--all")
    scratch.git("commit", "--quiet", "--message", "second")
    return scratch


@pytest.fixture
def scratch(origin: Scratch, tmp_path: Path) -> Scratch:
    """A clone of it that a test may change."""
    root = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", str(origin.root), str(root)], check=True)
    return Scratch(root)

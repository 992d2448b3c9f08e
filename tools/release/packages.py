"""The packages of the repository, as their own pyproject.toml describe them."""

from __future__ import annotations

import os
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.requirements import Requirement
from packaging.version import InvalidVersion
from packaging.version import Version

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]
CORE = "vllm-fl-core"


class ReleaseError(Exception):
    """A package cannot be released as it is; the text says why and what to do."""


@dataclass(frozen=True)
class Package:
    """One package.

    Attributes:
        short: its short name, the prefix of its tags: ``cuda`` of ``vllm-plugin-cuda``.
        name: the distribution's name.
        folder: where its pyproject.toml is.
        module: the package that its wheel holds.
        fallback: its version in a clone without tags.
        core: the versions of the core that it takes; None for the core itself.
    """

    short: str
    name: str
    folder: Path
    module: str
    fallback: Version
    core: SpecifierSet | None

    @property
    def root(self) -> Path:
        """The repository's root."""
        return self.folder.parents[1]

    @property
    def plugin(self) -> bool:
        """Whether it is a plug-in of the core."""
        return self.core is not None

    def takes(self, core: Version) -> bool:
        """Whether it takes a version of the core, also a development version."""
        return self.core is None or self.core.contains(core, prereleases=True)

    def tag(self, version: Version) -> str:
        """Return the tag that releases a version."""
        return f"{self.short}-v{version}"


def short_name(name: str) -> str:
    """Return ``cuda`` of ``vllm-plugin-cuda`` and ``core`` of ``vllm-fl-core``."""
    return name.removeprefix("vllm-fl-").removeprefix("vllm-plugin-")


def load_packages(root: Path = ROOT) -> dict[str, Package]:
    """Return every package of a repository by its short name, the core first."""
    found = [_load(path) for path in sorted(root.glob("packages/*/pyproject.toml"))]
    return {package.short: package for package in sorted(found, key=lambda package: package.plugin)}


def _load(path: Path) -> Package:
    pyproject = tomllib.loads(path.read_text(encoding="utf-8"))
    name = pyproject["project"]["name"]
    requirements = [Requirement(line) for line in pyproject["project"].get("dependencies", ())]
    hatch = pyproject["tool"]["hatch"]
    return Package(
        short=short_name(name),
        name=name,
        folder=path.parent,
        module=Path(hatch["build"]["targets"]["wheel"]["packages"][0]).name,
        fallback=Version(hatch["version"]["fallback-version"]),
        core=next((req.specifier for req in requirements if req.name == CORE), None),
    )


def run(*command: str | Path, cwd: Path = ROOT, **variables: str) -> str:
    """Run a command and return what it wrote on stdout.

    Raises:
        ReleaseError: it failed; with all that it printed.
    """
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        shown = " ".join(str(part) for part in command)
        raise ReleaseError(f"{shown} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


def released(package: Package) -> dict[Version, str]:
    """Return the tags of a package by version, the oldest first."""
    prefix = f"{package.short}-v"
    found = {}
    for tag in run("git", "tag", "--list", f"{prefix}[0-9]*", cwd=package.root).split():
        try:
            found[Version(tag.removeprefix(prefix))] = tag
        except InvalidVersion:
            raise ReleaseError(f"the tag {tag} names no version; delete it") from None
    return dict(sorted(found.items()))

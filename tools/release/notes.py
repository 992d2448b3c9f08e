"""What a release says about itself: fragments, or a section of the package's CHANGELOG.md."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

from tools.release.packages import ReleaseError
from tools.release.packages import run

if TYPE_CHECKING:
    from packaging.version import Version

    from tools.release.packages import Package

FRAGMENTS = "changelog.d"


def release_notes(package: Package, version: Version) -> str:
    """Return the notes of a version in Markdown.

    They are its section of CHANGELOG.md, or what the fragments would make.

    Raises:
        ReleaseError: there is neither.
    """
    section = _section(package, version)
    if section:
        return section
    draft = _towncrier(package, version, "--draft") if fragments(package) else ""
    if not draft.strip():
        folder = f"packages/{package.folder.name}"
        raise ReleaseError(
            f"{package.name} {version} has no release notes: {folder}/CHANGELOG.md has no section "
            f"'## {version}', and {folder}/{FRAGMENTS} no fragment. CONTRIBUTING.md says how to write one"
        )
    return draft


def write_notes(package: Package, version: Version) -> None:
    """Turn the fragments into the section of a version; towncrier removes them."""
    if not fragments(package):
        raise ReleaseError(f"packages/{package.folder.name}/{FRAGMENTS} holds no fragment")
    _towncrier(package, version, "--yes")


def fragments(package: Package) -> list[str]:
    """Return the names of the fragments that no release has used yet."""
    return sorted(path.name for path in (package.folder / FRAGMENTS).glob("*.md"))


def says_breaking(package: Package, version: Version) -> bool:
    """Whether the notes of a version announce that something of the API breaks."""
    return bool(re.search(r"^#+ Breaking", release_notes(package, version), re.MULTILINE))


def _section(package: Package, version: Version) -> str:
    changelog = package.folder / "CHANGELOG.md"
    if not changelog.is_file():
        return ""
    for section in re.split(r"^(?=## )", changelog.read_text(encoding="utf-8"), flags=re.MULTILINE):
        heading, _, body = section.partition("\n")
        if re.fullmatch(rf"## {re.escape(str(version))}( .*)?", heading):
            return body.strip()
    return ""


def _towncrier(package: Package, version: Version, mode: str) -> str:
    return run(
        *(sys.executable, "-m", "towncrier", "build", mode, "--version", str(version)),
        *("--config", package.root / "towncrier.toml", "--dir", package.folder),
        cwd=package.root,
    )

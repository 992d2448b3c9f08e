"""A release needs notes: fragments, or a section for its version."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from packaging.version import Version

from tools.release.notes import fragments
from tools.release.notes import release_notes
from tools.release.notes import says_breaking
from tools.release.notes import write_notes
from tools.release.packages import ReleaseError
from tools.release.packages import load_packages

if TYPE_CHECKING:
    from conftest import Scratch

    from tools.release.packages import Package

VERSION = Version("7.8.9")


@pytest.fixture
def cuda(scratch: Scratch) -> Package:
    """A package without fragments and without releases."""
    package = load_packages(scratch.root)["cuda"]
    for name in fragments(package):
        (package.folder / "changelog.d" / name).unlink()
    (package.folder / "changelog.d").mkdir(exist_ok=True)
    (package.folder / "CHANGELOG.md").write_text("# Releases\n\n<!-- Here towncrier adds a release. -->\n")
    return package


def fragment(package: Package, name: str, text: str) -> None:
    (package.folder / "changelog.d" / name).write_text(f"{text}\n")


def test_none_is_refused(cuda: Package) -> None:
    with pytest.raises(ReleaseError, match=r"vllm-plugin-cuda 7\.8\.9 has no release notes"):
        release_notes(cuda, VERSION)
    with pytest.raises(ReleaseError, match="holds no fragment"):
        write_notes(cuda, VERSION)


def test_fragments_become_a_section(cuda: Package) -> None:
    fragment(cuda, "+gelu.operators.md", "`gelu_and_mul`.")
    fragment(cuda, "31.fixed.md", "A stride.")
    draft = release_notes(cuda, VERSION)
    assert "### Operators\n\n- `gelu_and_mul`." in draft
    assert "### Fixed\n\n- A stride. (#31)" in draft
    assert fragments(cuda) == ["+gelu.operators.md", "31.fixed.md"]

    write_notes(cuda, VERSION)
    assert fragments(cuda) == []
    section = release_notes(cuda, VERSION)
    assert section.startswith("### Operators")
    assert draft.endswith(section)
    with pytest.raises(ReleaseError, match="has no release notes"):
        release_notes(cuda, Version("7.8"))

    fragment(cuda, "+more.added.md", "More.")
    write_notes(cuda, Version("7.9"))
    assert release_notes(cuda, VERSION) == section
    assert release_notes(cuda, Version("7.9")) == "### Added\n\n- More."


def test_a_wrong_name_is_refused(cuda: Package) -> None:
    fragment(cuda, "+gelu.operator.md", "`gelu_and_mul`.")
    with pytest.raises(ReleaseError, match=r"Invalid news fragment name: \+gelu\.operator\.md"):
        release_notes(cuda, VERSION)


def test_what_breaks_is_announced(cuda: Package) -> None:
    fragment(cuda, "+a.changed.md", "Breaking nothing.")
    assert not says_breaking(cuda, VERSION)
    fragment(cuda, "+b.breaking.md", "A name is gone.")
    assert says_breaking(cuda, VERSION)
    write_notes(cuda, VERSION)
    assert says_breaking(cuda, VERSION)

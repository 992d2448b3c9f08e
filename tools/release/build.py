"""Building a package: its source distribution, and its wheel from that."""

from __future__ import annotations

import hashlib
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.utils import parse_wheel_filename

from tools.release.packages import ReleaseError
from tools.release.packages import load_packages
from tools.release.packages import run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from packaging.version import Version

    from tools.release.packages import Package


@dataclass(frozen=True)
class Built:
    """The two files of a build."""

    sdist: Path
    wheel: Path

    @property
    def version(self) -> Version:
        """The version that both files have."""
        return parse_wheel_filename(self.wheel.name)[1]


def build(package: Package, out: Path) -> Built:
    """Build the source distribution into ``out``, and from it, away from git, the wheel.

    The time in the files is that of the commit, so that who builds it again gets
    the same bytes.
    """
    out.mkdir(parents=True, exist_ok=True)
    committed = run("git", "log", "-1", "--format=%ct", cwd=package.root)
    with tempfile.TemporaryDirectory() as folder:
        # `build` makes the wheel of the source distribution unless it is told otherwise.
        run(
            *(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, package.folder),
            SOURCE_DATE_EPOCH=committed,
        )
        made = find_built(Path(folder))
        return Built(made.sdist.replace(out / made.sdist.name), made.wheel.replace(out / made.wheel.name))


def find_built(folder: Path) -> Built:
    """Return the files of a build that lie in a folder by themselves.

    Raises:
        ReleaseError: something is missing, or there is more.
    """
    names = sorted(path.name for path in folder.glob("*"))
    sdists, wheels = sorted(folder.glob("*.tar.gz")), sorted(folder.glob("*.whl"))
    if len(names) != 2 or len(sdists) != 1 or len(wheels) != 1:
        raise ReleaseError(f"{folder} must hold one source distribution and one wheel, and holds {names}")
    return Built(sdists[0], wheels[0])


@contextmanager
def sources_of(package: Package, tag: str) -> Iterator[Package]:
    """Give a package as its tag has it, in a clone that lives as long as the context."""
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "clone"
        command = ("git", "clone", "--quiet", "--shared", "--branch", tag, package.root, clone)
        run(
            *command, GIT_CONFIG_COUNT="1", GIT_CONFIG_KEY_0="advice.detachedHead", GIT_CONFIG_VALUE_0="false"
        )
        yield load_packages(clone)[package.short]


def build_tag(package: Package, tag: str, out: Path) -> Path:
    """Build the wheel of a release and return it."""
    with sources_of(package, tag) as then:
        return build(then, out).wheel


def expect_tag(package: Package, version: Version, tag: str) -> None:
    """Refuse a build that is not what a tag releases.

    Raises:
        ReleaseError: the tag is another package's, or another version's.
    """
    if tag != package.tag(version):
        raise ReleaseError(
            f"{tag} does not release {package.name} {version}, which {package.tag(version)} would; "
            "a release is built from the tagged commit, with every tag fetched and nothing changed"
        )


def compare(first: Built, second: Built) -> None:
    """Refuse two builds that differ.

    Raises:
        ReleaseError: their files have other names or other bytes.
    """
    for one, other in ((first.sdist, second.sdist), (first.wheel, second.wheel)):
        if one.name != other.name or digest(one) != digest(other):
            raise ReleaseError(f"{one.name} built twice gave other bytes; `diffoscope` shows which")


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()

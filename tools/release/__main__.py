"""``python -m tools.release COMMAND``: see docs/releasing.md."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.version import Version

from tools.release import checks
from tools.release.build import build
from tools.release.build import expect_tag
from tools.release.build import find_built
from tools.release.notes import release_notes
from tools.release.notes import write_notes
from tools.release.packages import ROOT
from tools.release.packages import ReleaseError
from tools.release.packages import load_packages
from tools.release.sbom import write_sbom

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tools.release.packages import Package


class Report:
    """Prints a line for each step, and the seconds since the line before."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()

    def __call__(self, step: str, line: str) -> None:
        """Print what a step saw."""
        now = time.perf_counter()
        print(f"{step:18} {line} ({now - self._begin:.1f} s)", flush=True)
        self._begin = now


def static(report: Report, packages: Iterable[Package]) -> None:
    """Check what needs no build: seconds."""
    report("workflows", checks.check_workflows(ROOT))
    report("without tags", checks.check_fallback(load_packages()))
    for package in packages:
        report(f"metadata {package.short}", checks.check_metadata(package))


def build_release(report: Report, package: Package, out: Path, tag: str | None) -> None:
    """Build what is uploaded into out/dist, and beside it the notes and the bill of materials."""
    for earlier in (out / "dist").glob(f"{package.name.replace('-', '_')}-*"):
        earlier.unlink()
    built = build(package, out / "dist")
    report("build", f"{built.sdist.name}, {built.wheel.name}")
    if tag is not None:
        expect_tag(package, built.version, tag)
        report("tag", tag)
    notes = release_notes(package, built.version)
    (out / "notes.md").write_text(f"{notes}\n", encoding="utf-8")
    report("notes", f"{len(notes.splitlines())} lines")
    report("reproducible", checks.check_reproducible(package, built))
    report("files", checks.check_files(package, built))
    report("bill of materials", write_sbom(built.wheel, out).name)


def verify(report: Report, package: Package, dist: Path, *, from_index: bool) -> None:
    """Check the wheel that was built, as users will install it."""
    built = find_built(dist)
    if from_index:
        report("from the index", checks.check_from_index(package, built.wheel))
    with tempfile.TemporaryDirectory() as folder:
        core = load_packages()["core"]
        wheel = build(core, Path(folder)).wheel if package.plugin else built.wheel
        report("without torch", checks.check_alone(package, built.wheel, wheel))
    for line in checks.check_edges(package, built.wheel):
        report("edge", line)
    if not package.plugin:
        report("public API", checks.check_api(package, built.version))


def parser(packages: Iterable[str]) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    top = argparse.ArgumentParser(prog="python -m tools.release", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)

    def command(name: str, help_: str) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=help_, description=help_)
        one.add_argument("package", choices=list(packages), metavar="PACKAGE")
        return one

    commands.add_parser("static", help="check the workflows and every package's metadata; seconds")
    command("check", "every step of a release but the upload")
    one = command("build", "build what is uploaded, its notes and its bill of materials")
    one.add_argument("--out", type=Path, default=ROOT / "out" / "release")
    one.add_argument("--tag", help="the tag that must be the one that releases this")
    one = command("verify", "check a wheel that was built")
    one.add_argument("--dist", type=Path, default=ROOT / "out" / "release" / "dist")
    one.add_argument("--from-index", action="store_true", help="also with what the index has")
    one = command("notes", "print the notes of a version, or write them into CHANGELOG.md")
    one.add_argument("version", type=Version)
    one.add_argument("--write", action="store_true")
    return top


def main() -> int:
    """Run the command and return its exit code."""
    packages = load_packages()
    arguments = parser(packages).parse_args()
    package = packages.get(getattr(arguments, "package", ""))
    report = Report()
    try:
        if package is None:
            static(report, packages.values())
        elif arguments.command == "check":
            static(report, [package])
            with tempfile.TemporaryDirectory() as folder:
                build_release(report, package, Path(folder), None)
                verify(report, package, Path(folder) / "dist", from_index=False)
        elif arguments.command == "build":
            build_release(report, package, arguments.out, arguments.tag)
        elif arguments.command == "verify":
            verify(report, package, arguments.dist, from_index=arguments.from_index)
        elif arguments.write:
            write_notes(package, arguments.version)
        else:
            print(release_notes(package, arguments.version))
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

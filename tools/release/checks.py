"""What must hold before a package is released, one function for each step.

A step returns a line that says what it saw, and raises ReleaseError where the
package cannot be released.
"""

from __future__ import annotations

import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import griffe
from packaging.utils import parse_wheel_filename

from tools.release.build import build
from tools.release.build import build_tag
from tools.release.build import compare
from tools.release.build import sources_of
from tools.release.environment import Environment
from tools.release.installed import check_imports
from tools.release.installed import check_plugins
from tools.release.notes import says_breaking
from tools.release.packages import CORE
from tools.release.packages import ReleaseError
from tools.release.packages import load_packages
from tools.release.packages import released
from tools.release.packages import run
from tools.release.packages import short_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from packaging.version import Version

    from tools.release.build import Built
    from tools.release.packages import Package


def check_workflows(root: Path) -> str:
    """Check all workflows for what is unsafe, and against GitHub's schemas."""
    folders = [root / ".github", *sorted(root.glob("packages/*/.github"))]
    run(_tool("zizmor"), "--quiet", "--offline", "--persona", "pedantic", *folders, cwd=root)
    workflows = [path for folder in folders for path in sorted(folder.glob("workflows/*.yml"))]
    schemas = {"vendor.github-workflows": workflows, "vendor.dependabot": [root / ".github/dependabot.yml"]}
    for schema, files in schemas.items():
        run(_tool("check-jsonschema"), "--builtin-schema", schema, *files, cwd=root)
    return f"{len(workflows)} workflows"


def check_metadata(package: Package) -> str:
    """Check the form of pyproject.toml, and that the code imports what it asks for."""
    run(_tool("validate-pyproject"), package.folder / "pyproject.toml", cwd=package.root)
    run(_tool("deptry"), "--no-ansi", "src", cwd=package.folder)
    return "pyproject.toml and imports agree"


def check_fallback(packages: dict[str, Package]) -> str:
    """Check that the packages of a clone without tags take each other."""
    core = packages[short_name(CORE)]
    for package in packages.values():
        if not package.takes(core.fallback):
            raise ReleaseError(
                f"{package.name} asks for {CORE}{package.core}, and in a clone without tags the core is "
                f"{core.fallback}: raise fallback-version in {core.folder / 'pyproject.toml'}"
            )
    return f"without tags the core is {core.fallback}"


def check_reproducible(package: Package, built: Built) -> str:
    """Build once more and compare the bytes."""
    with tempfile.TemporaryDirectory() as folder:
        compare(built, build(package, Path(folder)))
    return "the same bytes twice"


def check_files(package: Package, built: Built) -> str:
    """Check what the files hold and how an index will show them."""
    run(_tool("check-wheel-contents"), built.wheel, cwd=package.folder)
    run(_tool("twine"), "check", "--strict", built.sdist, built.wheel)
    # The project publishes no address of a person; the rest must be right.
    run(_tool("pyroma"), "--min", "10", "--skip-tests", "AuthorEmail", built.sdist)
    return "contents, description and metadata"


def check_alone(package: Package, wheel: Path, core: Path) -> str:
    """Install a wheel where there is no torch: it must load and be listed all the same.

    Args:
        package: what is checked.
        wheel: its wheel.
        core: the core's wheel; the same one for the core itself.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = Environment(Path(folder) / "venv")
        environment.pip("install", str(core))
        plugins = [package] if package.plugin else []
        if plugins:
            environment.pip("install", "--no-deps", str(wheel))
        return f"{check_plugins(environment, plugins)}, {check_imports(environment, plugins)}"


def check_from_index(package: Package, wheel: Path) -> str:
    """Install a wheel with everything that it asks for from the index.

    A plug-in that needs a core which is not published yet stops here.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = Environment(Path(folder) / "venv")
        environment.pip("install", str(wheel))
        plugins = [package] if package.plugin else []
        return f"{check_plugins(environment, plugins)}, {check_imports(environment, plugins)}"


@dataclass(frozen=True)
class Edge:
    """A wheel that is to be released, beside a release that users may have with it.

    Attributes:
        tag: the release.
        plugin: the plug-in of the two.
        wheel: the plug-in's wheel.
        core: the core's wheel.
    """

    tag: str
    plugin: Package
    wheel: Path
    core: Path


def edges(package: Package, wheel: Path, out: Path) -> Iterator[Edge]:
    """Build the releases that a wheel must work with, into folders of ``out``.

    For a plug-in they are the lowest and the newest core that it takes, for the core
    the last release of each plug-in, if that takes it. A release is what has a tag.
    """
    packages = load_packages(package.root)
    core = packages[short_name(CORE)]
    if package.plugin:
        finals = {version: tag for version, tag in released(core).items() if not version.is_prerelease}
        cores = [tag for version, tag in finals.items() if package.takes(version)]
        for tag in dict.fromkeys([*cores[:1], *cores[-1:]]):
            yield Edge(tag, package, wheel, build_tag(core, tag, out / tag))
        return
    version = parse_wheel_filename(wheel.name)[1]
    for plugin in packages.values():
        for tag in list(released(plugin).values())[-1:] if plugin.plugin else ():
            with sources_of(plugin, tag) as then:
                if then.takes(version):
                    yield Edge(tag, plugin, build(then, out / tag).wheel, wheel)


def check_edges(package: Package, wheel: Path) -> Iterator[str]:
    """Check that a plug-in loads with the cores of users, and the core their plug-ins."""
    any_released = False
    with tempfile.TemporaryDirectory() as folder:
        for edge in edges(package, wheel, Path(folder)):
            any_released = True
            yield f"{edge.tag}: {check_alone(edge.plugin, edge.wheel, edge.core)}"
    if not any_released:
        yield f"no {'core that it takes' if package.plugin else 'plug-in that takes it'} is released yet"


def check_api(core: Package, version: Version) -> str:
    """Compare the public API of the core with that of its last release.

    What breaks is allowed where the release notes announce it.
    """
    before = [tag for earlier, tag in released(core).items() if earlier < version]
    if not before:
        return "no earlier release to compare with"
    public = f"{core.module}.dispatch"
    with sources_of(core, before[-1]) as then:
        old = griffe.load(public, search_paths=[then.folder / "src"], allow_inspection=False)
        new = griffe.load(public, search_paths=[core.folder / "src"], allow_inspection=False)
        breakages = [_line(change) for change in _changes(old, new)]
    if breakages and not says_breaking(core, version):
        raise ReleaseError(
            f"the public API breaks since {before[-1]}, and no fragment of type 'breaking' says so:\n"
            + "\n".join(breakages)
        )
    return f"{len(breakages)} announced breakages since {before[-1]}"


def _changes(old: object, new: object) -> list[griffe.Breakage]:
    assert isinstance(old, griffe.Module)
    assert isinstance(new, griffe.Module)
    return list(griffe.find_breaking_changes(old, new))


def _line(change: griffe.Breakage) -> str:
    coloured = change.explain(style=griffe.ExplanationStyle.ONE_LINE)
    return re.sub(r"\x1b\[\d*m", "", coloured)


def _tool(name: str) -> Path:
    """Return a command of the environment that this runs in."""
    return Path(sys.executable).with_name(name)

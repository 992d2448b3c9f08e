"""A tag releases one package, and versions are right with tags, without them and without git."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from typing import TYPE_CHECKING

import pytest
from packaging.version import Version

from tools.release.build import build
from tools.release.build import expect_tag
from tools.release.checks import check_fallback
from tools.release.packages import ReleaseError
from tools.release.packages import load_packages

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Scratch

    from tools.release.build import Built

SHORT = ["core", "reference", "flaggems", "cuda", "ascend", "template"]


def build_all(root: Path, out: Path) -> dict[str, Built]:
    return {short: build(package, out / short) for short, package in load_packages(root).items()}


def test_every_package_is_known() -> None:
    packages = load_packages()
    assert sorted(packages) == sorted(SHORT)
    assert next(iter(packages)) == "core"
    for package in packages.values():
        assert package.plugin == (package.short != "core")
        assert (package.folder / "src" / package.module / "py.typed").is_file()


def test_a_tag_releases_its_package_and_no_other(scratch: Scratch, tmp_path: Path) -> None:
    scratch.tag("cuda-v0.3.0", "core-v0.9.0rc1")
    packages = load_packages(scratch.root)
    built = build_all(scratch.root, tmp_path / "dist")
    for short, package in packages.items():
        version = built[short].version
        if short == "cuda":
            assert version == Version("0.3.0")
            expect_tag(package, version, "cuda-v0.3.0")
        elif short == "core":
            assert version == Version("0.9.0rc1")
        else:
            assert version.is_devrelease
        if short != "cuda":
            with pytest.raises(ReleaseError, match=rf"^cuda-v0\.3\.0 does not release {package.name} "):
                expect_tag(package, version, "cuda-v0.3.0")


def test_the_files_are_those_of_the_package_alone(scratch: Scratch, tmp_path: Path) -> None:
    scratch.tag("cuda-v0.3.0")
    package = load_packages(scratch.root)["cuda"]
    built = build(package, tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*.whl")) == ["vllm_plugin_cuda-0.3.0-py3-none-any.whl"]
    assert built.sdist.name == "vllm_plugin_cuda-0.3.0.tar.gz"
    names = zipfile.ZipFile(built.wheel).namelist()
    assert {name.partition("/")[0] for name in names} == {"vllm_fl_cuda", "vllm_plugin_cuda-0.3.0.dist-info"}

    tracked = scratch.git("ls-files", "packages/vllm-plugin-cuda").split()
    mine = {name.removeprefix("packages/vllm-plugin-cuda/") for name in tracked}
    with tarfile.open(built.sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert packed - mine <= {"PKG-INFO", ".gitignore"}
    assert mine - packed == {name for name in mine if name.startswith("changelog.d/")}


def test_the_command_that_a_tag_starts(scratch: Scratch, tmp_path: Path) -> None:
    scratch.tag("cuda-v0.3.0")
    out = tmp_path / "out"
    command = [sys.executable, "-m", "tools.release", "build", "cuda", "--out", str(out), "--tag"]
    done = subprocess.run(
        [*command, "cuda-v0.3.0"], cwd=scratch.root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert sorted(str(path.relative_to(out)) for path in out.rglob("*.*")) == [
        "dist/vllm_plugin_cuda-0.3.0-py3-none-any.whl",
        "dist/vllm_plugin_cuda-0.3.0.tar.gz",
        "notes.md",
        "vllm_plugin_cuda-0.3.0-py3-none-any.cdx.json",
    ]
    refused = subprocess.run(
        [*command, "core-v0.3.0"], cwd=scratch.root, capture_output=True, text=True, check=False
    )
    assert refused.returncode == 1
    assert refused.stderr.startswith("release: core-v0.3.0 does not release vllm-plugin-cuda 0.3.0, which ")


def test_a_commit_after_a_tag_is_a_pre_release_of_the_next(scratch: Scratch, tmp_path: Path) -> None:
    scratch.tag("cuda-v0.3.0")
    scratch.git("commit", "--quiet", "--allow-empty", "--message", "later")
    package = load_packages(scratch.root)["cuda"]
    version = build(package, tmp_path).version
    assert version == Version("0.3.1.dev1")
    with pytest.raises(ReleaseError, match=r"does not release vllm-plugin-cuda 0\.3\.1\.dev1"):
        expect_tag(package, version, "cuda-v0.3.0")


def test_a_wheel_of_the_sdist_has_its_version_without_git(scratch: Scratch, tmp_path: Path) -> None:
    scratch.tag("reference-v1.2.3")
    built = build(load_packages(scratch.root)["reference"], tmp_path / "dist")
    assert built.wheel.name == "vllm_fl_reference-1.2.3-py3-none-any.whl"
    with tarfile.open(built.sdist) as archive:
        archive.extractall(tmp_path / "elsewhere", filter="data")
    (project,) = (tmp_path / "elsewhere").iterdir()
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory"]
    subprocess.run([*command, str(tmp_path)], cwd=project, check=True, capture_output=True)
    assert (tmp_path / built.wheel.name).is_file()


@pytest.mark.parametrize("kind", ["clone", "shallow", "download"])
def test_without_tags_the_packages_take_each_other(origin: Scratch, tmp_path: Path, kind: str) -> None:
    root = tmp_path / kind
    if kind == "download":
        shutil.copytree(origin.root, root, ignore=shutil.ignore_patterns(".git"))
    else:
        depth = ["--depth", "1"] if kind == "shallow" else []
        subprocess.run(["git", "clone", "--quiet", *depth, origin.root.as_uri(), str(root)], check=True)
    packages = load_packages(root)
    versions = {}
    for short, package in packages.items():
        command = [sys.executable, "-m", "hatchling", "version"]
        done = subprocess.run(command, cwd=package.folder, capture_output=True, text=True, check=True)
        versions[short] = Version(done.stdout.strip())
    commits = {"clone": "2", "shallow": "1", "download": "0"}[kind]
    assert versions == dict.fromkeys(SHORT, Version(f"0.1.1.dev{commits}"))
    for package in packages.values():
        assert package.core is None or package.core.contains(versions["core"], prereleases=True)


def test_a_range_that_the_fallback_does_not_satisfy_is_refused(scratch: Scratch) -> None:
    assert check_fallback(load_packages(scratch.root)) == "without tags the core is 0.1.1.dev0"
    scratch.edit("packages/vllm-plugin-cuda/pyproject.toml", "vllm-fl-core>=0.1,<2", "vllm-fl-core>=0.4,<2")
    with pytest.raises(ReleaseError, match=r"vllm-plugin-cuda asks for vllm-fl-core<2,>=0\.4"):
        check_fallback(load_packages(scratch.root))

"""From the built wheels to a vendor's package that builds, installs, registers and is chosen."""

from __future__ import annotations

import json
import shutil
import tarfile
import zipfile
from importlib import metadata
from typing import TYPE_CHECKING

import pytest
from bare_environment import PACKAGES
from bare_environment import Environment
from bare_environment import build

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.long

SAMPLE = "vllm-plugin-template"


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheels, each built from its sdist, and the sample's sdist."""
    folder = tmp_path_factory.mktemp("dist")
    built = {}
    for name in ("vllm-fl-core", SAMPLE):
        sdist = build(PACKAGES / name, folder, "sdist")
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        built[f"{name} sdist"] = folder / sdist.name.removesuffix(".tar.gz")
        built[name] = build(built[f"{name} sdist"], folder)
    return built


@pytest.fixture(scope="module")
def environment(dist: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Environment:
    environment = Environment(tmp_path_factory.mktemp("venv") / "vendor")
    environment.pip("install", str(dist["vllm-fl-core"]))
    return environment


@pytest.fixture(scope="module")
def project(environment: Environment, dist: dict[str, Path]) -> Path:
    """What the command makes, in a folder of its own."""
    folder = environment.folder / "made" / "vllm-plugin-acme"
    missing = environment.run("vllm-fl", "new-vendor", "acme", str(folder))
    assert missing.returncode == 1
    assert f"pip install {SAMPLE}" in missing.stderr
    # The build that is installed here, so that pip does not choose another one.
    versions = [f"{name}=={metadata.version(name)}" for name in ("torch", "pytest")]
    environment.pip("install", *versions, "numpy", str(dist[SAMPLE]))
    made = environment.run("vllm-fl", "new-vendor", "acme", str(folder))
    assert made.returncode == 0, made.stderr
    assert "vllm-fl conformance --backend acme --tier smoke" in made.stdout
    return folder


@pytest.fixture(scope="module")
def installed(environment: Environment, project: Path) -> Environment:
    """The same environment with the new wheel, and the sample still beside it."""
    wheel = build(project, environment.folder)
    assert {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()} == {
        "vllm_fl_acme",
        f"{wheel.name.rsplit('-', 3)[0]}.dist-info",
    }
    environment.pip("install", "--no-deps", str(wheel))
    return environment


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_wheel_of_the_sources_and_one_of_the_sdist_are_the_same(
    dist: dict[str, Path], tmp_path: Path
) -> None:
    for name in ("vllm-fl-core", SAMPLE):
        ours = zipfile.ZipFile(dist[name])
        direct = zipfile.ZipFile(build(PACKAGES / name, tmp_path))
        assert {n: ours.read(n) for n in ours.namelist()} == {n: direct.read(n) for n in direct.namelist()}


def test_the_renamed_copy_is_the_same(
    project: Path, environment: Environment, dist: dict[str, Path], tmp_path: Path
) -> None:
    copy = tmp_path / "vllm-plugin-acme"
    shutil.copytree(dist[f"{SAMPLE} sdist"], copy)
    refused = environment.run("python", "rename.py", "Acme", cwd=copy)
    assert refused.returncode == 1
    assert "use lower-case letters" in refused.stderr
    renamed = environment.run("python", "rename.py", "acme", cwd=copy)
    assert renamed.returncode == 0, renamed.stderr
    assert contents(copy) == contents(project)


def test_nothing_of_the_sample_is_left(project: Path) -> None:
    found = contents(project)
    assert "src/vllm_fl_acme/acme.py" in found
    for name, content in found.items():
        for word in ("template", "<sample>"):
            assert word not in name.lower()
            assert word.encode() not in content.lower(), name


def test_it_registers_and_is_chosen(installed: Environment) -> None:
    listed = json.loads(installed.run("vllm-fl", "list", "--probe", "--json").stdout)
    states = {plugin["name"]: plugin["state"] for plugin in listed["plugins"]}
    assert states == {"acme": "loaded", "template": "loaded"}
    available = {backend["impl_id"]: backend["available"] for backend in listed["backends"]}
    assert available == {"vendor.acme": True, "vendor.template": False}
    explained = installed.run("vllm-fl", "explain", "rms_norm", VLLM_FL_PREFER="vendor")
    assert explained.stdout.startswith("rms_norm: vendor.acme")
    assert "VLLM_FL_TEMPLATE_ENABLED=1 lets it run" in explained.stdout


def test_the_sample_runs_where_it_is_asked_for(installed: Environment) -> None:
    explained = installed.run(
        "vllm-fl",
        "explain",
        "rms_norm",
        VLLM_FL_PER_OP="rms_norm=vendor:template",
        VLLM_FL_TEMPLATE_ENABLED="1",
    )
    assert explained.stdout.startswith("rms_norm: vendor.template")


def test_its_own_tests_pass(installed: Environment, project: Path) -> None:
    tested = installed.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=project)
    assert tested.returncode == 0, tested.stdout
    assert " passed, 1 skipped" in tested.stdout  # attention, without vLLM


def test_it_passes_conformance(installed: Environment) -> None:
    checked = installed.run("vllm-fl", "conformance", "--backend", "acme", "--tier", "smoke")
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_its_name_is_taken_now(installed: Environment) -> None:
    again = installed.run("vllm-fl", "new-vendor", "acme", "another")
    assert again.returncode == 1
    assert "a plugin 'acme' is already installed, by vllm-plugin-acme" in again.stderr


def test_its_release_is_trusted_publishing_with_pinned_actions(project: Path) -> None:
    workflows = [path.read_text() for path in (project / ".github" / "workflows").glob("*.yml")]
    assert len(workflows) == 2
    for text in workflows:
        assert "permissions: {}" in text
        uses = [line.split("uses: ")[1] for line in text.splitlines() if "uses: " in line]
        assert uses
        for action in uses:
            _, _, pin = action.partition("@")
            commit, _, version = pin.partition(" # v")
            assert len(commit) == 40, action
            assert version, action
    (release,) = [text for text in workflows if "pypi-publish" in text]
    assert release.count("id-token: write") == 1
    assert "secrets." not in release
    assert "password" not in release

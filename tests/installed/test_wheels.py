"""What users install: the built wheels in a bare environment, the sources out of sight."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PACKAGES = Path(__file__).parents[2] / "packages"
CALL = """
import torch
from vllm_fl.dispatch import call_op
print(call_op("silu_and_mul", torch.ones(2, 8)).shape)
"""


class Environment:
    """A virtual environment with nothing but pip."""

    def __init__(self, folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        self.bin = folder / ("Scripts" if sys.platform == "win32" else "bin")
        self.folder = folder

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command of the environment away from the sources."""
        return subprocess.run(
            [str(self.bin / command[0]), *command[1:]],
            cwd=self.folder,
            env={"PATH": str(self.bin), "HOME": str(self.folder), "PYTHONNOUSERSITE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )

    def pip(self, *arguments: str) -> None:
        """Run pip with the index that the caller's environment uses."""
        subprocess.run(
            [str(self.bin / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments],
            # What stands on PYTHONPATH would count as installed.
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            check=True,
        )


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("dist")
    for name in ("vllm-fl-core", "vllm-fl-reference"):
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
        subprocess.run(command, cwd=PACKAGES / name, check=True, capture_output=True)
    return {path.name.partition("-")[0]: path for path in folder.glob("*.whl")}


@pytest.fixture(scope="module")
def core_alone(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Environment:
    environment = Environment(tmp_path_factory.mktemp("venv") / "core")
    environment.pip("install", str(wheels["vllm_fl_core"]))
    return environment


def test_a_wheel_holds_the_package_and_nothing_else(wheels: dict[str, Path]) -> None:
    for name, package in (("vllm_fl_core", "vllm_fl"), ("vllm_fl_reference", "vllm_fl_reference")):
        names = zipfile.ZipFile(wheels[name]).namelist()
        tops = {path.partition("/")[0] for path in names}
        assert tops == {package, f"{wheels[name].name.rsplit('-', 3)[0]}.dist-info"}
        assert f"{package}/py.typed" in names
        assert any(path.endswith("LICENSE") for path in names)
    assert "vllm_fl/dispatch/known_wheels.json" in zipfile.ZipFile(wheels["vllm_fl_core"]).namelist()


def test_core_alone_says_what_to_install(core_alone: Environment) -> None:
    said = core_alone.run("python", "-c", "from vllm_fl.dispatch import call_op; call_op('silu_and_mul', 1)")
    assert said.returncode == 1
    assert "nothing can run 'silu_and_mul'" in said.stderr
    assert "pip install vllm-fl-reference" in said.stderr

    explained = core_alone.run("vllm-fl", "explain", "silu_and_mul")
    assert explained.returncode == 1
    assert "pip install vllm-fl-reference" in explained.stdout

    listed = core_alone.run("vllm-fl", "list", "--json")
    assert listed.returncode == 0
    assert json.loads(listed.stdout)["plugins"] == []


def test_core_alone_is_light(core_alone: Environment) -> None:
    installed = core_alone.run("python", "-m", "pip", "list", "--format", "json").stdout
    names = {row["name"].lower() for row in json.loads(installed)}
    assert names <= {"pip", "setuptools", "wheel", "pyyaml", "vllm-fl-core"}


def test_a_wheel_adds_its_implementations_and_takes_them_away(
    core_alone: Environment, wheels: dict[str, Path]
) -> None:
    # The build that is installed here, so that pip does not choose another one.
    core_alone.pip(
        "install", f"torch=={metadata.version('torch')}", "numpy", str(wheels["vllm_fl_reference"])
    )
    called = core_alone.run("python", "-c", CALL)
    assert called.stdout.strip() == "torch.Size([2, 4])", called.stderr
    listed = json.loads(core_alone.run("vllm-fl", "list", "--json").stdout)
    assert [plugin["name"] for plugin in listed["plugins"]] == ["reference"]
    assert core_alone.run("vllm-fl", "explain", "rms_norm").stdout.startswith("rms_norm: reference.torch")
    assert core_alone.run("python", "-m", "vllm_fl", "list", "ops").returncode == 0

    core_alone.pip("uninstall", "--yes", "vllm-fl-reference")
    listed = json.loads(core_alone.run("vllm-fl", "list", "--json").stdout)
    assert listed["plugins"] == []

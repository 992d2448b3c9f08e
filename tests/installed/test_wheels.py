"""What users install: the built wheels in a bare environment, the sources out of sight."""

from __future__ import annotations

import json
import zipfile
from importlib import metadata
from typing import TYPE_CHECKING

import pytest
from bare_environment import PACKAGES
from bare_environment import Environment
from bare_environment import build

if TYPE_CHECKING:
    from pathlib import Path

CALL = """
import torch
from vllm_fl.dispatch import call_op
print(call_op("silu_and_mul", torch.ones(2, 8)).shape)
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("dist")
    built = [build(PACKAGES / name, folder) for name in ("vllm-fl-core", "vllm-fl-reference")]
    return {path.name.partition("-")[0]: path for path in built}


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
    files = zipfile.ZipFile(wheels["vllm_fl_core"]).namelist()
    assert {"vllm_fl/dispatch/known_wheels.json", "vllm_fl/dispatch/calling/fatal_errors.json"} <= set(files)


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
    installed = json.loads(core_alone.pip("list", "--format", "json"))
    assert {row["name"].lower() for row in installed} == {"pyyaml", "vllm-fl-core"}


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

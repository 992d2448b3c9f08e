"""What is released beside what users have: old cores, old plug-ins, the public API."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from packaging.version import Version

from tools.release.build import build
from tools.release.checks import check_alone
from tools.release.checks import check_api
from tools.release.checks import check_edges
from tools.release.packages import ReleaseError
from tools.release.packages import load_packages

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Scratch

DISCOVERY = "packages/vllm-fl-core/src/vllm_fl/dispatch/discovery.py"
MANAGER = "packages/vllm-fl-core/src/vllm_fl/dispatch/manager.py"
CUDA = "packages/vllm-plugin-cuda/src/vllm_fl_cuda/register_ops.py"
REFERENCE = "packages/vllm-fl-reference/src/vllm_fl_reference/register_ops.py"
NONE = "no plug-in that takes it is released yet"
VERSIONS = "PLUGIN_API_VERSION = 1\nOLDEST_PLUGIN_API_VERSION = 1\n"


def test_a_plugin_with_the_lowest_and_the_newest_core_that_it_takes(scratch: Scratch, tmp_path: Path) -> None:
    scratch.tag("core-v0.1.0", "core-v0.2.0", "core-v0.3.0", "core-v0.4.0", "core-v2.0.0", "cuda-v0.1.0")
    scratch.edit("packages/vllm-plugin-cuda/pyproject.toml", "vllm-fl-core>=0.1,<2", "vllm-fl-core>=0.2,<2")
    cuda = load_packages(scratch.root)["cuda"]
    lines = list(check_edges(cuda, build(cuda, tmp_path).wheel))
    assert [line.partition(": ")[0] for line in lines] == ["core-v0.2.0", "core-v0.4.0"]
    assert all(": loaded vllm-plugin-cuda, imported in " in line for line in lines)


def test_a_plugin_that_needs_what_its_lowest_core_lacks(scratch: Scratch, tmp_path: Path) -> None:
    scratch.tag("core-v0.1.0")
    scratch.edit(DISCOVERY, VERSIONS, "PLUGIN_API_VERSION = 2\nOLDEST_PLUGIN_API_VERSION = 1\n")
    scratch.edit(CUDA, "VLLM_FL_PLUGIN_API = 1", "VLLM_FL_PLUGIN_API = 2")
    scratch.tag("core-v0.2.0")
    packages = load_packages(scratch.root)
    wheel = build(packages["cuda"], tmp_path / "cuda").wheel
    core = build(packages["core"], tmp_path / "core").wheel
    assert check_alone(packages["cuda"], wheel, core).startswith("loaded vllm-plugin-cuda")
    with pytest.raises(ReleaseError, match=r"is incompatible: .* was written for plugin API 2"):
        list(check_edges(packages["cuda"], wheel))


def test_a_core_with_the_last_release_of_every_plugin(scratch: Scratch, tmp_path: Path) -> None:
    core = load_packages(scratch.root)["core"]
    assert list(check_edges(core, build(core, tmp_path / "1").wheel)) == [
        "no plug-in that takes it is released yet"
    ]
    scratch.tag("cuda-v0.1.0", "reference-v0.1.0")
    # The core may drop an API that no plug-in's last release uses any more.
    scratch.edit(DISCOVERY, VERSIONS, "PLUGIN_API_VERSION = 2\nOLDEST_PLUGIN_API_VERSION = 2\n")
    scratch.edit(CUDA, "VLLM_FL_PLUGIN_API = 1", "VLLM_FL_PLUGIN_API = 2")
    scratch.tag("cuda-v0.2.0")
    edges = check_edges(core, build(core, tmp_path / "2").wheel)
    with pytest.raises(ReleaseError, match="vllm-fl-reference is incompatible"):
        list(edges)
    scratch.edit(REFERENCE, "VLLM_FL_PLUGIN_API = 1", "VLLM_FL_PLUGIN_API = 2")
    scratch.tag("reference-v0.2.0")
    lines = list(check_edges(core, build(core, tmp_path / "3").wheel))
    assert [line.partition(": ")[0] for line in lines] == ["reference-v0.2.0", "cuda-v0.2.0"]


def test_a_core_is_not_tried_with_a_plugin_that_does_not_take_it(scratch: Scratch, tmp_path: Path) -> None:
    core = load_packages(scratch.root)["core"]
    scratch.tag("cuda-v0.1.0", "core-v2.0.0")
    assert list(check_edges(core, build(core, tmp_path).wheel)) == [
        "no plug-in that takes it is released yet"
    ]


def test_the_public_api(scratch: Scratch) -> None:
    core = load_packages(scratch.root)["core"]
    version = Version("0.2.0")
    scratch.tag("cuda-v0.1.0", "core-v0.2.0")
    assert check_api(core, version) == "no earlier release to compare with"
    scratch.tag("core-v0.1.0")
    optional = "def resolve_op(op_name: str, wanted: int = 0)"
    scratch.edit(MANAGER, "def resolve_op(op_name: str)", optional)
    assert check_api(core, version) == "0 announced breakages since core-v0.1.0"

    scratch.edit(MANAGER, optional, "def resolve_op(op_name: str, needed: int)")
    with pytest.raises(ReleaseError, match=r"breaks since core-v0\.1\.0(.|\n)*resolve_op\(needed\)"):
        check_api(core, version)
    (core.folder / "changelog.d" / "+resolve.breaking.md").write_text("`resolve_op` needs more.\n")
    assert check_api(core, version) == "1 announced breakages since core-v0.1.0"

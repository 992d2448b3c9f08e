"""What is built twice is the same, is described well, and has a bill of materials."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import TYPE_CHECKING

import pytest

from tools.release import checks
from tools.release.build import build
from tools.release.build import compare
from tools.release.build import find_built
from tools.release.packages import ReleaseError
from tools.release.packages import load_packages
from tools.release.sbom import write_sbom

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Scratch

PYPROJECT = "packages/vllm-plugin-cuda/pyproject.toml"


def test_the_same_commit_gives_the_same_bytes(scratch: Scratch, tmp_path: Path) -> None:
    cuda = load_packages(scratch.root)["cuda"]
    built = build(cuda, tmp_path / "1")
    assert checks.check_reproducible(cuda, built) == "the same bytes twice"
    scratch.edit("packages/vllm-plugin-cuda/README.md", "# vllm-plugin-cuda", "# vllm-plugin-cuda!")
    with pytest.raises(ReleaseError, match="other bytes"):
        compare(built, build(cuda, tmp_path / "2"))


def test_what_an_index_would_refuse_or_show_badly(scratch: Scratch, tmp_path: Path) -> None:
    cuda = load_packages(scratch.root)["cuda"]
    assert checks.check_files(cuda, build(cuda, tmp_path / "1")) == "contents, description and metadata"
    scratch.edit(PYPROJECT, 'keywords = ["vllm"', 'keywords = [] # ["vllm"')
    with pytest.raises(ReleaseError, match="does not have keywords data"):
        checks.check_files(cuda, build(cuda, tmp_path / "2"))
    scratch.edit(PYPROJECT, 'readme = "README.md"\n', "")
    with pytest.raises(ReleaseError, match="long_description"):
        checks.check_files(cuda, build(cuda, tmp_path / "3"))


def test_an_import_that_nothing_asks_for(scratch: Scratch) -> None:
    cuda = load_packages(scratch.root)["cuda"]
    assert checks.check_metadata(cuda) == "pyproject.toml and imports agree"
    scratch.edit(PYPROJECT, ', "torch>=2.9"]', "]")
    with pytest.raises(ReleaseError, match="DEP001 'torch' imported but missing"):
        checks.check_metadata(cuda)


def test_a_pyproject_that_is_none(scratch: Scratch) -> None:
    scratch.edit(PYPROJECT, 'requires-python = ">=3.11"', 'requires-python = ["3.11"]')
    with pytest.raises(ReleaseError, match="requires-python"):
        checks.check_metadata(load_packages(scratch.root)["cuda"])


def test_the_bill_of_materials(scratch: Scratch, tmp_path: Path) -> None:
    scratch.tag("cuda-v0.3.0")
    wheel = build(load_packages(scratch.root)["cuda"], tmp_path / "dist").wheel
    path = write_sbom(wheel, tmp_path)
    text = path.read_text()
    found = json.loads(text)
    subject = found["metadata"]["component"]
    assert subject["purl"] == "pkg:pypi/vllm-plugin-cuda@0.3.0"
    assert subject["hashes"] == [{"alg": "SHA-256", "content": sha256(wheel.read_bytes()).hexdigest()}]
    assert subject["licenses"] == [{"expression": "Apache-2.0"}]
    assert {component["name"] for component in found["components"]} == {"torch", "vllm-fl-core"}
    assert write_sbom(wheel, tmp_path).read_text() == text


def test_a_folder_with_more_than_one_build(tmp_path: Path) -> None:
    with pytest.raises(ReleaseError, match="must hold one source distribution and one wheel"):
        find_built(tmp_path)
    for name in ("a-1.tar.gz", "a-1-py3-none-any.whl"):
        (tmp_path / name).touch()
    assert find_built(tmp_path).wheel.name == "a-1-py3-none-any.whl"
    (tmp_path / "b-1-py3-none-any.whl").touch()
    with pytest.raises(ReleaseError, match=r"b-1-py3-none-any\.whl"):
        find_built(tmp_path)

"""The workflows: one for each package, alike, and none that can do more than it must."""

from __future__ import annotations

import fnmatch
import re
import shutil
from typing import TYPE_CHECKING
from typing import Any

import pytest
from ruamel.yaml import YAML

from tools.release.checks import check_workflows
from tools.release.packages import ROOT
from tools.release.packages import ReleaseError
from tools.release.packages import load_packages

if TYPE_CHECKING:
    from pathlib import Path

WORKFLOWS = ROOT / ".github" / "workflows"
PACKAGES = load_packages()


def read(name: str) -> Any:
    return YAML(typ="safe").load(WORKFLOWS / name)


def test_a_package_has_a_workflow_and_a_workflow_a_package() -> None:
    expected = {f"release-{short}.yml" for short in PACKAGES}
    assert {path.name for path in WORKFLOWS.glob("release-*.yml")} == expected
    assert read("ci.yml")["jobs"]["package"]["strategy"]["matrix"]["package"] == list(
        dict.fromkeys(["core", "reference", "flaggems", "cuda", "ascend", "template"])
    )


@pytest.mark.parametrize("short", PACKAGES)
def test_the_workflows_differ_in_the_package_alone(short: str) -> None:
    core = (WORKFLOWS / "release-core.yml").read_text()
    expected = core.replace("vllm-fl-core", PACKAGES[short].name).replace("core-v*", f"{short}-v*")
    expected = re.sub(r"\b(package: |release-|pypi-)core\b", rf"\g<1>{short}", expected)
    assert (WORKFLOWS / f"release-{short}.yml").read_text() == expected


@pytest.mark.parametrize("short", PACKAGES)
def test_a_release_is_started_by_its_own_tag_and_publishes_what_was_verified(short: str) -> None:
    workflow = read(f"release-{short}.yml")
    # YAML reads the key `on` as true.
    (pattern,) = workflow[True if True in workflow else "on"].pop("push")["tags"]
    assert workflow["permissions"] == {}
    for other in PACKAGES:
        assert fnmatch.fnmatchcase(f"{other}-v1.2.3", pattern) == (other == short)
    jobs = workflow["jobs"]
    assert (jobs["verify"]["needs"], jobs["publish"]["needs"]) == ("build", "verify")
    publish = jobs["publish"]
    assert publish["environment"] == f"pypi-{short}"
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["steps"][-1]["with"] == {"packages-dir": "dist", "attestations": True}
    assert "secrets." not in (WORKFLOWS / f"release-{short}.yml").read_text()


def test_one_pin_for_an_action() -> None:
    pins: dict[str, set[str]] = {}
    for path in [*WORKFLOWS.glob("*.yml"), *ROOT.glob("packages/*/.github/workflows/*.yml")]:
        for action, pin in re.findall(r"uses: ([\w/-]+)@(.+)", path.read_text()):
            assert re.fullmatch(r"[0-9a-f]{40} # v\d+\.\d+\.\d+", pin), f"{path.name}: {action}@{pin}"
            pins.setdefault(action, set()).add(pin)
    assert pins
    assert {action: found for action, found in pins.items() if len(found) > 1} == {}


def test_what_the_checks_refuse(tmp_path: Path) -> None:
    shutil.copytree(ROOT / ".github", tmp_path / ".github")
    assert check_workflows(tmp_path) == f"{len(list(WORKFLOWS.glob('*.yml')))} workflows"
    build = tmp_path / ".github" / "workflows" / "build.yml"
    right = build.read_text()
    build.write_text(right.replace('"$PACKAGE"', "${{ inputs.package }}"))
    with pytest.raises(ReleaseError, match="template-injection"):
        check_workflows(tmp_path)
    build.write_text(right.replace("runs-on:", "run-on:"))
    with pytest.raises(ReleaseError, match="run-on"):
        check_workflows(tmp_path)

"""What users install, line by line of the README's table: built wheels in bare environments.

``hatch run release:installed``. Every environment is new, sees no source, and takes the
wheels from a folder as pip takes them from an index. They share one torch, which is
installed once. There is no accelerator and no vendor's library: what needs one must say
so, and must not stand in the way of what does not.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING
from typing import Any

import pytest

from tools.release.build import build
from tools.release.checks import edges
from tools.release.environment import Environment
from tools.release.installed import check_imports
from tools.release.installed import check_plugins
from tools.release.packages import ROOT
from tools.release.packages import load_packages

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

PACKAGES = load_packages()
IMPLEMENTATIONS = {
    "reference": "reference.torch",
    "flaggems": "default.flagos",
    "cuda": "vendor.cuda",
    "ascend": "vendor.ascend",
    "template": "vendor.template",
}
#: Why an implementation is not available on a machine with a CPU and torch alone.
REASONS = {
    "flaggems": r"^flag_gems is not installed: to mend it: pip install --no-deps flag-gems==",
    "cuda": r"(is built for CPUs, not CUDA|sees no CUDA device)",
    "ascend": r"^torch_npu is not installed: .*; install the version that belongs to your torch",
    "template": r"VLLM_FL_TEMPLATE_ENABLED=1 lets it run",
}
SCENARIOS = {
    "core": [],
    "core + reference": ["reference"],
    "core + cuda": ["cuda"],
    "core + ascend": ["ascend"],
    "core + flaggems": ["flaggems"],
    "core + template": ["template"],
    "all": ["reference", "cuda", "ascend", "flaggems", "template"],
}
CALL = """
import torch
from vllm_fl.dispatch import call_op
print(tuple(call_op("silu_and_mul", torch.ones(2, 8)).shape))
"""


@dataclass(frozen=True)
class Installed:
    """An environment and the plug-ins in it, by their short names."""

    environment: Environment
    plugins: list[str]

    def check(self) -> None:
        """Check what importing costs, and that these plug-ins are there and no other."""
        packages = [PACKAGES[short] for short in self.plugins]
        check_imports(self.environment, packages)
        check_plugins(self.environment, packages)

    def backends(self) -> dict[str, Any]:
        """Return what ``vllm-fl list --probe`` says of each implementation."""
        found = self.environment.report("list", "--probe")["backends"]
        return {backend["impl_id"]: backend for backend in found}


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every wheel, each built from its source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    for package in PACKAGES.values():
        build(package, folder)
    return folder


@pytest.fixture(scope="session")
def torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The torch that the environments share, and what the core needs, in a folder."""
    folder = tmp_path_factory.mktemp("shared") / "site"
    pins = tomllib.loads((ROOT / "hatch.toml").read_text(encoding="utf-8"))["envs"]["default"]["dependencies"]
    (pin,) = (pin for pin in pins if pin.startswith("torch=="))
    Environment(folder.parent / "venv").pip("install", "--target", str(folder), pin, "numpy", "pyyaml")
    return folder


@pytest.fixture(scope="module", params=SCENARIOS)
def installed(
    request: pytest.FixtureRequest, dist: Path, torch: Path, tmp_path_factory: pytest.TempPathFactory
) -> Installed:
    """What ``pip install vllm-fl-core PLUGIN...`` makes."""
    plugins = SCENARIOS[request.param]
    environment = Environment(tmp_path_factory.mktemp("scenario") / "venv", shared=torch)
    names = [PACKAGES[short].name for short in ("core", *plugins)]
    # An untagged tree builds pre-releases.
    environment.pip("install", "--pre", "--no-index", "--find-links", str(dist), *names)
    return Installed(environment, plugins)


def test_every_line_of_the_table_is_a_scenario() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\| \[([\w-]+)\]\(\S*packages/", readme, re.MULTILINE)
    assert len(lines) > 1
    covered = {PACKAGES[short].name for short in ("core", *SCENARIOS["all"])}
    assert set(lines) <= covered
    assert covered == {package.name for package in PACKAGES.values()}
    assert sorted(plugins[0] for plugins in SCENARIOS.values() if len(plugins) == 1) == sorted(
        SCENARIOS["all"]
    )


def test_it_is_listed_whole_and_costs_nothing_to_import(installed: Installed) -> None:
    installed.check()


def test_what_is_not_available_says_why(installed: Installed) -> None:
    backends = installed.backends()
    assert sorted(backends) == sorted(IMPLEMENTATIONS[short] for short in installed.plugins)
    for short in installed.plugins:
        backend = backends[IMPLEMENTATIONS[short]]
        assert backend["distribution"] == PACKAGES[short].name
        assert backend["available"] == (short == "reference")
        if short != "reference":
            assert re.search(REASONS[short], backend["reason"]), backend["reason"]


def test_a_call_runs_or_says_what_is_missing(installed: Installed) -> None:
    done = installed.environment.run("python", "-c", CALL)
    if "reference" in installed.plugins:
        assert done.stdout == "(2, 4)\n", done.stderr
        explained = installed.environment.run("vllm-fl", "explain", "silu_and_mul")
        assert explained.stdout.startswith("silu_and_mul: reference.torch")
        return
    assert done.returncode == 1
    assert "NoImplementationError: nothing can run 'silu_and_mul'" in done.stderr
    assert "pip install vllm-fl-reference" in done.stderr
    for short in installed.plugins:
        (line,) = (line for line in done.stderr.splitlines() if f"  {IMPLEMENTATIONS[short]} " in line)
        assert re.search(REASONS[short].removeprefix("^"), line), line


def test_the_contract_is_kept(installed: Installed) -> None:
    # The whole tier where the reference is alone; beside others one operator will do.
    operators = ["--op", "rms_norm"] if len(installed.plugins) > 1 else []
    for short in installed.plugins:
        done = conformance(installed.environment, short, *operators)
        if short == "reference":
            _passed(done)
            continue
        # What cannot run here was not judged, and that is no pass: the reason is told.
        assert done.returncode == 1, done.stdout + done.stderr
        failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED ")]
        assert len(failed) == 1, done.stdout
        assert re.search(REASONS[short].removeprefix("^"), failed[0]), failed
        assert done.stdout.strip().splitlines()[-1].startswith("FAILED: ")


def conformance(environment: Environment, short: str, *more: str) -> subprocess.CompletedProcess[str]:
    which = ["--backend", IMPLEMENTATIONS[short], "--tier", "smoke"]
    return environment.run("vllm-fl", "conformance", *which, *more)


def _passed(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.match(r"passed: \d+ passed", done.stdout.strip().splitlines()[-1]), done.stdout


@pytest.mark.parametrize("short", ["core", "reference"])
def test_with_the_releases_that_users_have(dist: Path, torch: Path, tmp_path: Path, short: str) -> None:
    """The reference computes with the cores that it takes, and the core with the last reference."""
    package = PACKAGES[short]
    (wheel,) = dist.glob(f"{package.name.replace('-', '_')}-*.whl")
    found = [edge for edge in edges(package, wheel, tmp_path) if edge.plugin.short == "reference"]
    if not found:
        pytest.skip(f"nothing is released yet that {package.name} could be installed with")
    for edge in found:
        environment = Environment(tmp_path / f"venv-{edge.tag}", shared=torch)
        environment.pip("install", "--no-deps", str(edge.core), str(edge.wheel))
        assert environment.python(CALL) == "(2, 4)\n"
        _passed(conformance(environment, "reference"))


def test_a_removed_wheel_is_gone_and_the_others_stay(dist: Path, torch: Path, tmp_path: Path) -> None:
    every = SCENARIOS["all"]
    environment = Environment(tmp_path / "venv", shared=torch)
    wheels = [str(path) for path in dist.glob("*.whl")]
    environment.pip("install", "--no-deps", *wheels)
    for removed in ("cuda", "reference"):
        environment.pip("uninstall", "--yes", PACKAGES[removed].name)
        every = [short for short in every if short != removed]
        left = Installed(environment, every)
        left.check()
        assert sorted(left.backends()) == sorted(IMPLEMENTATIONS[short] for short in every)
        called = environment.run("python", "-c", CALL)
        assert (called.returncode == 0) == ("reference" in every), called.stderr
    assert "pip install vllm-fl-reference" in called.stderr

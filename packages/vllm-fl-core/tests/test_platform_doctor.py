"""What ``vllm-fl doctor`` says of vLLM's platform."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING
from typing import Any

import pytest

from vllm_fl.doctor.platform import platform
from vllm_fl.doctor.probe_process import Answer
from vllm_fl.platform import bind
from vllm_fl.platform import choice
from vllm_fl.platform import report
from vllm_fl.platform.names import VARIABLE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CHIP = """
from vllm_fl.platform.description import Chip, Quirk
CHIP = Chip(name="Acme", probe="{name}_chip:probe", device_type="cpu", torch_module="{name}_chip"{more})
def probe():
    return {answer}
"""


class Machine:
    """What is installed here, and what vLLM itself would say."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self._patch = folder, monkeypatch
        self.vllm: str | None = "0.32.0"
        self.claims: list[str] = []

    def describe(self, name: str, *, answer: str = "True", more: str = "") -> None:
        (self.folder / f"{name}_chip.py").write_text(CHIP.format(name=name, answer=answer, more=more))
        self.wheel(name, f"[vllm_fl.platforms]\n{name} = {name}_chip:CHIP\n")

    def wheel(self, name: str, entries: str) -> None:
        info = self.folder / f"{name}_wheel-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-wheel\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(entries)
        importlib.invalidate_caches()

    def findings(self, wanted: str = "") -> dict[str, list[str]]:
        """Return what the check finds, by status."""
        self._patch.setenv(VARIABLE, wanted)
        self._patch.setattr(choice, "claims", lambda: self.claims)
        self._patch.setattr(report, "_vllm_version", lambda: self.vllm)
        choice.chosen.cache_clear()
        answer = json.loads(json.dumps(report.report()))

        class Examination:
            def ask(self, question: str) -> Answer:
                assert question == "platform"
                return Answer(answer)

        found: dict[str, list[str]] = {}
        for one in platform(Examination()):  # type: ignore[arg-type]
            assert one.status == "pass" or (one.why and one.mend)
            found.setdefault(one.status, []).append(one.what)
        return found


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("VLLM_USE_V2_MODEL_RUNNER", "VLLM_TARGET_DEVICE"):
        monkeypatch.delenv(name, raising=False)
    yield Machine(tmp_path, monkeypatch)
    choice.chosen.cache_clear()


TITLE = "the platform 'acme' of acme-wheel 1.0 (acme_chip:CHIP)"
STREAMS = ", cuda_names=dict.fromkeys({names!r}, 'acme_chip:probe')"


def test_a_machine_that_nobody_serves(machine: Machine) -> None:
    found = machine.findings()
    assert found == {"warn": ["vLLM has no platform for this machine: no installed wheel describes a chip"]}
    machine.vllm = None
    assert machine.findings() == {"pass": ["no description is used: no installed wheel describes a chip"]}


def test_a_machine_that_vllm_serves(machine: Machine) -> None:
    machine.claims = ["cuda"]
    machine.describe("acme")
    (line,) = machine.findings()["pass"]
    assert line.startswith("no description is used: vLLM's own platform cuda serves this machine")
    machine.wheel("rival", "[vllm.platform_plugins]\nrival = rival:platform\n")
    (line,) = machine.findings()["pass"]
    assert line.startswith("no description is used: rival-wheel brings vLLM a platform")


def test_a_chip_that_is_not_here(machine: Machine) -> None:
    machine.describe("acme", answer="'there is no /dev/acme0'")
    found = machine.findings()
    assert found["pass"] == [f"{TITLE} is not used: there is no /dev/acme0"]
    assert found["warn"] == [
        "vLLM has no platform for this machine: no installed wheel describes this machine"
    ]
    assert machine.findings("acme")["fail"] == [
        f"VLLM_FL_PLATFORM=acme: {TITLE} cannot be used: there is no /dev/acme0"
    ]


def test_two_that_say_yes(machine: Machine) -> None:
    machine.describe("acme")
    machine.describe("bolt")
    (line,) = machine.findings()["fail"]
    assert line.startswith(TITLE)
    assert line.endswith(
        "both say that their chip is here: set VLLM_FL_PLATFORM=acme or VLLM_FL_PLATFORM=bolt"
    )


def test_a_description_that_is_wrong(machine: Machine) -> None:
    machine.describe("acme", more=", block_size='16'")
    warned = machine.findings()["warn"]
    assert warned[0] == (
        f"{TITLE} is not used: DescriptionError: field block_size: must be a positive number, not '16'"
    )


def test_a_description_field_by_field(machine: Machine) -> None:
    names = [name for name, entry in bind.CUDA_NAMES.items() if not entry.needs]
    quirks = "Quirk(name='late', first='0.26', reason='it is late', apply='a:b')"
    old = "Quirk(name='old', first='0.26', last='0.26', reason='it is old', apply='a:b')"
    more = f"{STREAMS.format(names=names)}, accelerator={{'Event': 'a:b', 'synchronize': 'a:b'}}"
    machine.describe("acme", more=f"{more}, runner='acme:Runner', quirks=({quirks}, {old})")
    found = machine.findings()
    assert set(found) == {"pass"}
    served, described, left, bound, runner, counted = found["pass"]
    assert served == f"{TITLE} is vLLM's: its probe says yes"
    assert described == (
        "described: name, probe, device_type, torch_module, cuda_names, accelerator, runner, quirks"
    )
    # What costs nothing where it is left out is not listed.
    assert "graph_wrapper (no device graphs" in left
    assert "dtypes" not in left
    assert bound.startswith("bound in a worker: torch.cuda.Stream, ")
    assert bound.endswith("torch.Event, torch.accelerator.synchronize")
    assert runner.startswith("vLLM's first model runner")
    assert counted == "2 overrides and quirks: runner acme:Runner; quirk late (it is late)"


@pytest.mark.parametrize("wrapper", [None, "acme:Graph"])
def test_what_vllm_calls_and_nobody_names(machine: Machine, wrapper: str | None) -> None:
    machine.describe("acme", more=f"{STREAMS.format(names=['Stream'])}, graph_wrapper={wrapper!r}")
    (line,) = machine.findings()["warn"]
    assert "torch.cuda.Event (waiting for those copies)" in line
    assert "torch.cuda.Stream" not in line
    assert ("torch.cuda.CUDAGraph" in line) is (wrapper is not None)


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("VLLM_USE_V2_MODEL_RUNNER", "1", "vLLM's second model runner"),
        ("VLLM_TARGET_DEVICE", "cpu", "vLLM takes its own platform for the CPU"),
    ],
)
def test_a_variable_of_vllm_that_leaves_the_path(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, said: str
) -> None:
    machine.describe("acme", more=STREAMS.format(names=list(bind.CUDA_NAMES)))
    monkeypatch.setenv(variable, value)
    (line,) = machine.findings()["warn"]
    assert line.startswith(f"{variable}={value}: {said}")


@pytest.mark.parametrize(
    ("vllm", "triton", "warns"), [("0.28.0", False, True), ("0.28.0", True, False), ("0.32.1", False, False)]
)
def test_an_older_vllm_needs_triton(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, vllm: str, triton: bool, warns: bool
) -> None:
    machine.describe("acme", more=STREAMS.format(names=list(bind.CUDA_NAMES)))
    machine.vllm = vllm
    monkeypatch.setattr(report, "find_spec", lambda name: object() if triton else None)
    assert ("warn" in machine.findings()) is warns


def test_the_command_asks_in_a_process_of_its_own(machine: Machine) -> None:
    """One that ends it, as a vendor's library may, is a finding."""
    machine.describe("acme", answer="__import__('os')._exit(3)")
    paths = [str(machine.folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "vllm_fl", "doctor", "--check", "platform", "--json"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), VARIABLE: ""},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    (check,) = json.loads(done.stdout)["checks"]
    (finding,) = check["findings"]
    assert finding["what"] == "a process that asked for vLLM's platform ended its process with exit status 3"


def test_every_field_has_a_state(machine: Machine) -> None:
    machine.describe("acme")
    machine.findings()
    found: Any = report.report()
    states = {name: state for name, _, state, _ in found["chip"]["fields"]}
    assert states["name"] == report.USED
    assert states["graph_wrapper"] == report.MISSED
    assert states["dtypes"] == report.DEFAULT

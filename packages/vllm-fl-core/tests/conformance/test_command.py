"""``vllm-fl conformance``: names, exit codes and reports; and the same as pytest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

import pytest

import vllm_fl
from vllm_fl.cli import main

PLUGIN = """
from vllm_fl.dispatch import Backend

class AcmeBackend(Backend):
    name = "acme"

    def is_available(self):
        import torch
        return True

    def silu_and_mul(self, x):
        import torch
        a, b = x.float().chunk(2, -1)
        return (torch.nn.functional.silu(a) * b * FACTOR).to(x.dtype).contiguous()

def register_builtins(registry):
    registry.register_backend(AcmeBackend())
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch, no_plugins):
    """Install the plug-in ``acme``; call it with what its results are multiplied by."""

    def install(factor):
        (tmp_path / "acme_plugin.py").write_text(PLUGIN.replace("FACTOR", factor))
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "acme_plugin", raising=False)
        monkeypatch.setenv("VLLM_FL_PLUGIN_MODULES", "acme_plugin")

    return install


@pytest.mark.parametrize("name", ["acme", "vendor.acme", "vendor:acme", "impl:vendor.acme", "vendor"])
def test_what_is_right_passes_under_each_of_its_names(plugin, name, capfd):
    plugin("1.0")
    assert main(["conformance", "--backend", name, "--device", "cpu"]) == 0
    out = capfd.readouterr().out
    assert "silu_and_mul" in out
    assert "passed: " in out


def test_what_is_wrong_is_exit_code_1_and_in_every_report(plugin, tmp_path, capfd):
    plugin("1.001")
    files = {kind: tmp_path / f"report.{kind}" for kind in ("json", "junit", "html")}
    flags = [text for kind, path in files.items() for text in (f"--{kind}", str(path))]
    assert main(["conformance", "--backend", "acme", "--device", "cpu", *flags]) == 1
    assert "FAILED silu_and_mul: float32 7x14: " in capfd.readouterr().out
    report = json.loads(files["json"].read_text())
    assert report["passed"] is False
    failed = {r["name"] for r in report["results"] if r["status"] == "failed"}
    assert "float32 7x14" in failed
    assert "bfloat16 7x14" not in failed
    assert report["environment"]["torch"]
    suites = {suite.get("name"): suite for suite in ElementTree.parse(files["junit"]).getroot()}
    assert int(suites["silu_and_mul"].get("failures")) == len(failed)
    page = files["html"].read_text()
    assert "float32 7x14" in page
    assert "<svg" in page
    assert "http" not in page.replace("http-equiv", "")
    assert "<script" not in page


@pytest.mark.parametrize(
    ("ends", "code", "why"),
    [
        ("__import__('signal').raise_signal(15)", 130, "interrupted in silu_and_mul: "),
        ("__import__('signal').raise_signal(2)", 130, "interrupted in silu_and_mul: "),
        (
            "exec('raise RuntimeError(\"CUDA error: device-side assert triggered\")')",
            1,
            "the device failed: RuntimeError: CUDA error",
        ),
    ],
    ids=["a time limit", "Ctrl-C", "a dead device"],
)
def test_a_run_that_ends_early_reports_what_has_run(plugin, tmp_path, capfd, ends, code, why):
    """Every report is written, and none says that it passed."""
    plugin(f"(1.0 if x.dtype is torch.float32 else {ends})")
    files = {kind: tmp_path / f"report.{kind}" for kind in ("json", "junit", "html")}
    flags = [text for kind, path in files.items() for text in (f"--{kind}", str(path))]
    assert main(["conformance", "--backend", "acme", "--device", "cpu", *flags]) == code
    assert f"FAILED run: to the end: {why}" in capfd.readouterr().out
    report = json.loads(files["json"].read_text())
    assert report["passed"] is False
    assert "passed" in {r["status"] for r in report["results"] if r["is_case"]}
    assert report["results"][-1]["note"].startswith(why)
    assert "steps did not end" in report["results"][-1]["note"]
    suites = {suite.get("name"): suite for suite in ElementTree.parse(files["junit"]).getroot()}
    assert suites["run"].get("failures") == "1"
    assert why in files["html"].read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "acne"], "Did you mean 'acme'?"),
        (["--backend", "acme", "--op", "silu_and_mull"], "Did you mean 'silu_and_mul'?"),
        (["--backend", "acme", "--device", "nowhere"], "there is no device 'nowhere'"),
        (["--backend", "acme", "--exceptions", "none.toml"], "No such file"),
        (["--backend", "acme", "--tier", "some"], "invalid choice"),
        ([], "--backend"),
    ],
)
def test_a_wrong_command_line_is_exit_code_2(plugin, capfd, arguments, message):
    plugin("1.0")
    assert main(["conformance", *arguments]) == 2
    assert message in capfd.readouterr().err


def test_larger_cases_are_reported_as_capped(plugin, capfd):
    plugin("1.0")
    assert main(["conformance", "--backend", "acme", "--device", "cpu", "--max-elements", "200"]) == 0
    assert "capped: silu_and_mul: " in capfd.readouterr().out


def test_an_operator_without_cases_is_said_and_one_with_its_own_is_judged(tmp_path, monkeypatch, capfd):
    package = tmp_path / "acme_own"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from vllm_fl.dispatch import BackendImplKind, OpImpl, operator\n"
        "@operator(fake=lambda torch, x: torch.empty_like(x))\n"
        "def doubled(self, x: 'Tensor') -> 'Tensor':\n    'Return 2 x.'\n"
        "@operator(fake=lambda torch, x: torch.empty_like(x))\n"
        "def tripled(self, x: 'Tensor') -> 'Tensor':\n    'Return 3 x.'\n"
        "def register_builtins(registry):\n"
        "    registry.declare(doubled)\n    registry.declare(tripled)\n"
        "    for name, factor in (('doubled', 2), ('tripled', 3)):\n"
        "        registry.register_impl(OpImpl(name, 'vendor.acme', BackendImplKind.VENDOR,\n"
        "            lambda x, factor=factor: x * factor, vendor='acme'))\n"
    )
    (package / "conformance_cases.py").write_text(
        "import torch\n"
        "from vllm_fl.conformance.case import Case, Suite, Tier\n"
        "from vllm_fl.conformance.judge import BASE, Expected, compare, wide\n"
        "F32 = torch.float32\n"
        "def expect(given):\n"
        "    exact = wide(given['x']) * 2\n"
        "    return Expected((exact.float(),), lambda outs: compare(outs[0], exact, F32, BASE[F32]))\n"
        "def case(rows):\n"
        "    make = lambda: {'x': torch.ones(rows, 4)}\n"
        "    return Case('doubled', f'float32 {rows} rows', F32, make, expect, rows * 4, Tier.SMOKE)\n"
        "SUITES = [Suite('doubled', lambda: [case(3)], lambda rows: [case(rows)], ('x',))]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("VLLM_FL_PLUGIN_MODULES", "acme_own")
    monkeypatch.setattr("vllm_fl.dispatch.discovery._installed", list)
    file = tmp_path / "r.json"
    main(["conformance", "--backend", "acme", "--device", "cpu", "--json", str(file)])
    found = {(r["op"], r["name"]): r["status"] for r in json.loads(file.read_text())["results"]}
    assert found["doubled", "float32 3 rows"] == "passed"
    assert "not run: tripled: every case: there are no conformance cases" in capfd.readouterr().out


def test_as_pytest(tmp_path):
    """From a folder of its own, as a vendor runs it: a test for each case, and a failure for each fault."""
    (tmp_path / "acme_plugin.py").write_text(PLUGIN.replace("FACTOR", "1.001"))
    path = os.pathsep.join([str(tmp_path), str(Path(vllm_fl.__file__).parents[1])])
    command = [sys.executable, "-m", "pytest", "-q"]
    if not any(entry.value.startswith("vllm_fl.") for entry in metadata.entry_points(group="pytest11")):
        command += ["-p", "vllm_fl.conformance.pytest_options"]  # from a source tree, not installed
    command += ["--pyargs", "vllm_fl.conformance", "--vllm-fl-backend", "acme", "--vllm-fl-device", "cpu"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "VLLM_FL_PLUGIN_MODULES": "acme_plugin"},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "test_conformance[silu_and_mul: float32 7x14]" in done.stdout
    assert " passed" in done.stdout

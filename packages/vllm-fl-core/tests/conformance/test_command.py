"""``vllm-fl conformance``: names, exit codes and reports; and the same as pytest."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

import pytest

import vllm_fl
from vllm_fl.cli import main

OPTIONS = "vllm_fl.conformance.pytest_options"

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
def test_a_run_that_ends_early_reports_what_has_run(plugin, tmp_path, capfd, request, ends, code, why):
    """Every report is written, and none says that it passed."""
    # A shell's background job ignores it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
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
        (["--backend", "acme", "--waivers", "none.toml"], "No such file"),
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


def test_a_plugin_that_waits_for_a_missing_library_is_one_clear_line(
    tmp_path, monkeypatch, no_plugins, capfd
):
    text = PLUGIN.replace("FACTOR", "1.0").replace(
        "        import torch\n        return True",
        "        import time\n        try:\n            import torch\n"
        "        except ImportError:\n            time.sleep(3600)\n        return True",
    )
    (tmp_path / "acme_plugin.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("VLLM_FL_PLUGIN_MODULES", "acme_plugin")
    monkeypatch.setattr("vllm_fl.conformance.checklist._SECONDS", 8)
    assert main(["conformance", "--backend", "acme", "--device", "cpu", "--max-elements", "20"]) == 1
    (line,) = [line for line in capfd.readouterr().out.splitlines() if line.startswith("FAILED checklist")]
    assert line == (
        "FAILED checklist: missing libraries become reasons: a process without its library did not register "
        "acme_plugin within 8 seconds: its import, or an is_available, waits for something that is not there"
    )


def pytest_of_a_vendor(folder, *arguments):
    """Run pytest in a folder with the plug-in ``acme``, whose results are wrong in float32, beside it."""
    (folder / "acme_plugin.py").write_text(PLUGIN.replace("FACTOR", "1.001"))
    path = os.pathsep.join([str(folder), str(Path(vllm_fl.__file__).parents[1])])
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "VLLM_FL_PLUGIN_MODULES": "acme_plugin"},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )


KIT = ("--pyargs", "vllm_fl.conformance", "--vllm-fl-backend", "acme", "--vllm-fl-device", "cpu")


@pytest.mark.parametrize(
    ("conftest", "arguments"),
    [("", ("-p", OPTIONS)), (f"pytest_plugins = [{OPTIONS!r}]", ())],
    ids=["by -p", "by a conftest.py"],
)
def test_as_pytest(tmp_path, conftest, arguments):
    """From a folder of its own, as a vendor runs it: a test for each case, and a failure for each fault."""
    (tmp_path / "conftest.py").write_text(conftest)
    done = pytest_of_a_vendor(tmp_path, *arguments, *KIT, "-k", "7x14")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "test_conformance[silu_and_mul: float32 7x14]" in done.stdout
    assert "test_conformance[silu_and_mul: bfloat16 7x14]" not in done.stdout
    assert " passed" in done.stdout


def test_no_other_pytest_knows_of_the_kit(tmp_path):
    """It is in the wheel of everybody; its options are for who asks for them."""
    try:
        installed = metadata.distribution("vllm-fl-core")
    except metadata.PackageNotFoundError:
        pytest.skip("the wheel is not installed")
    assert not installed.entry_points.select(group="pytest11")
    done = pytest_of_a_vendor(tmp_path, *KIT)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "unrecognized arguments: --vllm-fl-backend" in done.stderr


def test_without_a_backend_it_says_what_to_add(tmp_path):
    done = pytest_of_a_vendor(tmp_path, "--pyargs", "vllm_fl.conformance")
    assert done.returncode == pytest.ExitCode.INTERRUPTED
    assert f"say which backend: -p {OPTIONS} --vllm-fl-backend NAME" in done.stdout

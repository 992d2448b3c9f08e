"""A chip that vLLM does not know: the CPU dressed up as one, by the description in the sample's wheel.

The wheel is built and installed as pip does it. vLLM's own platform for the CPU has no part
in these runs: each of them says which platform, which runner and which kernels served.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any

import pytest
from engine import run_vllm
from engine import serve

if TYPE_CHECKING:
    from checkpoints import Checkpoint
    from engine import Result
    from evidence import Evidence

_SAMPLE = Path(__file__).parents[2] / "packages" / "vllm-plugin-template"

#: The CPU's memory is the host's, which others use too.
_ENGINE = {"kv_cache_memory_bytes": 1 << 26, "gpu_memory_utilization": 0.05}

_WHO = """
def report(llm):
    from vllm.platforms import current_platform
    return {"platform": type(current_platform).__name__, "enum": current_platform._enum.name}
"""


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sample's wheel, installed."""
    folder = tmp_path_factory.mktemp("chip")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=_SAMPLE, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    target = folder / "site"
    install = ["install", "-q", "--no-deps", "--no-index", "--target", str(target), str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", *install], check=True, capture_output=True)
    return target


@pytest.fixture
def chip(site: Path, evidence: Evidence) -> dict[str, str]:
    """The environment of a run on the chip."""
    return dict(
        evidence.env(PYTHONPATH=_before(site), VLLM_FL_PLATFORM="template", VLLM_FL_TEMPLATE_ENABLED="1")
    )


def _before(site: Path) -> str:
    return os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])


def _on_the_chip(
    result: Result, checkpoint: Checkpoint, evidence: Evidence, *, compiled: str = "off"
) -> None:
    """Check that the chip's platform served, and the tokens."""
    assert result.checked().tokens == checkpoint.golden
    assert result.report == {"platform": "ChipPlatform", "enum": "OOT"}
    assert "vllm-fl: platform Template CPU by vllm-plugin-template" in result.log
    assert f"; V1 runner; compiled {compiled}; graphs off; 22 names bound, 0 overrides" in result.log
    assert evidence.layers()["Attention", "vendor.template", "plain"] >= 1


def _served(evidence: Evidence) -> set[str]:
    return {impl_id for _, impl_id in evidence.calls()}


def test_dense(qwen3: Checkpoint, chip: dict[str, str], evidence: Evidence) -> None:
    result = run_vllm(qwen3, env=chip, engine_args=_ENGINE, setup=_WHO)
    _on_the_chip(result, qwen3, evidence)
    assert _served(evidence) == {"vendor.template"}
    assert evidence.layers()["RMSNorm", "vendor.template", "guard"] == 9


def test_experts_with_the_engine_in_a_process_of_its_own(
    qwen3_moe: Checkpoint, chip: dict[str, str], evidence: Evidence
) -> None:
    result = run_vllm(qwen3_moe, env=chip, engine_args=_ENGINE, setup=_WHO, in_process=False)
    _on_the_chip(result, qwen3_moe, evidence)
    # One layer of the two has experts; the sample has no routing, which the reference serves.
    calls = evidence.calls()
    assert calls["fused_experts", "vendor.template"] >= 16
    assert calls["topk_softmax", "reference.torch"] >= 16


@pytest.mark.long
def test_two_ranks(qwen3: Checkpoint, chip: dict[str, str], evidence: Evidence) -> None:
    arguments = {**_ENGINE, "tensor_parallel_size": 2}
    result = run_vllm(qwen3, env=chip, engine_args=arguments, setup=_WHO, in_process=False)
    _on_the_chip(result, qwen3, evidence)
    first, second = evidence.processes
    assert first["fingerprint"] == second["fingerprint"]
    assert "vllm-fl: rank 1 of 2 agrees" in result.log
    assert _served(evidence) == {"vendor.template"}


@pytest.mark.long
@pytest.mark.parametrize("custom_ops", [[], ["all"]], ids=["default", "all"])
def test_compiled(qwen3: Checkpoint, chip: dict[str, str], evidence: Evidence, custom_ops: list[str]) -> None:
    """By Inductor; with every custom operator on, vLLM itself would fuse some for chips that it knows."""
    arguments: dict[str, Any] = {**_ENGINE, "compilation_config": {"custom_ops": custom_ops}}
    env = {**chip, "VLLM_FL_PREFER": "vendor"}
    result = run_vllm(qwen3, mode="compile", env=env, engine_args=arguments, setup=_WHO)
    _on_the_chip(result, qwen3, evidence, compiled="on")
    assert {impl_id for _, impl_id, _ in evidence.layers()} == {"vendor.template"}
    assert any(evidence.graphs().values())


@pytest.mark.long
def test_the_server(qwen3: Checkpoint, chip: dict[str, str], evidence: Evidence) -> None:
    with serve(qwen3, env=chip, engine_args=_ENGINE) as server:
        answers = tuple(server.complete(prompt) for prompt in qwen3.prompts)
    assert answers == qwen3.golden
    assert "vllm-fl: platform Template CPU by vllm-plugin-template" in server.log
    assert _served(evidence) == {"vendor.template"}


_HASH = "from vllm.config import VllmConfig; print(VllmConfig().compute_hash())"


def test_what_is_compiled_for_one_chip_is_not_for_another(site: Path, tmp_path: Path) -> None:
    """vLLM's own key has neither the platform nor the type of the device in it."""
    (tmp_path / "other_chip.py").write_text(
        "from dataclasses import fields\n"
        "from vllm_fl.platform.description import Chip\n"
        "from vllm_fl_template.chip import CHIP as SAME\n"
        "values = {field.name: getattr(SAME, field.name) for field in fields(Chip)}\n"
        "CHIP = Chip(**{**values, 'name': 'Other'})\n"
    )
    _install(tmp_path, "other", "other_chip:CHIP")
    path = os.pathsep.join([str(tmp_path), _before(site)])
    keys = []
    for name in ("template", "template", "other"):
        done = _ask(_HASH, PYTHONPATH=path, VLLM_FL_PLATFORM=name, VLLM_FL_TEMPLATE_ENABLED="1")
        assert done.returncode == 0, done.stderr
        keys.append(done.stdout.splitlines()[-1])
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.long
def test_a_chip_without_attention(qwen3: Checkpoint, chip: dict[str, str]) -> None:
    result = run_vllm(qwen3, env={**chip, "VLLM_FL_DENY_VENDORS": "template"}, engine_args=_ENGINE)
    assert result.returncode != 0
    assert "NotImplementedError: no installed wheel serves attention_backend on Template CPU" in result.log


# -- what becomes of vLLM where it is not active ----------------------------------------------

_ASK = """
import json, os, sys
import vllm
from vllm.platforms import current_platform
of_platform = sorted(name for name in sys.modules if name.startswith("vllm_fl.platform"))
print(json.dumps([type(current_platform).__name__, of_platform, os.environ.get("VLLM_FL_PLATFORM")]))
"""


def _install(folder: Path, name: str, chip: str) -> None:
    info = folder / f"{name}_wheel-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-wheel\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[vllm_fl.platforms]\n{name} = {chip}\n")


def _ask(code: str = _ASK, **env: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, env={**inherited, **env}, capture_output=True, text=True, timeout=600, check=False
    )


def _asked(**env: str) -> list[Any]:
    done = _ask(**env)
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_without_a_description_vllm_is_as_before() -> None:
    platform, imported, handed_on = _asked()
    assert platform == "CpuPlatform"
    assert imported == ["vllm_fl.platform", "vllm_fl.platform.names"]
    assert handed_on is None


def test_a_description_makes_way_for_vllms_own_platform(site: Path) -> None:
    platform, imported, handed_on = _asked(PYTHONPATH=_before(site), VLLM_FL_TEMPLATE_ENABLED="1")
    assert platform == "CpuPlatform"
    loaded = ("", ".choice", ".description", ".errors", ".names")
    assert imported == [f"vllm_fl.platform{name}" for name in loaded]
    # Its children do not ask again.
    assert handed_on == "none"


def test_a_named_platform_that_is_not_here_stops_vllm(site: Path) -> None:
    """vLLM swallows what the entry point raises, and would serve on another platform."""
    done = _ask(PYTHONPATH=_before(site), VLLM_FL_PLATFORM="template")
    assert done.returncode == 1
    assert "PlatformError: vllm-fl: VLLM_FL_PLATFORM=template: the platform 'template' of " in done.stderr
    assert "cannot be used: there is no /dev/template0" in done.stderr


_HOSTILE = """
from vllm_fl.platform.description import Chip
CHIP = Chip(name="Acme", probe="acme:probe", device_type="cpu", torch_module="{module}")
def probe(): return True
def set_device(device): pass
manual_seed_all = 3
"""


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("acme", "field torch_module: acme has no device_count, manual_seed_all"),
        ("torch.acme", "field torch_module: torch.acme cannot be loaded: there is no module torch.acme"),
    ],
)
def test_a_torch_module_that_vllm_cannot_use(tmp_path: Path, module: str, said: str) -> None:
    (tmp_path / "acme.py").write_text(_HOSTILE.format(module=module))
    _install(tmp_path, "acme", "acme:CHIP")
    done = _ask(PYTHONPATH=_before(tmp_path), VLLM_FL_PLATFORM="acme")
    assert done.returncode == 1
    error = "vllm_fl.platform.errors.PlatformError: the platform 'acme' of acme-wheel 1.0 (acme:CHIP): "
    assert done.stderr.splitlines()[-1] == f"{error}{said}"

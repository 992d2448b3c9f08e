"""What a description does to vLLM's configuration and to a worker's process, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING
from typing import Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

_CHIP = """
from vllm_fl.platform.description import Chip, Quirk

def probe(): return True
def device_count(): return 1
def set_device(device): pass
def manual_seed_all(seed): pass

def seqs(config): config.scheduler_config.max_num_seqs = 3
def never(config): raise AssertionError("a quirk of another version")

CHIP = Chip(name="Acme", probe="acme:probe", device_type="cpu", torch_module="acme", dispatch_key="CPU"{more})
"""


def _run(folder: Path, code: str, more: str, **env: str) -> subprocess.CompletedProcess[str]:
    (folder / "acme.py").write_text(_CHIP.format(more=more))
    info = folder / "acme_wheel-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-wheel\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm_fl.platforms]\nacme = acme:CHIP\n")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**inherited, "PYTHONPATH": path, "VLLM_FL_PLATFORM": "acme", **env},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


_SETTINGS = """
import json, logging
logging.basicConfig(level=logging.INFO)
from vllm.config import CompilationConfig, VllmConfig
from vllm.config.compilation import PassConfig
asked = CompilationConfig(mode=3, pass_config=PassConfig(fuse_norm_quant=True))
config = VllmConfig(compilation_config=asked)
compilation = config.compilation_config
print(json.dumps({
    "worker": config.parallel_config.worker_cls,
    "custom all-reduce off": config.parallel_config.disable_custom_all_reduce,
    "mode": compilation.mode.name, "graphs": compilation.cudagraph_mode.name,
    "custom_ops": compilation.custom_ops, "sizes": compilation.compile_sizes,
    "fusions": [n for n, on in vars(compilation.pass_config).items() if n[:5] in ("fuse_", "enabl") and on],
    "seqs": config.scheduler_config.max_num_seqs, "more": sorted(config.additional_config),
    "runner": config.use_v2_model_runner,
}))
"""

_QUIRKS = (
    "Quirk(name='few', first='0.26', reason='it is a small chip', apply='acme:seqs'), "
    "Quirk(name='old', first='0.26', last='0.26', reason='it was slow', apply='acme:never')"
)


def _settings(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_chip_without_compiler_and_graphs(tmp_path: Path) -> None:
    """What the user asked for and the chip has not is left out, and said."""
    done = _run(tmp_path, _SETTINGS, f", worker='acme:Worker', quirks=({_QUIRKS})")
    assert _settings(done) == {
        "worker": "acme.Worker",
        "custom all-reduce off": True,
        "mode": "NONE",
        "graphs": "NONE",
        # Not "none", which leaves every layer to a compiler.
        "custom_ops": ["all"],
        "sizes": [],
        "fusions": [],
        "seqs": 3,
        "more": ["vllm_fl_platform"],
        "runner": False,
    }
    said = done.stdout + done.stderr
    assert "vllm-fl: Acme has no fuse_norm_quant of vLLM's; left out" in said
    assert "vllm-fl: quirk few of the platform: it is a small chip" in said
    assert (
        "vllm-fl: platform Acme by acme-wheel 1.0; V1 runner; compiled off; graphs off; 0 names bound" in said
    )
    # The worker and both quirks.
    assert "3 overrides" in said


def test_a_chip_with_a_compiler(tmp_path: Path) -> None:
    found = _settings(_run(tmp_path, _SETTINGS, ", compile_backend='inductor'"))
    assert (found["mode"], found["custom_ops"], found["fusions"]) == ("VLLM_COMPILE", ["none"], [])
    assert found["worker"] == "vllm_fl.platform.worker.ChipWorker"


_BOUND = """
import torch
before = torch.accelerator.synchronize
from vllm_fl.platform import worker
from vllm.utils.torch_utils import current_stream
print(torch.cuda.Stream.__name__, torch.Event.__name__, torch.accelerator.synchronize is before)
print(type(torch.cuda.current_stream).__name__, torch.cuda.current_stream(), current_stream())
"""


def test_names_are_bound_in_a_worker(tmp_path: Path) -> None:
    more = (
        ", cuda_names={'Stream': 'collections:Counter', 'current_stream': 'acme:current_stream'}"
        ", accelerator={'Event': 'collections:OrderedDict'})\ndef current_stream(): return 'acme stream'\n("
    )
    done = _run(tmp_path, _BOUND, more)
    assert done.returncode == 0, done.stderr
    # Classes as they are; functions as what Dynamo does not take for torch's own.
    assert done.stdout.splitlines()[-2:] == ["Counter OrderedDict True", "partial acme stream acme stream"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            ", cuda_names={'CUDAGraphs': 'acme:probe'}",
            "field cuda_names: torch.cuda has no CUDAGraphs. Did you mean 'CUDAGraph'?",
        ),
        (
            ", accelerator={'synchronize': 'acme:wait'}",
            "field accelerator: synchronize: acme:wait cannot be loaded: AttributeError: module 'acme'",
        ),
    ],
)
def test_a_name_that_cannot_be_bound(tmp_path: Path, more: str, said: str) -> None:
    done = _run(tmp_path, "import vllm_fl.platform.worker", more)
    assert done.returncode == 1
    assert f"PlatformError: the platform 'acme' of acme-wheel 1.0 (acme:CHIP): {said}" in done.stderr


_WARM_UP = """
from vllm_fl.platform.worker import _guarded

def fails(error):
    def warm_up(worker):
        raise error
    return _guarded(warm_up)

fails(ModuleNotFoundError("No module named 'flashinfer'", name="flashinfer"))(None)
try:
    fails(MemoryError("no more"))(None)
except MemoryError as error:
    print("raised", error)
"""


def test_a_warm_up_that_fails(tmp_path: Path) -> None:
    """What is for other chips is left out; a chip without memory is not hidden."""
    done = _run(tmp_path, _WARM_UP, "")
    assert done.returncode == 0, done.stderr
    assert "vLLM's warm-up of kernels ends with flashinfer is not installed" in done.stderr + done.stdout
    assert done.stdout.splitlines()[-1] == "raised no more"


_WEAK = """
import gc, weakref, torch
from vllm_fl.platform.schemas import define_weak_reference
define_weak_reference("CPU")
define_weak_reference("CPU")
whole = torch.arange(12.0).reshape(3, 4)
part = whole[1:, ::2]
weak = torch.ops._C.weak_ref_tensor(part)
assert weak.data_ptr() == part.data_ptr() and weak.stride() == part.stride() and torch.equal(weak, part)
storage = weakref.ref(whole.untyped_storage())
held = torch._C._storage_Use_Count(whole.untyped_storage()._cdata)
del weak
print(held, torch._C._storage_Use_Count(whole.untyped_storage()._cdata))
"""


def test_a_weak_reference_keeps_no_memory(tmp_path: Path) -> None:
    done = _run(tmp_path, _WEAK, "")
    assert done.returncode == 0, done.stderr
    with_it, without = done.stdout.split()[-2:]
    assert with_it == without

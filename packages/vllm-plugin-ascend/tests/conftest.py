"""An emulated Ascend card, where this is the repository and torch_npu is installed."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parent))

if find_spec("torch_npu"):
    # Else torch loads it by itself, and cannot be imported where there is no CANN.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

#: What these import is no dependency of the wheel.
_NEEDS = {
    "test_ascend_operators.py": ("torch",),
    "test_ascend_attention.py": ("torch", "vllm"),
}
collect_ignore = [name for name, modules in _NEEDS.items() if not all(map(find_spec, modules))]

_EMULATION = Path(__file__).parents[3] / "tests" / "emulation" / "npu"
if _EMULATION.is_dir():
    sys.path.insert(0, str(_EMULATION))


def _lacks() -> str | None:
    if not _EMULATION.is_dir():
        return "needs tests/emulation/npu of the repository"
    if find_spec("torch_npu") is None:
        return "needs torch_npu"
    import shutil

    return None if shutil.which("cc") or shutil.which("gcc") else "needs a C compiler"


@pytest.fixture(scope="session")
def cann_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the stand-in CANN libraries."""
    reason = _lacks()
    if reason:
        pytest.skip(reason)
    import cann

    return cann.build(tmp_path_factory.mktemp("cann"))


@pytest.fixture(scope="session")
def npu(cann_folder: Path) -> SimpleNamespace:
    """The emulated card in this process: simulated kernels, and how often each ran."""
    import cann

    os.environ["VLLM_FL_ASCEND_EMULATED"] = "1"
    cann.load(cann_folder)
    import npu_attention_kernels
    import npu_kernels

    from vllm_fl_ascend import _availability

    _availability.emulated.cache_clear()
    _availability.device_type.cache_clear()
    npu_kernels.register()
    return SimpleNamespace(calls=npu_kernels.calls, attention_dtypes=npu_attention_kernels.attention_dtypes)


@pytest.fixture
def backend(npu: SimpleNamespace):
    """The backend, on the emulated card."""
    from vllm_fl_ascend.ascend import AscendBackend

    npu.calls.clear()
    return AscendBackend()

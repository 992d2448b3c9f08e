"""An emulated card for vLLM's processes, and the checkpoints of tests/e2e."""

from __future__ import annotations

import os
import shutil
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Mapping

    from checkpoints import Checkpoint

_HERE = Path(__file__).parent
sys.path.insert(0, str(_HERE))


def _lacks() -> str | None:
    for module in ("vllm", "torch_npu"):
        if find_spec(module) is None:
            return f"needs {module}"
    try:
        metadata.distribution("vllm-plugin-ascend")
    except metadata.PackageNotFoundError:
        return "needs the installed vllm-plugin-ascend"
    return None if shutil.which("cc") or shutil.which("gcc") else "needs a C compiler"


@pytest.fixture(scope="session")
def card(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """The variables that give a process an emulated card."""
    reason = _lacks()
    if reason:
        pytest.skip(reason)
    import cann

    folder = cann.build(tmp_path_factory.mktemp("cann"))
    # The checkpoints are made in this process, and transformers imports torch_npu where it is installed.
    cann.load(folder)
    path = os.pathsep.join([str(_HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {
        **cann.environment(folder),
        "VLLM_FL_ASCEND_EMULATED": "1",
        "VLLM_FL_PLUGIN_MODULES": "emulated_npu",
        "PYTHONPATH": path,
    }


@pytest.fixture(scope="session")
def make_checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, card: Mapping[str, str]
) -> Callable[[str], Checkpoint]:
    """Return a function from a recipe's name to its checkpoint; see tests/e2e."""
    from checkpoints import build

    cache = getattr(request.config, "cache", None)
    root = cache.mkdir("vllm-fl-checkpoints") if cache else tmp_path_factory.mktemp("checkpoints")
    return lambda name: build(name, root)

"""What runs FlagGems' kernels needs a process of its own; see ``test_flaggems_kernels.py``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import vllm_fl
import vllm_fl_flaggems

sys.path.insert(0, str(Path(__file__).parent))

# Triton decides when it is imported whether it interprets, and the emulation of a
# device stays in the process: it must not reach other tests.
collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]


@pytest.fixture
def python():
    """Run code in a new interpreter: ``python(code, *paths, VARIABLE=value)``; return what it prints."""
    packages = [Path(module.__file__).parents[1] for module in (vllm_fl, vllm_fl_flaggems)]

    def run(code: str, *paths: Path, **variables: str) -> str:
        inherited = {name: v for name, v in os.environ.items() if not name.startswith(("VLLM_", "GEMS_"))}
        path = os.pathsep.join([*map(str, [*paths, *packages]), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**inherited, "PYTHONPATH": path, **variables},
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        assert done.returncode == 0, f"ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout.strip()

    return run

"""Make this directory's helpers importable, whatever pytest's import mode."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
# Which library of vLLM's kernels a process has, is chosen as in the reference's own tests.
sys.path.insert(1, str(Path(__file__).parents[2] / "vllm-fl-reference" / "tests"))

# What needs a process with a certain one: test_cuda_conformance.py.
collect_ignore = [] if "VLLM_FL_TEST_CPU_LIBRARY" in os.environ else ["compiled"]

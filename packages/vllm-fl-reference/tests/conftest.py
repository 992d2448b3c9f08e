"""Make this directory's helpers importable, whatever pytest's import mode."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

# What compares with compiled kernels needs a process of its own: test_reference_kernels.py.
collect_ignore = [] if "VLLM_FL_TEST_CPU_LIBRARY" in os.environ else ["compiled"]

"""Load the library of kernels that the environment names, before any test here asks vLLM for one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import cpu_libraries  # found on the path above

cpu_libraries.load(os.environ[cpu_libraries.VARIABLE])

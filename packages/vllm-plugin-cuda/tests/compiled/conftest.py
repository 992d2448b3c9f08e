"""Load the library of kernels that the environment names, before any test here asks vLLM for one."""

from __future__ import annotations

import os

import cpu_libraries

cpu_libraries.load(os.environ[cpu_libraries.VARIABLE])

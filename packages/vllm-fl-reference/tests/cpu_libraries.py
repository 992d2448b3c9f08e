"""The libraries of kernels in vLLM's CPU build, and how a process gets one of them.

For x86 the wheel brings one for AVX2, one for AVX512 and one for AVX512 with BF16, and
vLLM loads the one that the processor is best at. Two of them end a process, and so does
one whose instructions the processor lacks: each is tested in a process of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

#: The variable that names the library for a process of tests.
VARIABLE = "VLLM_FL_TEST_CPU_LIBRARY"
LIBRARIES = ("_C_AVX2", "_C_AVX512", "_C")


def unusable(library: str) -> str:
    """Say why a library cannot be tested here; ``""`` if it can."""
    from vllm.platforms import CpuArchEnum
    from vllm.platforms import current_platform

    spec = find_spec("vllm")
    if not current_platform.is_cpu() or spec is None:
        return "this vLLM is no build for CPUs"
    folder = Path(spec.submodule_search_locations[0])
    if not any(folder.glob(f"{library}.*so")):
        return f"this vLLM brings no {library}"
    if current_platform.get_cpu_architecture() is not CpuArchEnum.X86:
        return ""  # there is one, and vLLM loads it without a question
    needs = {
        "_C_AVX2": {"AVX2": torch.cpu._is_avx2_supported},
        "_C_AVX512": {"AVX512": torch.cpu._is_avx512_supported},
        "_C": {"AVX512": torch.cpu._is_avx512_supported, "AVX512-BF16": torch.cpu._is_avx512_bf16_supported},
    }
    lacks = [name for name, is_supported in needs[library].items() if not is_supported()]
    return f"{library} needs {' and '.join(lacks)}, which this processor lacks" if lacks else ""


def load(library: str) -> None:
    """Let vLLM load one library in this process, which must not have loaded another."""
    # What vLLM asks the processor before it chooses.
    torch.cpu._is_avx512_supported = lambda: library != "_C_AVX2"
    torch.cpu._is_avx512_bf16_supported = lambda: library == "_C"
    # A processor with AMX has AVX512-BF16 too: the other libraries have no attention for it.
    if library != "_C":
        torch.cpu._is_amx_tile_supported = lambda: False
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert set(re.findall(r"/vllm/(_C\w*)\.\S*so", maps.read_text())) == {library}


def run_tests(library: str, folder: Path, *options: str, timeout: float) -> str:
    """Run the tests of a folder in a process that has one library, and return what it says.

    Raises:
        AssertionError: one has failed, or none has run.
    """
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *options, str(folder)],
        env={**os.environ, VARIABLE: library},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    said = f"{done.stdout[-20000:]}{done.stderr[-2000:]}"
    assert done.returncode == 0, f"exit code {done.returncode}\n{said}"
    return said

"""Run the kit, which is in ``compiled``, on every library of kernels in vLLM's CPU build."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")
# Of the reference's tests, so of the repository.
cpu_libraries = pytest.importorskip("cpu_libraries")


@pytest.mark.parametrize("library", cpu_libraries.LIBRARIES)
@pytest.mark.parametrize("which", ["not long", pytest.param("long", marks=pytest.mark.long)])
def test_conformance_of_vllms_compiled_kernels(which, library):
    reason = cpu_libraries.unusable(library)
    if reason:
        pytest.skip(reason)
    folder = Path(__file__).with_name("compiled")
    said = cpu_libraries.run_tests(library, folder, "-m", which, timeout=3600 if which == "long" else 1800)
    assert "1 passed" in said or "installed: run `vllm-fl conformance" in said

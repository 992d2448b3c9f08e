"""Run the comparison with vLLM's compiled kernels, which is in ``compiled``, on every library of them."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

import cpu_libraries


@pytest.mark.parametrize("library", cpu_libraries.LIBRARIES)
def test_beside_vllms_compiled_kernels(library):
    reason = cpu_libraries.unusable(library)
    if reason:
        pytest.skip(reason)
    said = cpu_libraries.run_tests(library, Path(__file__).with_name("compiled"), timeout=1800)
    assert " passed" in said
    assert "skipped" not in said

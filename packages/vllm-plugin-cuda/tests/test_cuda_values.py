"""Every operator that a CPU build of vLLM has kernels for, against float64."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import cases

pytest.importorskip("vllm")

from vllm_fl_cuda.cuda import CudaBackend

CASES = list(cases("cpu"))


@pytest.fixture(scope="module")
def backend():
    backend = CudaBackend("cpu")
    assert backend.is_available()
    return backend


@pytest.fixture(scope="module")
def impls(backend):
    return {impl.op_name: impl for impl in backend.implementations()}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_float64(case, backend, impls):
    """Right, or refused by the predicate for a reason that is one of the CPU's."""
    missing = backend.missing(case.op)
    if missing is not None:
        pytest.skip(missing)
    answer = impls[case.op].supports(*case.make(), **case.keywords())
    if answer is not True:
        assert isinstance(answer, str)
        assert "table of query's dtype" in answer or "aligned to 8" in answer
        return
    verdict = case.run(getattr(backend, case.op))
    assert verdict.is_right, verdict


def test_the_judges_reject_what_is_wrong():
    """Zeros, and the truth with one element in fifty doubled."""
    judged = set()
    for case in CASES:
        arguments = case.make()
        kept = tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in arguments)
        if case.op in judged or not arguments[0].numel() or case.writes:
            continue
        if case.op == "dynamic_per_token_quant_fp8":
            continue
        right = case.run(getattr(CudaBackend("cpu"), case.op))
        assert right.is_right
        result = getattr(CudaBackend("cpu"), case.op)(*arguments)
        first = result[0] if isinstance(result, tuple) else result
        for bad in (torch.zeros_like(first), doubled(first)):
            other = (bad, *result[1:]) if isinstance(result, tuple) else bad
            assert not case.judge(other, arguments, kept).is_right, (case.op, bad)
        judged.add(case.op)
    assert judged == {"silu_and_mul", "gelu_and_mul", "rms_norm", "dynamic_per_token_quant_int8"}


def doubled(x):
    flat = x.flatten().clone()
    flat[::50] = (flat[::50].int() * 2 + 7).to(x.dtype) if x.dtype is torch.int8 else flat[::50] * 2 + 1
    return flat.view(x.shape)

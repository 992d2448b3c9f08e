"""What every operator promises: its signature, what it writes, and what it returns."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import pytest
import torch
from reference_cases import CASES

from vllm_fl.dispatch.ops import OPERATORS
from vllm_fl_reference.reference import ReferenceBackend

if TYPE_CHECKING:
    from reference_cases import Case

TOKENS = (0, 1, 5)

cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
tokens = pytest.mark.parametrize("n", TOKENS)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def owners(case: Case, arguments: dict) -> dict[str, torch.Tensor]:
    return {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}


def test_there_is_a_case_for_every_operator():
    assert {case.function.__name__ for case in CASES} == set(OPERATORS) - {"attention_backend"}


@cases
def test_the_signature_is_the_operators(case):
    """Names, order, kinds and defaults."""
    declared = OPERATORS[case.function.__name__].signature
    ours = inspect.signature(case.function)
    for mine, its in zip(ours.parameters.values(), declared.parameters.values(), strict=True):
        assert (mine.name, mine.kind, mine.default) == (its.name, its.kind, its.default)
    assert ours.return_annotation == declared.return_annotation


@cases
def test_it_declares_what_it_writes(case):
    operator = OPERATORS[case.function.__name__]
    impl = ReferenceBackend().implementation_of(operator.name)
    assert set(case.writes) <= set(operator.mutates if impl.writes is None else impl.writes)


@cases
@tokens
@dtypes
def test_nothing_undeclared_is_written(case, n, dtype):
    arguments = case.arguments(n, dtype)
    # Fused views share memory with each other: compare what is seen through each.
    before = {name: value.clone() for name, value in owners(case, arguments).items()}
    versions = {name: value._version for name, value in owners(case, arguments).items()}
    case(arguments)
    for name, value in owners(case, arguments).items():
        if name in case.writes:
            assert n == 0 or not torch.equal(value, before[name])
        else:
            assert torch.equal(value, before[name]), name
            assert value._version == versions[name], name


@cases
@tokens
@dtypes
def test_results_are_new_and_contiguous_or_the_arguments(case, n, dtype):
    arguments = case.arguments(n, dtype)
    outs = case(arguments)
    if case.returns:
        assert len(outs) == len(case.returns)
        for out, name in zip(outs, case.returns, strict=True):
            assert out is arguments[name]
        return
    for i, out in enumerate(outs):
        assert out.is_contiguous()
        for name, value in owners(case, arguments).items():
            assert not torch._C._is_alias_of(out, value), name
        for other in outs[:i]:
            assert not torch._C._is_alias_of(out, other)


@cases
@tokens
@dtypes
def test_results_have_the_declared_shapes(case, n, dtype):
    """What a compiler is told of the operator is what comes out."""
    fake = OPERATORS[case.function.__name__].fake
    if fake is None or case.returns:
        pytest.skip("its results are its arguments")
    arguments = case.arguments(n, dtype)
    declared = fake(torch, *arguments.values())
    declared = declared if isinstance(declared, tuple) else (declared,)
    for out, like in zip(case(arguments), declared, strict=True):
        assert (out.shape, out.dtype) == (like.shape, like.dtype)
        assert out.is_contiguous()


@cases
def test_it_is_the_same_each_time_and_under_inference_mode(case):
    results = []
    for mode in (False, False, True):
        with torch.inference_mode(mode):
            results.append([out.clone() for out in case(case.arguments(5, torch.float32))])
    for result in results[1:]:
        for a, b in zip(result, results[0], strict=True):
            assert torch.equal(a.float(), b.float())

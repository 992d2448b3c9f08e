"""The kit itself: it accepts what is right, and catches every planted fault."""

from __future__ import annotations

from fnmatch import fnmatchcase
from importlib import import_module

import pytest
import right
import torch
from planted import FAULTS

from vllm_fl.conformance import compiled
from vllm_fl.conformance.case import Tier
from vllm_fl.conformance.cases import SUITES
from vllm_fl.conformance.check import check
from vllm_fl.conformance.dispatched import Dispatched
from vllm_fl.conformance.result import Status
from vllm_fl.conformance.steps import accepts_something
from vllm_fl.conformance.steps import must_run
from vllm_fl.dispatch import OPERATORS
from vllm_fl.dispatch import BackendImplKind
from vllm_fl.dispatch import OpImpl

for module in (
    "faults_of_layer_questions",
    "faults_of_layers",
    "faults_of_experts",
    "faults_of_rounding",
    "faults_of_size",
    "faults_of_state",
):
    import_module(module)

CPU = torch.device("cpu")
#: Larger cases find nothing more where no fault of a size is looked for, and take long.
MOST = 2**15


def results(op, function, *, tier=Tier.FULL, found="*", **options):
    impl = OpImpl(op, "vendor.planted", BackendImplKind.VENDOR, function, vendor="planted", **options)
    dispatched = Dispatched(impl, OPERATORS[op], row_arguments=SUITES[op].row_arguments)
    if found == "compiled":
        yield must_run(compiled.trace(SUITES[op], dispatched, CPU), [Status.PASSED])
        return
    cases = [case for case in SUITES[op].cases() if case.tier <= tier and fnmatchcase(case.name, found)]
    assert cases, f"no case of {op} is called {found}"
    statuses = []
    for case in cases:
        if found != "*" or case.elements <= MOST:
            result = check(case, dispatched, CPU)
            statuses.append(result.status)
            yield result
    yield accepts_something(dispatched, statuses)
    if found == "*":
        yield must_run(compiled.trace(SUITES[op], dispatched, CPU), statuses)


@pytest.mark.parametrize("op", right.FUNCTIONS)
def test_what_is_right_passes(op):
    options = {"writes": right.WRITES.get(op, ()), "traceable": op in right.TRACEABLE}
    found = list(results(op, right.FUNCTIONS[op], tier=Tier.SMOKE, **options))
    assert [r for r in found if r.status is not Status.PASSED] == []
    assert all(r.is_deterministic for r in found if r.is_case)


def test_what_never_changes_for_a_layer_may_be_asked_once():
    """By every operator, of dtypes, devices, last dimensions and the shapes of weights."""

    def supports_layer(*args, **kwargs):
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        if len({x.device for x in tensors}) > 1:
            return "two devices"
        return all(x.dtype is not torch.float16 for x in tensors) or "no float16"

    for op, function in right.FUNCTIONS.items():
        options = {"writes": right.WRITES.get(op, ()), "supports_layer": supports_layer}
        impl = OpImpl(op, "vendor.planted", BackendImplKind.VENDOR, function, vendor="planted", **options)
        dispatched = Dispatched(impl, OPERATORS[op], row_arguments=SUITES[op].row_arguments)
        cases = [case for case in SUITES[op].cases() if case.tier is Tier.SMOKE and case.elements <= MOST]
        found = [check(case, dispatched, CPU) for case in cases]
        assert [r for r in found if r.status is Status.FAILED] == [], op
        assert Status.PASSED in {r.status for r in found}, op


def test_a_row_with_nan_may_name_an_expert_twice():
    """What follows of it is NaN; a kernel's search for the largest finds what it likes there."""

    def topk_softmax(topk_weights, topk_indices, token_expert_indices, gating_output, renormalize=False):
        right.topk_softmax(topk_weights, topk_indices, token_expert_indices, gating_output, renormalize)
        for row in gating_output.isnan().any(-1).nonzero():
            topk_indices[int(row)].fill_(3)
        return topk_weights, topk_indices

    found = list(
        results("topk_softmax", topk_softmax, found="*a row with NaN", writes=right.WRITES["topk_softmax"])
    )
    assert [r for r in found if r.status is not Status.PASSED] == []
    assert "float32 a row with NaN" in {r.name for r in found}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.op}: {fault.name}")
def test_every_planted_fault_is_caught(fault):
    found = results(fault.op, fault.make(), found=fault.found, **fault.options)
    caught = next((r for r in found if r.is_failure), None)
    assert caught is not None, f"nothing found that {fault.op} {fault.name}"
    assert fault.says in caught.note
    # The kit's own fault, or one of this table, would catch everything.
    assert "a fault of this case" not in caught.note
    assert "TypeError" not in caught.note
    print(f"{fault.op}: {fault.name}: {caught.name}: {caught.note}")


def test_there_are_enough_of_them():
    assert len(FAULTS) >= 120
    assert {fault.op for fault in FAULTS} == set(right.FUNCTIONS)


def test_every_operator_of_the_core_has_cases():
    assert set(SUITES) == set(OPERATORS) - {"attention_backend"}


@pytest.mark.parametrize("op", SUITES)
def test_names_are_unique(op):
    names = [case.name for case in SUITES[op].cases()]
    assert len(names) == len(set(names))

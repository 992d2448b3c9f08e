"""Calling a kernel as its loaded schema says, over the schemas of several vLLMs.

The kernels are defined in namespaces of their own and computed by the reference:
what is tested is which argument arrives where, and what is allocated.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

pytest.importorskip("vllm")

from vllm_fl.conformance.case import Tier
from vllm_fl.conformance.cases import SUITES
from vllm_fl.conformance.check import check
from vllm_fl.conformance.dispatched import Dispatched
from vllm_fl.conformance.result import Status
from vllm_fl.dispatch import get_default_manager
from vllm_fl_cuda import kernels
from vllm_fl_cuda.cuda import CudaBackend
from vllm_fl_cuda.impl import moe
from vllm_fl_cuda.kernels import Kernel

reference = pytest.importorskip("vllm_fl_reference.impl.moe")

_numbers = itertools.count()


@pytest.fixture
def define():
    """Return a function that defines an operator for the CPU and returns its Kernel."""
    libraries = []

    def define(schema, arguments, function=None, key="CPU"):
        name = schema.partition("(")[0]
        library = torch.library.Library(f"vllm_fl_cuda_test_{next(_numbers)}", "DEF")
        libraries.append(library)
        library.define(schema)
        if function is not None:
            returns = not schema.endswith("-> ()")

            def implementation(*args):
                result = function(*args)
                return result if returns else None

            library.impl(name, implementation, key)
        return Kernel(library.ns, name, arguments)

    yield define
    for library in libraries:
        library._destroy()


SILU = "silu_and_mul(Tensor! result, Tensor input) -> ()"


def test_an_exact_schema_is_the_operator_itself(define):
    kernel = define(SILU, "Tensor! Tensor", lambda out, x: out.copy_(x[..., :2]))
    assert kernel.missing("CPU") is None
    assert isinstance(kernel.call, torch._ops.OpOverload)
    out = torch.empty(3, 2)
    kernel.call(out, torch.ones(3, 4))
    assert out.eq(1).all()


def test_it_is_bound_when_first_called_too(define):
    kernel = define(SILU, "Tensor! Tensor", lambda out, x: out.fill_(5.0))
    out = torch.empty(2)
    kernel.call(out, torch.ones(4))
    assert out.eq(5).all()


def test_an_operator_without_a_kernel(define):
    kernel = define(SILU, "Tensor! Tensor")
    assert kernel.missing("CPU").endswith("has no kernel for CPU")
    assert not kernel.runs_on("cpu")


def test_a_kernel_of_another_device(define):
    kernel = define(SILU, "Tensor! Tensor", lambda out, x: None)
    assert kernel.runs_on("cpu")
    assert kernel.missing("CUDA").endswith("has no kernel for CUDA")
    assert not kernel.runs_on("cuda")
    assert not kernel.runs_on("xpu")


def test_a_placeholder(define):
    kernel = define("silu_and_mul() -> ()", "Tensor! Tensor", lambda: None, "CompositeExplicitAutograd")
    assert "is an empty placeholder in vLLM" in kernel.missing("CPU")


def test_an_operator_that_does_not_exist():
    kernel = Kernel("_C", "no_such_kernel", "Tensor")
    assert kernel.missing("CPU").endswith("has no _C.no_such_kernel")
    with pytest.raises(NotImplementedError, match=r"has no _C\.no_such_kernel"):
        kernel.call(torch.ones(1))


def test_new_arguments_with_a_default_or_without_a_value(define):
    seen = []
    kernel = define(
        "k(Tensor! out, Tensor x, Tensor? bias, int offset=7, Tensor? is_padding=None) -> ()",
        "Tensor! Tensor",
        lambda out, x, bias, offset=7, is_padding=None: seen.append((bias, offset, is_padding)),
    )
    assert kernel.missing("CPU") is None
    kernel.call(torch.ones(1), torch.ones(1))
    assert seen == [(None, 7, None)]


def test_a_new_argument_that_is_required_is_named(define):
    kernel = define("k(Tensor! out, Tensor x, int mode) -> ()", "Tensor! Tensor", lambda *a: None)
    assert "requires mode, of which this wheel knows nothing" in kernel.missing("CPU")


def test_another_order_of_arguments_is_refused(define):
    kernel = define("moe_sum(Tensor! output, Tensor input) -> ()", "Tensor Tensor!", lambda *a: None)
    assert "takes output as Tensor! where Tensor is passed" in kernel.missing("CPU")


def test_an_older_schema_without_the_last_optional_argument(define):
    seen = []
    kernel = define(
        "k(Tensor! out, Tensor x) -> ()", "Tensor! Tensor Tensor?", lambda *a: seen.append(len(a))
    )
    assert kernel.missing("CPU") is None
    kernel.call(torch.ones(1), torch.ones(1), None)
    assert seen == [2]
    with pytest.raises(NotImplementedError, match="takes 2 arguments"):
        kernel.call(torch.ones(1), torch.ones(1), torch.ones(1))
    kernel = define("k(Tensor! out) -> ()", "Tensor! Tensor", lambda *a: None)
    assert "takes fewer arguments than are passed" in kernel.missing("CPU")


def test_an_older_schema_that_takes_no_none(define):
    kernel = define(
        "rms_norm(Tensor! result, Tensor input, Tensor weight, float epsilon) -> ()",
        "Tensor! Tensor Tensor? float",
        lambda *a: None,
    )
    assert kernel.missing("CPU") is None
    kernel.call(torch.ones(1), torch.ones(1), torch.ones(1), 1e-5)
    with pytest.raises(NotImplementedError, match="takes no None as weight"):
        kernel.call(torch.ones(1), torch.ones(1), None, 1e-5)


# The operators that a CPU build has no kernels for, through schemas of vLLM 0.26 and 0.33.

TOPK_026 = (
    "topk_softmax(Tensor! topk_weights, Tensor! topk_indices, Tensor! token_expert_indices, "
    "Tensor gating_output, bool renormalize, Tensor? bias"
)
ALIGN = (
    "moe_align_block_size(Tensor topk_ids, int num_experts, int block_size, Tensor! sorted_token_ids, "
    "Tensor! experts_ids, Tensor! num_tokens_post_pad, Tensor? maybe_expert_map"
)
GROUPED = (
    "grouped_topk(Tensor scores, int n_group, int topk_group, int topk, bool renormalize, "
    "float routed_scaling_factor, Tensor bias, int scoring_func) -> (Tensor, Tensor)"
)
SUM = "moe_sum(Tensor input, Tensor! output"
SCHEMAS = {
    "0.26": {
        "TOPK_SOFTMAX": f"{TOPK_026}) -> ()",
        "MOE_ALIGN": f"{ALIGN}) -> ()",
        "MOE_SUM": f"{SUM}) -> ()",
        "GROUPED_TOPK": GROUPED,
    },
    "0.33": {
        "TOPK_SOFTMAX": f"{TOPK_026}, Tensor? is_padding) -> ()",
        "MOE_ALIGN": f"{ALIGN}, Tensor(a!)? scatter_idx=None) -> ()",
        "MOE_SUM": f"{SUM}, Tensor? topk_ids=None, Tensor? expert_map=None) -> ()",
        "GROUPED_TOPK": GROUPED,
    },
}


def _topk_softmax(weights, indices, source, gating, renormalize, *more):
    assert gating.is_contiguous()
    assert more == (None,) * len(more)
    reference.topk_softmax(weights, indices, source, gating, renormalize)


def _moe_align(ids, experts, block, sorted_ids, expert_ids, used, expert_map, *more):
    assert ids.is_contiguous()
    found = reference.moe_align_block_size(ids, block, experts, expert_map, False, expert_map is not None)
    sorted_ids.fill_(ids.numel())
    rows = int(found[2])
    sorted_ids[:rows] = found[0][:rows]
    expert_ids.fill_(-1)
    expert_ids[: rows // block] = found[1][: rows // block]
    used.copy_(found[2])


def _moe_sum(inp, out, *more):
    assert inp.is_contiguous()
    out.copy_(inp.sum(1, dtype=torch.float32))


FUNCTIONS = {
    "TOPK_SOFTMAX": _topk_softmax,
    "MOE_ALIGN": _moe_align,
    "MOE_SUM": _moe_sum,
    "GROUPED_TOPK": reference.grouped_topk,
}


@pytest.fixture(params=SCHEMAS)
def as_in(request, define, monkeypatch):
    for name, schema in SCHEMAS[request.param].items():
        own = getattr(kernels, name)
        kernel = define(schema, " ".join(own.arguments), FUNCTIONS[name])
        assert kernel.missing("CPU") is None
        monkeypatch.setattr(moe, name, kernel)
    return request.param


@pytest.mark.parametrize("op_name", ["topk_softmax", "grouped_topk", "moe_align_block_size", "moe_sum"])
def test_the_routing_operators(as_in, op_name):
    """Every case of the conformance kit: arguments in order, outputs allocated right."""
    operators = get_default_manager().registry.snapshot().operators
    (registered,) = [one for one in CudaBackend("cpu").implementations() if one.op_name == op_name]
    # Without the backend, which looks for vLLM's own kernels.
    impl = dataclasses.replace(registered, backend=None)
    dispatched = Dispatched(impl, operators[op_name], row_arguments=SUITES[op_name].row_arguments)
    passed = 0
    for case in SUITES[op_name].cases():
        if case.tier > Tier.SMOKE:
            continue
        result = check(case, dispatched, torch.device("cpu"))
        assert not result.is_failure, (case, result)
        if result.status is Status.REFUSED:
            assert "scores in 16 bits" in result.note or "writes a contiguous" in result.note
        passed += result.status is Status.PASSED
    assert passed

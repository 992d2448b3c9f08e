"""The judge of attention backends: through vLLM's interface, and every planted fault is caught."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("vllm.v1.attention.backend")

import attention_backend
from attention_backend import PlainBackend
from attention_backend import PlainBuilder
from attention_backend import PlainImpl

from vllm_fl.conformance import attention
from vllm_fl.conformance.attention_cases import AttentionCase
from vllm_fl.conformance.case import Tier
from vllm_fl.conformance.dispatched import Dispatched
from vllm_fl.conformance.paged import serve
from vllm_fl.conformance.result import Status
from vllm_fl.dispatch import OPERATORS
from vllm_fl.dispatch import BackendImplKind
from vllm_fl.dispatch import OpImpl
from vllm_fl.integration.fit import problems_of

CPU = torch.device("cpu")
PATH = "attention_backend.PlainBackend"
FP16 = torch.float16

CASES = [
    AttentionCase(FP16, block=32, heads=(4, 2), head=16),
    AttentionCase(FP16, block=32, heads=(4, 2), head=16, window=20, padding=6),
]


def judged(case):
    return serve(case, lambda selector: PATH, CPU)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_right_passes(case):
    verdict = judged(case)
    assert verdict.note == ""
    assert 0 < verdict.ratio < 1


@pytest.mark.parametrize("fault", attention_backend.FAULTS)
def test_every_planted_fault_is_caught(fault, monkeypatch):
    monkeypatch.setattr(attention_backend, "FAULT", fault)
    found = [judged(case) for case in CASES]
    assert not all(verdict.is_right for verdict in found), found
    assert not any("fault of this case" in verdict.note for verdict in found)


def of(path):
    impl = OpImpl(
        "attention_backend",
        "vendor.planted",
        BackendImplKind.VENDOR,
        lambda use_mla=False, use_sparse=False, *, selector=None: path,
        vendor="planted",
    )
    (_, fits), *_ = attention.questions(Dispatched(impl, OPERATORS["attention_backend"]), CPU, Tier.SMOKE)
    return fits(1.0)


def test_a_library_that_draws_where_it_is_imported_is_no_fault():
    def answer(use_mla=False, use_sparse=False, *, selector=None):
        random.random()
        return PATH

    impl = OpImpl("attention_backend", "vendor.planted", BackendImplKind.VENDOR, answer, vendor="planted")
    found = Dispatched(impl, OPERATORS["attention_backend"])
    assert attention.path_of(found) == PATH


def test_a_class_that_fits():
    assert of(PATH).status is Status.PASSED
    assert of(None).status is Status.NOT_RUN


@pytest.mark.parametrize(
    ("path", "note"),
    [
        ("attention_backend.Nothing", "has no attribute 'Nothing'"),
        ("no_such_module.Backend", "no_such_module"),
        ("attention_backend.PlainImpl", "is no subclass of"),
        ("PlainBackend", "not the dotted path"),
    ],
)
def test_a_path_that_names_no_backend(path, note):
    result = of(path)
    assert result.status is Status.FAILED
    assert note in result.note


class NoBuilder(PlainBackend):
    get_builder_cls = None


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"get_name": staticmethod(lambda: "PLAIN")}, "'PLAIN', which vLLM does not know"),
        ({"get_impl_cls": staticmethod(lambda: PlainBuilder)}, "get_impl_cls() returns"),
        ({"get_builder_cls": staticmethod(lambda: PlainImpl)}, "get_builder_cls() returns"),
        ({"supports_head_size": classmethod(lambda cls: True)}, "supports_head_size does not take head_size"),
        ({"is_mla": classmethod(lambda cls, model: False)}, "is_mla requires model"),
    ],
)
def test_a_class_that_does_not_fit(changes, note):
    problems = problems_of(type("Changed", (PlainBackend,), changes))
    assert any(note in problem for problem in problems), problems


def test_an_impl_without_its_methods():
    incomplete = type(
        "Incomplete",
        (PlainBackend,),
        {"get_impl_cls": staticmethod(lambda: type("Impl", PlainImpl.__bases__, {}))},
    )
    assert any("Impl.forward is missing" in p for p in problems_of(incomplete))

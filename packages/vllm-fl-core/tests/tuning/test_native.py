"""vLLM's own path, built alone: it computes what the operator does, or says why it cannot be reached."""

from __future__ import annotations

import pytest
import torch

from vllm_fl.dispatch import OPERATORS
from vllm_fl.integration import alone
from vllm_fl.tuning import recipes
from vllm_fl.tuning.contenders import Contender
from vllm_fl.tuning.judging import Judge
from vllm_fl.tuning.models import usual
from vllm_fl.tuning.shapes import SIZES

CPU = torch.device("cpu")
# In float32, where vLLM's activations round once too.
FAMILIES = {one.op: one for one in reversed(usual("float32", is_small=True).families)}


@pytest.mark.parametrize("op", sorted(alone._BUILDERS))
@pytest.mark.parametrize("compiled", [False, True])
def test_it_is_right(op, compiled):
    pytest.importorskip("vllm")
    arguments = recipes.make(FAMILIES[op], 5, CPU)
    path = alone.native_path(op, arguments, compiled=compiled)
    native = Contender("native", lambda *_: path, lambda *_, **__: None, ())
    answer = Judge(OPERATORS[op], arguments).ask(native, path, values_only=True)
    assert answer.is_right, answer.note


@pytest.mark.parametrize("op", sorted({*SIZES} - {*alone._BUILDERS}))
def test_what_cannot_be_reached_says_why(op):
    with pytest.raises(alone.UnreachableError, match="vLLM"):
        alone.native_path(op, {})


def test_what_another_vllm_builds_in_another_way_is_not_measured():
    pytest.importorskip("vllm")
    with pytest.raises(alone.UnreachableError, match="cannot be built alone"):
        alone.native_path("rms_norm", {})

"""How close is close: the conformance kit's own measure, and what a new result is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm_fl.conformance.judge import BASE
from vllm_fl.conformance.judge import EXPERTS
from vllm_fl.conformance.judge import compare
from vllm_fl.conformance.judge import relative_to_rms

if TYPE_CHECKING:
    from torch import Tensor


def close(out: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """Fail unless ``out`` is of ``dtype``, and ``exact``, in float64, but for a rounding."""
    verdict = compare(out, exact, dtype, BASE[dtype])
    assert verdict.is_right, verdict.note


def close_to_rms(out: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """As :func:`close`, relative to the size of the whole: both products are rounded in between."""
    verdict = relative_to_rms(out, exact.double(), dtype, EXPERTS[dtype])
    assert verdict.is_right, verdict.note


def fresh(out: Tensor, *inputs: Tensor | None) -> None:
    """Fail unless ``out`` is contiguous and shares no memory with an input."""
    assert out.is_contiguous()
    for x in inputs:
        assert x is None or not torch._C._is_alias_of(out, x)

"""The cases of the core's operators, by operator.

A plugin that declares an operator of its own gives it cases in the same form: a
module ``conformance_cases`` in its package, with ``SUITES``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_fl.conformance.cases import activation
from vllm_fl.conformance.cases import experts
from vllm_fl.conformance.cases import normalization
from vllm_fl.conformance.cases import quantization
from vllm_fl.conformance.cases import rotary
from vllm_fl.conformance.cases import routing

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm_fl.conformance.case import Suite

_MODULES = (activation, normalization, rotary, routing, experts, quantization)

SUITES: Mapping[str, Suite] = {suite.op: suite for module in _MODULES for suite in module.SUITES}

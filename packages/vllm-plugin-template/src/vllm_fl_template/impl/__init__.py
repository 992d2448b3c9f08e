"""The operators, by kind. Importing this imports torch, and would import a vendor's library."""

from __future__ import annotations

from vllm_fl_template.impl import activation
from vllm_fl_template.impl import moe
from vllm_fl_template.impl import normalization
from vllm_fl_template.impl import quantization
from vllm_fl_template.impl import rotary

__all__ = ["activation", "moe", "normalization", "quantization", "rotary"]

"""Attention. FlagGems has kernels for it, and nothing yet that vLLM can load; imports nothing."""

from __future__ import annotations

from typing import Any
from typing import NoReturn

from vllm_fl_flaggems.limits import NO_ATTENTION


def attention_backend(use_mla: bool = False, use_sparse: bool = False, *, selector: Any = None) -> NoReturn:
    """Refuse: an answer of None would hide the attention of the device's vendor.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(NO_ATTENTION)

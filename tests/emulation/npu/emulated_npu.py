"""A module for VLLM_FL_PLUGIN_MODULES that makes a process emulate an Ascend card.

With :func:`cann.environment` and ``VLLM_FL_ASCEND_EMULATED=1``, in every process of
a server: it registers the simulated kernels and no implementation.
EMULATED_NPU_FLOAT32=1 lets attention take float32, which no card does.
"""

from __future__ import annotations

import os
from typing import Any


def register_builtins(registry: Any) -> None:
    import npu_kernels

    from vllm_fl.integration import attention

    npu_kernels.register()
    # The core's own hook, in case its plug-in does not install it.
    attention.install()
    if os.environ.get("EMULATED_NPU_FLOAT32") == "1":
        allow_float32()


def allow_float32() -> None:
    """Let attention take float32 too, in the simulated kernel and in the backend's limits."""
    import npu_attention_kernels
    import torch

    from vllm_fl_ascend.impl.attention import AscendAttentionBackend

    npu_attention_kernels.attention_dtypes.add(torch.float32)
    AscendAttentionBackend.supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]
    AscendAttentionBackend.supported_kv_cache_dtypes = ["auto", "float16", "bfloat16", "float32"]

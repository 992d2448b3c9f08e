"""The backend ``reference.torch``: every operator but attention, a line each. Imports no torch."""

from __future__ import annotations

import functools
from typing import ClassVar

from vllm_fl.dispatch import Backend
from vllm_fl.dispatch import BackendImplKind
from vllm_fl.dispatch import implementation

# Each compiles into one graph for any number of tokens, and nothing waits for the device.
_implementation = functools.partial(implementation, traceable=True, graph_safe=True)


class ReferenceBackend(Backend):
    """The contracts in plain PyTorch, on any device that it has.

    The functions are named, not imported: torch is imported when the first of them is chosen.
    """

    kind: ClassVar[BackendImplKind] = BackendImplKind.REFERENCE

    @property
    def name(self) -> str:
        """The name in ``reference.torch``."""
        return "torch"

    def is_available(self) -> bool:
        """Whether torch is here.

        Raises:
            ModuleNotFoundError: it is not installed.
        """
        import torch  # noqa: F401

        return True

    silu_and_mul = _implementation("vllm_fl_reference.impl.activation:silu_and_mul")
    gelu_and_mul = _implementation("vllm_fl_reference.impl.activation:gelu_and_mul")
    # The contract would let it write x and residual.
    rms_norm = _implementation("vllm_fl_reference.impl.normalization:rms_norm", writes=())
    rotary_embedding = _implementation("vllm_fl_reference.impl.rotary:rotary_embedding")
    topk_softmax = _implementation("vllm_fl_reference.impl.moe:topk_softmax")
    grouped_topk = _implementation("vllm_fl_reference.impl.moe:grouped_topk")
    moe_align_block_size = _implementation("vllm_fl_reference.impl.moe:moe_align_block_size")
    moe_sum = _implementation("vllm_fl_reference.impl.moe:moe_sum")
    fused_experts = _implementation("vllm_fl_reference.impl.moe:fused_experts")
    dynamic_per_token_quant_int8 = _implementation(
        "vllm_fl_reference.impl.quantization:dynamic_per_token_quant_int8"
    )
    dynamic_per_token_quant_fp8 = _implementation(
        "vllm_fl_reference.impl.quantization:dynamic_per_token_quant_fp8"
    )

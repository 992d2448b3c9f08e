"""The backend ``vendor.ascend``: which operators it has, and when they may run."""

from __future__ import annotations

from vllm_fl.dispatch import Backend
from vllm_fl.dispatch import implementation
from vllm_fl_ascend import _availability
from vllm_fl_ascend import _limits

#: What each operator calls of torch_npu.
_KERNELS: dict[str, tuple[str, ...]] = {
    "silu_and_mul": ("npu.npu_swiglu",),
    "gelu_and_mul": ("npu.npu_geglu",),
    "rms_norm": ("npu.npu_rms_norm", "npu.npu_add_rms_norm"),
    "rotary_embedding": ("npu.npu_mrope",),
    "attention_backend": ("npu.npu_fused_infer_attention_score", "atb._npu_reshape_and_cache"),
    "topk_softmax": ("npu.npu_moe_gating_top_k_softmax",),
    "grouped_topk": ("npu.npu_moe_gating_top_k",),
    "fused_experts": (
        "npu.npu_moe_init_routing",
        "npu.npu_moe_compute_expert_tokens",
        "npu.npu_grouped_matmul",
        "npu.npu_moe_finalize_routing",
    ),
    "dynamic_per_token_quant_int8": ("npu.npu_dynamic_quant",),
}


class AscendBackend(Backend):
    """torch_npu's kernels.

    The contracts are those of :class:`vllm_fl.dispatch.Operators`. Where a kernel
    cannot keep one, :mod:`vllm_fl_ascend._limits` says so, and another implementation runs.
    Nothing is traceable and nothing is captured in a graph: neither was tried on
    a card.
    """

    @property
    def name(self) -> str:
        """The vendor's name in a policy."""
        return "ascend"

    def is_available(self) -> bool:
        """Whether there are torch_npu, CANN and a device.

        Raises:
            Exception: what is missing, and what to do; see
                :func:`vllm_fl_ascend._availability.require_device`.
        """
        _availability.require_device()
        return True

    def missing(self, op_name: str) -> str | None:
        """Say which kernel of an operator this torch_npu lacks, or None."""
        return _availability.missing_kernel(_KERNELS.get(op_name, ()))

    # The modules import torch_npu: the core imports one when its first function is chosen.
    silu_and_mul = implementation(
        "vllm_fl_ascend.impl.activation:silu_and_mul", supports_layer=_limits.gated_layer
    )
    gelu_and_mul = implementation(
        "vllm_fl_ascend.impl.activation:gelu_and_mul", supports_layer=_limits.gated_layer
    )
    rms_norm = implementation(
        "vllm_fl_ascend.impl.normalization:rms_norm",
        supports_layer=_limits.rms_norm_layer,
        supports=_limits.rms_norm_call,
        writes=(),
    )
    rotary_embedding = implementation(
        "vllm_fl_ascend.impl.rotary:rotary_embedding",
        supports_layer=_limits.rotary_embedding_layer,
        writes=("query", "key"),
    )
    attention_backend = implementation(
        "vllm_fl_ascend.impl.selection:attention_backend", supports=_limits.attention_backend
    )
    topk_softmax = implementation(
        "vllm_fl_ascend.impl.moe:topk_softmax",
        supports_layer=_limits.topk_softmax_layer,
        writes=("topk_weights", "topk_indices", "token_expert_indices"),
    )
    grouped_topk = implementation(
        "vllm_fl_ascend.impl.moe:grouped_topk", supports_layer=_limits.grouped_topk_layer
    )
    fused_experts = implementation(
        "vllm_fl_ascend.impl.moe:fused_experts", supports_layer=_limits.fused_experts_layer
    )
    dynamic_per_token_quant_int8 = implementation(
        "vllm_fl_ascend.impl.quantization:dynamic_per_token_quant_int8",
        supports_layer=_limits.dynamic_quant_layer,
    )

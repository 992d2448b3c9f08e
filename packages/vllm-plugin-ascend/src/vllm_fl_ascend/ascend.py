"""The backend ``vendor.ascend``: which operators it has, and when they may run."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.dispatch import Backend
from vllm_fl.dispatch import implementation
from vllm_fl_ascend import _availability
from vllm_fl_ascend import _limits

if TYPE_CHECKING:
    from typing import TypeAlias

    Tensor: TypeAlias = Any  # torch.Tensor; importing this module imports no torch

_ATTENTION = "vllm_fl_ascend.impl.attention.AscendAttentionBackend"

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
    cannot keep one, ``supports`` says so, and another implementation runs.
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

    # The modules import torch_npu: at the first call, and no import statement in a call.
    @functools.cached_property
    def _activation(self) -> Any:
        return importlib.import_module("vllm_fl_ascend.impl.activation")

    @functools.cached_property
    def _normalization(self) -> Any:
        return importlib.import_module("vllm_fl_ascend.impl.normalization")

    @functools.cached_property
    def _rotary(self) -> Any:
        return importlib.import_module("vllm_fl_ascend.impl.rotary")

    @functools.cached_property
    def _moe(self) -> Any:
        return importlib.import_module("vllm_fl_ascend.impl.moe")

    @functools.cached_property
    def _quantization(self) -> Any:
        return importlib.import_module("vllm_fl_ascend.impl.quantization")

    @implementation(supports=_limits.silu_and_mul, writes=())
    def silu_and_mul(self, x: Tensor) -> Tensor:
        """Call ``npu_swiglu``."""
        return self._activation.silu_and_mul(x)

    @implementation(supports=_limits.gelu_and_mul, writes=())
    def gelu_and_mul(self, x: Tensor, approximate: str = "none") -> Tensor:
        """Call ``npu_geglu``."""
        return self._activation.gelu_and_mul(x, approximate)

    @implementation(supports=_limits.rms_norm, writes=())
    def rms_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor | None, epsilon: float
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Call ``npu_rms_norm``, or ``npu_add_rms_norm`` with a residual."""
        return self._normalization.rms_norm(x, residual, weight, epsilon)

    @implementation(supports=_limits.rotary_embedding, writes=("query", "key"))
    def rotary_embedding(
        self,
        query: Tensor,
        key: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        position_ids: Tensor | None,
        rotary_interleaved: bool = False,
        inplace: bool = True,
        cos_sin_cache: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Call ``npu_mrope`` in its rope mode."""
        rotated: tuple[Tensor, Tensor | None] = self._rotary.rotary_embedding(
            query, key, cos, sin, position_ids, rotary_interleaved, inplace, cos_sin_cache
        )
        return rotated

    @implementation(supports=_limits.attention_backend)
    def attention_backend(
        self, use_mla: bool = False, use_sparse: bool = False, *, selector: Any = None
    ) -> str | None:
        """Return the path of ``AscendAttentionBackend``.

        Raises:
            NotImplementedError: what vLLM asks for and it lacks.
        """
        if selector is not None:
            attention: Any = importlib.import_module("vllm_fl_ascend.impl.attention")
            reasons = attention.refusals(selector)
            if reasons:
                raise NotImplementedError("; ".join(reasons))
        return _ATTENTION

    @implementation(
        supports=_limits.topk_softmax, writes=("topk_weights", "topk_indices", "token_expert_indices")
    )
    def topk_softmax(
        self,
        topk_weights: Tensor,
        topk_indices: Tensor,
        token_expert_indices: Tensor,
        gating_output: Tensor,
        renormalize: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Call ``npu_moe_gating_top_k_softmax``."""
        chosen: tuple[Tensor, Tensor] = self._moe.topk_softmax(
            topk_weights, topk_indices, token_expert_indices, gating_output, renormalize
        )
        return chosen

    @implementation(supports=_limits.grouped_topk, writes=())
    def grouped_topk(
        self,
        scores: Tensor,
        n_group: int,
        topk_group: int,
        topk: int,
        renormalize: bool,
        routed_scaling_factor: float,
        bias: Tensor,
        scoring_func: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Call ``npu_moe_gating_top_k``."""
        chosen: tuple[Tensor, Tensor] = self._moe.grouped_topk(
            scores, n_group, topk_group, topk, renormalize, routed_scaling_factor, bias, scoring_func
        )
        return chosen

    @implementation(supports=_limits.fused_experts, writes=())
    def fused_experts(
        self,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        *,
        activation: str = "silu",
        apply_router_weight_on_input: bool = False,
        global_num_experts: int = -1,
        expert_map: Tensor | None = None,
    ) -> Tensor:
        """Call routing, grouped matrix products, the activation, and the weighted sum."""
        return self._moe.fused_experts(
            hidden_states,
            w1,
            w2,
            topk_weights,
            topk_ids,
            activation=activation,
            apply_router_weight_on_input=apply_router_weight_on_input,
        )

    @implementation(supports=_limits.dynamic_quant, writes=())
    def dynamic_per_token_quant_int8(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Call ``npu_dynamic_quant``."""
        quantized: tuple[Tensor, Tensor] = self._quantization.dynamic_per_token_quant_int8(x)
        return quantized

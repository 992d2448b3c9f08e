"""FlagGems as a backend: the operators that it offers, on the devices that it has."""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import ClassVar

from vllm_fl.dispatch import OPERATORS
from vllm_fl.dispatch import Backend
from vllm_fl.dispatch import BackendImplKind
from vllm_fl.dispatch import implementation
from vllm_fl_flaggems import _availability
from vllm_fl_flaggems import limits

if TYPE_CHECKING:
    from collections.abc import Mapping


class FlagGemsBackend(Backend):
    """FlagGems' Triton kernels, ``default.flagos``.

    FlagGems is imported when the first operator is chosen, by no question.

    Args:
        left_out: operators that are not offered, each with the reason.
    """

    kind: ClassVar[BackendImplKind] = BackendImplKind.DEFAULT

    def __init__(self, left_out: Mapping[str, str] | None = None) -> None:
        self._left_out = dict(left_out or {})

    @classmethod
    def operators(cls) -> list[str]:
        """Return the names of the operators that FlagGems has."""
        return [name for name in OPERATORS if name in vars(cls)]

    @property
    def name(self) -> str:
        """The name in ``default.flagos``."""
        return "flagos"

    def is_available(self) -> bool:
        """Whether FlagGems and a device for it are here; FlagGems is not imported."""
        _availability.check()
        return True

    def missing(self, op_name: str) -> str | None:
        """Say why an operator is left out, or None."""
        if op_name == "attention_backend":
            return limits.NO_ATTENTION
        return self._left_out.get(op_name)

    silu_and_mul = implementation(
        "vllm_fl_flaggems.impl.activation:silu_and_mul",
        supports_layer=limits.silu_and_mul_layer,
        supports=limits.silu_and_mul_call,
        graph_safe=True,
    )
    gelu_and_mul = implementation(
        "vllm_fl_flaggems.impl.activation:gelu_and_mul",
        supports_layer=limits.silu_and_mul_layer,
        supports=limits.gelu_and_mul_call,
        graph_safe=True,
    )
    rms_norm = implementation(
        "vllm_fl_flaggems.impl.normalization:rms_norm",
        supports_layer=limits.rms_norm_layer,
        supports=limits.rms_norm_call,
        graph_safe=True,
    )
    rotary_embedding = implementation(
        "vllm_fl_flaggems.impl.rotary:rotary_embedding",
        supports_layer=limits.rotary_embedding_layer,
        supports=limits.rotary_embedding_call,
        graph_safe=True,
    )
    attention_backend = implementation(
        "vllm_fl_flaggems.impl.attention:attention_backend", supports=limits.attention_backend
    )
    topk_softmax = implementation(
        "vllm_fl_flaggems.impl.moe:topk_softmax",
        supports_layer=limits.topk_softmax_layer,
        supports=limits.topk_softmax_call,
    )
    grouped_topk = implementation(
        "vllm_fl_flaggems.impl.moe:grouped_topk",
        supports_layer=limits.grouped_topk_layer,
        supports=limits.grouped_topk_call,
    )
    moe_align_block_size = implementation(
        "vllm_fl_flaggems.impl.moe:moe_align_block_size", supports_layer=limits.moe_align_block_size_layer
    )
    moe_sum = implementation(
        "vllm_fl_flaggems.impl.moe:moe_sum",
        supports_layer=limits.moe_sum_layer,
        supports=limits.moe_sum_call,
    )
    fused_experts = implementation(
        "vllm_fl_flaggems.impl.moe:fused_experts",
        supports_layer=limits.fused_experts_layer,
        supports=limits.fused_experts_call,
    )

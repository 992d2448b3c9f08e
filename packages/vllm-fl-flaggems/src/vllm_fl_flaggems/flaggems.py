"""FlagGems as a backend: the operators that it offers, on the devices that it has."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING
from typing import Any
from typing import ClassVar

from vllm_fl.dispatch import OPERATORS
from vllm_fl.dispatch import Backend
from vllm_fl.dispatch import BackendImplKind
from vllm_fl.dispatch import implementation
from vllm_fl_flaggems import _availability
from vllm_fl_flaggems import limits
from vllm_fl_flaggems.impl import attention

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

    from torch import Tensor


class FlagGemsBackend(Backend):
    """FlagGems' Triton kernels, ``default.flagos``.

    FlagGems is imported by the first call of an operator, by no question.

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

    # Imported once, by the first call: their import is FlagGems' own.

    @cached_property
    def _activation(self) -> ModuleType:
        from vllm_fl_flaggems.impl import activation

        return activation

    @cached_property
    def _normalization(self) -> ModuleType:
        from vllm_fl_flaggems.impl import normalization

        return normalization

    @cached_property
    def _rotary(self) -> ModuleType:
        from vllm_fl_flaggems.impl import rotary

        return rotary

    @cached_property
    def _moe(self) -> ModuleType:
        from vllm_fl_flaggems.impl import moe

        return moe

    @implementation(supports=limits.silu_and_mul, writes=(), graph_safe=True)
    def silu_and_mul(self, x: Tensor) -> Tensor:
        """See :func:`vllm_fl_flaggems.impl.activation.silu_and_mul`."""
        return self._activation.silu_and_mul(x)  # type: ignore[no-any-return]

    @implementation(supports=limits.gelu_and_mul, writes=(), graph_safe=True)
    def gelu_and_mul(self, x: Tensor, approximate: str = "none") -> Tensor:
        """See :func:`vllm_fl_flaggems.impl.activation.gelu_and_mul`."""
        return self._activation.gelu_and_mul(x, approximate)  # type: ignore[no-any-return]

    @implementation(supports=limits.rms_norm, writes=("x", "residual"), graph_safe=True)
    def rms_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor | None, epsilon: float
    ) -> Tensor | tuple[Tensor, Tensor]:
        """See :func:`vllm_fl_flaggems.impl.normalization.rms_norm`."""
        return self._normalization.rms_norm(x, residual, weight, epsilon)  # type: ignore[no-any-return]

    @implementation(supports=limits.rotary_embedding, writes=("query", "key"), graph_safe=True)
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
        """See :func:`vllm_fl_flaggems.impl.rotary.rotary_embedding`."""
        return self._rotary.rotary_embedding(  # type: ignore[no-any-return]
            query, key, cos, sin, position_ids, rotary_interleaved, inplace, cos_sin_cache
        )

    @implementation(supports=limits.attention_backend, writes=())
    def attention_backend(
        self, use_mla: bool = False, use_sparse: bool = False, *, selector: Any = None
    ) -> str | None:
        """See :func:`vllm_fl_flaggems.impl.attention.attention_backend`."""
        return attention.attention_backend(use_mla, use_sparse, selector=selector)

    @implementation(
        supports=limits.topk_softmax, writes=("topk_weights", "topk_indices", "token_expert_indices")
    )
    def topk_softmax(
        self,
        topk_weights: Tensor,
        topk_indices: Tensor,
        token_expert_indices: Tensor,
        gating_output: Tensor,
        renormalize: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """See :func:`vllm_fl_flaggems.impl.moe.topk_softmax`."""
        return self._moe.topk_softmax(  # type: ignore[no-any-return]
            topk_weights, topk_indices, token_expert_indices, gating_output, renormalize
        )

    @implementation(supports=limits.grouped_topk, writes=())
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
        """See :func:`vllm_fl_flaggems.impl.moe.grouped_topk`."""
        return self._moe.grouped_topk(  # type: ignore[no-any-return]
            scores, n_group, topk_group, topk, renormalize, routed_scaling_factor, bias, scoring_func
        )

    @implementation(supports=limits.moe_align_block_size, writes=())
    def moe_align_block_size(
        self,
        topk_ids: Tensor,
        block_size: int,
        num_experts: int,
        expert_map: Tensor | None = None,
        pad_sorted_ids: bool = False,
        ignore_invalid_experts: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See :func:`vllm_fl_flaggems.impl.moe.moe_align_block_size`."""
        return self._moe.moe_align_block_size(  # type: ignore[no-any-return]
            topk_ids, block_size, num_experts, expert_map, pad_sorted_ids, ignore_invalid_experts
        )

    @implementation(supports=limits.moe_sum, writes=("out",))
    def moe_sum(self, inp: Tensor, out: Tensor) -> Tensor:
        """See :func:`vllm_fl_flaggems.impl.moe.moe_sum`."""
        return self._moe.moe_sum(inp, out)  # type: ignore[no-any-return]

    @implementation(supports=limits.fused_experts, writes=())
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
        """See :func:`vllm_fl_flaggems.impl.moe.fused_experts`."""
        return self._moe.fused_experts(  # type: ignore[no-any-return]
            hidden_states,
            w1,
            w2,
            topk_weights,
            topk_ids,
            activation=activation,
            apply_router_weight_on_input=apply_router_weight_on_input,
            global_num_experts=global_num_experts,
            expert_map=expert_map,
        )

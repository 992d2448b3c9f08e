"""The backend ``vendor.template``: which operators it has, and when they may run.

Every operator of :class:`vllm_fl.dispatch.Operators` that the class overrides is
registered; what it does not override, another wheel or vLLM itself computes. The
docstrings over there are the contracts: shapes, dtypes, what may be written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.dispatch import Backend
from vllm_fl.dispatch import implementation
from vllm_fl_template import _limits

if TYPE_CHECKING:
    from typing import TypeAlias

    Tensor: TypeAlias = Any  # torch.Tensor; importing this module imports no torch


class TemplateBackend(Backend):
    """Operators on the CPU, in plain torch."""

    @property
    def name(self) -> str:
        """The vendor's name in a policy: ``VLLM_FL_PER_OP='rms_norm=vendor:template'``."""
        return "template"

    def is_available(self) -> bool:
        """Whether the library and its device are here.

        It is asked once, in a process that computes. To say no, raise: what the
        exception says is the reason that ``vllm-fl explain`` prints.

        Raises:
            ModuleNotFoundError: torch is not installed.
            RuntimeError: there is no device.
        """
        # <sample>
        import os

        if os.environ.get("VLLM_FL_TEMPLATE_ENABLED") != "1":
            raise RuntimeError(
                "this is the sample that vendors start from; VLLM_FL_TEMPLATE_ENABLED=1 lets it run"
            )
        # </sample>
        # The library first: `import my_kernels` needs no handler, its error is the reason.
        import torch

        # Then the device: `torch.my_device.is_available()`.
        if not torch.cpu.is_available():
            raise RuntimeError("torch finds no CPU")
        # Then the functions, once: so registering imports nothing heavy, and no call has
        # an import in it, which vLLM's compiler could not follow.
        from vllm_fl_template import impl

        self._impl: Any = impl
        return True

    # The plain manner: it takes everything that the contract allows. Without the
    # decorator it would be right, too; `traceable` lets vLLM's compiler look into it
    # and fuse it with its neighbours, which plain torch code allows.
    @implementation(traceable=True)
    def silu_and_mul(self, x: Tensor) -> Tensor:
        """See :func:`vllm_fl_template.impl.activation.silu_and_mul`."""
        return self._impl.activation.silu_and_mul(x)

    @implementation(traceable=True)
    def gelu_and_mul(self, x: Tensor, approximate: str = "none") -> Tensor:
        """See :func:`vllm_fl_template.impl.activation.gelu_and_mul`."""
        return self._impl.activation.gelu_and_mul(x, approximate)

    # A kernel with limits: where `supports` says no, the next implementation runs.
    # The contract would let it write x and residual; `writes=()` says that it does not,
    # so that no copies of them are kept.
    @implementation(supports=_limits.rms_norm, writes=(), traceable=True)
    def rms_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor | None, epsilon: float
    ) -> Tensor | tuple[Tensor, Tensor]:
        """See :func:`vllm_fl_template.impl.normalization.rms_norm`."""
        return self._impl.normalization.rms_norm(x, residual, weight, epsilon)

    # It writes its arguments in place, and says which.
    @implementation(writes=("query", "key"), traceable=True)
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
        """See :func:`vllm_fl_template.impl.rotary.rotary_embedding`."""
        # cos_sin_cache is the same table in one piece, for kernels that want it so.
        return self._impl.rotary.rotary_embedding(  # type: ignore[no-any-return]
            query, key, cos, sin, position_ids, rotary_interleaved, inplace
        )

    @implementation(supports=_limits.attention_backend)
    def attention_backend(
        self, use_mla: bool = False, use_sparse: bool = False, *, selector: Any = None
    ) -> str | None:
        """Return the path of the attention's class.

        Raises:
            NotImplementedError: what vLLM asks for and the class lacks; the log says it.
        """
        if selector is not None:
            # Not beside the others: it imports vLLM, which is not everywhere.
            from vllm_fl_template.impl import attention

            reasons = attention.refusals(selector)
            if reasons:
                raise NotImplementedError("; ".join(reasons))
        return "vllm_fl_template.impl.attention.TemplateAttentionBackend"

    # It loops over values, which no compiler can trace: without `traceable` compiled
    # code calls it through a torch operator that vllm-fl makes of it.
    @implementation(supports=_limits.fused_experts)
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
        """See :func:`vllm_fl_template.impl.moe.fused_experts`."""
        return self._impl.moe.fused_experts(hidden_states, w1, w2, topk_weights, topk_ids, activation)

    @implementation(traceable=True)
    def dynamic_per_token_quant_int8(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See :func:`vllm_fl_template.impl.quantization.dynamic_per_token_quant_int8`."""
        return self._impl.quantization.dynamic_per_token_quant_int8(x)  # type: ignore[no-any-return]

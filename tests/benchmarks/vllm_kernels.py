"""vLLM's own kernels behind the operators, as a plugin for the benchmarks alone.

What is left between native and this is the cost of the dispatch: the kernels are
the same. On a CPU vLLM has a compiled kernel for the rotary embedding only; its
norms and its activation are PyTorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import Any

from torch.nn import functional
from vllm import _custom_ops
from vllm import ir

from vllm_fl.dispatch import Backend

if TYPE_CHECKING:
    import torch

    from vllm_fl.dispatch import OpRegistry


class VllmKernels(Backend):
    """``vendor.vllmkernels``."""

    name = "vllmkernels"

    def is_available(self) -> bool:
        return True

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        d = x.shape[-1] // 2
        return functional.silu(x[..., :d]) * x[..., d:]

    def rms_norm(self, x: torch.Tensor, residual: Any, weight: Any, epsilon: float) -> Any:
        if residual is None:
            return ir.ops.rms_norm(x, weight, epsilon, None)
        return ir.ops.fused_add_rms_norm.maybe_inplace(x, residual, weight, epsilon, None)

    def rotary_embedding(
        self,
        query: torch.Tensor,
        key: Any,
        cos: torch.Tensor,
        sin: torch.Tensor,
        position_ids: Any,
        rotary_interleaved: bool = False,
        inplace: bool = True,
        cos_sin_cache: Any = None,
    ) -> tuple[torch.Tensor, Any]:
        tokens = query.shape[0]
        key_2d = None if key is None else key.view(tokens, -1)
        _custom_ops.rotary_embedding(
            position_ids,
            query.view(tokens, -1),
            key_2d,
            query.shape[-1],
            cos_sin_cache,
            not rotary_interleaved,
        )
        return query, key


def register(registry: OpRegistry) -> None:
    """Register the three operators."""
    registry.register_backend(VllmKernels())

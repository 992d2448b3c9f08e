"""When the kernels may run: one predicate for each operator that has limits.

Each takes the operator's arguments and returns True, or a sentence that says why
not. They look at dtype, device and trailing dimensions and run nothing. Never at
the number of tokens: a compiled graph is traced once and used for all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import Any

if TYPE_CHECKING:
    from typing import TypeAlias

    Tensor: TypeAlias = Any


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor | None, epsilon: float) -> bool | str:
    """The usual limit of such kernels: one dtype for all."""
    if weight is None:
        return "the kernel needs a weight"
    if weight.dtype is not x.dtype:
        return "the kernel needs a weight of x's dtype"
    return residual is None or residual.dtype is x.dtype or "the kernel needs a residual of x's dtype"


def attention_backend(use_mla: bool = False, use_sparse: bool = False, *, selector: Any = None) -> bool | str:
    """There is plain attention alone."""
    if use_mla:
        return "there is no multi-head latent attention here"
    return not use_sparse or "there is no sparse attention here"


def fused_experts(
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
) -> bool | str:
    """All experts are here, and weigh results."""
    if activation not in ("silu", "gelu"):
        return f"there is no activation {activation!r} here"
    if apply_router_weight_on_input:
        return "the router's weights multiply the results here"
    return expert_map is None or "all experts must be on this device"

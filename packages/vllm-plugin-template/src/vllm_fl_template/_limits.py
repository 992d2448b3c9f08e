"""When the kernels may run: two questions for each operator that has limits.

Each takes arguments of the operator by their names, those that it looks at, and returns
True, or a sentence that says why not. Nothing is run, and no value is read.

``<operator>_layer`` asks what never changes for a layer: dtypes, devices, last dimensions,
weights, flags. A layer of vLLM asks it once, so that it must answer alike for any number
of rows and any strides. ``<operator>_call`` asks the rest, at every call: keep it short.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import Any

if TYPE_CHECKING:
    from typing import TypeAlias

    Tensor: TypeAlias = Any  # torch.Tensor; importing this module imports no torch


def rms_norm_layer(x: Tensor, weight: Tensor | None) -> bool | str:
    """The usual limit of such kernels: one dtype for all."""
    if weight is None:
        return "the kernel needs a weight"
    return weight.dtype is x.dtype or "the kernel needs a weight of x's dtype"


def rms_norm_call(x: Tensor, residual: Tensor | None, weight: Tensor | None, epsilon: float) -> bool | str:
    """A model may keep its residual in another dtype than what it adds to it."""
    return residual is None or residual.dtype is x.dtype or "the kernel needs a residual of x's dtype"


def attention_backend(use_mla: bool = False, use_sparse: bool = False, *, selector: Any = None) -> bool | str:
    """There is plain attention alone. It is asked when a model is built, once."""
    if use_mla:
        return "there is no multi-head latent attention here"
    return not use_sparse or "there is no sparse attention here"


def fused_experts_layer(
    activation: str, apply_router_weight_on_input: bool, expert_map: Tensor | None
) -> bool | str:
    """All experts are here, and weigh results."""
    if activation not in ("silu", "gelu"):
        return f"there is no activation {activation!r} here"
    if apply_router_weight_on_input:
        return "the router's weights multiply the results here"
    return expert_map is None or "all experts must be on this device"

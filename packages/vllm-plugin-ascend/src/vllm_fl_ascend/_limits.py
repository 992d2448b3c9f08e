"""When the kernels may run: what is asked of each operator.

``<operator>_layer`` is asked once for a layer, of what never changes for it: devices,
dtypes, last dimensions, weights, flags; ``<operator>_call`` of the rest, at every call. They
take those of the operator's arguments that they look at, and return True or a sentence.
The limits are those that torch_npu's own documentation states
(``torch_npu/_op_plugin_docs.py`` and ``op_plugin/meta`` of the wheel); where it is silent,
what it shows in its examples. None is of the number of tokens, so that a compiled graph may
rely on the answer.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl_ascend import _availability

if TYPE_CHECKING:
    from typing import TypeAlias

    Tensor: TypeAlias = Any

_HALF = ("float16", "bfloat16")
_FLOATING = ("float16", "bfloat16", "float32")

#: npu_moe_gating_top_k_softmax: k.
_MOST_CHOSEN = 1024
#: npu_moe_gating_top_k: experts, and experts rounded up to 32 in each group.
_MOST_EXPERTS = 2048
#: npu_grouped_matmul: the last dimension of its operands stays below it.
_INNER_LIMIT = 65536


@functools.cache
def _dtypes(names: tuple[str, ...]) -> tuple[Any, ...]:
    torch = importlib.import_module("torch")
    return tuple(getattr(torch, name) for name in names)


def _tensor(name: str, x: Tensor, dtypes: tuple[str, ...]) -> str | None:
    """Say why ``x`` is none of a kernel's tensors, or None."""
    if x.device.type != _availability.device_type():
        return f"{name} is on {x.device.type}, and the kernels take tensors on {_availability.device_type()}"
    if x.dtype not in _dtypes(dtypes):
        return f"{name} is of {str(x.dtype).removeprefix('torch.')}; the kernel takes {', '.join(dtypes)}"
    return None


def gated_layer(x: Tensor) -> bool | str:
    """npu_swiglu and npu_geglu: 1 to 8 dimensions, float16, bfloat16, float32."""
    problem = _tensor("x", x, _FLOATING)
    if problem:
        return problem
    if x.shape[-1] % 2:
        return f"the last dimension holds two halves; {x.shape[-1]} is odd"
    return x.dim() <= 8 or "the kernel takes up to 8 dimensions"


def rms_norm_layer(x: Tensor, weight: Tensor | None) -> bool | str:
    """npu_rms_norm: gamma is required and of x's dtype."""
    problem = _tensor("x", x, _FLOATING)
    if problem:
        return problem
    if weight is None:
        return "the kernel needs a weight"
    return weight.dtype is x.dtype or "the kernel needs a weight of x's dtype"


def rms_norm_call(x: Tensor, residual: Tensor | None, weight: Tensor | None, epsilon: float) -> bool | str:
    """npu_rms_norm: 2 to 8 dimensions; npu_add_rms_norm: a residual like x."""
    if not 2 <= x.dim() <= 8:
        return "the kernel takes 2 to 8 dimensions"
    if residual is not None and (residual.dtype is not x.dtype or residual.shape[1:] != x.shape[1:]):
        return "the kernel needs a residual of x's shape and dtype"
    return True


def rotary_embedding_layer(query: Tensor, key: Tensor | None, cos: Tensor) -> bool | str:
    """npu_mrope: query and key together; rotary_dim a multiple of 64 bytes.

    The documentation names the dtypes and not whether the table's may differ.
    """
    if key is None:
        return "the kernel rotates a query and a key together"
    problem = _tensor("query", query, _FLOATING)
    if problem:
        return problem
    if query.dim() != 3 or key.dim() != 3 or key.dtype is not query.dtype:
        return "the kernel needs query and key T[n, heads, head] of one dtype"
    if cos.dtype is not query.dtype:
        return "the kernel needs a table of query's dtype"
    rotary_dim = 2 * cos.shape[-1]
    multiple = 16 if query.dtype.itemsize == 4 else 32
    if rotary_dim % multiple:
        return f"the kernel rotates multiples of {multiple} elements of {query.dtype.itemsize} bytes"
    return rotary_dim <= query.shape[-1] or "the table is wider than a head"


def attention_backend(use_mla: bool = False, use_sparse: bool = False, *, selector: Any = None) -> bool | str:
    """AscendAttentionBackend has no latent and no sparse attention. Asked when a model is built, once."""
    if use_mla:
        return "there is no multi-head latent attention here"
    return not use_sparse or "there is no sparse attention here"


def topk_softmax_layer(topk_weights: Tensor, topk_indices: Tensor, gating_output: Tensor) -> bool | str:
    """npu_moe_gating_top_k_softmax: 0 < k <= experts, k <= 1024."""
    problem = _tensor("gating_output", gating_output, _FLOATING)
    if problem:
        return problem
    if topk_indices.dtype not in _dtypes(("int32", "int64")):
        return "the indices must be int32 or int64"
    chosen = topk_weights.shape[-1]
    return 0 < chosen <= min(gating_output.shape[-1], _MOST_CHOSEN) or (
        f"the kernel chooses 1 to {_MOST_CHOSEN} of {gating_output.shape[-1]} experts, not {chosen}"
    )


def grouped_topk_layer(
    scores: Tensor, n_group: int, topk_group: int, topk: int, scoring_func: int
) -> bool | str:
    """npu_moe_gating_top_k: its own sigmoid; up to 2048 experts, more than 2 in a group."""
    problem = _tensor("scores", scores, _FLOATING)
    if problem:
        return problem
    if scoring_func != 1:
        return "the kernel takes the sigmoid itself: final scores (scoring_func 0) do not fit"
    experts = scores.shape[-1]
    if scores.dim() != 2 or n_group < 1 or experts % n_group or not 1 <= topk_group <= n_group:
        return "the kernel needs T[n, e], e a multiple of n_group, and 1 <= topk_group <= n_group"
    size = experts // n_group
    if size <= 2 or experts > _MOST_EXPERTS or (size + 31) // 32 * 32 * n_group > _MOST_EXPERTS:
        return (
            f"the kernel needs more than 2 experts in a group and at most {_MOST_EXPERTS} in all, each "
            f"group rounded up to a multiple of 32; these are {n_group} groups of {size}"
        )
    return 1 <= topk <= size * topk_group or "the chosen groups do not hold so many experts"


def fused_experts_layer(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_ids: Tensor,
    activation: str,
    apply_router_weight_on_input: bool,
    global_num_experts: int,
    expert_map: Tensor | None,
) -> bool | str:
    """The four kernels: one dtype, every expert here, inner dimensions below 65536."""
    for name, x in (("hidden_states", hidden_states), ("w1", w1), ("w2", w2)):
        problem = _tensor(name, x, _FLOATING)
        if problem:
            return problem
    if w1.dtype is not hidden_states.dtype or w2.dtype is not hidden_states.dtype:
        return "the kernels need weights of hidden_states' dtype"
    if activation not in ("silu", "gelu"):
        return f"there is no kernel for the activation {activation!r}"
    experts = w1.shape[0]
    if expert_map is not None or global_num_experts not in (-1, experts):
        # npu_grouped_matmul leaves the rows of absent experts unwritten.
        return "every expert must be on this device"
    if experts > _MOST_EXPERTS:
        return f"npu_moe_compute_expert_tokens counts up to {_MOST_EXPERTS} experts"
    if max(w1.shape[-1], w1.shape[-2], w2.shape[-1]) >= _INNER_LIMIT:
        return f"npu_grouped_matmul's inner dimensions stay below {_INNER_LIMIT}"
    if apply_router_weight_on_input and topk_ids.shape[-1] != 1:
        return "apply_router_weight_on_input is for one expert per token"
    return True


def dynamic_quant_layer(x: Tensor) -> bool | str:
    """npu_dynamic_quant: float16 or bfloat16, more than one dimension."""
    problem = _tensor("x", x, _HALF)
    if problem:
        return problem
    return x.dim() > 1 or "the kernel takes more than one dimension"

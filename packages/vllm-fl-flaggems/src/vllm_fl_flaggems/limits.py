"""What FlagGems' kernels take: for each operator True, or a sentence that says why not.

``<operator>_layer`` is asked once for a layer, of what never changes for it: devices,
dtypes, last dimensions, flags; ``<operator>_call`` of the rest, sizes and strides, at every
call. They take those of the operator's arguments that they look at, and import nothing:
neither torch nor FlagGems.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import Any

from vllm_fl_flaggems._availability import device
from vllm_fl_flaggems._availability import is_emulated

if TYPE_CHECKING:
    from torch import Tensor

_TOO_MANY = 2**31


def _floating(name: str, x: Tensor) -> str | None:
    """Say what is wrong with an operator's first tensor: its device or its dtype."""
    where = x.device.type
    if where != device():
        return f"FlagGems runs on {device()} here, and {name} is on {where}"
    return _dtype(name, x)


def _too_many(name: str, x: Tensor) -> str:
    return f"FlagGems counts elements in 32 bits, and {name} has {x.numel()}"


def _dtype(name: str, x: Tensor) -> str | None:
    """Say what is wrong with the dtype of a floating tensor."""
    dtype = x.dtype
    if dtype.is_floating_point and dtype.itemsize in (2, 4):
        return None
    return f"FlagGems computes in float32, and {name} is {dtype}"


def _is_float32(x: Tensor) -> bool:
    return x.dtype.is_floating_point and x.dtype.itemsize == 4


def _is_integer(x: Tensor) -> bool:
    return not x.dtype.is_floating_point and not x.dtype.is_complex and x.dtype.itemsize in (4, 8)


def silu_and_mul_layer(x: Tensor) -> bool | str:
    """Of float16, bfloat16 and float32, with two halves."""
    reason = _floating("x", x)
    if reason is not None:
        return reason
    if x.size(-1) % 2:
        return f"the last dimension holds two halves, and {x.size(-1)} is odd"
    return True


def silu_and_mul_call(x: Tensor) -> bool | str:
    """Any stride, and any shape of fewer than 2**31 elements."""
    return x.numel() < _TOO_MANY or _too_many("x", x)


def gelu_and_mul_call(x: Tensor, approximate: str = "none") -> bool | str:
    """As :func:`silu_and_mul_call`; both kinds of GELU."""
    return x.numel() < _TOO_MANY or _too_many("x", x)


def rms_norm_layer(x: Tensor, weight: Tensor | None) -> bool | str:
    """Of float16, bfloat16 and float32; a weight of x's dtype or float32."""
    reason = _floating("x", x)
    if reason is not None:
        return reason
    if weight is not None and weight.dtype is not x.dtype and not _is_float32(weight):
        return f"FlagGems does not round to the weight's dtype: {weight.dtype}, where x is {x.dtype}"
    return True


def rms_norm_call(x: Tensor, residual: Tensor | None, weight: Tensor | None, epsilon: float) -> bool | str:
    """A residual like x."""
    if x.numel() >= _TOO_MANY:
        return _too_many("x", x)
    if residual is not None and (residual.dtype is not x.dtype or residual.shape != x.shape):
        return (
            f"FlagGems writes the sum into the residual, which is {residual.dtype} of shape "
            f"{tuple(residual.shape)}, where x is {x.dtype} of shape {tuple(x.shape)}"
        )
    return True


def rotary_embedding_layer(
    query: Tensor, key: Tensor | None, cos: Tensor, sin: Tensor, position_ids: Tensor | None
) -> bool | str:
    """T[n, heads, head] of float16, bfloat16 and float32, with a position for each token."""
    reason = _floating("query", query) or _dtype("cos", cos) or _dtype("sin", sin)
    if reason is None and key is not None:
        reason = _dtype("key", key) or _heads("key", key, 2 * cos.size(-1))
    reason = reason or _heads("query", query, 2 * cos.size(-1))
    if reason is not None:
        return reason
    if position_ids is not None and not _is_integer(position_ids):
        return f"position_ids must be int32 or int64, not {position_ids.dtype}"
    return True


def rotary_embedding_call(
    query: Tensor,
    key: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None,
    rotary_interleaved: bool = False,
    inplace: bool = True,
    cos_sin_cache: Tensor | None = None,
) -> bool | str:
    """Any stride, and fewer than 2**31 elements."""
    return query.numel() < _TOO_MANY or _too_many("query", query)


def _heads(name: str, x: Tensor, rot: int) -> str | None:
    if x.dim() != 3:
        return f"{name} must be T[n, heads, head], and has {x.dim()} dimensions"
    if rot > x.size(-1):
        return f"the tables rotate {rot} elements, and a head of {name} has {x.size(-1)}"
    return None


def topk_softmax_layer(
    topk_weights: Tensor, topk_indices: Tensor, token_expert_indices: Tensor, gating_output: Tensor
) -> bool | str:
    """Up to 1024 experts and 32 of them for a token."""
    reason = _floating("gating_output", gating_output)
    if reason is not None:
        return reason
    experts, k = gating_output.shape[-1], topk_weights.shape[-1]
    if experts > 1024:
        return f"FlagGems looks at the first 1024 experts, of {experts}"
    if k > 32:
        return f"FlagGems chooses up to 32 experts, not {k}"
    if k > experts:
        return f"cannot choose {k} of {experts}"
    if not _is_float32(topk_weights) or not _is_integer(topk_indices):
        return (
            f"FlagGems writes float32 and int32 or int64, not {topk_weights.dtype} and {topk_indices.dtype}"
        )
    if token_expert_indices.dtype.itemsize != 4 or not _is_integer(token_expert_indices):
        return f"FlagGems writes int32 token_expert_indices, not {token_expert_indices.dtype}"
    return True


def topk_softmax_call(
    topk_weights: Tensor,
    topk_indices: Tensor,
    token_expert_indices: Tensor,
    gating_output: Tensor,
    renormalize: bool = False,
) -> bool | str:
    """What is written must be contiguous."""
    if gating_output.numel() >= _TOO_MANY:
        return _too_many("gating_output", gating_output)
    for written in (topk_weights, topk_indices, token_expert_indices):
        if not written.is_contiguous():
            return "FlagGems writes contiguous results only"
    return True


def grouped_topk_layer(
    scores: Tensor, n_group: int, topk_group: int, topk: int, bias: Tensor, scoring_func: int
) -> bool | str:
    """Up to 32 groups of two or more experts, and 1, 2, 4, 8, 16 or 32 experts for a token."""
    reason = _floating("scores", scores) or _dtype("bias", bias)
    if reason is not None:
        return reason
    if scores.dim() != 2:
        return f"scores must be T[n, e], and has {scores.dim()} dimensions"
    if not 0 < topk <= 32 or topk & (topk - 1):
        return f"FlagGems needs topk to be a power of two up to 32, not {topk}"
    if n_group > 32:
        return f"FlagGems takes up to 32 groups, not {n_group}"
    experts = scores.shape[-1]
    if experts % n_group or topk_group > n_group or topk > topk_group * (experts // n_group):
        return f"{experts} experts in {n_group} groups, {topk_group} of them kept, do not give {topk}"
    if experts // n_group < 2:
        return "FlagGems needs two experts in a group, to add up its two best"
    if scoring_func not in (0, 1):
        return f"scoring_func must be 0 (final scores) or 1 (sigmoid), not {scoring_func!r}"
    return True


def grouped_topk_call(
    scores: Tensor,
    n_group: int,
    topk_group: int,
    topk: int,
    renormalize: bool,
    routed_scaling_factor: float,
    bias: Tensor,
    scoring_func: int = 0,
) -> bool | str:
    """Any stride, and fewer than 2**31 elements."""
    return scores.numel() < _TOO_MANY or _too_many("scores", scores)


def moe_align_block_size_layer(
    topk_ids: Tensor, expert_map: Tensor | None, ignore_invalid_experts: bool
) -> bool | str:
    """Every pair gets a place, also one whose expert is elsewhere."""
    if topk_ids.device.type != device():
        return f"FlagGems runs on {device()} here, and topk_ids is on {topk_ids.device.type}"
    if not _is_integer(topk_ids):
        return f"topk_ids must be int32 or int64, not {topk_ids.dtype}"
    if ignore_invalid_experts and expert_map is not None:
        return "FlagGems does not leave out experts that are elsewhere (ignore_invalid_experts)"
    return True


def moe_sum_layer(inp: Tensor, out: Tensor) -> bool | str:
    """Of float16, bfloat16 and float32."""
    reason = _floating("inp", inp)
    if reason is not None:
        return reason
    if inp.dim() != 3 or out.dim() != 2:
        return "inp must be T[n, k, h] and out T[n, h]"
    return out.dtype is inp.dtype or f"out is {out.dtype}, where inp is {inp.dtype}"


def moe_sum_call(inp: Tensor, out: Tensor) -> bool | str:
    """out's last dimension must be dense."""
    if inp.numel() >= _TOO_MANY:
        return _too_many("inp", inp)
    if inp.shape[0] * inp.stride(0) >= _TOO_MANY:
        return "FlagGems counts elements in 32 bits, and inp spans more"
    if out.shape[-1] > 1 and out.stride(-1) != 1:
        return "FlagGems writes rows that are dense"
    return True


def fused_experts_layer(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str,
    apply_router_weight_on_input: bool,
) -> bool | str:
    """SiLU alone, of float16 and bfloat16, with weights of the same dtype."""
    reason = _floating("hidden_states", hidden_states) or _dtype("topk_weights", topk_weights)
    if reason is not None:
        return reason
    if activation != "silu":
        return f"FlagGems' experts have silu alone, not {activation!r}"
    if _is_float32(hidden_states) and not is_emulated():
        return "FlagGems multiplies float32 matrices as Triton does by default, in fewer bits (TF32)"
    if w1.dtype is not hidden_states.dtype or w2.dtype is not hidden_states.dtype:
        return f"FlagGems needs weights of {hidden_states.dtype}, not {w1.dtype} and {w2.dtype}"
    if not _is_integer(topk_ids):
        return f"topk_ids must be int32 or int64, not {topk_ids.dtype}"
    if apply_router_weight_on_input and topk_ids.shape[-1] != 1:
        return f"apply_router_weight_on_input needs one expert per token, not {topk_ids.shape[-1]}"
    return True


def fused_experts_call(
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
    """Dense rows of weights, and fewer than 2**31 elements of hidden_states."""
    if hidden_states.numel() >= _TOO_MANY:
        return _too_many("hidden_states", hidden_states)
    if w1.stride(-1) != 1 or w2.stride(-1) != 1:
        return "FlagGems needs weights whose last dimension is dense"
    return True


# It patches methods of vLLM's classes instead, and does not find them in vLLM 0.32.
NO_ATTENTION = (
    "FlagGems has no attention backend for vLLM, and its kernel for paged attention addresses a layer's "
    "cache in 32 bits; the device vendor's attention, or vLLM's own, is used"
)


def attention_backend(use_mla: bool = False, use_sparse: bool = False, *, selector: Any = None) -> bool | str:
    """No kind of attention."""
    return NO_ATTENTION

"""Mixture of experts: the choice of experts, their order, the experts themselves."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING
from typing import Any

import torch

from vllm_fl_cuda.impl._inputs import FLOATS
from vllm_fl_cuda.impl._inputs import dense
from vllm_fl_cuda.impl._inputs import problem
from vllm_fl_cuda.kernels import GROUPED_TOPK
from vllm_fl_cuda.kernels import MOE_ALIGN
from vllm_fl_cuda.kernels import MOE_SUM
from vllm_fl_cuda.kernels import TOPK_SOFTMAX

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

_IDS = (torch.int32, torch.int64)
_MOST_GROUPS = _MOST_CHOSEN = 32
#: The kernel counts experts in whole warps, below 1024.
_MOST_EXPERTS = 992


def topk_softmax_layer(
    topk_weights: Tensor, topk_indices: Tensor, token_expert_indices: Tensor, gating_output: Tensor
) -> bool | str:
    """Whether the kernel takes the dtypes and the numbers of experts; a sentence where not."""
    if gating_output.dim() != 2 or gating_output.shape[1] == 0:
        return "gating_output must be T[tokens, experts]"
    if topk_weights.shape[-1] > gating_output.shape[1]:
        return f"there are no {topk_weights.shape[-1]} of {gating_output.shape[1]} experts"
    if topk_weights.dtype is not torch.float32 or token_expert_indices.dtype is not torch.int32:
        return f"{TOPK_SOFTMAX} writes float32 weights and int32 token_expert_indices"
    if topk_indices.dtype not in (*_IDS, torch.uint32):
        return f"{TOPK_SOFTMAX} writes int32, int64 or uint32 indices, not {topk_indices.dtype}"
    return problem(TOPK_SOFTMAX, gating_output) or True


def topk_softmax_call(
    topk_weights: Tensor,
    topk_indices: Tensor,
    token_expert_indices: Tensor,
    gating_output: Tensor,
    renormalize: bool = False,
) -> bool | str:
    """Whether the kernel can write what it is given; a sentence where not."""
    shape = topk_weights.shape
    for written in (topk_weights, topk_indices, token_expert_indices):
        if written.shape != shape or not written.is_contiguous():
            return f"{TOPK_SOFTMAX} writes contiguous tensors of one shape"
    return True


def topk_softmax(
    topk_weights: Tensor,
    topk_indices: Tensor,
    token_expert_indices: Tensor,
    gating_output: Tensor,
    renormalize: bool = False,
) -> tuple[Tensor, Tensor]:
    """Softmax over the experts, then the k largest of each row.

    Args:
        topk_weights: T[n, k], float32, contiguous; written with the weights, in
            falling order. A row of NaN gives zeros.
        topk_indices: T[n, k], int32, int64 or uint32, contiguous; written with the
            experts, of equals the lower one first.
        token_expert_indices: T[n, k], int32, contiguous; written with
            ``slot * n + row``.
        gating_output: T[n, e], float32, float16 or bfloat16; copied where it is not
            contiguous, not written.
        renormalize: divide each row's weights by their sum.

    Returns:
        (topk_weights, topk_indices), the arguments.
    """
    if topk_weights.numel():
        gating_output = dense(gating_output, gating_output.shape[1])
        TOPK_SOFTMAX.call(topk_weights, topk_indices, token_expert_indices, gating_output, renormalize)
    return topk_weights, topk_indices


def _is_chosen_in_float32(experts: int, n_group: int, topk_group: int, topk: int) -> bool:
    """Whether the kernel has a form for these numbers that adds scores and bias in float32.

    Its general form adds them in the dtype of the scores, and in 16 bits chooses
    other experts for one token in ten.
    """
    if n_group == 1:
        return experts <= 512 and topk <= 8
    size = experts // n_group
    return experts <= 256 and size <= 32 and size * topk_group <= 128 and topk_group <= 4 and topk <= 8


def grouped_topk_layer(
    scores: Tensor, n_group: int, topk_group: int, topk: int, bias: Tensor, scoring_func: int
) -> bool | str:
    """Whether the kernel takes the arguments; a sentence where not."""
    if scores.dim() != 2:
        return "scores must be T[tokens, experts]"
    experts = scores.shape[1]
    if n_group > _MOST_GROUPS or topk > _MOST_CHOSEN:
        return f"{GROUPED_TOPK} takes {_MOST_GROUPS} groups and chooses {_MOST_CHOSEN} experts at most"
    if n_group < 1 or experts % n_group:
        return f"n_group {n_group} does not divide {experts} experts"
    if n_group > 1 and experts // n_group < 2:
        return f"{GROUPED_TOPK} adds up the two best of a group, and a group has one expert"
    if not 0 < topk <= topk_group * (experts // n_group) or topk_group > n_group:
        return f"{topk_group} of {n_group} groups do not hold {topk} of {experts} experts"
    if scoring_func not in (0, 1):
        return f"scoring_func must be 0 (final scores) or 1 (sigmoid), not {scoring_func!r}"
    if bias.dtype not in FLOATS:
        return f"{GROUPED_TOPK} takes no bias of {bias.dtype}"
    if scores.dtype is not torch.float32 and not _is_chosen_in_float32(experts, n_group, topk_group, topk):
        numbers = f"{topk} of {experts} experts in {topk_group} of {n_group} groups"
        return f"{GROUPED_TOPK} adds {scores.dtype} scores in 16 bits for {numbers}"
    return problem(GROUPED_TOPK, scores) or True


def grouped_topk(
    scores: Tensor,
    n_group: int,
    topk_group: int,
    topk: int,
    renormalize: bool,
    routed_scaling_factor: float,
    bias: Tensor,
    scoring_func: int = 0,
) -> tuple[Tensor, Tensor]:
    """Choose topk experts from the topk_group best groups.

    Args:
        scores: T[n, e], float32, float16 or bfloat16; copied where it is not
            contiguous, not written. In 16 bits the shapes of the common models.
        n_group: number of groups, 32 at most; divides e.
        topk_group: groups that are kept.
        topk: experts per row, 32 at most.
        renormalize: divide each row's weights by their sum.
        routed_scaling_factor: multiplies the weights.
        bias: T[e], the correction of the scores.
        scoring_func: 0 where scores are final, 1 for their sigmoid.

    Returns:
        (weights T[n, topk] float32, indices T[n, topk] int32), new.
    """
    if scores.shape[0] == 0:
        shape = (0, topk)
        return scores.new_empty(shape, dtype=torch.float32), scores.new_empty(shape, dtype=torch.int32)
    weights, indices = GROUPED_TOPK.call(
        dense(scores, scores.shape[1]),
        n_group,
        topk_group,
        topk,
        renormalize,
        routed_scaling_factor,
        bias.contiguous(),
        scoring_func,
    )
    return weights, indices


def moe_align_block_size_layer(topk_ids: Tensor, num_experts: int, expert_map: Tensor | None) -> bool | str:
    """Whether the kernel takes the arguments; a sentence where not."""
    if topk_ids.dim() != 2 or topk_ids.dtype not in _IDS:
        return "topk_ids must be T[tokens, slots] of int32 or int64"
    if num_experts > _MOST_EXPERTS:
        return f"{MOE_ALIGN} takes {_MOST_EXPERTS} experts at most, not {num_experts}"
    if expert_map is not None and expert_map.dtype is not torch.int32:
        return f"{MOE_ALIGN} takes an expert_map of int32, not {expert_map.dtype}"
    if not MOE_ALIGN.runs_on(topk_ids.device.type):
        return f"{MOE_ALIGN} has no kernel for {topk_ids.device.type}"
    return True


def moe_align_block_size_call(
    topk_ids: Tensor,
    block_size: int,
    num_experts: int,
    expert_map: Tensor | None = None,
    pad_sorted_ids: bool = False,
    ignore_invalid_experts: bool = False,
) -> bool | str:
    """Whether the kernel can read the map; a sentence where not."""
    return expert_map is None or expert_map.is_contiguous() or f"{MOE_ALIGN} takes a contiguous expert_map"


def moe_align_block_size(
    topk_ids: Tensor,
    block_size: int,
    num_experts: int,
    expert_map: Tensor | None = None,
    pad_sorted_ids: bool = False,
    ignore_invalid_experts: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the (token, slot) pairs by expert, each expert padded to whole blocks.

    Args:
        topk_ids: T[n, k], int32 or int64; copied where it is not contiguous, not
            written. A pair whose expert is not in [0, num_experts) is left out.
        block_size: rows of a block.
        num_experts: number of experts that topk_ids names, 992 at most.
        expert_map: T[num_experts] int32: the local expert, or -1; applied to the
            experts of the blocks.
        pad_sorted_ids: round the length of sorted_ids up to whole blocks.
        ignore_invalid_experts: leave out pairs whose expert maps to -1.

    Returns:
        sorted_ids int32[m]: indices into the flattened topk_ids, in any order inside
        an expert, ``n * k`` where there is none; m as the contract says. expert_ids
        int32[ceil(m / block_size)], defined for the blocks that are used.
        num_tokens_post_pad int32[1]: the rows that are used. All are new.
    """
    pairs = topk_ids.numel()
    length = pairs + num_experts * (block_size - 1)
    if pad_sorted_ids:
        length = (length + block_size - 1) // block_size * block_size
    length = min(length, pairs * block_size)
    blocks = (length + block_size - 1) // block_size
    sorted_ids, expert_ids, used = (
        torch.empty(size, dtype=torch.int32, device=topk_ids.device) for size in (length, blocks, 1)
    )
    if pairs == 0:
        return sorted_ids, expert_ids, used.zero_()
    ignored = expert_map if ignore_invalid_experts else None
    MOE_ALIGN.call(topk_ids.contiguous(), num_experts, block_size, sorted_ids, expert_ids, used, ignored)
    if expert_map is not None and not ignore_invalid_experts:
        # The unused blocks hold -1, which means the last one here and is not read.
        expert_ids = expert_map[expert_ids]
    return sorted_ids, expert_ids, used


def moe_sum_layer(inp: Tensor, out: Tensor) -> bool | str:
    """Whether the kernel takes the dtypes; a sentence where not."""
    if inp.dim() != 3 or inp.shape[1] == 0:
        return "inp must be T[tokens, slots, hidden]"
    if out.dtype is not inp.dtype:
        return f"{MOE_SUM} writes an out of inp's dtype {inp.dtype}, not {out.dtype}"
    return problem(MOE_SUM, inp) or True


def moe_sum_call(inp: Tensor, out: Tensor) -> bool | str:
    """Whether the kernel can write ``out``; a sentence where not."""
    tokens, _, hidden = inp.shape
    if out.shape != (tokens, hidden) or not out.is_contiguous():
        return f"{MOE_SUM} writes a contiguous T[tokens, hidden]"
    return True


def moe_sum(inp: Tensor, out: Tensor) -> Tensor:
    """Add up the experts' results of every token.

    Args:
        inp: T[n, k, h], float32, float16 or bfloat16; copied where it is not
            contiguous, not written.
        out: T[n, h], inp's dtype, contiguous; written with the sum over k.

    Returns:
        out.
    """
    if out.numel():
        MOE_SUM.call(dense(inp, inp.shape[2]), out)
    return out


def fused_experts_layer(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_ids: Tensor,
    activation: str,
    apply_router_weight_on_input: bool,
    expert_map: Tensor | None,
) -> bool | str:
    """Whether vLLM's function takes the dtypes and the flags; a sentence where not."""
    if hidden_states.dtype is torch.float32:
        return "vLLM's fused_experts multiplies float32 in fewer bits (TF32)"
    if activation not in ("silu", "gelu"):
        return f"activation must be 'silu' or 'gelu', not {activation!r}"
    if w1.dtype is not hidden_states.dtype or w2.dtype is not hidden_states.dtype:
        return f"the weights are {w1.dtype} and {w2.dtype}, hidden_states {hidden_states.dtype}"
    if apply_router_weight_on_input and topk_ids.shape[1] != 1:
        return f"apply_router_weight_on_input needs one expert per token, not {topk_ids.shape[1]}"
    if topk_ids.dtype not in _IDS:
        return f"topk_ids must be int32 or int64, not {topk_ids.dtype}"
    if expert_map is not None and expert_map.dtype is not torch.int32:
        return f"expert_map must be int32, not {expert_map.dtype}"
    return problem(MOE_SUM, hidden_states) or True


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
    """Whether weights lie as vLLM's function reads them; a sentence where not."""
    if w1.stride(-1) != 1 or w2.stride(-1) != 1:
        return "the last dimension of w1 and w2 must be contiguous"
    return topk_weights.shape == topk_ids.shape or "topk_ids must be of topk_weights' shape"


@functools.cache
def _vllms_fused_experts() -> tuple[Callable[..., Any], frozenset[str], Callable[[str], Any]]:
    """Return vLLM's function, what it takes, and how it wants an activation."""
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    def as_text(name: str) -> str:
        return name

    try:
        from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    except ImportError:
        activation: Callable[[str], Any] = as_text
    else:
        activation = MoEActivation
    return fused_experts, frozenset(inspect.signature(fused_experts).parameters), activation


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
) -> Tensor:
    """Run every token through its experts and add their weighted results.

    vLLM's ``fused_experts``: Triton products between the compiled kernels, each
    intermediate rounded to hidden_states' dtype. No argument is written.

    Args:
        hidden_states: T[n, h], float16 or bfloat16; copied where it is not contiguous.
        w1: T[e, 2i, h], hidden_states' dtype, the last dimension contiguous.
        w2: T[e, h, i], likewise.
        topk_weights: T[n, k], floating.
        topk_ids: T[n, k], int32 or int64, every one an expert that exists.
        activation: ``"silu"`` or ``"gelu"``, the one with the error function.
        apply_router_weight_on_input: multiply x by the weight and not the result;
            k is 1 then.
        global_num_experts: experts that topk_ids names; -1 means e.
        expert_map: T[global_num_experts] int32: the local expert, or -1 for one
            that is elsewhere and adds nothing.

    Returns:
        T[n, h], new and contiguous, hidden_states' dtype.
    """
    hidden_states = hidden_states.contiguous()
    if hidden_states.numel() == 0:
        return torch.empty_like(hidden_states)
    function, takes, activation_of = _vllms_fused_experts()
    options = {
        "activation": activation_of(activation),
        "apply_router_weight_on_input": apply_router_weight_on_input,
        "global_num_experts": global_num_experts,
        "expert_map": expert_map,
    }
    if not takes.issuperset(options):
        raise NotImplementedError(f"this vLLM's fused_experts lacks {sorted(options.keys() - takes)}")
    weights, ids = topk_weights.contiguous(), topk_ids.contiguous()
    return function(hidden_states, w1, w2, weights, ids, **options)  # type: ignore[no-any-return]

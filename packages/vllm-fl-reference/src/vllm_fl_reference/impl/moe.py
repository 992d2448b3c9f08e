"""Mixture of experts: the choice of experts, their order, the experts themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from vllm_fl_reference.impl._precision import wide

if TYPE_CHECKING:
    from torch import Tensor


def _largest(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest of the last dimension and where; of equals, the first.

    torch.topk leaves the order of equals open: it differs between devices.
    """
    if k > x.shape[-1]:
        raise ValueError(f"cannot choose {k} of {x.shape[-1]}")
    values, indices = x.sort(dim=-1, descending=True, stable=True)
    return values[..., :k], indices[..., :k]


def topk_softmax(
    topk_weights: Tensor,
    topk_indices: Tensor,
    token_expert_indices: Tensor,
    gating_output: Tensor,
    renormalize: bool = False,
) -> tuple[Tensor, Tensor]:
    """Softmax over the experts, then the k largest of each row.

    Args:
        topk_weights: T[n, k], float32; written with the weights, in falling order.
        topk_indices: T[n, k], int32, int64 or uint32; written with the experts. Of
            experts with equal weights the lower one comes first.
        token_expert_indices: T[n, k], int32; written with ``slot * n + row``.
        gating_output: T[n, e], floating, of any stride; not written.
        renormalize: divide each row's weights by their sum.

    Returns:
        (topk_weights, topk_indices), the arguments.

    Raises:
        ValueError: k is above e.
    """
    n, k = topk_weights.shape
    weights, indices = _largest(wide(gating_output).softmax(-1), k)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    topk_weights.copy_(weights)
    topk_indices.copy_(indices)
    device = token_expert_indices.device
    row = torch.arange(n, device=device).unsqueeze(1)
    token_expert_indices.copy_(torch.arange(k, device=device) * n + row)
    return topk_weights, topk_indices


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

    A group's score is the sum of its two largest ``score + bias``, or the only
    one; experts are chosen by ``score + bias`` and weighted by ``score`` alone. Of
    equals the lower one is chosen.

    Args:
        scores: T[n, e], floating, of any stride; not written.
        n_group: number of groups; divides e.
        topk_group: groups that are kept.
        topk: experts per row.
        renormalize: divide each row's weights by their sum.
        routed_scaling_factor: multiplies the weights.
        bias: T[e], the correction of the scores.
        scoring_func: 0 where scores are final, 1 for their sigmoid.

    Returns:
        (weights T[n, topk] float32, indices T[n, topk] int32), new and
        contiguous, in the falling order of ``score + bias``.

    Raises:
        ValueError: another scoring_func, n_group does not divide e, topk_group is
            above n_group, or topk above the experts of the kept groups.
    """
    experts = scores.shape[-1]
    if experts % n_group:
        raise ValueError(f"n_group {n_group} does not divide {experts} experts")
    if topk > topk_group * (experts // n_group):
        raise ValueError(f"{topk_group} groups of {experts // n_group} do not hold {topk} experts")
    if scoring_func not in (0, 1):
        raise ValueError(f"scoring_func must be 0 (final scores) or 1 (sigmoid), not {scoring_func!r}")
    scores = wide(scores)
    if scoring_func == 1:
        scores = scores.sigmoid()
    choice = scores + bias
    grouped = choice.reshape(*choice.shape[:-1], n_group, experts // n_group)
    best, _ = _largest(grouped, min(2, experts // n_group))
    _, kept_groups = _largest(best.sum(-1), topk_group)
    kept = torch.zeros(grouped.shape[:-1], dtype=torch.bool, device=scores.device)
    kept = kept.scatter(-1, kept_groups, True)
    choice = grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)
    _, indices = _largest(choice, topk)
    weights = scores.gather(-1, indices)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    weights = weights * routed_scaling_factor
    return weights.float().contiguous(), indices.int().contiguous()


def _sorted_by_expert(expert: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the order that sorts ``expert``, each expert's first place in it, and its count.

    Entries that are not below ``experts`` come last and are not counted.
    """
    ordered, order = expert.sort(stable=True)
    bounds = torch.searchsorted(ordered, torch.arange(experts + 1, device=expert.device))
    return order, bounds[:-1], bounds[1:] - bounds[:-1]


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
        topk_ids: T[n, k], int32 or int64, of any stride; not written. A pair whose
            expert is not in [0, num_experts) is left out.
        block_size: rows of a block.
        num_experts: number of experts that topk_ids names.
        expert_map: T[num_experts] int32: the local expert, or -1; applied to the
            experts of the blocks.
        pad_sorted_ids: round the length of sorted_ids up to whole blocks.
        ignore_invalid_experts: leave out pairs whose expert maps to -1.

    Returns:
        sorted_ids int32[m]: indices into the flattened topk_ids, rising inside an
        expert, ``n * k`` where there is none; m is ``n * k + num_experts *
        (block_size - 1)``, rounded up if asked, at most ``n * k * block_size``.
        expert_ids int32[ceil(m / block_size)]: the expert of each block (what
        expert_map says of it), -1 for the blocks that are not used.
        num_tokens_post_pad int32[1]: the rows that are used. All are new.
    """
    device = topk_ids.device
    pairs = topk_ids.numel()
    length = pairs + num_experts * (block_size - 1)
    if pad_sorted_ids:
        length = (length + block_size - 1) // block_size * block_size
    # n * k * block_size is the smaller one exactly where n * k < num_experts. A
    # branch on the number of tokens would be fixed by a compiler that drops guards.
    length = torch.sym_min(pairs * block_size, length)  # type: ignore[no-untyped-call]

    expert = topk_ids.flatten().long()
    counted = (expert >= 0) & (expert < num_experts)
    if expert_map is not None and ignore_invalid_experts:
        counted = counted & (expert_map[expert.clamp(0, num_experts - 1)] >= 0)
    expert = torch.where(counted, expert, num_experts)
    order, first, counts = _sorted_by_expert(expert, num_experts)
    padded = (counts + block_size - 1) // block_size * block_size
    ends = padded.cumsum(0)

    row = torch.arange(length, device=device)
    owner = torch.searchsorted(ends, row, right=True).clamp(max=num_experts - 1)
    inside = row - (ends - padded)[owner]
    place = (first[owner] + inside).clamp(max=pairs - 1)
    sorted_ids = torch.where(inside < counts[owner], order[place], pairs)

    block_start = torch.arange((length + block_size - 1) // block_size, device=device) * block_size
    owner = torch.searchsorted(ends, block_start, right=True)
    names = torch.arange(num_experts, device=device) if expert_map is None else expert_map.long()
    expert_ids = functional.pad(names, (0, 1), value=-1)[owner]
    return sorted_ids.int(), expert_ids.int(), ends[-1:].int()


def moe_sum(inp: Tensor, out: Tensor) -> Tensor:
    """Add up the experts' results of every token.

    Args:
        inp: T[n, k, h], floating, of any stride; not written.
        out: T[n, h], inp's dtype, of any stride; written with the sum over k.

    Returns:
        out.
    """
    dtype = torch.float64 if inp.dtype is torch.float64 else torch.float32
    return out.copy_(inp.sum(1, dtype=dtype))


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

    For each of a token's experts ``e``: ``w2[e] @ act(w1[e] @ x)``, where act is
    the gated activation of the first and second half. All of it in float32 and
    rounded once. No argument is written.

    Args:
        hidden_states: T[n, h], floating.
        w1: T[e, 2i, h], gate and up projection.
        w2: T[e, h, i], down projection.
        topk_weights: T[n, k], floating.
        topk_ids: T[n, k], int32 or int64. An expert that does not exist adds
            nothing.
        activation: ``"silu"`` or ``"gelu"``, the one with the error function.
        apply_router_weight_on_input: multiply x by the weight and not the result;
            k is 1 then.
        global_num_experts: experts that topk_ids names; -1 means e.
        expert_map: T[global_num_experts] int32: the local expert, or -1 for one
            that is elsewhere and adds nothing.

    Returns:
        T[n, h], new and contiguous, hidden_states' dtype.

    Raises:
        NotImplementedError: another activation.
        ValueError: apply_router_weight_on_input where k is not 1.
    """
    if activation not in ("silu", "gelu"):
        raise NotImplementedError(f"activation must be 'silu' or 'gelu', not {activation!r}")
    k = topk_ids.shape[1]
    if apply_router_weight_on_input and k != 1:
        raise ValueError(f"apply_router_weight_on_input needs one expert per token, not {k}")
    experts = w1.shape[0]
    expert = topk_ids.flatten().long()
    if expert_map is not None:
        named = expert_map.shape[0]
        local = expert_map.long()[expert.clamp(0, named - 1)]
        expert = torch.where((expert >= 0) & (expert < named), local, -1)
    present = (expert >= 0) & (expert < experts)
    expert = torch.where(present, expert, experts)

    x = wide(hidden_states)
    weights = topk_weights.to(x.dtype)
    if apply_router_weight_on_input:
        x = x * weights
        weights = torch.ones_like(weights)
    # On a CPU the experts can be asked which of them have tokens. Elsewhere that
    # would wait for the device, and could not be captured; nor can it be traced.
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        out = _by_expert(x, w1, w2, weights, expert, activation)
    else:
        results = _by_block(x, w1, w2, k, expert, activation)
        # Not times 0: what an absent pair reads may be NaN.
        results = results.masked_fill(~present.unsqueeze(1), 0.0)
        out = (results.view(-1, k, x.shape[1]) * weights.unsqueeze(2)).sum(1)
    return out.to(hidden_states.dtype)


def _activate(gate_up: Tensor, activation: str) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return (functional.silu(gate) if activation == "silu" else functional.gelu(gate)) * up


def _by_expert(x: Tensor, w1: Tensor, w2: Tensor, weights: Tensor, expert: Tensor, activation: str) -> Tensor:
    """Return the weighted sum for each token, one expert after the other."""
    experts = w1.shape[0]
    k = weights.shape[1]
    weights = weights.reshape(-1, 1)
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    order, first, counts = _sorted_by_expert(expert, experts)
    for e, (start, count) in enumerate(zip(first.tolist(), counts.tolist(), strict=True)):
        if not count:
            continue
        pair = order[start : start + count]
        token = pair // k
        gate_up = x[token] @ w1[e].to(x.dtype).t()
        result = _activate(gate_up, activation) @ w2[e].to(x.dtype).t()
        out.index_add_(0, token, result * weights[pair])
    return out


def _by_block(x: Tensor, w1: Tensor, w2: Tensor, k: int, expert: Tensor, activation: str) -> Tensor:
    """Return the result of each pair, T[n * k, h], in sizes that depend on no value.

    A loop over the experts would be unrolled by a compiler, and gathering weights
    for every pair takes memory without bound. So the pairs, sorted by expert, are
    cut into blocks of one expert each. With ``n * k // e + 2`` rows in a block, at
    most ``2 * e`` blocks are used, whatever the router chose: the gathered weights
    are at most twice the layer's own, and the products about twice those that are
    needed. (One row less would do, but a compiler makes a case of its own of 1.)
    """
    experts = w1.shape[0]
    pairs = expert.shape[0]
    device = x.device
    rows = pairs // experts + 2
    blocks = torch.sym_min(pairs, 2 * experts)  # type: ignore[no-untyped-call]
    order, first, counts = _sorted_by_expert(expert, experts)
    per_expert = (counts + rows - 1) // rows
    ends = per_expert.cumsum(0)
    starts = ends - per_expert

    block = torch.arange(blocks, device=device)
    owner = torch.searchsorted(ends, block, right=True).clamp(max=experts - 1)
    place = (first[owner] + (block - starts[owner]) * rows).unsqueeze(1)
    # A place beyond the expert's last holds another pair's row; nobody reads the result.
    place = (place + torch.arange(rows, device=device)).clamp(max=pairs - 1)
    gate_up = torch.bmm(x[order[place] // k], w1[owner].to(x.dtype).transpose(1, 2))
    results = torch.bmm(_activate(gate_up, activation), w2[owner].to(x.dtype).transpose(1, 2))

    rank = torch.zeros_like(order).scatter(0, order, torch.arange(pairs, device=device))
    expert = expert.clamp(max=experts - 1)
    # Where the expert is absent the place is anyone's, but must exist.
    place = (starts[expert] * rows + rank - first[expert]).clamp(0, blocks * rows - 1)
    return results.flatten(0, 1)[place]

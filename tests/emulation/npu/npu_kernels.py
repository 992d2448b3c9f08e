"""torch_npu's kernels, simulated on CPU tensors.

:func:`register` gives the operators of the real wheel a kernel for CPU tensors, so
that every call is checked by the real schema. Each kernel first refuses what the
documentation in the wheel does not allow, then computes what it says, in float32.
What the documentation leaves open is left open here in the worst way: rows that
nobody asked for are NaN, padding is garbage.

A simulated kernel shows that a call is well formed and what it means. It shows
nothing about a card.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING
from typing import Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

#: How often each kernel ran in this process.
calls: collections.Counter[str] = collections.Counter()

_FLOATING = (torch.float16, torch.bfloat16, torch.float32)
_kernels: list[tuple[str, str, Callable[..., Any]]] = []
_libraries: list[torch.library.Library] = []


def kernel(namespace: str, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Note the decorated function as the CPU kernel of an operator."""

    def note(function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return function(*args, **kwargs)

        _kernels.append((namespace, name, counted))
        return function

    return note


def register() -> None:
    """Register every kernel, once; torch_npu must be importable."""
    import npu_attention_kernels  # noqa: F401 - adds to the list
    import torch_npu  # noqa: F401

    if _libraries:
        return
    for namespace, name, function in _kernels:
        library = torch.library.Library(namespace, "IMPL", "CPU")
        library.impl(name, function)
        _libraries.append(library)  # it lasts as long as this


def need(condition: bool, message: str) -> None:
    """Raise as a card would; the message names the rule."""
    if not condition:
        raise RuntimeError(f"simulated NPU: {message}")


@kernel("npu", "npu_swiglu")
def swiglu(x: Tensor, dim: int = -1) -> Tensor:
    need(x.dtype in _FLOATING and 1 <= x.dim() <= 8, "npu_swiglu: dtype or rank")
    need(x.is_contiguous() and x.shape[dim] % 2 == 0, "npu_swiglu: layout")
    a, b = x.float().chunk(2, dim)
    return (torch.nn.functional.silu(a) * b).to(x.dtype)


@kernel("npu", "npu_geglu")
def geglu(x: Tensor, dim: int = -1, approximate: int = 1, activate_left: bool = False) -> Any:
    need(x.dtype in _FLOATING and 1 <= x.dim() <= 8, "npu_geglu: dtype or rank")
    need(approximate in (0, 1) and x.shape[dim] % 2 == 0, "npu_geglu: approximate or size")
    left, right = x.float().chunk(2, dim)
    gate, up = (left, right) if activate_left else (right, left)
    gelu = torch.nn.functional.gelu(gate, approximate="tanh" if approximate else "none")
    return (gelu * up).to(x.dtype), gelu.to(x.dtype)


def _normed(x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    rstd = (x.float().pow(2).mean(-1, keepdim=True) + epsilon).rsqrt()
    return (x.float() * rstd * gamma.float()).to(x.dtype), rstd


@kernel("npu", "npu_rms_norm")
def rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> Any:
    need(x.dtype in _FLOATING and 2 <= x.dim() <= 8, "npu_rms_norm: dtype or rank")
    need(gamma.dtype is x.dtype and gamma.shape == x.shape[-1:], "npu_rms_norm: gamma")
    return _normed(x, gamma, epsilon)


@kernel("npu", "npu_add_rms_norm")
def add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> Any:
    need(x1.dtype in _FLOATING and x1.dtype is x2.dtype is gamma.dtype, "npu_add_rms_norm: dtype")
    need(x1.shape == x2.shape and gamma.shape == x1.shape[-1:], "npu_add_rms_norm: shape")
    total = x1.float() + x2.float()
    rstd = (total.pow(2).mean(-1, keepdim=True) + epsilon).rsqrt()
    return (total * rstd * gamma.float()).to(x1.dtype), rstd, total.to(x1.dtype)


@kernel("npu", "npu_mrope")
def mrope(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    cos_sin_cache: Tensor,
    head_size: int,
    *,
    mrope_section: list[int] | None = None,
    rotary_mode: str = "half",
    cache_mode: str = "default",
) -> tuple[Tensor, Tensor]:
    need(positions.dim() == 1 and positions.dtype in (torch.int32, torch.int64), "npu_mrope: positions")
    need(not any(mrope_section or ()), "npu_mrope: rope mode has no sections")
    need(query.dim() == key.dim() == cos_sin_cache.dim() == 2, "npu_mrope: 2 dimensions")
    need(query.dtype in _FLOATING and query.dtype is key.dtype is cos_sin_cache.dtype, "npu_mrope: dtype")
    rot = cos_sin_cache.shape[1]
    need(rot % (16 if query.dtype is torch.float32 else 32) == 0, "npu_mrope: rotary_dim")
    need(rot == head_size, "npu_mrope: a part of a head is not documented")
    need(bool((positions < cos_sin_cache.shape[0]).all()), "npu_mrope: a position beyond the table")
    cos, sin = cos_sin_cache.float()[positions.long()].unsqueeze(1).chunk(2, -1)

    def rotate(x: Tensor) -> Tensor:
        heads = x.float().view(x.shape[0], -1, head_size)
        if rotary_mode == "half":
            a, b = heads.chunk(2, -1)
            out = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        else:
            a, b = heads[..., ::2], heads[..., 1::2]
            out = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
        return out.view(x.shape).to(x.dtype)

    return rotate(query), rotate(key)


@kernel("npu", "npu_moe_gating_top_k_softmax")
def gating_top_k_softmax(x: Tensor, finished: Tensor | None = None, k: int = 1) -> Any:
    need(x.dtype in _FLOATING and x.dim() in (2, 3), "npu_moe_gating_top_k_softmax: dtype or rank")
    need(0 < k <= min(x.shape[-1], 1024), "npu_moe_gating_top_k_softmax: k")
    weights, experts = x.float().softmax(-1).sort(dim=-1, descending=True, stable=True)
    rows = torch.arange(x.shape[0] * k, dtype=torch.int32).view(k, -1).t().contiguous()
    return weights[..., :k].to(x.dtype).contiguous(), experts[..., :k].int().contiguous(), rows


@kernel("npu", "npu_moe_gating_top_k")
def gating_top_k(
    x: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    input_ids: Tensor | None = None,
    tid2eid: Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> Any:
    n, experts = x.shape
    need(x.dtype in _FLOATING and experts <= 2048, "npu_moe_gating_top_k: dtype or experts")
    need(bias is None or (bias.dtype is x.dtype and bias.shape == x.shape[1:]), "npu_moe_gating_top_k: bias")
    size = experts // group_count
    need(experts % group_count == 0 and size > 2, "npu_moe_gating_top_k: group_count")
    need((size + 31) // 32 * 32 * group_count <= 2048, "npu_moe_gating_top_k: aligned groups")
    need(1 <= k_group <= group_count and 1 <= k <= size * k_group, "npu_moe_gating_top_k: k")
    need(renorm == 0, "npu_moe_gating_top_k: renorm")
    scores = x.float().sigmoid() if norm_type else x.float().softmax(-1)
    choice = scores if bias is None else scores + bias.float()
    grouped = choice.view(n, group_count, size)
    value = grouped.topk(2, -1).values.sum(-1) if group_select_mode else grouped.amax(-1)
    kept = torch.zeros(n, group_count, dtype=torch.bool).scatter_(1, value.topk(k_group, -1).indices, True)
    masked = grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).view(n, experts)
    indices = masked.topk(k, -1).indices
    # The weights are not documented to be normalised or not: NaN.
    return torch.full((n, k), float("nan"), dtype=x.dtype), indices.int(), scores


@kernel("npu", "npu_moe_init_routing")
def init_routing(x: Tensor, row_idx: Tensor, expert_idx: Tensor, active_num: int) -> Any:
    n, k = expert_idx.shape
    need(x.dim() == 2 and x.dtype in _FLOATING and x.numel() < 2**24, "npu_moe_init_routing: x")
    need(row_idx.dtype is expert_idx.dtype is torch.int32, "npu_moe_init_routing: indices are int32")
    need(row_idx.shape == expert_idx.shape and row_idx.is_contiguous(), "npu_moe_init_routing: row_idx")
    sorted_experts, order = expert_idx.flatten().sort(stable=True)
    sorted_rows = row_idx.flatten()[order].long()
    places = torch.empty(n * k, dtype=torch.int32)
    places[sorted_rows] = torch.arange(n * k, dtype=torch.int32)
    return x[sorted_rows % n][: min(n, active_num) * k], places, sorted_experts


@kernel("npu", "npu_moe_compute_expert_tokens")
def compute_expert_tokens(experts: Tensor, num_expert: int) -> Tensor:
    need(experts.dtype is torch.int32 and experts.dim() == 1, "npu_moe_compute_expert_tokens: input")
    need(0 < num_expert <= 2048, "npu_moe_compute_expert_tokens: num_expert")
    return torch.searchsorted(experts, torch.arange(num_expert, dtype=torch.int32), right=True).int()


@kernel("npu", "npu_grouped_matmul")
def grouped_matmul(x: list[Tensor], weight: list[Tensor], **more: Any) -> list[Tensor]:
    ends = more.pop("group_list")
    # The dispatcher leaves out what has its default value, such as group_list_type=0.
    given = {name: value for name, value in more.items() if value is not None}
    need(given.pop("group_type", None) == 0, "npu_grouped_matmul: group_type")
    need(given.pop("split_item", 0) == 2, "npu_grouped_matmul: split_item")
    need(not any(given.values()), f"npu_grouped_matmul: {given}")
    need(len(x) == len(weight) == 1 and weight[0].dim() == 3, "npu_grouped_matmul: one tensor each")
    rows, experts = x[0], weight[0]
    need(rows.dtype is experts.dtype and rows.dtype in _FLOATING, "npu_grouped_matmul: dtype")
    need(ends.dtype is torch.int64 and ends.shape == experts.shape[:1], "npu_grouped_matmul: group_list")
    need(max(rows.shape[-1], *experts.shape[1:]) < 65536, "npu_grouped_matmul: inner dimension")
    out = torch.full((rows.shape[0], experts.shape[2]), float("nan"), dtype=rows.dtype)
    begin = 0
    for expert, end in enumerate(ends.tolist()):
        out[begin:end] = (rows[begin:end].float() @ experts[expert].float()).to(rows.dtype)
        begin = end
    return [out]


@kernel("npu", "npu_moe_finalize_routing")
def finalize_routing(
    rows: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor | None,
    places: Tensor,
    experts: Tensor | None,
    drop_pad_mode: int = 0,
    k: int = 1,
) -> Tensor:
    need(skip1 is None and skip2 is None and bias is None and drop_pad_mode == 0, "finalize_routing: options")
    need(scales is not None and scales.dtype is rows.dtype, "npu_moe_finalize_routing: scales")
    need(places.dtype is torch.int32 and places.shape == rows.shape[:1], "npu_moe_finalize_routing: places")
    assert scales is not None
    n, chosen = scales.shape
    each = rows.float()[places.long()].view(chosen, n, -1)
    return (each * scales.float().t().unsqueeze(-1)).sum(0).to(rows.dtype)


@kernel("npu", "npu_dynamic_quant")
def dynamic_quant(
    x: Tensor,
    *,
    smooth_scales: Tensor | None = None,
    group_index: Tensor | None = None,
    dst_type: int | None = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> tuple[Tensor, Tensor]:
    need(x.dtype in (torch.float16, torch.bfloat16) and x.dim() > 1, "npu_dynamic_quant: dtype or rank")
    scales = x.float().abs().amax(-1) / 127
    q = (x.float() / scales.unsqueeze(-1)).round()
    return torch.where(q.isnan(), 77, q).to(torch.int8), scales

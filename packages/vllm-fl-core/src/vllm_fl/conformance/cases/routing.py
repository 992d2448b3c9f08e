"""Cases of ``topk_softmax`` and ``grouped_topk``: which experts, with which weights.

Equal scores may be broken either way, so that experts are not compared by their
numbers but by what choosing them is worth.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from vllm_fl.conformance.case import MANY
from vllm_fl.conformance.case import ROWS_DTYPES
from vllm_fl.conformance.case import Case
from vllm_fl.conformance.case import Suite
from vllm_fl.conformance.case import Tier
from vllm_fl.conformance.case import label
from vllm_fl.conformance.judge import RIGHT
from vllm_fl.conformance.judge import Expected
from vllm_fl.conformance.judge import compare
from vllm_fl.conformance.judge import spoiled
from vllm_fl.conformance.judge import wide
from vllm_fl.conformance.judge import wrong
from vllm_fl.conformance.tensors import FLOATS
from vllm_fl.conformance.tensors import LAYOUTS
from vllm_fl.conformance.tensors import contiguous
from vllm_fl.conformance.tensors import named
from vllm_fl.conformance.tensors import random

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Iterator

    from torch import Tensor

    from vllm_fl.conformance.case import Arguments
    from vllm_fl.conformance.judge import Verdict

#: Of float32 weights, which a float32 softmax gives whatever the scores' dtype.
_WEIGHTS = (1e-6, 2e-5)
_EXPERTS = (1, 6, 8, 16, 64, 128, 160, 256, 257, 384, 512)


def _ids_problem(
    ids: Tensor, dtype: torch.dtype, shape: tuple[int, ...], experts: int, known: Tensor | None = None
) -> str:
    """Say what is wrong with indices; a row that is not ``known`` may name an expert twice."""
    if ids.dtype is not dtype or tuple(ids.shape) != shape:
        return f"indices of {named(ids.dtype)} {tuple(ids.shape)}, not {named(dtype)} {shape}"
    chosen = ids.long()
    if chosen.numel() and (int(chosen.min()) < 0 or int(chosen.max()) >= experts):
        return "an expert that does not exist"
    rows = chosen if known is None else chosen[known]
    if bool((rows.sort(-1).values.diff(dim=-1) == 0).any()):
        return "an expert twice in a row"
    return ""


# -- topk_softmax --------------------------------------------------------------------


def _repeated(answer: Tensor) -> Tensor:
    """Spoil indices where every expert is as good as any other: name one twice."""
    if answer.is_floating_point() or answer.shape[-1] < 2:
        return spoiled(answer)
    twice = answer.clone()
    twice[0, 0] = answer[0, 1]
    return twice


def _expect_softmax(given: Arguments) -> Expected:
    gating, renormalize = given["gating_output"], given["renormalize"]
    tokens, k = given["topk_weights"].shape
    dtype = given["topk_indices"].dtype
    known = ~wide(gating).isnan().any(-1)
    probability = wide(gating).softmax(-1).nan_to_num(0.0)
    best, chosen = probability.topk(k, dim=-1) if tokens else (probability[:, :k], torch.zeros(0, k).long())
    share = best.sum(-1, keepdim=True) if renormalize else torch.ones(1, dtype=torch.float64)
    right = best / share.clamp(min=torch.finfo(torch.float64).tiny)
    rows = torch.arange(k) * tokens + torch.arange(tokens).unsqueeze(1)

    def judge(outs: tuple[Tensor | None, ...]) -> Verdict:
        weights, ids, source = (*outs, None, None)[:3]
        if len(outs) != 3 or weights is None or ids is None or source is None:
            return wrong("returned no (topk_weights, topk_indices)")
        problem = _ids_problem(ids, dtype, (tokens, k), gating.shape[1], known)
        if problem:
            return wrong(problem)
        if source.dtype is not torch.int32 or not torch.equal(source.long(), rows):
            return wrong("token_expert_indices is not slot * n + row")
        gathered = probability.gather(-1, ids.long())
        # Of a row with NaN the experts must exist, and no more can be asked.
        return compare(weights[known], right[known], torch.float32, _WEIGHTS, what="weights") + compare(
            gathered[known].float(), best[known], torch.float32, _WEIGHTS, what="the chosen experts"
        )

    is_level = bool((probability == probability[:, :1]).all())
    return Expected((right.float(), chosen.to(dtype), rows.int()), judge, _repeated if is_level else spoiled)


def _softmax(
    what: str,
    dtype: torch.dtype,
    tokens: int,
    experts: int,
    k: int,
    tier: Tier = Tier.FULL,
    *,
    renormalize: bool = False,
    ids: torch.dtype = torch.int32,
    change: Callable[[Tensor], Tensor] = contiguous,
    scale: float = 1.0,
) -> Case:
    def make() -> Arguments:
        return {
            "topk_weights": torch.full((tokens, k), 9.0),
            "topk_indices": torch.full((tokens, k), 9).to(ids),
            "token_expert_indices": torch.full((tokens, k), -9, dtype=torch.int32),
            "gating_output": change(random(tokens, experts, dtype=dtype, scale=scale)),
            "renormalize": renormalize,
        }

    return Case(
        "topk_softmax",
        label(dtype, what, "renormalized" if renormalize else ""),
        dtype,
        make,
        _expect_softmax,
        tokens * experts,
        tier,
        writes=("topk_weights", "topk_indices", "token_expert_indices"),
        returns_arguments=("topk_weights", "topk_indices"),
        also=("token_expert_indices",),
    )


def _very_negative(x: Tensor) -> Tensor:
    return x * 50 - 3e4


def _masked(x: Tensor) -> Tensor:
    x[:, ::2] = -math.inf
    return x


def _nan_row(x: Tensor) -> Tensor:
    x[1, 3] = math.nan
    return x


def _softmax_cases() -> Iterator[Case]:
    for dtype in FLOATS:
        for experts in _EXPERTS:
            for k in sorted({1, min(2, experts), min(8, experts)}):
                tier = Tier.SMOKE if experts in (6, 64, 257) else Tier.FULL
                what = f"33 of {experts}, {k}"
                yield _softmax(what, dtype, 33, experts, k, tier, renormalize=k == min(8, experts))
        for tokens in (0, 1, 56, 4096):
            tier = Tier.SMOKE if tokens < 2 else Tier.FULL
            yield _softmax(f"{tokens} of 64, 6", dtype, tokens, 64, 6, tier)
        yield _softmax("33 of 64, 8", dtype, 33, 64, 8)
        for experts, k in ((256, 10), (512, 10), (512, 16)):
            yield _softmax(f"33 of {experts}, {k}", dtype, 33, experts, k, renormalize=True)
        for ids in (torch.int64, torch.uint32):
            yield _softmax(f"{named(ids)} indices", dtype, 33, 64, 4, Tier.SMOKE, ids=ids)
        yield _softmax("every expert", dtype, 5, 16, 16, Tier.SMOKE)
        yield _softmax("all equal", dtype, 5, 64, 4, Tier.SMOKE, change=torch.zeros_like)
        yield _softmax("peaked", dtype, 33, 64, 4, Tier.SMOKE, scale=8.0, renormalize=True)
        yield _softmax("very negative", dtype, 5, 64, 4, change=_very_negative)
        yield _softmax("half of the experts masked", dtype, 5, 64, 4, change=_masked)
        yield _softmax("a row with NaN", dtype, 5, 64, 4, change=_nan_row)
        for name, layout in LAYOUTS.items():
            yield _softmax(name, dtype, 33, 64, 4, change=layout)

    yield _softmax(f"{MANY} of 8, 2", torch.bfloat16, MANY, 8, 2)


def _softmax_rows(rows: int) -> Iterator[Case]:
    for dtype in ROWS_DTYPES:
        yield _softmax(f"{rows} of 64, 6", dtype, rows, 64, 6, renormalize=True)


# -- grouped_topk --------------------------------------------------------------------


def _expect_grouped(given: Arguments) -> Expected:
    scores, groups, kept = given["scores"], given["n_group"], given["topk_group"]
    topk, factor = given["topk"], given["routed_scaling_factor"]
    tokens, experts = scores.shape
    plain = wide(scores).sigmoid() if given["scoring_func"] == 1 else wide(scores)
    choice = plain + wide(given["bias"])
    by_group = choice.view(tokens, groups, experts // groups)
    value = by_group.topk(min(2, by_group.shape[-1]), dim=-1).values.sum(-1)
    is_kept = torch.zeros(value.shape, dtype=torch.bool).scatter(-1, value.topk(kept, -1).indices, True)
    allowed = by_group.masked_fill(~is_kept.unsqueeze(-1), -math.inf).view(tokens, experts)
    best, chosen = allowed.topk(topk, -1)

    def weights_of(ids: Tensor) -> Tensor:
        weights = plain.gather(-1, ids)
        share = weights.sum(-1, keepdim=True) if given["renormalize"] else torch.ones(1)
        scaled: Tensor = weights / share * factor
        return scaled

    def judge(outs: tuple[Tensor | None, ...]) -> Verdict:
        weights, ids = (*outs, None)[:2]
        if len(outs) != 2 or weights is None or ids is None:
            return wrong("returned no (weights, indices)")
        problem = _ids_problem(ids, torch.int32, (tokens, topk), experts)
        if problem:
            return wrong(problem)
        if not tokens:
            return RIGHT if weights.dtype is torch.float32 else wrong(f"weights of {named(weights.dtype)}")
        # Worth as much as the best, in any order: another group's would be worth more or less.
        worth = choice.gather(-1, ids.long()).sort(-1, descending=True).values
        return compare(worth.float(), best, torch.float32, (1e-5, 1e-5), what="the chosen experts") + compare(
            weights, weights_of(ids.long()), torch.float32, _WEIGHTS, what="weights"
        )

    return Expected((weights_of(chosen).float(), chosen.int()), judge)


def _grouped(
    what: str,
    dtype: torch.dtype,
    size: tuple[int, int],
    groups: int,
    kept: int,
    k: int,
    tier: Tier = Tier.FULL,
    *,
    scoring_func: int = 1,
    renormalize: bool = True,
    bias: torch.dtype = torch.float32,
    layout: Callable[[Tensor], Tensor] = contiguous,
) -> Case:
    tokens, experts = size

    def make() -> Arguments:
        scores = random(tokens, experts, dtype=dtype)
        return {
            "scores": layout(scores if scoring_func else scores.sigmoid()),
            "n_group": groups,
            "topk_group": kept,
            "topk": k,
            "renormalize": renormalize,
            "routed_scaling_factor": 2.5,
            "bias": random(experts, dtype=bias, seed=6, scale=0.3),
            "scoring_func": scoring_func,
        }

    return Case("grouped_topk", label(dtype, what), dtype, make, _expect_grouped, tokens * experts, tier)


def _grouped_cases() -> Iterator[Case]:
    for dtype in FLOATS:
        for tokens, experts, groups, kept, k in (
            (33, 256, 8, 4, 8),
            (1, 128, 8, 3, 6),
            (77, 64, 4, 2, 4),
            (5, 16, 2, 1, 3),
            (33, 384, 1, 1, 8),
            (33, 512, 16, 4, 8),
            (33, 96, 32, 5, 7),
            (33, 512, 8, 4, 16),
            (4096, 256, 8, 4, 8),
            (0, 256, 8, 4, 8),
        ):
            tier = Tier.FULL if tokens > 1000 or experts > 256 else Tier.SMOKE
            what = f"{tokens}x{experts}, {kept} of {groups}, {k}"
            yield _grouped(what, dtype, (tokens, experts), groups, kept, k, tier)
        for what, options in (
            ("final scores", {"scoring_func": 0}),
            ("not renormalized", {"renormalize": False}),
            ("bfloat16 bias", {"bias": torch.bfloat16}),
        ):
            yield _grouped(what, dtype, (33, 256), 8, 4, 8, Tier.SMOKE, **options)
        for name, layout in LAYOUTS.items():
            yield _grouped(name, dtype, (33, 256), 8, 4, 8, layout=layout)

    yield _grouped(f"{MANY}x8, 1 of 2, 2", torch.bfloat16, (MANY, 8), 2, 1, 2)


def _grouped_rows(rows: int) -> Iterator[Case]:
    for dtype in ROWS_DTYPES:
        yield _grouped(f"{rows}x128, 4 of 8, 8", dtype, (rows, 128), 8, 4, 8)


SUITES = (
    Suite(
        "topk_softmax",
        _softmax_cases,
        _softmax_rows,
        ("topk_weights", "topk_indices", "token_expert_indices", "gating_output"),
    ),
    Suite("grouped_topk", _grouped_cases, _grouped_rows, ("scores",)),
)

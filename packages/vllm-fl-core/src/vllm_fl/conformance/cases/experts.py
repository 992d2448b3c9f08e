"""Cases of ``moe_align_block_size``, ``moe_sum`` and ``fused_experts``."""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import Any

import torch

from vllm_fl.conformance import truth
from vllm_fl.conformance.case import MANY
from vllm_fl.conformance.case import ROWS_DTYPES
from vllm_fl.conformance.case import Case
from vllm_fl.conformance.case import Suite
from vllm_fl.conformance.case import Tier
from vllm_fl.conformance.case import label
from vllm_fl.conformance.case import shape_of
from vllm_fl.conformance.judge import BASE
from vllm_fl.conformance.judge import EXPERTS
from vllm_fl.conformance.judge import RIGHT
from vllm_fl.conformance.judge import Expected
from vllm_fl.conformance.judge import compare
from vllm_fl.conformance.judge import relative_to_rms
from vllm_fl.conformance.judge import wide
from vllm_fl.conformance.judge import wrong
from vllm_fl.conformance.tensors import FLOATS
from vllm_fl.conformance.tensors import LAYOUTS
from vllm_fl.conformance.tensors import contiguous
from vllm_fl.conformance.tensors import random
from vllm_fl.conformance.tensors import wider

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Iterator

    from torch import Tensor

    from vllm_fl.conformance.case import Arguments
    from vllm_fl.conformance.judge import Verdict


def _every_second(experts: int) -> Tensor:
    """Map every second expert to a local one, and the others to none."""
    table = torch.full((experts,), -1, dtype=torch.int32)
    table[::2] = torch.arange((experts + 1) // 2, dtype=torch.int32)
    return table


# -- moe_align_block_size ------------------------------------------------------------


def _length(pairs: int, block: int, experts: int, *, pad: bool) -> int:
    length = pairs + experts * (block - 1)
    if pad:
        length = -(-length // block) * block
    return min(length, pairs * block) if pairs < experts else length


def _expect_aligned(given: Arguments) -> Expected:
    block, experts = given["block_size"], given["num_experts"]
    flat = given["topk_ids"].flatten().long()
    pairs = flat.numel()
    table = given["expert_map"]
    names = torch.arange(experts) if table is None else table.long()
    ignored = given["ignore_invalid_experts"] and table is not None
    counted = names[flat] >= 0 if ignored else torch.ones(pairs, dtype=torch.bool)
    length = _length(pairs, block, experts, pad=given["pad_sorted_ids"])
    ids = torch.full((length,), pairs, dtype=torch.int32)
    of_block = torch.zeros(-(-length // block), dtype=torch.int32)
    rows = 0
    for expert in range(experts):
        its = (counted & (flat == expert)).nonzero().flatten()
        ids[rows : rows + its.numel()] = its.int()
        blocks = -(-its.numel() // block)
        of_block[rows // block : rows // block + blocks] = int(names[expert])
        rows += blocks * block

    def judge(outs: tuple[Tensor | None, ...]) -> Verdict:
        return _aligned(outs, flat, counted, names, block, rows, length)

    return Expected((ids, of_block, torch.tensor([rows], dtype=torch.int32)), judge)


def _aligned(
    outs: tuple[Tensor | None, ...],
    flat: Tensor,
    counted: Tensor,
    names: Tensor,
    block: int,
    rows: int,
    length: int,
) -> Verdict:
    """Judge the invariants: each pair once, in a block of its expert; the order inside is free."""
    if len(outs) != 3 or any(out is None or out.dtype is not torch.int32 for out in outs):
        return wrong("returned no three tensors of int32")
    ids, of_block, used = (out for out in outs if out is not None)
    sizes = (tuple(ids.shape), tuple(of_block.shape), tuple(used.shape))
    if sizes != ((length,), (-(-length // block),), (1,)):
        return wrong(f"shapes {sizes}, not {((length,), (-(-length // block),), (1,))}")
    if int(used) != rows:
        return wrong(f"says that {int(used)} rows are used, not {rows}")
    pairs = flat.numel()
    body = ids[:rows].view(-1, block)
    if bool((ids[rows:] != pairs).any()) or bool(((body > pairs) | (body < 0)).any()):
        return wrong("filled with something else than n * k")
    if not torch.equal(body[body < pairs].sort().values.long(), counted.nonzero().flatten()):
        return wrong("a pair is missing, or is there twice")
    for place, expert in zip(body.tolist(), of_block.tolist(), strict=False):
        found = {int(names[flat[pair]]) for pair in place if pair < pairs}
        if found != {expert}:
            return wrong(f"a block of expert {expert} holds pairs of {sorted(found)}")
    return RIGHT


def _align(
    what: str,
    tokens: int,
    k: int,
    experts: int,
    block: int,
    tier: Tier = Tier.FULL,
    *,
    mapped: bool = False,
    pad: bool = False,
    ignore: bool = False,
    one: bool = False,
    ids: torch.dtype = torch.int32,
) -> Case:
    def make() -> Arguments:
        chosen = random(tokens, experts).argsort(-1)[:, :k]
        if one:
            chosen = torch.ones((tokens, k), dtype=torch.int64)
        return {
            "topk_ids": chosen.contiguous().to(ids),
            "block_size": block,
            "num_experts": experts,
            "expert_map": _every_second(experts) if mapped else None,
            "pad_sorted_ids": pad,
            "ignore_invalid_experts": ignore,
        }

    elements = tokens * k + experts * block
    return Case("moe_align_block_size", label(ids, what), ids, make, _expect_aligned, elements, tier)


def _align_cases() -> Iterator[Case]:
    for tokens in (0, 1, 33, 222, 1024):
        for k, experts in ((2, 8), (8, 64), (6, 160), (8, 257), (8, 512)):
            for block in (16, 32, 64, 128):
                tier = Tier.SMOKE if tokens in (0, 1, 33) and block == 16 and experts < 200 else Tier.FULL
                yield _align(f"{tokens}x{k} of {experts}, blocks of {block}", tokens, k, experts, block, tier)
    for mapped, pad, ignore in (
        (True, False, False),
        (True, True, False),
        (True, True, True),
        (False, True, False),
    ):
        for experts in (8, 160):
            flags = [
                name for name, on in (("a map", mapped), ("padded", pad), ("invalid ignored", ignore)) if on
            ]
            what = f"{experts} experts, {', '.join(flags)}"
            tier = Tier.SMOKE if experts == 8 else Tier.FULL
            yield _align(what, 111, 2, experts, 32, tier, mapped=mapped, pad=pad, ignore=ignore)
    yield _align("one expert takes all", 111, 1, 64, 64, Tier.SMOKE, one=True)
    yield _align("222x2 of 8, blocks of 64", 222, 2, 8, 64, Tier.SMOKE, ids=torch.int64)

    yield _align(f"{MANY}x2 of 8, blocks of 64", MANY, 2, 8, 64)


def _align_rows(rows: int) -> Iterator[Case]:
    for ids in (torch.int32, torch.int64):
        yield _align(f"{rows}x2 of 8", rows, 2, 8, 16, ids=ids)


# -- moe_sum ---------------------------------------------------------------------------


def _sum(
    what: str,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    tier: Tier = Tier.FULL,
    *,
    layout: Callable[[Tensor], Tensor] = contiguous,
    out_layout: Callable[[Tensor], Tensor] = contiguous,
) -> Case:
    tokens, k, hidden = shape

    def make() -> Arguments:
        out = out_layout(torch.full((tokens, hidden), 9.0, dtype=dtype))
        return {"inp": layout(random(*shape, dtype=dtype)), "out": out}

    def expect(given: Arguments) -> Expected:
        exact = wide(given["inp"]).sum(1)
        return Expected(
            (exact.to(dtype),), lambda outs: compare(outs[0], exact, dtype, BASE[dtype], once=(exact,))
        )

    return Case(
        "moe_sum",
        label(dtype, what or shape_of(*shape)),
        dtype,
        make,
        expect,
        tokens * k * hidden,
        tier,
        writes=("out",),
        returns_arguments=("out",),
    )


def _sum_cases() -> Iterator[Case]:
    for dtype in FLOATS:
        for shape in (
            (1, 2, 128),
            (33, 6, 511),
            (7, 1, 64),
            (7, 2, 64),
            (7, 3, 65),
            (7, 4, 64),
            (222, 9, 1024),
        ):
            yield _sum("", dtype, shape, Tier.FULL if shape[0] > 100 else Tier.SMOKE)
        yield _sum("no tokens", dtype, (0, 2, 64), Tier.SMOKE)
        for name, layout in LAYOUTS.items():
            yield _sum(name, dtype, (33, 4, 64), Tier.SMOKE, layout=layout)
        yield _sum("out in wider rows", dtype, (33, 4, 64), Tier.SMOKE, out_layout=wider)
    for shape in ((1024, 8, 512), (MANY, 2, 8), (3, 8, 16384), (33, 16, 64)):
        yield _sum("", torch.bfloat16, shape)


def _sum_rows(rows: int) -> Iterator[Case]:
    for dtype in ROWS_DTYPES:
        yield _sum(f"{rows} tokens", dtype, (rows, 4, 64))


# -- fused_experts ---------------------------------------------------------------------


def _fused(
    what: str,
    dtype: torch.dtype,
    size: tuple[int, int, int, int, int],
    tier: Tier = Tier.FULL,
    *,
    mapped: bool = False,
    layout: Callable[[Tensor], Tensor] = contiguous,
    ids: torch.dtype = torch.int32,
    change_weights: Callable[[Tensor], Tensor] = contiguous,
    change_ids: Callable[[Tensor], Tensor] = contiguous,
    **keywords: Any,
) -> Case:
    """Make a case; ``size``: tokens, hidden, inner, experts here, experts of a token."""
    tokens, hidden, inner, experts, k = size

    def make() -> Arguments:
        everyone = 2 * experts if mapped else experts
        scores = random(tokens, everyone, seed=3, scale=2.0)
        weights, chosen = scores.softmax(-1).topk(k, -1)
        made: Arguments = {
            "hidden_states": layout(random(tokens, hidden, dtype=dtype)),
            "w1": random(experts, 2 * inner, hidden, dtype=dtype, scale=hidden**-0.5, seed=1),
            "w2": random(experts, hidden, inner, dtype=dtype, scale=inner**-0.5, seed=2),
            "topk_weights": change_weights(weights),
            "topk_ids": change_ids(chosen).to(ids),
            **keywords,
        }
        if mapped:
            made |= {"global_num_experts": everyone, "expert_map": _every_second(everyone)}
        return made

    def expect(given: Arguments) -> Expected:
        exact = truth.fused_experts(
            given["hidden_states"],
            given["w1"],
            given["w2"],
            given["topk_weights"],
            given["topk_ids"],
            given.get("activation", "silu"),
            given.get("apply_router_weight_on_input", False),
            given.get("expert_map"),
        )
        return Expected(
            (exact.to(dtype),), lambda outs: relative_to_rms(outs[0], exact, dtype, EXPERTS[dtype])
        )

    elements = max(tokens * hidden, experts * 2 * inner * hidden)
    return Case("fused_experts", label(dtype, what), dtype, make, expect, elements, tier)


def _zero_sums(weights: Tensor) -> Tensor:
    """Weights that add up to nothing: what is normalised by their sum is lost."""
    weights[:, 1] = -weights[:, 0]
    return weights


def _fused_cases() -> Iterator[Case]:
    for dtype in FLOATS:
        for size in (
            (1, 128, 128, 8, 2),
            (33, 64, 32, 6, 2),
            (33, 256, 128, 8, 2),
            (64, 511, 128, 8, 6),
            (222, 1024, 512, 16, 6),
        ):
            tokens, hidden, inner, experts, k = size
            what = f"{tokens} tokens, {hidden}x{inner}, {k} of {experts}"
            yield _fused(what, dtype, size, Tier.SMOKE if hidden <= 256 else Tier.FULL)
        small = (33, 64, 32, 8, 2)
        yield _fused("no tokens", dtype, (0, 64, 32, 8, 2), Tier.SMOKE)
        yield _fused("gelu", dtype, small, Tier.SMOKE, activation="gelu")
        yield _fused(
            "weights on the input",
            dtype,
            (33, 64, 32, 8, 1),
            Tier.SMOKE,
            apply_router_weight_on_input=True,
        )
        yield _fused("half of the experts elsewhere", dtype, small, Tier.SMOKE, mapped=True)
        yield _fused("rows of a wider tensor", dtype, small, Tier.SMOKE, layout=wider)
        yield _fused("int64 indices", dtype, small, ids=torch.int64)
        yield _fused("weights that add up to 0", dtype, small, Tier.SMOKE, change_weights=_zero_sums)
        # Others have no tokens at all.
        yield _fused(
            "one expert takes all", dtype, (33, 64, 32, 8, 1), Tier.SMOKE, change_ids=torch.ones_like
        )
    yield _fused("33 tokens, 64x32, 8 of 256", torch.bfloat16, (33, 64, 32, 256, 8))
    yield _fused("3 tokens, 16384x64, 2 of 4", torch.bfloat16, (3, 16384, 64, 4, 2))
    yield _fused(f"{MANY} tokens, 32x32, 2 of 4", torch.bfloat16, (MANY, 32, 32, 4, 2))
    yield _fused("222 tokens, 1024x512, 6 of 64", torch.bfloat16, (222, 1024, 512, 64, 6))
    yield _fused("1024 tokens, 1024x1024, 2 of 8", torch.bfloat16, (1024, 1024, 1024, 8, 2))


def _fused_rows(rows: int) -> Iterator[Case]:
    for dtype in ROWS_DTYPES:
        yield _fused(f"{rows} tokens", dtype, (rows, 64, 32, 8, 2))


SUITES = (
    Suite("moe_align_block_size", _align_cases, _align_rows, ("topk_ids",)),
    Suite("moe_sum", _sum_cases, _sum_rows, ("inp", "out")),
    Suite("fused_experts", _fused_cases, _fused_rows, ("hidden_states", "topk_weights", "topk_ids")),
)

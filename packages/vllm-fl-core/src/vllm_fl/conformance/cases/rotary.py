"""Cases of ``rotary_embedding``."""

from __future__ import annotations

import functools
from dataclasses import dataclass
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
from vllm_fl.conformance.judge import RIGHT
from vllm_fl.conformance.judge import ROTATION
from vllm_fl.conformance.judge import Expected
from vllm_fl.conformance.judge import compare
from vllm_fl.conformance.judge import wrong
from vllm_fl.conformance.tensors import FLOATS
from vllm_fl.conformance.tensors import random
from vllm_fl.conformance.tensors import same_bytes
from vllm_fl.conformance.tensors import seeded
from vllm_fl.conformance.tensors import variation

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from vllm_fl.conformance.case import Arguments
    from vllm_fl.conformance.judge import Verdict

_HEADS = (64, 80, 96, 120, 128, 256)


@dataclass(frozen=True)
class _Form:
    """What a case varies.

    Attributes:
        tokens: rows.
        heads: of the query, and of the key; None for no key.
        head: elements of a head.
        rot: how many of them are rotated.
        interleaved: the style of the pairs.
        positions: their dtype; None where the tables hold a row for each token.
        order: ``random``, ``same`` (every token at one place) or ``zero`` (at place 0).
        rows: of the tables.
        inplace: write the arguments.
        table: the tables' dtype; query's where it is None.
        cache: pass the packed table.
        layout: ``fused`` (views of one qkv buffer), ``padded`` (each head in a wider
            one) or ``apart``.
    """

    tokens: int = 19
    heads: tuple[int, int | None] = (4, 2)
    head: int = 64
    rot: int = 64
    interleaved: bool = False
    positions: torch.dtype | None = torch.int64
    order: str = "random"
    rows: int = 512
    inplace: bool = True
    table: torch.dtype | None = None
    cache: bool = True
    layout: str = "fused"


def _query_and_key(form: _Form, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    query_heads, key_heads = form.heads
    room = form.head + (16 if form.layout == "padded" else 0)
    widths = [query_heads * room, (key_heads or 0) * room, 2 * room]
    qkv = random(form.tokens, sum(widths), dtype=dtype)
    query, key, _ = torch.split(qkv, widths, -1)
    query = query.view(form.tokens, query_heads, room)[..., : form.head]
    heads = None if key_heads is None else key.view(form.tokens, key_heads, room)[..., : form.head]
    if form.layout == "apart":
        return query.contiguous(), None if heads is None else heads.contiguous()
    return query, heads


def _positions(form: _Form) -> Tensor | None:
    if form.positions is None:
        return None
    positions = torch.randint(0, form.rows, (form.tokens,), generator=seeded(form.tokens))
    if form.order == "same":
        positions[:] = 3 + variation()
    elif form.order == "zero":
        positions[:] = 0
    else:
        # The last place of all first, and the first one last.
        positions[:1] = form.rows - 1
        positions[1:][-1:] = 0
    return positions.to(form.positions)


def _tables(form: _Form, dtype: torch.dtype) -> Tensor:
    rows = form.tokens if form.positions is None else form.rows
    # A model with another base, where other values are made.
    base = 10000.0 * (1 + variation())
    frequencies = base ** (-torch.arange(form.rot // 2) * 2 / form.rot)
    angles = torch.outer(torch.arange(float(rows)), frequencies)
    return torch.cat([angles.cos(), angles.sin()], -1).to(form.table or dtype)


def _case(what: str, dtype: torch.dtype, tier: Tier = Tier.FULL, **options: Any) -> Case:
    form = _Form(**options)
    query_heads, key_heads = form.heads

    def make() -> Arguments:
        query, key = _query_and_key(form, dtype)
        cache = _tables(form, dtype)
        cos, sin = cache.chunk(2, -1)
        return {
            "query": query,
            "key": key,
            "cos": cos,
            "sin": sin,
            "position_ids": _positions(form),
            "rotary_interleaved": form.interleaved,
            "inplace": form.inplace,
            "cos_sin_cache": cache if form.cache else None,
        }

    def expect(given: Arguments) -> Expected:
        before = [None if x is None else x.clone() for x in (given["query"], given["key"])]
        rot = 2 * given["cos"].shape[-1]
        turned = [
            None
            if x is None
            else truth.rotary(x, given["cos"], given["sin"], given["position_ids"], form.interleaved)
            for x in before
        ]
        answer = tuple(None if x is None else x.to(dtype) for x in turned)

        def judge(outs: tuple[Tensor | None, ...]) -> Verdict:
            if len(outs) != 2:
                return wrong(f"returned {len(outs)} results, not (query, key)")
            verdict = RIGHT
            for name, out, was, exact in zip(("query", "key"), outs, before, turned, strict=True):
                if was is None or exact is None:
                    verdict += RIGHT if out is None else wrong(f"{name}: a result for None")
                    continue
                compared = functools.partial(compare, dtype=dtype, tolerance=ROTATION[dtype], what=name)
                whole = compared(out, exact, leans=False)
                if out is not None and whole.is_right:
                    # How it rounds shows in what is rotated alone; the tail passes through.
                    rotated = exact[..., :rot]
                    whole += compared(out[..., :rot], rotated, once=(rotated,))
                verdict += whole
                tail = slice(rot, None)
                if out is not None and verdict.is_right and not same_bytes(out[..., tail], was[..., tail]):
                    verdict += wrong(f"{name}: what lies beyond the {rot} rotated elements was changed")
            return verdict

        return Expected(answer, judge)

    names = ("query",) if key_heads is None else ("query", "key")
    style = "interleaved" if form.interleaved else "halves"
    return Case(
        "rotary_embedding",
        label(dtype, style, what),
        dtype,
        make,
        expect,
        max(form.tokens * (query_heads + (key_heads or 0)) * form.head, form.rows * form.rot),
        tier,
        writes=names if form.inplace else (),
        returns_arguments=("query", "key") if form.inplace else (),
    )


_VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("positions of int32", {"positions": torch.int32}),
    ("a row of the tables for each token", {"positions": None}),
    ("one place for all tokens", {"order": "same"}),
    ("place 0", {"order": "zero"}),
    ("no packed table", {"cache": False}),
    ("no packed table, a row for each token", {"cache": False, "positions": None}),
    ("new results", {"inplace": False}),
    ("new results, partial", {"inplace": False, "rot": 32}),
    ("query and key apart", {"layout": "apart"}),
    ("heads in wider ones", {"layout": "padded"}),
    ("no key", {"heads": (4, None)}),
    ("no key, new results", {"heads": (4, None), "inplace": False}),
    ("17 heads to 1", {"heads": (17, 1)}),
    ("tables of float32", {"table": torch.float32}),
    ("no tokens", {"tokens": 0}),
    ("one token", {"tokens": 1}),
)
#: What no 16 bits count, and more heads than a small block of threads has; with few elements.
_SIZES: tuple[tuple[str, dict[str, Any]], ...] = (
    (f"{MANY} tokens", {"tokens": MANY, "heads": (1, 1), "head": 16, "rot": 16, "layout": "apart"}),
    (f"{MANY} places", {"tokens": 83, "rows": MANY, "rot": 32}),
    (f"{2 * MANY} places, of int32", {"tokens": 83, "rows": 2 * MANY, "rot": 32, "positions": torch.int32}),
    ("64 heads to 8", {"tokens": 3, "heads": (64, 8)}),
    ("128 heads to 128", {"tokens": 3, "heads": (128, 128)}),
)
_SMOKE = {name for name, _ in _VARIANTS} - {"one token", "place 0", "no packed table, a row for each token"}


def _cases() -> Iterator[Case]:
    for dtype in FLOATS:
        for interleaved in (False, True):
            for head in _HEADS:
                for rot in sorted({head, 32, head // 2}):
                    tier = Tier.SMOKE if head in (64, 80) else Tier.FULL
                    yield _case(f"{rot} of {head}", dtype, tier, head=head, rot=rot, interleaved=interleaved)
            for name, options in _VARIANTS:
                tier = Tier.SMOKE if name in _SMOKE and dtype is not torch.float16 else Tier.FULL
                yield _case(name, dtype, tier, interleaved=interleaved, **options)
            if dtype is torch.bfloat16:
                for name, options in _SIZES:
                    yield _case(name, dtype, interleaved=interleaved, **options)
            yield _case("32 heads to 8", dtype, interleaved=interleaved, heads=(32, 8), head=128, rot=128)
        yield _case("4096 tokens", dtype, tokens=4096, rows=8192)
    yield _case("7 tokens", torch.float64, tokens=7)


def _rows(rows: int) -> Iterator[Case]:
    for dtype in ROWS_DTYPES:
        for interleaved in (False, True):
            yield _case(f"{rows} tokens", dtype, tokens=rows, interleaved=interleaved, layout="apart")
        what = f"{rows} tokens, partial, new results"
        yield _case(what, dtype, tokens=rows, rot=32, inplace=False, layout="apart")


SUITES = (Suite("rotary_embedding", _cases, _rows, ("query", "key", "position_ids")),)

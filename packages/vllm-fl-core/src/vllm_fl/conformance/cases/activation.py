"""Cases of ``silu_and_mul`` and ``gelu_and_mul``."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from vllm_fl.conformance import truth
from vllm_fl.conformance.case import MANY
from vllm_fl.conformance.case import ROWS_DTYPES
from vllm_fl.conformance.case import Case
from vllm_fl.conformance.case import Suite
from vllm_fl.conformance.case import Tier
from vllm_fl.conformance.case import label
from vllm_fl.conformance.case import shape_of
from vllm_fl.conformance.case import stretched
from vllm_fl.conformance.judge import BASE
from vllm_fl.conformance.judge import Expected
from vllm_fl.conformance.judge import compare
from vllm_fl.conformance.tensors import DENSE_LAYOUTS
from vllm_fl.conformance.tensors import FLOATS
from vllm_fl.conformance.tensors import OTHER_LAYOUTS
from vllm_fl.conformance.tensors import contiguous
from vllm_fl.conformance.tensors import odd_stride
from vllm_fl.conformance.tensors import random

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Iterator

    from torch import Tensor

    from vllm_fl.conformance.case import Arguments

_WIDTHS = (1, 7, 512, 13824)
_TOKENS = (1, 7, 83)


def _case(
    op: str,
    kind: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    what: str = "",
    *,
    tier: Tier = Tier.FULL,
    layout: Callable[[Tensor], Tensor] = contiguous,
    scale: float = 2.0,
    special: tuple[float, ...] = (),
    same_bytes: bool = False,
) -> Case:
    def make() -> Arguments:
        x = random(*shape, dtype=dtype, scale=scale)
        for place, value in enumerate(special):
            x[..., place] = value
        more = {} if kind == "silu" else {"approximate": "tanh" if kind == "gelu_tanh" else "none"}
        return {"x": layout(x), **more}

    def expect(given: Arguments) -> Expected:
        exact = truth.gated(given["x"], kind)
        return Expected(
            (exact.to(dtype),), lambda outs: compare(outs[0], exact, dtype, BASE[dtype], once=(exact,))
        )

    name = label(dtype, "" if kind == "silu" else kind, what or shape_of(*shape))
    elements = functools.reduce(lambda a, b: a * b, shape, 1)
    return Case(op, name, dtype, make, expect, elements, tier, same_bytes=same_bytes)


def _kind_cases(op: str, kind: str) -> Iterator[Case]:
    case = functools.partial(_case, op, kind)
    for dtype in FLOATS:
        for width in _WIDTHS:
            for tokens in _TOKENS:
                small = width in (7, 512) and tokens != 83
                yield case(dtype, (tokens, 2 * width), tier=Tier.SMOKE if small else Tier.FULL)
        yield case(dtype, (0, 128), "no tokens", tier=Tier.SMOKE)
        yield case(dtype, (2, 19, 128), "three dimensions", tier=Tier.SMOKE)
        yield case(dtype, (2, 3, 4, 64), "four dimensions")
        yield case(dtype, (128,), "one dimension")
        yield case(dtype, (7, 128), "tails", scale=10.0, tier=Tier.SMOKE)
        # In float32 what a GELU's cancellation leaves, times a large factor, says nothing.
        if kind == "silu" or dtype is not torch.float32:
            yield case(dtype, (7, 128), "large", scale=60.0)
        # Of -inf the product is NaN with a formula and 0 with another; and of inf torch's
        # own GELU with the error function gives NaN on a CPU.
        infinite = float("inf") if kind != "gelu" else 1.0
        yield case(dtype, (3, 64), "inf, nan, -0", special=(infinite, float("nan"), -0.0), tier=Tier.SMOKE)
        for name, layout in DENSE_LAYOUTS.items():
            yield case(dtype, (19, 128), name, layout=layout, same_bytes=True, tier=Tier.SMOKE)
        for name, layout in OTHER_LAYOUTS.items():
            yield case(dtype, (19, 128), name, layout=layout, tier=Tier.SMOKE)
        yield case(dtype, (2, 5, 64), "three dimensions, rows of odd stride", layout=odd_stride)
    yield case(torch.bfloat16, (2048, 2 * 512))
    yield case(torch.bfloat16, (MANY, 2 * 8))
    yield case(torch.bfloat16, (3, 2 * 16384))
    yield case(torch.bfloat16, (2, 2 * 28672))
    yield case(torch.float64, (7, 64))
    # 2**31 elements and a row.
    wide = case(torch.bfloat16, (8, 2 * 8192))
    yield stretched(
        wide, label(torch.bfloat16, "" if kind == "silu" else kind, "over 2**31 elements"), 2**14 + 1
    )


def _rows(op: str, kinds: tuple[str, ...], rows: int) -> Iterator[Case]:
    for dtype in ROWS_DTYPES:
        for kind in kinds:
            yield _case(op, kind, dtype, (rows, 128))


def _suite(op: str, *kinds: str) -> Suite:
    return Suite(
        op,
        lambda: (case for kind in kinds for case in _kind_cases(op, kind)),
        functools.partial(_rows, op, kinds),
        ("x",),
    )


SUITES = (_suite("silu_and_mul", "silu"), _suite("gelu_and_mul", "gelu", "gelu_tanh"))

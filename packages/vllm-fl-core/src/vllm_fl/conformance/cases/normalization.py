"""Cases of ``rms_norm``, alone and with a residual."""

from __future__ import annotations

import functools
import math
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
from vllm_fl.conformance.judge import REDUCTION
from vllm_fl.conformance.judge import Expected
from vllm_fl.conformance.judge import compare
from vllm_fl.conformance.judge import wide
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

_HIDDEN = (1, 8, 16, 768, 769, 5120, 5125, 8192)
_HIDDEN_SMOKE = (8, 768, 769)


def _case(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    what: str = "",
    *,
    add: bool = False,
    tier: Tier = Tier.FULL,
    layout: Callable[[Tensor], Tensor] = contiguous,
    residual_layout: Callable[[Tensor], Tensor] | None = None,
    weight: torch.dtype | bool = True,
    epsilon: float = 1e-6,
    scale: float = 1.0,
    special: Callable[[Tensor], object] | None = None,
    same: bool = False,
) -> Case:
    """Make a case; ``weight`` is a dtype, True for x's or False for none; ``same``: x is residual."""

    def make() -> Arguments:
        x = random(*shape, dtype=dtype, scale=scale)
        residual = random(*shape, dtype=dtype, seed=1, scale=scale) if add else None
        for one in (x, residual):
            if special is not None and one is not None:
                special(one)
        gain = None
        if weight is not False:
            kind = dtype if weight is True else weight
            gain = random(shape[-1], dtype=torch.float32, seed=2, scale=0.3, mean=1.0).to(kind)
        x = layout(x)
        if residual is not None:
            residual = x if same else (residual_layout or layout)(residual)
        return {"x": x, "residual": residual, "weight": gain, "epsilon": epsilon}

    def expect(given: Arguments) -> Expected:
        gain = given["weight"]
        normed, total = truth.rms_norm(given["x"], given["residual"], gain, epsilon)
        once = [normed]
        if gain is not None:
            # The contract rounds to the weight's dtype before it multiplies.
            before, _ = truth.rms_norm(given["x"], given["residual"], None, epsilon)
            once.append(before.to(gain.dtype).double() * wide(gain))
        compared = functools.partial(
            compare, truth=normed, dtype=dtype, tolerance=REDUCTION[dtype], once=once
        )
        if not add:
            return Expected((normed.to(dtype),), lambda outs: compared(outs[0]))

        def judge(outs: tuple[Tensor | None, ...]) -> Verdict:
            # The sum is exact in float64, so that one rounding is all that it may be off.
            half_unit = (1e-12, torch.finfo(dtype).eps / 2 * 1.01)
            return compared(outs[0], what="normed") + compare(
                outs[1], total, dtype, half_unit, what="x + residual"
            )

        return Expected((normed.to(dtype), total.to(dtype)), judge)

    return Case(
        "rms_norm",
        label(dtype, "with a residual" if add else "alone", what or shape_of(*shape)),
        dtype,
        make,
        expect,
        math.prod(shape),
        tier,
        writes=("x", "residual") if add else (),
    )


def _zero_row(x: Tensor) -> None:
    x[0] = 0


def _nan_row(x: Tensor) -> None:
    x[1, 3] = float("nan")


def _cases() -> Iterator[Case]:
    for dtype in FLOATS:
        for add in (False, True):
            for hidden in _HIDDEN:
                tier = Tier.SMOKE if hidden in _HIDDEN_SMOKE else Tier.FULL
                yield _case(dtype, (7, hidden), add=add, tier=tier)
            for tokens in (1, 83):
                yield _case(dtype, (tokens, 1024), add=add)
            yield _case(dtype, (0, 64), "no tokens", add=add, tier=Tier.SMOKE)
            yield _case(dtype, (7, 64), "no weight", weight=False, add=add, tier=Tier.SMOKE)
            # So small that epsilon is what the row is divided by.
            yield _case(dtype, (7, 64), "epsilon rules", scale=1e-3, epsilon=1e-5, add=add, tier=Tier.SMOKE)
            yield _case(dtype, (7, 64), "a tiny epsilon rules", scale=1e-4, epsilon=1e-7, add=add)
            yield _case(dtype, (7, 64), "a row of zeros", special=_zero_row, add=add, tier=Tier.SMOKE)
            yield _case(dtype, (7, 64), "a row with NaN", special=_nan_row, add=add, tier=Tier.SMOKE)
            # The square overflows float16.
            yield _case(dtype, (7, 64), "large", scale=6e3, add=add, tier=Tier.SMOKE)
            for shape in ((64,), (3, 5, 64), (2, 3, 4, 64)):
                tier = Tier.SMOKE if len(shape) == 3 else Tier.FULL
                yield _case(dtype, shape, f"{len(shape)} dimensions", add=add, tier=tier)
            for name, layout in LAYOUTS.items():
                yield _case(dtype, (7, 64), name, layout=layout, add=add, tier=Tier.SMOKE)
                yield _case(dtype, (7, 3, 64), f"heads, {name}", layout=layout, add=add)
        yield _case(dtype, (7, 64), "x in wider rows", add=True, layout=wider, residual_layout=contiguous)
        yield _case(dtype, (7, 64), "the residual in wider rows", add=True, residual_layout=wider)
        yield _case(dtype, (7, 64), "x is the residual", add=True, same=True)
    for add in (False, True):
        yield _case(
            torch.bfloat16, (7, 768), "weight of float32", weight=torch.float32, add=add, tier=Tier.SMOKE
        )
        yield _case(torch.float16, (7, 768), "weight of float32", weight=torch.float32, add=add)
        yield _case(torch.bfloat16, (4096, 1024), add=add)
        yield _case(torch.bfloat16, (MANY, 8), add=add)
        for hidden in (16384, 28672):
            yield _case(torch.bfloat16, (3, hidden), add=add)
        for heads in (64, 128):
            yield _case(torch.bfloat16, (3, heads, 64), f"{heads} heads", add=add)
        yield _case(torch.bfloat16, (513, 128, 8), "more heads than 16 bits count", add=add)
        yield _case(torch.float64, (7, 64), add=add)
    yield stretched(
        _case(torch.bfloat16, (8, 8192)), label(torch.bfloat16, "alone over 2**31 elements"), 2**15 + 1
    )


def _rows(rows: int) -> Iterator[Case]:
    for dtype in ROWS_DTYPES:
        for add in (False, True):
            yield _case(dtype, (rows, 96), add=add)


SUITES = (Suite("rms_norm", _cases, _rows, ("x", "residual")),)

"""Cases of the dynamic quantisations, one scale for each row."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import torch

from vllm_fl.conformance.case import MANY
from vllm_fl.conformance.case import ROWS_DTYPES
from vllm_fl.conformance.case import Case
from vllm_fl.conformance.case import Suite
from vllm_fl.conformance.case import Tier
from vllm_fl.conformance.case import label
from vllm_fl.conformance.case import shape_of
from vllm_fl.conformance.case import stretched
from vllm_fl.conformance.judge import Expected
from vllm_fl.conformance.judge import Verdict
from vllm_fl.conformance.judge import compare
from vllm_fl.conformance.judge import wide
from vllm_fl.conformance.judge import wrong
from vllm_fl.conformance.tensors import DENSE_LAYOUTS
from vllm_fl.conformance.tensors import FLOATS
from vllm_fl.conformance.tensors import OTHER_LAYOUTS
from vllm_fl.conformance.tensors import contiguous
from vllm_fl.conformance.tensors import named
from vllm_fl.conformance.tensors import random

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Iterator

    from torch import Tensor

    from vllm_fl.conformance.case import Arguments

_HIDDEN = (17, 1024, 1025, 1026, 5137, 8193)
_SCALE = (0.0, 1.3e-6)
#: The quotient itself is computed in float32, as a division or by a reciprocal.
_NEAR = (1.0, 1.0 - 2.0**-22, 1.0 + 2.0**-22)
_E4M3_MAX = 448.0


def _results(outs: tuple[Tensor | None, ...], dtype: torch.dtype, like: Tensor) -> str:
    """Say why results are no (codes, scales); ``""`` where they are."""
    if len(outs) != 2 or outs[0] is None or outs[1] is None:
        return "returned no (codes, scales)"
    if outs[0].dtype is not dtype or outs[0].shape != like.shape:
        return (
            f"codes of {named(outs[0].dtype)} {tuple(outs[0].shape)}, not {named(dtype)} {tuple(like.shape)}"
        )
    return ""


def expect_int8(x: Tensor, *, is_exact: bool = False) -> Expected:
    """Return what is right of int8; ``is_exact``: quotients are exact, so that rounding can be told."""
    exact = wide(x)
    scale = (exact.abs().amax(-1, keepdim=True) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    is_zero = ~exact.any(-1, keepdim=True)

    def judge(outs: tuple[Tensor | None, ...]) -> Verdict:
        problem = _results(outs, torch.int8, x)
        codes, scales = outs[0], outs[1] if len(outs) > 1 else None
        if problem or codes is None or scales is None:
            return wrong(problem)
        if scales.dtype is not torch.float32 or scales.shape != scale.shape:
            return wrong(f"scales of {named(scales.dtype)} {tuple(scales.shape)}")
        if not bool((scales.isfinite() & (scales > 0)).all()):
            return wrong("a scale that is 0 or not finite")
        # Of a row of zeros any scale will do.
        right = torch.where(is_zero, wide(scales), scale)
        verdict = compare(scales, right, torch.float32, _SCALE, what="scales")
        if not codes.numel() or not verdict.is_right:
            return verdict
        quotient = exact / wide(scales)
        nears = (1.0,) if is_exact else _NEAR
        off = torch.stack([(wide(codes) - (quotient * near).round()).abs() for near in nears]).amin(0)
        verdict += Verdict(float(off.max()) * 2, float(off.max()), _codes(off))
        lost = (wide(codes) * wide(scales) - exact).abs() / (wide(scales) / 2 * 1.01)
        note = "dequantised, it is further off than half a step" if float(lost.max()) > 1 else ""
        return verdict + Verdict(float(lost.max()), 0.0, note)

    codes = (exact / scale.float().double()).round()
    return Expected((codes.to(torch.int8), scale.float()), judge)


def _codes(off: Tensor) -> str:
    count = int((off > 0).sum())
    return f"{count} of {off.numel()} codes differ, by {float(off.max()):g} at most" if count else ""


def expect_fp8(x: Tensor) -> Expected:
    """Return what is right of float8_e4m3fn."""
    exact = wide(x)
    scale = (exact.abs().amax(-1, keepdim=True) / _E4M3_MAX).clamp(min=1 / (_E4M3_MAX * 512))

    def codes_of(quotient: Tensor) -> Tensor:
        return quotient.clamp(-_E4M3_MAX, _E4M3_MAX).float().to(torch.float8_e4m3fn)

    def judge(outs: tuple[Tensor | None, ...]) -> Verdict:
        problem = _results(outs, torch.float8_e4m3fn, x)
        codes, scales = outs[0], outs[1] if len(outs) > 1 else None
        if problem or codes is None or scales is None:
            return wrong(problem)
        verdict = compare(scales, scale, torch.float32, _SCALE, what="scales")
        if not codes.numel() or not verdict.is_right:
            return verdict
        if not bool(codes.float().isfinite().all()):
            return verdict + wrong("NaN among the codes: the largest is 448")
        quotient, bits = exact / wide(scales), codes.view(torch.uint8).int()
        off = torch.full(bits.shape, 255, dtype=torch.int32)
        for near in _NEAR:
            code = codes_of(quotient * near)
            off = torch.minimum(off, (bits - code.view(torch.uint8).int()).abs())
            off[(codes.float() == 0) & (code.float() == 0)] = 0  # the two zeros
        others = int((off > 0).sum())
        ratio = max(others / (codes.numel() / 100000 + 8), float(off.max()))
        return verdict + Verdict(ratio, float((wide(codes) - quotient).abs().max()), _codes(off))

    return Expected((codes_of(exact / scale.float().double()), scale.float()), judge)


_OPERATORS = {
    "dynamic_per_token_quant_int8": expect_int8,
    "dynamic_per_token_quant_fp8": expect_fp8,
}


def _case(
    op: str,
    dtype: torch.dtype,
    shape: tuple[int, int],
    what: str = "",
    tier: Tier = Tier.FULL,
    *,
    layout: Callable[[Tensor], Tensor] = contiguous,
    special: Callable[[Tensor], object] | None = None,
    is_exact: bool = False,
    same_bytes: bool = False,
) -> Case:
    def make() -> Arguments:
        x = random(*shape, dtype=dtype)
        if special is not None:
            special(x)
        return {"x": layout(x)}

    def expect(given: Arguments) -> Expected:
        return expect_int8(given["x"], is_exact=True) if is_exact else _OPERATORS[op](given["x"])

    name = label(dtype, what or shape_of(*shape))
    return Case(op, name, dtype, make, expect, math.prod(shape), tier, same_bytes=same_bytes)


def _zero_row(x: Tensor) -> None:
    x[1] = 0


def _outlier(x: Tensor) -> None:
    x[1, 5] = 3e4


def _tiny(x: Tensor) -> None:
    x.mul_(1e-5)


def _negative_peak(x: Tensor) -> None:
    x[:, 3] = -9.0


def _halves(x: Tensor) -> None:
    """With 127 in the row the scale is 1, and every quotient is half an odd number."""
    x.copy_((torch.arange(x.numel()).view(x.shape) % 120 - 60) + 0.5)
    x[:, 0] = 127


def _saturating(x: Tensor) -> None:
    """Every element is the largest of its row, of both signs."""
    x.copy_(torch.where(x < 0, -1.0, 1.0) * (torch.arange(x.shape[0]).unsqueeze(1) + 0.37))


def _cases(op: str) -> Iterator[Case]:
    for dtype in FLOATS:
        for hidden in _HIDDEN:
            for tokens in (1, 7):
                tier = Tier.SMOKE if hidden in (1024, 1025) and tokens == 7 else Tier.FULL
                yield _case(op, dtype, (tokens, hidden), tier=tier)
        yield _case(op, dtype, (83, 1024))
        yield _case(op, dtype, (0, 64), "no tokens", Tier.SMOKE)
        yield _case(op, dtype, (3, 64), "a row of zeros", Tier.SMOKE, special=_zero_row)
        yield _case(op, dtype, (3, 64), "one outlier", Tier.SMOKE, special=_outlier)
        yield _case(op, dtype, (3, 64), "tiny", Tier.SMOKE, special=_tiny)
        yield _case(op, dtype, (3, 64), "the largest is negative", Tier.SMOKE, special=_negative_peak)
        yield _case(op, dtype, (16, 64), "saturating", Tier.SMOKE, special=_saturating)
        if op.endswith("int8"):
            yield _case(
                op, dtype, (4, 64), "halves between codes", Tier.SMOKE, special=_halves, is_exact=True
            )
        for name, layout in DENSE_LAYOUTS.items():
            yield _case(op, dtype, (19, 64), name, Tier.SMOKE, layout=layout, same_bytes=True)
        for name, layout in OTHER_LAYOUTS.items():
            yield _case(op, dtype, (19, 64), name, Tier.SMOKE, layout=layout)
    for shape in ((4096, 1024), (MANY, 16), (3, 16384), (2, 28672)):
        yield _case(op, torch.bfloat16, shape)
    yield stretched(
        _case(op, torch.bfloat16, (8, 8192)), label(torch.bfloat16, "over 2**31 elements"), 2**15 + 1
    )


def _rows(op: str, rows: int) -> Iterator[Case]:
    for dtype in ROWS_DTYPES:
        yield _case(op, dtype, (rows, 128))


SUITES = tuple(
    Suite(op, functools.partial(_cases, op), functools.partial(_rows, op), ("x",)) for op in _OPERATORS
)

"""How far a result is from the truth, in tolerances.

A tolerance that suits one shape can be void for another: a mixture of experts of
small inputs is itself smaller than the usual 2e-2, so that zeros pass. Sums over a
hidden dimension are therefore judged relative to the root mean square R of the
truth, and every case must reject zeros and a result with one element in fifty
wrong (:func:`spoiled`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vllm_fl.conformance.tensors import named

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence

    from torch import Tensor

#: (absolute, relative) for one rounding, and for a reduction in low precision.
BASE = {
    torch.float64: (1e-5, 1.3e-6),
    torch.float32: (1e-5, 1.3e-6),
    torch.float16: (1e-3, 1e-3),
    torch.bfloat16: (1e-3, 1.6e-2),
}
REDUCTION = {**BASE, torch.float16: (1e-2, 1e-2), torch.bfloat16: (1e-2, 1e-2)}
ROTATION = {**BASE, torch.bfloat16: (1e-2, 1.6e-2)}

#: (largest, root mean square) relative to R.
EXPERTS = {
    torch.float64: (1e-4, 1e-5),
    torch.float32: (1e-4, 1e-5),
    torch.float16: (1e-2, 2e-3),
    torch.bfloat16: (6e-2, 1e-2),
}
#: FlashAttention 3 on an H200 comes to 5.0e-3 in float16.
ATTENTION = {
    torch.float32: (1e-4, 1e-5),
    torch.float16: (8e-3, 1e-3),
    torch.bfloat16: (4e-2, 6e-3),
}

#: Units in the last place by which rounding may lean to one side on average.
#: Rounding to nearest leans by none, truncation by one half.
_LEAN = 0.25
#: Share of the elements that may be another number than the nearest, ties apart, where a
#: result is rounded once. What rounds in between as well comes to a fifth and more.
_SECOND = 0.05
#: Beyond half a unit in the last place: what computing in float32 adds.
_NEAREST = 0.5 + 1 / 16
#: Elements that it takes to tell either, and of how many it is told at most.
_ENOUGH = 256
_PLENTY = 2**16


@dataclass(frozen=True)
class Verdict:
    """How far a result is from the truth.

    Attributes:
        ratio: the error in tolerances; right is at most 1, and infinite is what no
            tolerance covers, such as another dtype.
        largest: the largest absolute error.
        note: what is wrong, or what there is to say of what is right.
    """

    ratio: float = 0.0
    largest: float = 0.0
    note: str = ""

    @property
    def is_right(self) -> bool:
        """Whether it is within the tolerance."""
        return self.ratio <= 1.0

    def __add__(self, other: Verdict) -> Verdict:
        """Return the worse ratio of both, and both notes."""
        notes = "; ".join(dict.fromkeys(note for note in (self.note, other.note) if note))
        return Verdict(max(self.ratio, other.ratio), max(self.largest, other.largest), notes)


RIGHT = Verdict()


def wrong(note: str) -> Verdict:
    """Return the verdict that no tolerance covers."""
    return Verdict(math.inf, math.inf, note)


def wide(x: Tensor) -> Tensor:
    """Return the values in float64 on the CPU."""
    return x.detach().cpu().double()


def _form(out: Tensor | None, truth: Tensor, dtype: torch.dtype) -> str:
    if out is None:
        return "None, where a tensor belongs"
    if out.dtype is not dtype:
        return f"dtype {named(out.dtype)}, not {named(dtype)}"
    if out.shape != truth.shape:
        return f"shape {tuple(out.shape)}, not {tuple(truth.shape)}"
    return ""


def compare(
    out: Tensor | None,
    truth: Tensor,
    dtype: torch.dtype,
    tolerance: tuple[float, float],
    *,
    what: str = "",
    leans: bool = True,
    once: Sequence[Tensor] = (),
) -> Verdict:
    """Compare every element with the truth.

    Infinities and NaN must stand where the truth, rounded, has them. In 16 bits
    the error must lean to no side: that tells rounding from truncation, which
    stays inside the usual tolerance.

    Args:
        out: the result.
        truth: float64, on the CPU.
        dtype: what the result must have.
        tolerance: (absolute, relative).
        what: names the result in a note.
        leans: judge the lean too.
        once: in 16 bits nearly every element must be the number nearest to one of these:
            to the truth, if it is rounded once, or to what else the contract allows.
    """
    prefix = f"{what}: " if what else ""
    problem = _form(out, truth, dtype)
    if problem or out is None:
        return wrong(prefix + problem)
    if not out.numel():
        return RIGHT
    absolute, relative = tolerance
    got, rounded = wide(out), truth.to(dtype).double()
    finite = rounded.isfinite()
    # One rounding next to the largest number may go either way.
    same = (got == rounded) | (got.isnan() & rounded.isnan())
    if not bool(same[~finite].all()):
        return wrong(prefix + "infinities or NaN are not where the truth has them")
    got, exact = got[finite], truth[finite]
    if not got.numel():
        return RIGHT
    error = (got - exact).abs()
    if bool(error.isnan().any()):
        return wrong(prefix + "NaN where the truth is finite")
    bound = absolute + relative * exact.abs()
    # An error of 0 is right whatever the bound, and any other beyond a bound of 0 is not.
    ratios = torch.where(error == 0, torch.zeros_like(error), error / bound)
    verdict = Verdict(float(ratios.max()), float(error.max()))
    if not verdict.is_right:
        share = float((ratios > 1).double().mean())
        verdict += Verdict(note=f"{prefix}{share:.1%} of the elements beyond {absolute:g} + {relative:g}|x|")
    if not leans or dtype not in (torch.float16, torch.bfloat16):
        return verdict
    # What is smaller than the absolute tolerance may be what a cancellation left.
    usual = (exact.abs() > absolute) & (got.abs() < torch.finfo(dtype).max)
    places = usual.nonzero().flatten()
    if places.numel() < _ENOUGH:
        return verdict
    # An odd step, so that not one column of a tensor is all that is looked at.
    places = places[:: (places.numel() // _PLENTY) | 1]
    # What the contract rounds before a product on purpose may itself lean.
    nearest = [one[finite][places] for one in once] or [exact[places]]
    units = [(_units(got[places], one, dtype), one.sign()) for one in nearest]
    lean = _lean(min((float((off * sign).clamp(-1, 1).mean()) for off, sign in units), key=abs), prefix)
    if once and lean.is_right:
        lean += _once(min(float((off.abs() > _NEAREST).double().mean()) for off, _ in units), prefix)
    return verdict + lean


def _units(got: Tensor, exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Return by how many units in the last place of the truth each element is off."""
    # frexp's mantissa begins at one half.
    unit = torch.ldexp(torch.ones_like(exact), exact.frexp().exponent - 1) * torch.finfo(dtype).eps
    return (got - exact) / unit


def _lean(units: float, prefix: str) -> Verdict:
    if abs(units) <= _LEAN:
        return RIGHT
    how = "truncated, not rounded to nearest" if units < 0 else "rounded away from zero"
    note = f"{prefix}{how}: leans by {units:+.2f} units in the last place"
    return Verdict(abs(units) / _LEAN, 0.0, note)


def _once(share: float, prefix: str) -> Verdict:
    if share <= _SECOND:
        return RIGHT
    note = f"{prefix}rounded more than once: {share:.0%} of the elements are not the nearest number"
    return Verdict(share / _SECOND, 0.0, note)


def relative_to_rms(
    out: Tensor | None, truth: Tensor, dtype: torch.dtype, tolerance: tuple[float, float], *, what: str = ""
) -> Verdict:
    """Compare with the truth's root mean square R: for sums over a hidden dimension.

    Args:
        out: the result.
        truth: float64, on the CPU.
        dtype: what the result must have.
        tolerance: the largest error and the error's root mean square, in R.
        what: names the result in a note.
    """
    prefix = f"{what}: " if what else ""
    problem = _form(out, truth, dtype)
    if problem or out is None:
        return wrong(prefix + problem)
    if not out.numel():
        return RIGHT
    size = float(truth.square().mean().sqrt())
    error = wide(out) - truth
    if not bool(error.isfinite().all()):
        return wrong(prefix + "not finite")
    if size == 0.0:
        return RIGHT if not bool(error.any()) else wrong(prefix + "not zero")
    largest = float(error.abs().max()) / size
    spread = float(error.square().mean().sqrt()) / size
    ratio = max(largest / tolerance[0], spread / tolerance[1])
    note = f"{prefix}largest error {largest:.1e} R, rms {spread:.1e} R" if ratio > 1 else ""
    return Verdict(ratio, float(error.abs().max()), note)


def spoiled(answer: Tensor) -> Tensor:
    """Return the answer with one element in fifty wrong: doubled, or another integer.

    The largest is among them, so that an answer of a few elements is spoiled too.
    """
    flat = answer.detach().clone(memory_format=torch.contiguous_format).flatten()
    values = flat.double()
    start = int(values.nan_to_num(0.0, 0.0, 0.0).abs().argmax())
    places = (torch.arange(start, start + flat.numel(), 50)) % flat.numel()
    if answer.is_floating_point():
        # A quantised number near the largest one cannot be doubled.
        bad = values[places] * (0.5 if answer.element_size() == 1 else 2.0)
        flat[places] = bad.to(answer.dtype)
    else:
        # By way of int64: torch adds no uint32.
        limit = torch.iinfo(answer.dtype).max
        whole = flat.long()
        whole[places] += torch.where(whole[places] == limit, -2, 1)
        flat = whole.to(answer.dtype)
    return flat.view(answer.shape)


@dataclass(frozen=True)
class Expected:
    """What is right for one case's arguments.

    Attributes:
        answer: a right result, computed without the implementation; None where the
            result is None.
        judge: takes a result on the CPU.
        spoil: makes a part of the answer wrong, for :func:`vacuity`.
    """

    answer: tuple[Tensor | None, ...]
    judge: Callable[[tuple[Tensor | None, ...]], Verdict]
    spoil: Callable[[Tensor], Tensor] = spoiled


def vacuity(expected: Expected) -> str:
    """Say what the judge of a case lets pass and must not, or ``""``.

    It must accept the answer; and reject, for each result by itself, zeros and
    a spoiled part, where the answer is neither empty nor itself zero.
    """
    verdict = expected.judge(expected.answer)
    if not verdict.is_right:
        return f"its judge rejects the truth itself: {verdict.note or verdict.ratio}"
    for place, part in enumerate(expected.answer):
        if part is None or not part.numel() or not bool(part.double().nan_to_num(1.0).any()):
            continue
        for name, bad in (("zeros", torch.zeros_like(part)), ("a spoiled result", expected.spoil(part))):
            parts = (*expected.answer[:place], bad, *expected.answer[place + 1 :])
            if expected.judge(parts).is_right:
                return f"its judge accepts {name} as result {place}"
    return ""

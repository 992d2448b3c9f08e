"""The kit's judge, number by number: where each bound lies, and on which side of it a result is right."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch

from vllm_fl.conformance import judge
from vllm_fl.conformance.judge import Expected
from vllm_fl.conformance.judge import Verdict
from vllm_fl.conformance.judge import compare
from vllm_fl.conformance.judge import relative_to_rms
from vllm_fl.conformance.judge import spoiled
from vllm_fl.conformance.judge import vacuity

if TYPE_CHECKING:
    from torch import Tensor

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
NAN, INF = math.nan, math.inf


def _tensor(*values: float, dtype: torch.dtype = F32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


# -- verdicts -------------------------------------------------------------------


@pytest.mark.parametrize(("ratio", "is_right"), [(0.0, True), (1.0, True), (1.001, False), (INF, False)])
def test_right_is_at_most_one_tolerance(ratio: float, is_right: bool) -> None:
    assert Verdict(ratio).is_right is is_right


def test_a_sum_is_the_worse_of_both() -> None:
    assert Verdict(1.0, 5.0, "a") + Verdict(2.0, 3.0, "b") == Verdict(2.0, 5.0, "a; b")
    assert Verdict(note="a") + Verdict(note="a") + Verdict() == Verdict(note="a")
    assert Verdict() == judge.RIGHT
    with pytest.raises(AttributeError):
        judge.RIGHT.ratio = 2.0  # type: ignore[misc]


def test_wrong_is_beyond_any_tolerance() -> None:
    assert judge.wrong("so") == Verdict(INF, INF, "so")


@pytest.mark.parametrize(
    ("table", "dtype", "bound"),
    [
        ("BASE", F64, (1e-5, 1.3e-6)),
        ("BASE", F32, (1e-5, 1.3e-6)),
        ("BASE", F16, (1e-3, 1e-3)),
        ("BASE", BF16, (1e-3, 1.6e-2)),
        ("REDUCTION", F32, (1e-5, 1.3e-6)),
        ("REDUCTION", F16, (1e-2, 1e-2)),
        ("REDUCTION", BF16, (1e-2, 1e-2)),
        ("ROTATION", F16, (1e-3, 1e-3)),
        ("ROTATION", BF16, (1e-2, 1.6e-2)),
        ("EXPERTS", F64, (1e-4, 1e-5)),
        ("EXPERTS", F32, (1e-4, 1e-5)),
        ("EXPERTS", F16, (1e-2, 2e-3)),
        ("EXPERTS", BF16, (6e-2, 1e-2)),
        ("ATTENTION", F32, (1e-4, 1e-5)),
        ("ATTENTION", F16, (8e-3, 1e-3)),
        ("ATTENTION", BF16, (4e-2, 6e-3)),
    ],
)
def test_the_tolerances(table: str, dtype: torch.dtype, bound: tuple[float, float]) -> None:
    """A wider one lets wrong kernels pass: it is changed here too, on purpose."""
    assert getattr(judge, table)[dtype] == bound


# -- element by element ---------------------------------------------------------


@pytest.mark.parametrize(
    ("out", "note"),
    [
        (None, "y: None, where a tensor belongs"),
        (_tensor(1.0, 2.0, dtype=F16), "y: dtype float16, not float32"),
        (_tensor(1.0), "y: shape (1,), not (2,)"),
    ],
)
def test_another_form(out: Tensor | None, note: str) -> None:
    truth = _tensor(1.0, 2.0, dtype=F64)
    assert compare(out, truth, F32, judge.BASE[F32], what="y") == judge.wrong(note)
    assert relative_to_rms(out, truth, F32, (1e-4, 1e-5), what="y") == judge.wrong(note)
    assert compare(out, truth, F32, judge.BASE[F32]).note == note.removeprefix("y: ")
    assert relative_to_rms(out, truth, F32, (1e-4, 1e-5)).note == note.removeprefix("y: ")


def test_nothing_is_right() -> None:
    empty = torch.empty(0, 4)
    assert compare(empty, empty.double(), F32, judge.BASE[F32]) == judge.RIGHT
    assert relative_to_rms(empty, empty.double(), F32, (1e-4, 1e-5)) == judge.RIGHT


@pytest.mark.parametrize(
    ("got", "exact", "ratio", "largest"),
    [
        (4.0, 4.0, 0.0, 0.0),
        # 0.25 + 0.125 * 4
        (4.75, 4.0, 1.0, 0.75),
        (3.25, 4.0, 1.0, 0.75),
        (-4.75, -4.0, 1.0, 0.75),
        (5.5, 4.0, 2.0, 1.5),
        (0.25, 0.0, 1.0, 0.25),
    ],
)
def test_the_bound_is_absolute_and_relative(got: float, exact: float, ratio: float, largest: float) -> None:
    verdict = compare(_tensor(0.0, got), _tensor(0.0, exact, dtype=F64), F32, (0.25, 0.125), what="y")
    assert (verdict.ratio, verdict.largest) == (ratio, largest)
    assert verdict.note == ("" if ratio <= 1 else "y: 50.0% of the elements beyond 0.25 + 0.125|x|")


def test_a_bound_of_zero() -> None:
    truth = _tensor(0.0, 1.0, dtype=F64)
    assert compare(_tensor(0.0, 1.0), truth, F32, (0.0, 0.0)) == judge.RIGHT
    assert compare(_tensor(0.0, 1.5), truth, F32, (0.0, 0.0)).ratio == INF


@pytest.mark.parametrize(
    ("got", "exact", "note"),
    [
        ((INF, 1.0), (INF, 1.0), ""),
        ((-INF, NAN), (-INF, NAN), ""),
        ((INF,), (1e39,), ""),
        ((1.0, 1.0), (INF, 1.0), "infinities or NaN are not where the truth has them"),
        ((-INF, 1.0), (INF, 1.0), "infinities or NaN are not where the truth has them"),
        ((NAN, 1.0), (INF, 1.0), "infinities or NaN are not where the truth has them"),
        ((1.0, 1.0), (NAN, 1.0), "infinities or NaN are not where the truth has them"),
        ((NAN, 1.0), (1.0, 1.0), "NaN where the truth is finite"),
    ],
)
def test_what_is_not_finite(got: tuple[float, ...], exact: tuple[float, ...], note: str) -> None:
    verdict = compare(_tensor(*got), _tensor(*exact, dtype=F64), F32, judge.BASE[F32])
    assert verdict == (judge.wrong(note) if note else judge.RIGHT)


def test_an_infinity_where_the_truth_is_finite() -> None:
    assert compare(_tensor(INF), _tensor(1.0, dtype=F64), F32, judge.BASE[F32]).ratio == INF


# -- rounding -------------------------------------------------------------------


def _leaning(units: float, count: int = 256, *, dtype: torch.dtype = BF16, sign: float = 1.0) -> Verdict:
    """Judge ``count`` results that are ``units`` in the last place above their truth."""
    got = torch.full((count,), 1.5 * sign, dtype=dtype)
    exact = got.double() - sign * units * torch.finfo(dtype).eps
    return compare(got, exact, dtype, (1e-3, 1.6e-2))


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("units", [0.25, -0.25, 0.0])
def test_a_quarter_of_a_unit_may_lean(units: float, dtype: torch.dtype, sign: float) -> None:
    verdict = _leaning(units, dtype=dtype, sign=sign)
    assert verdict.is_right
    assert verdict.note == ""


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize(
    ("units", "note"),
    [
        (0.5, "rounded away from zero: leans by +0.50 units in the last place"),
        (-0.5, "truncated, not rounded to nearest: leans by -0.50 units in the last place"),
    ],
)
def test_more_is_not_rounded_to_nearest(units: float, note: str, dtype: torch.dtype, sign: float) -> None:
    verdict = _leaning(units, dtype=dtype, sign=sign)
    assert verdict.ratio == pytest.approx(2.0)
    assert verdict.note == note


def test_few_elements_tell_nothing_of_rounding() -> None:
    assert _leaning(0.5, 255).is_right
    assert not _leaning(0.5, 256).is_right


def test_one_unit_is_the_most_that_an_element_counts() -> None:
    """Few large errors are judged by the tolerance, and do not make the rest lean."""
    got = torch.full((400,), 1.5, dtype=BF16)
    exact = got.double()
    exact[:80] -= 2 * torch.finfo(BF16).eps
    assert compare(got, exact, BF16, (1e-1, 1e-1)).note == ""
    exact[:120] = 1.5 - 2 * torch.finfo(BF16).eps
    assert "leans by +0.30" in compare(got, exact, BF16, (1e-1, 1e-1)).note


def test_where_rounding_is_not_judged() -> None:
    got = torch.full((256,), 1.5, dtype=BF16)
    exact = got.double() - 0.5 * torch.finfo(BF16).eps
    assert compare(got, exact, BF16, (1e-3, 1.6e-2), leans=False).is_right
    # At most the absolute tolerance, which a cancellation may leave.
    assert compare(got, exact, BF16, (1.5, 1.6e-2)).is_right
    assert not compare(got, exact, BF16, (1.49, 1.6e-2)).is_right
    # The largest number, which rounding cannot pass.
    most = torch.full((256,), torch.finfo(BF16).max, dtype=BF16)
    unit = 2.0 ** math.floor(math.log2(torch.finfo(BF16).max)) * torch.finfo(BF16).eps
    assert compare(most, most.double() - 0.4 * unit, BF16, (1e-3, 1.6e-2)).is_right
    # And float32 has no lean.
    wide = torch.full((256,), 1.5)
    assert compare(wide, wide.double() - 0.5 * torch.finfo(F32).eps, F32, judge.BASE[F32]).note == ""


# -- relative to the root mean square -----------------------------------------------


@pytest.mark.parametrize(
    ("errors", "ratio"),
    [
        ((0.0, 0.0), 0.0),
        # R is 2. The largest error: 0.2 R of 0.2; its root mean square: 0.141 R of 0.5.
        ((0.4, 0.0), 1.0),
        ((0.0, -0.8), 2.0),
    ],
)
def test_the_largest_error(errors: tuple[float, float], ratio: float) -> None:
    truth = _tensor(2.0, -2.0, dtype=F64)
    verdict = relative_to_rms(truth + torch.tensor(errors, dtype=F64), truth, F64, (0.2, 0.5), what="y")
    assert verdict.ratio == pytest.approx(ratio)
    assert verdict.largest == pytest.approx(max(map(abs, errors)))
    assert verdict.note == ("y: largest error 4.0e-01 R, rms 2.8e-01 R" if ratio > 1 else "")


def test_the_errors_root_mean_square() -> None:
    truth = _tensor(2.0, -2.0, dtype=F64)
    verdict = relative_to_rms(truth + 0.4, truth, F64, (10.0, 0.1))
    assert verdict.ratio == pytest.approx(2.0)
    assert verdict.note == "largest error 2.0e-01 R, rms 2.0e-01 R"


def test_a_truth_of_zeros() -> None:
    zeros = torch.zeros(3, dtype=F64)
    assert relative_to_rms(zeros, zeros, F64, (0.1, 0.1)) == judge.RIGHT
    assert relative_to_rms(zeros + 1e-9, zeros, F64, (0.1, 0.1)) == judge.wrong("not zero")


@pytest.mark.parametrize("bad", [NAN, INF])
def test_sums_are_finite(bad: float) -> None:
    truth = _tensor(1.0, 1.0, dtype=F64)
    assert relative_to_rms(_tensor(1.0, bad, dtype=F64), truth, F64, (0.1, 0.1)) == judge.wrong("not finite")


# -- spoiling ---------------------------------------------------------------------


@pytest.mark.parametrize(("count", "wrong"), [(1, 1), (50, 1), (51, 2), (120, 3)])
def test_one_in_fifty_is_spoiled(count: int, wrong: int) -> None:
    answer = torch.arange(1.0, count + 1)
    answer[count // 2] = -1000.0
    before = answer.clone()
    bad = spoiled(answer)
    changed = bad != answer
    assert int(changed.sum()) == wrong
    assert bool(changed[count // 2])
    assert torch.equal(bad[changed], answer[changed] * 2)
    assert torch.equal(answer, before)


def test_spoiling_takes_any_layout_and_what_is_not_finite() -> None:
    answer = _tensor(1.0, NAN, 3.0, INF, 2.0, -INF).reshape(2, 3).t()
    bad = spoiled(answer)
    assert bad.shape == answer.shape
    assert bad[answer == 3.0].item() == 6.0
    assert bad[answer == 1.0].item() == 1.0


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64, torch.uint8, torch.uint32])
def test_integers_are_spoiled_within_their_range(dtype: torch.dtype) -> None:
    limit = torch.iinfo(dtype).max
    if limit < 2**53:
        assert spoiled(torch.tensor([3, limit], dtype=dtype)).tolist() == [3, limit - 2]
    assert spoiled(torch.tensor([3, 7], dtype=dtype)).tolist() == [3, 8]


def test_a_quantised_number_is_halved() -> None:
    answer = _tensor(2.0, 448.0).to(torch.float8_e4m3fn)
    assert spoiled(answer).float().tolist() == [2.0, 224.0]


# -- what a judge must reject ---------------------------------------------------------


def _expected(*answer: Tensor | None, lets: str = "") -> Expected:
    def rule(results: tuple[Tensor | None, ...]) -> Verdict:
        for place, (got, right) in enumerate(zip(results, answer, strict=True)):
            if right is None or got is None:
                continue
            if lets == f"zeros of {place}" and not bool(got.any()):
                continue
            if lets == f"spoiled {place}" and torch.equal(got, spoiled(right)):
                continue
            if lets != "anything" and not torch.equal(got, right):
                return judge.wrong("other")
        return judge.wrong("why") if lets == "nothing" else judge.RIGHT

    return Expected(tuple(answer), rule)


@pytest.mark.parametrize(
    ("lets", "said"),
    [
        ("", ""),
        ("nothing", "its judge rejects the truth itself: why"),
        ("anything", "its judge accepts zeros as result 0"),
        ("zeros of 1", "its judge accepts zeros as result 1"),
        ("spoiled 0", "its judge accepts a spoiled result as result 0"),
        ("spoiled 1", "its judge accepts a spoiled result as result 1"),
    ],
)
def test_a_judge_that_lets_pass_what_it_must_not(lets: str, said: str) -> None:
    assert vacuity(_expected(_tensor(1.0, 2.0), _tensor(3.0, 4.0), lets=lets)) == said


def test_a_judge_that_rejects_without_a_note() -> None:
    expected = Expected((_tensor(1.0),), lambda _: Verdict(2.0))
    assert vacuity(expected) == "its judge rejects the truth itself: 2.0"


def test_what_no_judge_could_tell() -> None:
    """No tensor, none of its elements, and zeros; what stands after them is still judged."""
    nothing = (None, torch.empty(0), torch.zeros(2))
    assert vacuity(_expected(*nothing, lets="anything")) == ""
    said = "its judge accepts zeros as result 3"
    assert vacuity(_expected(*nothing, _tensor(1.0), lets="anything")) == said
    # NaN is an answer, too.
    assert vacuity(_expected(_tensor(NAN), lets="anything")) == said.replace("3", "0")

"""From two passes to a table, and from the table to what the dispatch runs."""

from __future__ import annotations

import pytest
import torch
import yaml
from planted_kernels import FAST
from planted_kernels import OP
from planted_kernels import SLOW
from planted_kernels import TORCH
from planted_kernels import VirtualClock
from planted_kernels import manager

from vllm_fl.dispatch import policy_context
from vllm_fl.dispatch import policy_from_config
from vllm_fl.tuning import bench
from vllm_fl.tuning import table
from vllm_fl.tuning import timing
from vllm_fl.tuning import tune
from vllm_fl.tuning.contenders import COMPILED
from vllm_fl.tuning.shapes import family

MACHINE = {
    "card": "Acme A1",
    "driver": None,
    "date": "2026-01-01 00:00 UTC",
    "by": "vllm-fl-core 1",
    "versions": {"torch": "2.13.0", "a: b": '"quoted" # no comment'},
}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(bench, "copy_bandwidth", lambda device, clock: 1e9)
    monkeypatch.setattr(timing, "_BATCH_SECONDS", 1e-6)


def passes(clock, rows=(4, 16, 64), then=lambda clock: None, **more):
    """Measure twice; between the passes ``then`` changes what the implementations take."""
    options = bench.Options(rows=rows, backends=("vendor", "reference"), seconds=3e-4)
    run = bench.Bench(manager(clock, **more), torch.device("cpu"), options, [family(OP, last=64)], clock)
    found = ([], [])
    for number, its in run.run(2):
        found[number].extend(its)
        if number == 0 and len(found[0]) == len(its) * len(rows):
            then(clock)
    return found


def chosen(first, second):
    return {one.entry.max_rows: one.entry.order[0] for one in tune.choose(OP, first, second)}


def test_the_fastest_is_chosen():
    clock = VirtualClock(vendor_fast=9.0, vendor_slow=50.0, reference_torch=3.0)
    (choice, *_) = tune.choose(OP, *passes(clock))
    assert choice.entry.order == (TORCH, FAST, SLOW)
    assert choice.entry.mode == "eager"
    # The activation has one layout, so that nobody needs to look.
    assert choice.entry.layout is None
    assert choice.fixed == FAST


def test_what_was_lucky_once_is_found_out():
    """Fast in the first pass alone: the second one, which knows nothing of it, decides."""
    clock = VirtualClock(vendor_fast=9.0, vendor_slow=2.0, reference_torch=20.0)

    def luck_ends(clock):
        clock.takes[SLOW] = 50.0

    first, second = passes(clock, then=luck_ends)
    assert {table.ranked(its)[0].impl_id for its in table.comparisons(first)} == {SLOW}
    assert set(chosen(first, second).values()) == {FAST}


def test_what_was_unlucky_in_the_first_pass_is_not_chosen_by_the_second():
    clock = VirtualClock(vendor_fast=9.0, vendor_slow=5.0, reference_torch=20.0)
    first, second = passes(clock, then=lambda clock: clock.takes.update({TORCH: 1.0}))
    assert set(chosen(first, second).values()) == {SLOW}


@pytest.mark.parametrize(("slow", "wins"), [(10.0, FAST), (9.9, FAST), (9.0, SLOW)])
def test_a_tie_goes_to_the_policys_order(slow, wins):
    clock = VirtualClock(vendor_fast=10.0, vendor_slow=slow, reference_torch=20.0)
    assert set(chosen(*passes(clock)).values()) == {wins}


def test_noise_is_as_wide_as_the_second_pass_says():
    clock = VirtualClock(vendor_fast=10.0, vendor_slow=9.0, reference_torch=20.0)
    clock.noise = (0.0, 0.2, 0.0, 0.2, 0.0)
    assert set(chosen(*passes(clock)).values()) == {FAST}


def test_what_is_wrong_or_cannot_be_named_is_in_no_table():
    clock = VirtualClock(vendor_wrong=0.1, vendor_fast=5.0, vendor_slow=9.0, reference_torch=8.0)
    first, second = passes(clock, wrong=torch.zeros_like)
    compiled = [
        bench.Row(**{**row.to_dict(), "impl_id": COMPILED, "median_us": 1.0, "p80_us": 1.0})
        for row in second
        if row.impl_id == FAST
    ]
    choices = tune.choose(OP, [*first, *compiled], [*second, *compiled])
    assert {name for one in choices for name in one.entry.order} == {FAST, SLOW, TORCH}
    (entry,) = tune.entries(choices)
    assert "reference.compiled takes 0.20 of it" in entry.comment()


def test_neighbours_that_agree_are_one_entry():
    clock = VirtualClock(vendor_fast=5.0, vendor_slow=9.0, reference_torch=8.0)
    (entry,) = tune.entries(tune.choose(OP, *passes(clock)))
    assert entry.measured.max_rows == 64
    assert entry.comment() == "5 us, the first of the policy's order"


def test_shapes_that_share_a_place_are_chosen_together():
    """Norms of 4 heads of 8 tokens, and of 2 of 16: a table counts 32 rows of both."""
    common = {"op": "rms_norm", "shape": "", "sizes": "", "rows": 32, "last": 8, "layout": "strided"}
    common |= {"dtype": "bfloat16", "mode": "eager", "correct": True}

    def rows(a, b):
        return [
            bench.Row(**common, tokens=tokens, impl_id=name, median_us=time, p20_us=time, p80_us=time)
            for tokens, times in ((8, a), (16, b))
            for name, time in zip((FAST, SLOW), times, strict=True)
        ]

    measured = rows((1.0, 2.0), (9.0, 3.0))
    (choice,) = tune.choose("rms_norm", measured, measured)
    assert choice.entry.order == (SLOW, FAST)
    assert (choice.entry.max_rows, choice.entry.layout) == (32, "strided")
    assert choice.chosen_us == 5.0


def test_the_table_is_read_by_the_dispatch_and_chooses_what_was_measured(tmp_path):
    """Round trip: rows decide, as they did when it was measured, and everything is kept."""
    clock = VirtualClock(vendor_fast=5.0, vendor_slow=9.0, reference_torch=30.0)
    fewer = passes(clock, rows=(4, 16))
    clock.takes |= {FAST: 9.0, SLOW: 4.0}
    more = passes(clock, rows=(64,))
    first, second = fewer[0] + more[0], fewer[1] + more[1]
    report = table.Report(MACHINE, "cpu", "a test", ("eager",), 1e9, second)
    text = tune.table_text(report, {OP: tune.entries(tune.choose(OP, first, second))})
    (tmp_path / "table.yaml").write_text(text)
    (tmp_path / "policy.yaml").write_text("tuned: table.yaml\n")

    plain = yaml.safe_load(text)
    assert plain["about"]["card"] == "Acme A1"
    assert plain["about"]["versions"] == MACHINE["versions"]
    assert plain["about"]["conformance"][FAST] == "right at 3 of 3 shapes"
    assert [one["max_rows"] for one in plain[OP]] == [16, 64]

    policy = policy_from_config(str(tmp_path / "policy.yaml"))
    ran = []
    clock.ran = ran.append
    dispatch = manager(clock)
    with policy_context(policy):
        for rows in (1, 4, 16, 17, 64, 65):
            dispatch.call(OP, torch.ones(rows, 64, dtype=torch.bfloat16))
        dispatch.call(OP, torch.ones(17, 64))
        assert dispatch.explain(OP).tuned == (
            f"up to 16 rows of 64, bfloat16, eager: {FAST}",
            f"up to 64 rows of 64, bfloat16, eager: {SLOW}",
        )
    # Not measured: more rows, another dtype.
    assert ran == [FAST, FAST, FAST, SLOW, SLOW, FAST, FAST]

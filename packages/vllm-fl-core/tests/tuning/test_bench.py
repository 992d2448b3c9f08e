"""A run: what is right is timed and compared, what is wrong is named and not timed."""

from __future__ import annotations

import time

import pytest
import torch
from planted_kernels import FAST
from planted_kernels import OP
from planted_kernels import SLOW
from planted_kernels import TORCH
from planted_kernels import VirtualClock
from planted_kernels import manager
from planted_kernels import right

from vllm_fl.conformance.cases import SUITES
from vllm_fl.dispatch import OPERATORS
from vllm_fl.dispatch import OpManager
from vllm_fl.dispatch import OpRegistry
from vllm_fl.tuning import bench
from vllm_fl.tuning import contenders as contenders_module
from vllm_fl.tuning import recipes
from vllm_fl.tuning import table
from vllm_fl.tuning import timing
from vllm_fl.tuning.contenders import contenders
from vllm_fl.tuning.judging import Judge
from vllm_fl.tuning.models import usual
from vllm_fl.tuning.shapes import SIZES
from vllm_fl.tuning.shapes import family
from vllm_fl.tuning.timing import Copies
from vllm_fl.tuning.timing import HostClock
from vllm_fl.tuning.timing import measure
from vllm_fl.tuning.timing import quantile

CPU = torch.device("cpu")
SMALL = family(OP, last=64)
#: What is planted, without vLLM's own path and without a compiler.
PLANTED = ("vendor", "reference")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(bench, "copy_bandwidth", lambda device, clock: 1e9)
    monkeypatch.setattr(timing, "_BATCH_SECONDS", 1e-6)


def rows_of(manager, clock, *families, rows=(3,), backends=PLANTED, seconds=1e-4):
    options = bench.Options(modes=("eager", "graph"), rows=rows, backends=backends, seconds=seconds)
    run = bench.Bench(manager, CPU, options, families or (SMALL,), clock)
    return [row for _, rows in run.run() for row in rows]


def test_a_slow_one_loses():
    clock = VirtualClock(vendor_fast=2.0, vendor_slow=50.0, reference_torch=4.0)
    rows = rows_of(manager(clock), clock, rows=(3, 70))
    for compared in table.comparisons(rows):
        assert [row.impl_id for row in table.ranked(compared)] == [FAST, TORCH, SLOW]
    assert {row.tokens for row in rows} == {3, 70}
    # The CPU has no graphs.
    assert {row.mode for row in rows} == {"eager"}
    first = rows[0]
    assert (first.shape, first.rows, first.last, first.layout, first.dtype) == (
        "3x64",
        3,
        64,
        "contiguous",
        "bfloat16",
    )
    # 3 rows: 64 elements in, 32 out, of two bytes, in 2 microseconds, of 1e9 bytes in a second.
    assert next(r for r in rows if r.impl_id == FAST).share_of_bandwidth == pytest.approx(
        3 * 96 * 2 / 2e-6 / 1e9
    )


def test_a_slow_one_loses_by_the_real_clock_too():
    def sleepy(x):
        time.sleep(0.002)
        return right(x)

    rows = rows_of(manager(VirtualClock(), sleepy=sleepy), None)
    (compared,) = table.comparisons(rows)
    assert table.ranked(compared)[-1].impl_id == "vendor.sleepy"
    assert table.ranked(compared)[-1].median_us > 2000


def test_the_order_of_the_policy_is_kept_and_its_cost_is_known():
    clock = VirtualClock(vendor_fast=2.0, vendor_slow=50.0, reference_torch=4.0)
    (compared,) = table.comparisons(rows_of(manager(clock), clock))
    assert [row.impl_id for row in compared] == [FAST, SLOW, TORCH]
    assert table.overhead(compared) == pytest.approx(1.0)
    clock.takes[FAST] = 8.0
    (compared,) = table.comparisons(rows_of(manager(clock), clock))
    assert table.overhead(compared) == pytest.approx(2.0)


def _writing(x):
    x.mul_(2)
    return right(x / 2)


def _wrong_in_the_last_row(x):
    result = right(x)
    result[-1] *= 2
    return result


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (lambda x: right(x) * 1.1, "of the elements beyond"),
        (lambda x: torch.zeros_like(right(x)), ""),
        (lambda x: right(x).float(), "dtype float32"),
        (lambda x: right(x)[:1], "shape"),
        (lambda x: None, "None"),
        (_writing, "wrote x"),
        (lambda x: [][0], "raised IndexError"),
        (_wrong_in_the_last_row, "of the elements beyond"),
    ],
    ids=["too large", "zeros", "dtype", "shape", "nothing", "written", "raises", "the last row"],
)
@pytest.mark.parametrize("tokens", [5, 200])
def test_what_is_wrong_is_named_and_not_timed(fault, said, tokens):
    clock = VirtualClock(vendor_wrong=0.1)
    wrong = [
        row for row in rows_of(manager(clock, wrong=fault), clock, rows=(tokens,)) if row.correct is False
    ]
    assert [row.impl_id for row in wrong] == ["vendor.wrong"]
    assert said in wrong[0].note
    assert wrong[0].note
    assert wrong[0].median_us is wrong[0].share_of_bandwidth is None
    report = table.Report({}, "cpu", "a test", ("eager",), rows=wrong)
    assert table.remarks(report)[0].startswith("WRONG and not timed: silu_and_mul: vendor.wrong, ")


def test_what_refuses_is_neither_right_nor_wrong():
    def refuses(x):
        raise NotImplementedError("not for these inputs")

    clock = VirtualClock()
    (row,) = [r for r in rows_of(manager(clock, shy=refuses), clock) if r.impl_id == "vendor.shy"]
    assert (row.correct, row.median_us, row.note) == (None, None, "not for these inputs")


def test_the_quantiles_are_in_order():
    clock = VirtualClock(vendor_fast=5.0)
    clock.noise = (0.0, 0.4, 0.1, 0.9, 0.2, 0.05, 0.6)
    for row in rows_of(manager(clock), clock, seconds=1e-3):
        assert row.p20_us <= row.median_us <= row.p80_us
        assert row.p20_us < row.p80_us


@pytest.mark.parametrize(("share", "value"), [(0.0, 1.0), (0.5, 3.0), (0.2, 1.8), (0.8, 4.2), (1.0, 5.0)])
def test_a_quantile(share, value):
    assert quantile([5.0, 1.0, 3.0, 2.0, 4.0], share) == pytest.approx(value)


def test_what_competes_is_interleaved():
    turns = []

    class Noting(HostClock):
        def time(self, calls):
            turns.append(None)
            return super().time(calls)

    arguments = recipes.make(SMALL, 3, CPU)
    copies = Copies(OPERATORS[OP], arguments, 3 * 64 * 3)
    subjects = [copies.eager(name, lambda x, its=name: turns.append(its)) for name in ("a", "b")]
    measure(subjects, Noting(), 1.0, rounds=6)
    batches = [one for at, one in enumerate(turns) if one is not None and turns[at - 1] is None]
    assert batches[2:] == ["a", "b", "b", "a"] * 3


@pytest.mark.parametrize("op", SIZES)
def test_every_operator_is_judged_and_the_reference_is_right(op):
    """In the layouts of the default list, with few rows and with so many that a part is judged."""
    registry = pytest.importorskip("vllm_fl_reference.register_ops")
    own = bench_manager(registry.register_builtins)
    field = contenders(own, op, ["reference.torch"])
    (reference,) = field.contenders
    for one in usual("bfloat16", is_small=True).families:
        if one.op != op:
            continue
        for tokens in (1, 5, 130):
            arguments = recipes.make(one, tokens, CPU)
            judge = Judge(field.operator, arguments)
            answer = judge.ask(reference, reference.make(arguments, False), values_only=False)
            assert answer.is_right, (str(one), tokens, answer.note)
            spoiled = judge.ask(reference, _spoiled(reference.make(arguments, False)), values_only=False)
            assert spoiled.is_right is False, (str(one), tokens)
            assert recipes.moved_bytes(one, tokens, arguments) > 0


def bench_manager(register):
    registry = OpRegistry()
    register(registry)
    return OpManager(registry)


def _spoiled(function):
    def spoiled(*args, **kwargs):
        result = function(*args, **kwargs)
        first = result[0] if isinstance(result, tuple) else result
        first.view(-1)[: first.numel() // 2].zero_() if first.is_contiguous() else first.zero_()
        return result

    return spoiled


def test_every_operator_that_computes_can_be_measured():
    """An operator that the core gains needs sizes; one without tensors has nothing to time."""
    assert {*SIZES} == {*SUITES} & {*OPERATORS}


@pytest.mark.parametrize(
    "one",
    [
        family("rms_norm", "strided", last=16, heads=4, room=160),
        family("rms_norm", "strided+residual", last=16),
        family("rotary_embedding", "strided", last=16, heads=4, kv_heads=2),
        family("rotary_embedding", "strided", last=16, heads=4, kv_heads=1, room=48, interleaved=True),
        family("dynamic_per_token_quant_int8", "strided", last=16),
    ],
    ids=str,
)
def test_strided_is_strided(one):
    """In the arguments, and in each of the copies that are timed."""
    arguments = recipes.make(one, 7, CPU)
    operator = OPERATORS[one.op]
    for args, kwargs in [(list(arguments.values()), {}), *Copies(operator, arguments, 10_000).calls]:
        assert not kwargs
        assert args[0].shape[-1] == 16
        assert not args[0].is_contiguous()
        assert args[0].stride(-1) == 1
        assert args[0].stride(0) > args[0][0].numel()
    if one.op == "rotary_embedding":
        query, key = arguments["query"], arguments["key"]
        assert query.dim() == key.dim() == 3
        # Views of one projection.
        assert query.untyped_storage().data_ptr() == key.untyped_storage().data_ptr()
    contiguous = [value for name, value in arguments.items() if name == "residual" and value is not None]
    assert all(not value.is_contiguous() for value in contiguous)


def test_copies_are_apart_and_past_the_cache(monkeypatch):
    monkeypatch.setattr(timing, "cache_bytes", lambda device: 10_000)
    arguments = recipes.make(SMALL, 3, CPU)
    copies = Copies(OPERATORS[OP], arguments, 600)
    assert len(copies.calls) == 34  # twice the cache, in calls of 600 bytes
    assert len({args[0].data_ptr() for args, _ in copies.calls}) == 34
    seen = []
    copies.eager("it", lambda x: seen.append(x.data_ptr())).run(40)
    assert seen[:34] == [args[0].data_ptr() for args, _ in copies.calls]
    assert seen[34] == seen[0]


def test_the_compiled_reference_and_its_note(monkeypatch):
    """Compiled, it is judged as all others are; here by a compiler that changes nothing."""
    registry = pytest.importorskip("vllm_fl_reference.register_ops")
    compiled = []

    def eagerly(fn):
        compiled.append(fn)
        return torch.compile(fn, fullgraph=True, dynamic=False, backend="eager")

    monkeypatch.setattr(contenders_module, "traced", eagerly)
    own = bench_manager(registry.register_builtins)
    one = family("rotary_embedding", "strided", last=16, heads=4, kv_heads=2)
    names = ("reference.torch", "reference.compiled")
    rows = rows_of(own, None, one, SMALL, rows=(1, 4), backends=names)
    assert {(row.op, row.impl_id): row.note for row in rows} == {
        (op, name): "" for op in ("rotary_embedding", OP) for name in names
    }
    assert all(row.correct and row.median_us for row in rows)
    assert len(compiled) == 2

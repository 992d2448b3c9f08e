"""What is run of one implementation: its cases, then the checks of the whole."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from vllm_fl.conformance import attention
from vllm_fl.conformance import compiled
from vllm_fl.conformance.cases import SUITES
from vllm_fl.conformance.check import check
from vllm_fl.conformance.dispatched import Dispatched
from vllm_fl.conformance.result import Result
from vllm_fl.conformance.result import Status
from vllm_fl.conformance.tensors import named
from vllm_fl.conformance.waivers import package_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence

    import torch

    from vllm_fl.conformance.case import Case
    from vllm_fl.conformance.case import Suite
    from vllm_fl.conformance.case import Tier
    from vllm_fl.conformance.waivers import Waiver
    from vllm_fl.dispatch import OpImpl
    from vllm_fl.dispatch import PluginRecord
    from vllm_fl.dispatch.registry import OpRegistrySnapshot


@dataclass(frozen=True)
class Step:
    """One thing to run.

    Attributes:
        op: the operator.
        name: the case or the check.
        run: returns what became of it.
    """

    op: str
    name: str
    run: Callable[[], Result]


@dataclass(frozen=True)
class Scope:
    """How much is run, where, and with which waivers.

    Attributes:
        tier: how much.
        device: where.
        max_elements: cases with a larger argument are reported as capped; None for no limit.
        waivers: those of the wheel's file and of the user's.
    """

    tier: Tier
    device: torch.device
    max_elements: int | None
    waivers: Sequence[Waiver]


def steps_of(
    impl: OpImpl, snapshot: OpRegistrySnapshot, record: PluginRecord | None, scope: Scope
) -> list[Step]:
    """List what is run of an implementation.

    Args:
        impl: what is judged.
        snapshot: what is registered.
        record: of the plugin that registered it; None where code did.
        scope: how much, and where.
    """
    op = impl.op_name
    reason = impl.unavailable_reason()
    if reason is not None:
        return _not_run(impl, f"not available: {reason}")
    operator = snapshot.operators.get(op)
    suite = None if op == attention.OPERATOR else suite_of(op, record)
    if operator is None or (suite is None and op != attention.OPERATOR):
        return _not_run(impl, "there are no conformance cases for this operator")
    rows = () if suite is None else suite.row_arguments
    dispatched = Dispatched(impl, operator, snapshot.impls_by_op[op], rows)
    if suite is None:
        return _attention_steps(dispatched, scope)
    return _suite_steps(suite, dispatched, scope)


def _not_run(impl: OpImpl, note: str) -> list[Step]:
    result = Result(impl.impl_id, impl.op_name, "every case", Status.NOT_RUN, note=note, is_case=False)
    return [Step(impl.op_name, "every case", lambda: result)]


def suite_of(op: str, record: PluginRecord | None) -> Suite | None:
    """Return the cases of an operator: the core's, or those of the plugin that declares it."""
    if op in SUITES:
        return SUITES[op]
    package = package_of(record)
    if package is None or find_spec(package).submodule_search_locations is None:  # type: ignore[union-attr]
        return None
    name = f"{package}.conformance_cases"
    if find_spec(name) is None:
        return None
    found: dict[str, Suite] = {suite.op: suite for suite in import_module(name).SUITES}
    return found.get(op)


def _attention_steps(dispatched: Dispatched, scope: Scope) -> list[Step]:
    impl, op = dispatched.impl.impl_id, attention.OPERATOR
    return [
        Step(op, name, functools.partial(_waived, scope, Result(impl, op, name, Status.SKIPPED), ask))
        for name, ask in attention.questions(dispatched, scope.device, scope.tier)
    ]


def _suite_steps(suite: Suite, dispatched: Dispatched, scope: Scope) -> list[Step]:
    impl, op, device = dispatched.impl, suite.op, scope.device
    statuses: list[Status] = []

    def judged(case: Case) -> Result:
        if scope.max_elements is not None and case.elements > scope.max_elements:
            note = f"{case.elements} elements, more than {scope.max_elements}"
            return Result(impl.impl_id, op, case.name, Status.CAPPED, named(case.dtype), note=note)
        result = _waived(
            scope,
            Result(impl.impl_id, op, case.name, Status.SKIPPED, named(case.dtype)),
            lambda loosen: check(case, dispatched, device, loosen=loosen),
        )
        statuses.append(result.status)
        return result

    def also(name: str, run: Callable[[Suite, Dispatched, torch.device, float], Result]) -> Step:
        skipped = Result(impl.impl_id, op, name, Status.SKIPPED, is_case=False)

        def judged(loosen: float) -> Result:
            return must_run(run(suite, dispatched, device, loosen), statuses)

        return Step(op, name, lambda: _waived(scope, skipped, judged))

    steps = [
        Step(op, case.name, functools.partial(judged, case))
        for case in suite.cases()
        if case.tier <= scope.tier
    ]
    steps.append(Step(op, "accepts something", lambda: accepts_something(dispatched, statuses)))
    steps.append(also(compiled.TRACED if impl.traceable else compiled.OPAQUE, compiled.trace))
    if impl.graph_safe and device.type == "cuda":
        steps.append(also(compiled.CAPTURED, compiled.capture))
    return steps


def _waived(scope: Scope, skipped: Result, run: Callable[[float], Result]) -> Result:
    """Run a case or a check with what the waivers say of it.

    Args:
        scope: holds the waivers.
        skipped: the result where it is not run.
        run: takes what the tolerances are multiplied by.
    """
    waiver = next((one for one in scope.waivers if one.applies(skipped, scope.device)), None)
    if waiver is None:
        return run(1.0)
    waiver.matched += 1
    if waiver.skip:
        waiver.used += 1
        return replace(skipped, waiver=waiver.reason)
    result = run(waiver.loosen)
    if result.ratio is None or result.ratio <= 1.0:
        return result
    waiver.used += 1
    return replace(result, waiver=f"tolerances times {waiver.loosen:g}: {waiver.reason}")


def accepts_something(dispatched: Dispatched, statuses: Sequence[Status]) -> Result:
    """Fail where an implementation refuses every case: then nothing of it was judged."""
    impl, op = dispatched.impl.impl_id, dispatched.operator.name
    ran = [status for status in statuses if status in (Status.PASSED, Status.FAILED)]
    refused = [status for status in statuses if status is Status.REFUSED]
    if ran or not refused:
        status = Status.PASSED if ran else Status.NOT_RUN
        return Result(impl, op, "accepts something", status, is_case=False)
    note = f"it refuses every one of {len(refused)} cases, so that nothing of it was judged"
    return Result(impl, op, "accepts something", Status.FAILED, note=note, is_case=False)


def must_run(result: Result, statuses: Sequence[Status]) -> Result:
    """Fail a check that the implementation left nothing to, although it takes arguments elsewhere."""
    takes_others = {Status.PASSED, Status.FAILED}.intersection(statuses)
    if result.status is not Status.NOT_RUN or not takes_others:
        return result
    note = "not run, although it takes other arguments; widen supports, or skip this with a reason"
    return replace(result, status=Status.FAILED, note=f"{note}: {result.note}")

"""The whole: every operator of a backend, every case of a tier, every other check."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from vllm_fl.conformance import attention
from vllm_fl.conformance import compiled
from vllm_fl.conformance import exceptions
from vllm_fl.conformance.case import Tier
from vllm_fl.conformance.cases import SUITES
from vllm_fl.conformance.check import check
from vllm_fl.conformance.checklist import points
from vllm_fl.conformance.dispatched import Dispatched
from vllm_fl.conformance.result import Result
from vllm_fl.conformance.result import Status
from vllm_fl.conformance.select import select
from vllm_fl.conformance.tensors import named
from vllm_fl.dispatch import OPERATORS
from vllm_fl.dispatch import get_default_manager

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Iterator
    from collections.abc import Sequence
    from pathlib import Path

    from vllm_fl.conformance.case import Case
    from vllm_fl.conformance.case import Suite
    from vllm_fl.conformance.exceptions import Exemption
    from vllm_fl.dispatch import OpImpl
    from vllm_fl.dispatch import OpManager
    from vllm_fl.dispatch import PluginRecord


@dataclass(frozen=True)
class Options:
    """What is run.

    Attributes:
        operators: only these; all where it is empty.
        tier: how much.
        device: where; ``auto`` is the accelerator where there is one.
        max_elements: cases with a larger argument are reported as capped.
        exceptions: a file beside the one that the wheel ships.
    """

    operators: Sequence[str] = ()
    tier: Tier = Tier.SMOKE
    device: str = "auto"
    max_elements: int | None = None
    exceptions: Path | None = None


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


@dataclass
class Plan:
    """Everything that is to be run for a backend, and what is known before.

    Attributes:
        impls: the implementations.
        steps: in order.
        exemptions: of the wheel's file and of the user's.
        device: where it runs.
    """

    impls: list[OpImpl]
    device: torch.device
    exemptions: list[Exemption]
    steps: list[Step] = field(default_factory=list)

    def run(self) -> Iterator[Result]:
        """Run every step, then say which exceptions are not needed."""
        for step in self.steps:
            yield step.run()
        yield from self.unused()

    def unfinished(self, done: int, why: str) -> Result:
        """Return the failure of a run that ended early.

        Args:
            done: how many steps have run.
            why: what ended it.
        """
        note = why
        if done < len(self.steps):
            step, left = self.steps[done], len(self.steps) - done
            note = f"{why} in {step.op}: {step.name}; {left} of {len(self.steps)} steps did not end"
        return Result("run", "run", "to the end", Status.FAILED, note=note, is_case=False)

    def _named_by(self, exemption: Exemption) -> int:
        """Count the cases and checks that an exception names, in every tier but the last."""
        suite = SUITES.get(exemption.op)
        cases = [] if suite is None else [case.name for case in suite.cases() if case.tier < Tier.STRESS]
        steps = [step.name for step in self.steps if step.op == exemption.op]
        return sum(exemption.names(exemption.op, name) for name in {*cases, *steps})

    def unused(self) -> Iterator[Result]:
        """Name the exceptions that changed nothing; asked after every step has run."""
        for exemption in self.exemptions:
            if exemption.used or not exemption.matched:
                continue
            # One that a larger tier or a capped case may need is left alone.
            if exemption.matched == self._named_by(exemption):
                note = f"{exemption}: every case that it names passes without it; take it out"
                yield Result(
                    "exceptions", exemption.op, exemption.case, Status.FAILED, note=note, is_case=False
                )


def plan(name: str, options: Options) -> Plan:
    """Find what a name means and list what there is to run.

    Raises:
        UnknownNameError: no such backend or operator.
        ExceptionsError: an exceptions file is wrong.
        PolicyError: the configuration is wrong.
        ValueError: no such device.
    """
    manager = get_default_manager()
    impls = select(manager, name, options.operators)
    device = device_of(options.device)
    records = {record.name: record for impl in impls if (record := _record_of(manager, impl))}
    found = [one for record in records.values() for one in exceptions.shipped(record)]
    if options.exceptions is not None:
        found += exceptions.read(options.exceptions)
    whole = Plan(impls, device, found)
    for exemption in found:
        _check_name(exemption)
    for group in _by_backend(impls):
        for point, ask in points(group, _record_of(manager, group[0])):
            whole.steps.append(Step("checklist", point, ask))
    for impl in impls:
        whole.steps += _steps(impl, manager, whole, options, _record_of(manager, impl))
    return whole


def _check_name(exemption: Exemption) -> None:
    """Refuse an exception for a case that does not exist in any tier.

    Raises:
        ExceptionsError: there is no such operator or case.
    """
    suite = SUITES.get(exemption.op)
    if suite is None:
        if exemption.op not in (*OPERATORS, attention.OPERATOR):
            return  # an operator of the plugin's own
        names = attention.names()
    else:
        names = [*(case.name for case in suite.cases()), compiled.TRACED, compiled.OPAQUE, compiled.CAPTURED]
    if not any(exemption.names(exemption.op, name) for name in names):
        raise exceptions.ExceptionsError(f"{exemption}: there is no such case.")


def device_of(name: str) -> torch.device:
    """Return a device by its name; ``auto`` is the accelerator where there is one.

    Raises:
        ValueError: torch knows no such device, or it is not here.
    """
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return torch.device("cpu") if accelerator is None else accelerator
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except Exception as error:  # noqa: BLE001 - each device's library raises something else
        raise ValueError(f"there is no device {name!r}: {str(error).splitlines()[0]}") from None
    return device


def _record_of(manager: OpManager, impl: OpImpl) -> PluginRecord | None:
    if impl.origin is None:
        return None
    return manager.registry.plugins.get(impl.origin.entry_point)


def _by_backend(impls: list[OpImpl]) -> list[list[OpImpl]]:
    groups: dict[str, list[OpImpl]] = {}
    for impl in impls:
        groups.setdefault(impl.impl_id, []).append(impl)
    return list(groups.values())


def _suite_of(op: str, record: PluginRecord | None) -> Suite | None:
    """Return the cases of an operator: the core's, or those of the plugin that declares it."""
    if op in SUITES:
        return SUITES[op]
    package = exceptions.package_of(record)
    if package is None or find_spec(package).submodule_search_locations is None:  # type: ignore[union-attr]
        return None
    name = f"{package}.conformance_cases"
    if find_spec(name) is None:
        return None
    found: dict[str, Suite] = {suite.op: suite for suite in import_module(name).SUITES}
    return found.get(op)


def _steps(
    impl: OpImpl, manager: OpManager, whole: Plan, options: Options, record: PluginRecord | None
) -> list[Step]:
    op = impl.op_name

    def not_run(note: str) -> list[Step]:
        result = Result(impl.impl_id, op, "every case", Status.NOT_RUN, note=note, is_case=False)
        return [Step(op, "every case", lambda: result)]

    reason = impl.unavailable_reason()
    if reason is not None:
        return not_run(f"not available: {reason}")
    snapshot = manager.registry.snapshot()
    operator = snapshot.operators.get(op)
    if op == attention.OPERATOR and operator is not None:
        backend = Dispatched(impl, operator, snapshot.impls_by_op[op])
        is_smoke = options.tier is Tier.SMOKE
        asked = attention.steps(backend, whole.device, is_smoke)
        return [
            Step(
                op,
                name,
                functools.partial(_excepted, whole, Result(impl.impl_id, op, name, Status.SKIPPED), ask),
            )
            for name, ask in asked
        ]
    suite = _suite_of(op, record)
    if suite is None or operator is None:
        return not_run("there are no conformance cases for this operator")
    dispatched = Dispatched(impl, operator, snapshot.impls_by_op[op])
    device = whole.device
    accepted: list[Status] = []

    def judged(case: Case) -> Result:
        if options.max_elements is not None and case.elements > options.max_elements:
            note = f"{case.elements} elements, more than {options.max_elements}"
            return Result(impl.impl_id, op, case.name, Status.CAPPED, named(case.dtype), note=note)
        result = _excepted(
            whole,
            Result(impl.impl_id, op, case.name, Status.SKIPPED, named(case.dtype)),
            lambda loosen: check(case, dispatched, device, loosen=loosen),
        )
        accepted.append(result.status)
        return result

    def also(name: str, run: Callable[[Suite, Dispatched, torch.device, float], Result]) -> Step:
        skipped = Result(impl.impl_id, op, name, Status.SKIPPED, is_case=False)

        def judged(loosen: float) -> Result:
            return must_run(run(suite, dispatched, device, loosen), accepted)

        return Step(op, name, lambda: _excepted(whole, skipped, judged))

    steps = [
        Step(op, case.name, functools.partial(judged, case))
        for case in suite.cases()
        if case.tier <= options.tier
    ]
    steps.append(Step(op, "accepts something", lambda: accepts_something(dispatched, accepted)))
    steps.append(also(compiled.TRACED if impl.traceable else compiled.OPAQUE, compiled.trace))
    if impl.graph_safe and device.type == "cuda":
        steps.append(also(compiled.CAPTURED, compiled.capture))
    return steps


def _excepted(whole: Plan, skipped: Result, run: Callable[[float], Result]) -> Result:
    """Run a case or a check with what the exceptions files say of it.

    Args:
        whole: holds the exceptions.
        skipped: the result where it is not run.
        run: takes what the tolerances are multiplied by.
    """
    exemption = next((one for one in whole.exemptions if one.applies(skipped, whole.device)), None)
    if exemption is None:
        return run(1.0)
    exemption.matched += 1
    if exemption.skip:
        exemption.used += 1
        return replace(skipped, exception=exemption.reason)
    result = run(exemption.loosen)
    if result.ratio is None or result.ratio <= 1.0:
        return result
    exemption.used += 1
    return replace(result, exception=f"tolerances times {exemption.loosen:g}: {exemption.reason}")


def accepts_something(dispatched: Dispatched, statuses: list[Status]) -> Result:
    """Fail where an implementation refuses every case: then nothing of it was judged."""
    impl, op = dispatched.impl.impl_id, dispatched.operator.name
    ran = [status for status in statuses if status in (Status.PASSED, Status.FAILED)]
    refused = [status for status in statuses if status is Status.REFUSED]
    if ran or not refused:
        status = Status.PASSED if ran else Status.NOT_RUN
        return Result(impl, op, "accepts something", status, is_case=False)
    note = f"it refuses every one of {len(refused)} cases, so that nothing of it was judged"
    return Result(impl, op, "accepts something", Status.FAILED, note=note, is_case=False)


def must_run(result: Result, statuses: list[Status]) -> Result:
    """Fail a check that the implementation left nothing to, although it takes arguments elsewhere."""
    takes_others = {Status.PASSED, Status.FAILED}.intersection(statuses)
    if result.status is not Status.NOT_RUN or not takes_others:
        return result
    note = "not run, although it takes other arguments; widen supports, or skip this with a reason"
    return replace(result, status=Status.FAILED, note=f"{note}: {result.note}")


def conform(name: str, options: Options) -> Iterator[Result]:
    """Run a backend's conformance; see :func:`plan` for what is raised."""
    return plan(name, options).run()

"""The whole: every operator of a backend, every case of a tier, every other check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vllm_fl.conformance import attention
from vllm_fl.conformance import compiled
from vllm_fl.conformance import waivers
from vllm_fl.conformance.case import Tier
from vllm_fl.conformance.cases import SUITES
from vllm_fl.conformance.checklist import points
from vllm_fl.conformance.result import Result
from vllm_fl.conformance.result import Status
from vllm_fl.conformance.select import select
from vllm_fl.conformance.steps import Scope
from vllm_fl.conformance.steps import Step
from vllm_fl.conformance.steps import steps_of
from vllm_fl.dispatch import OPERATORS
from vllm_fl.dispatch import get_default_manager

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Sequence
    from pathlib import Path

    from vllm_fl.conformance.waivers import Waiver
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
        waivers: a file beside the one that the wheel ships.
    """

    operators: Sequence[str] = ()
    tier: Tier = Tier.SMOKE
    device: str = "auto"
    max_elements: int | None = None
    waivers: Path | None = None


@dataclass(frozen=True)
class PreparedRun:
    """Everything that is to be run for a backend, and what is known before.

    Attributes:
        impls: the implementations.
        steps: in order.
        waivers: of the wheel's file and of the user's.
        device: where it runs.
    """

    impls: Sequence[OpImpl]
    device: torch.device
    waivers: Sequence[Waiver]
    steps: Sequence[Step]

    def run(self) -> Iterator[Result]:
        """Run every step, then say which waivers are not needed."""
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

    def _named_by(self, waiver: Waiver) -> int:
        """Count the cases and checks that a waiver names, in every tier but the last."""
        suite = SUITES.get(waiver.op)
        cases = [] if suite is None else [case.name for case in suite.cases() if case.tier < Tier.STRESS]
        steps = [step.name for step in self.steps if step.op == waiver.op]
        return sum(waiver.names(waiver.op, name) for name in {*cases, *steps})

    def unused(self) -> Iterator[Result]:
        """Name the waivers that changed nothing; asked after every step has run."""
        for waiver in self.waivers:
            if waiver.used or not waiver.matched:
                continue
            # One that a larger tier or a capped case may need is left alone.
            if waiver.matched == self._named_by(waiver):
                note = f"{waiver}: every case that it names passes without it; take it out"
                yield Result("waivers", waiver.op, waiver.case, Status.FAILED, note=note, is_case=False)


def prepare(name: str, options: Options) -> PreparedRun:
    """Find what a name means and list what there is to run.

    Raises:
        UnknownNameError: no such backend or operator.
        WaiverError: a file of waivers is wrong.
        PolicyError: the configuration is wrong.
        ValueError: no such device.
    """
    manager = get_default_manager()
    impls = select(manager, name, options.operators)
    device = device_of(options.device)
    records = {record.name: record for impl in impls if (record := _record_of(manager, impl))}
    found = [one for record in records.values() for one in waivers.shipped(record)]
    if options.waivers is not None:
        found += waivers.read(options.waivers)
    for waiver in found:
        _check_name(waiver)
    steps = [
        Step("checklist", point, ask)
        for group in _by_backend(impls)
        for point, ask in points(group, _record_of(manager, group[0]))
    ]
    scope = Scope(options.tier, device, options.max_elements, found)
    snapshot = manager.registry.snapshot()
    for impl in impls:
        steps += steps_of(impl, snapshot, _record_of(manager, impl), scope)
    return PreparedRun(impls, device, found, steps)


def _check_name(waiver: Waiver) -> None:
    """Refuse a waiver for a case that does not exist in any tier.

    Raises:
        WaiverError: there is no such operator or case.
    """
    suite = SUITES.get(waiver.op)
    if suite is None:
        if waiver.op not in (*OPERATORS, attention.OPERATOR):
            return  # an operator of the plugin's own
        names = attention.names()
    else:
        names = [*(case.name for case in suite.cases()), compiled.TRACED, compiled.OPAQUE, compiled.CAPTURED]
    if not any(waiver.names(waiver.op, name) for name in names):
        raise waivers.WaiverError(f"{waiver}: there is no such case.")


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


def _by_backend(impls: Sequence[OpImpl]) -> list[list[OpImpl]]:
    groups: dict[str, list[OpImpl]] = {}
    for impl in impls:
        groups.setdefault(impl.impl_id, []).append(impl)
    return list(groups.values())

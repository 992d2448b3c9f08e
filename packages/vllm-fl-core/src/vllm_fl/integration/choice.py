"""What one layer of vLLM's runs: its own forward, or one that calls the resolved operator.

It is decided once, when the layer is built. While a plan is frozen, what has been decided for
a layer holds for the next one of its kind; each has its own path and its own ticket, of
:mod:`vllm_fl.integration.opaque`, all the same.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.dispatch import get_default_manager
from vllm_fl.dispatch import get_policy
from vllm_fl.dispatch import trace
from vllm_fl.dispatch.callables import Resolved
from vllm_fl.dispatch.calling import guard
from vllm_fl.dispatch.calling import torch_state
from vllm_fl.dispatch.calling.fatal import is_fatal
from vllm_fl.dispatch.calling.guard import Candidate
from vllm_fl.dispatch.calling.torch_state import is_one_of_several_ranks
from vllm_fl.dispatch.policy.packaged import effective
from vllm_fl.dispatch.types import NATIVE
from vllm_fl.dispatch.types import BackendImplKind
from vllm_fl.dispatch.wheels import faster_wheels
from vllm_fl.integration import engine
from vllm_fl.integration import seam
from vllm_fl.integration import settings
from vllm_fl.integration import vendors
from vllm_fl.integration.layer import Served
from vllm_fl.integration.log import logger
from vllm_fl.integration.opaque import opaque
from vllm_fl.integration.opaque import shielded
from vllm_fl.integration.results import checked
from vllm_fl.integration.trial import MORE_ROWS
from vllm_fl.integration.trial import first_calls
from vllm_fl.integration.trial import kinds

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_fl.dispatch import OpManager
    from vllm_fl.dispatch import Plan
    from vllm_fl.dispatch.declaration import Operator
    from vllm_fl.integration.layer import Layer
    from vllm_fl.integration.results import Trial

    _Watch = Callable[[Candidate], Candidate]


@dataclass(frozen=True)
class _Choice:
    """What the layers of a kind run.

    Attributes:
        impl_id: the implementation; ``native`` for vLLM's own path.
        note: what the log says more, or why it is vLLM's own.
        form: the form of what a layer calls.
        make: returns what a layer calls; None for vLLM's own path.
        is_settled: it was asked once for the layer, and a call with another dtype is not its.
    """

    impl_id: str
    note: str
    form: str = "plain"
    make: Callable[[Layer], Callable[..., Any]] | None = None
    is_settled: bool = False


#: What has been decided under a frozen plan, by the kind of layer. Another plan begins anew.
_decided: tuple[Plan | None, dict[tuple[Any, ...], _Choice]] = (None, {})


def choose(layer: Layer) -> None:
    """Choose what the layer runs, once; on a fault of ours it stays vLLM's own.

    Raises:
        PolicyError: the configuration is wrong.
        NoImplementationError: the policy leaves nothing that can run.
        ExplicitFailureError: what it leaves fails on its first call.
        RanksDifferError: another rank of the engine chose otherwise, or did not choose.
        Exception: a fault of ours, in a rank of several.
    """
    from vllm.config import get_current_vllm_config

    layer.owner.vllm_fl = layer
    try:
        vllm_config = get_current_vllm_config()
        plan = engine.begin(vllm_config)
        compiled = bool(vllm_config.compilation_config.mode)
        record = trace.recorder()
        if record is not None:
            record.fact("compiled", compiled)
        reason = seam.why_left_to_vllm() or layer.refuses() or _why_left_to_the_compiler(layer)
        choice, is_known = _Choice(NATIVE, reason or ""), False
        if reason is None:
            choice, is_known = _choice(layer, plan, compiled=compiled)
        if choice.make is None:
            seam.note_native(layer.name, layer.op_name, choice.note, is_counted=layer.own is not None)
            if record is not None and layer.own is not None:
                setattr(layer.owner, layer.attribute, trace.recorded(layer.op_name, NATIVE, layer.own))
            return
        function = choice.make(layer)
        if record is not None or not is_known:
            seam.note_served(layer.name, layer.op_name, choice.impl_id, choice.form, choice.note)
        layer.serve(function, is_opaque=choice.form == "opaque", is_settled=choice.is_settled)
    except Exception as error:  # noqa: BLE001 - what is not contained is raised again
        seam.contain(layer.name, error)


def _why_left_to_the_compiler(layer: Layer) -> str | None:
    from vllm.model_executor.custom_op import CustomOp

    owner = layer.owner
    if isinstance(owner, CustomOp):
        enabled = owner._enforce_enable or owner.enabled()
    else:
        enabled = CustomOp.default_on()
    if enabled or get_policy().is_explicit_for(layer.op_name):
        return None
    return (
        "vLLM leaves it to its compiler (custom_ops); an explicit VLLM_FL_PREFER or "
        "VLLM_FL_PER_OP serves it all the same"
    )


def _choice(layer: Layer, plan: Plan | None, *, compiled: bool) -> tuple[_Choice, bool]:
    """Return the choice for the layer's kind, and whether it has been made for another one before."""
    global _decided
    if plan is None:
        return _Choosing(type(layer), compiled=compiled).choice(layer), False
    if _decided[0] is not plan:
        _decided = (plan, {})
    key = (
        type(layer),
        type(layer.owner),
        # Two paths of a class of vLLM's, a kernel's and PyTorch's, may take different inputs.
        getattr(layer.own, "__qualname__", None),
        compiled,
        *get_default_manager().failures.by_operator.get(layer.op_name, ()),
        *kinds(layer, layer.examples()),
    )
    found = _decided[1].get(key)
    if found is not None:
        return found, True
    found = _decided[1][key] = _Choosing(type(layer), compiled=compiled).choice(layer)
    return found, False


class _Choosing:
    """The choice for the layers of a kind. It keeps no layer: a choice outlives the first one."""

    def __init__(self, kind: type[Layer], *, compiled: bool) -> None:
        self.compiled = compiled
        self.op_name = kind.op_name
        self.manager: OpManager = get_default_manager()
        self.operator: Operator = self.manager.snapshot().operators[kind.op_name]
        self.is_tuned = bool(get_policy().measured(kind.op_name))
        # Traced code looks at no rows, and a tuned table is one of them.
        self.is_traced = compiled and kind.is_traced and not self.is_tuned

    def choice(self, layer: Layer) -> _Choice:
        """Resolve the operator and try it out on a layer, until something takes it."""
        owner = layer.owner
        reason = vendors.wins(type(owner), self.op_name) if isinstance(owner, Served) else None
        if reason is not None:
            return _Choice(NATIVE, reason)
        while True:
            resolved = self._resolved(layer)
            if resolved.candidates[0].impl_id == NATIVE and (self.compiled or not self.is_tuned):
                return _Choice(NATIVE, settings.POLICY_CHOOSES_NATIVE)
            found = self._tried(layer, resolved)
            if found is not None:
                return found

    def _resolved(self, layer: Layer, watch: _Watch | None = None) -> Resolved:
        """Resolve the operator for a layer, which answers once what never changes for it."""
        return self.manager.resolve_with_native(
            self.op_name,
            self._own_path(layer, watch),
            only_traceable=self.is_traced,
            wrap=watch,
            layer=layer.asked_once(),
        )

    def _own_path(self, layer: Layer, watch: _Watch | None) -> Callable[..., Any]:
        own = layer.own_path()
        return watch(Candidate(NATIVE, own, writes=self.operator.mutates)).fn if watch else own

    def _tried(self, layer: Layer, resolved: Resolved) -> _Choice | None:
        """Try out what is resolved; None where its first candidate is set aside, and others are left."""
        manager, op_name, first = self.manager, self.op_name, resolved.candidates[0].impl_id
        is_opaque = self.compiled and not (self.is_traced and resolved.candidates[0].traceable)
        # What is tried is watched; what a layer calls later is not, but in the opaque form.
        watch: _Watch = functools.partial(shielded if is_opaque else checked, self.operator)
        if is_opaque:
            watch = functools.partial(watch, is_set_aside=manager.failures.is_set_aside)  # type: ignore[call-arg]
        watched = self._resolved(layer, watch)
        function = opaque(self.operator, watched) if is_opaque else watched.fn
        form = "opaque" if is_opaque else resolved.decision.form
        try_out = functools.partial(first_calls, layer, watched, form, function)
        # vLLM's own path is in the function, or needs to be chosen now.
        has_native = any(report.impl_id == NATIVE for report in resolved.decision.usable)
        passes_on = any(one.impl_id == NATIVE for one in watched.candidates)
        try:
            trial = try_out()
            gives_up = passes_on and is_opaque and trial.ran == NATIVE
            if first in trial.refused and (gives_up or not passes_on) and has_native:
                # Every call would cost more than what a compiler makes of vLLM's own path.
                more = try_out(rows=MORE_ROWS)
                if first in more.refused and more.ran in (NATIVE, None):
                    why = trial.refused[first]
                    manager.failures.note_trial(op_name, first, f"refused the trial of {layer.name} ({why})")
                    return _Choice(NATIVE, f"{first} does not take its inputs: {why}")
        except Exception as error:
            self._raise_what_ends_the_start(first, error, has_native=has_native)
            if passes_on or is_fatal(error):
                raise
            # No candidate inside the function, and right for this layer.
            manager.failures.set_aside(op_name, first, error)
        if manager.failures.is_set_aside(op_name, first):
            return None
        warn_of_the_reference(layer.name, op_name, first)
        make = self._for_the_kind(layer, watch if is_opaque else None)
        return _Choice(first, self._noted(layer, first, trial), form, make, watched.is_settled)

    def _raise_what_ends_the_start(self, first: str, error: Exception, *, has_native: bool) -> None:
        is_alone = not is_one_of_several_ranks()
        if get_policy().strict or not has_native or not is_alone:
            why = "the policy leaves nothing else" if is_alone else "one rank of several runs nothing else"
            raise seam.ExplicitFailureError(
                f"{first} failed on its first call of {self.op_name}, and {why}: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _noted(self, layer: Layer, first: str, trial: Trial) -> str:
        """Return what the log says of a first candidate that refused one row; `explain` says it too."""
        if first not in trial.refused:
            return ""
        why, other = trial.refused[first], trial.ran or "nothing"
        refused = f"refused the trial of {layer.name} with one row ({why}), which {other} ran"
        self.manager.failures.note_trial(self.op_name, first, refused)
        return f"; {first} refused the trial of one row ({why}), which {other} ran"

    def _for_the_kind(self, layer: Layer, watch: _Watch | None) -> Callable[[Layer], Callable[..., Any]]:
        """Return what makes of any layer of the kind what it calls; ``watch`` is that of the opaque form."""
        operator = self.operator
        if self.is_tuned:
            return lambda layer: self._called(operator, self._resolved(layer, watch), watch)
        op_name, failures, called = self.op_name, self.manager.failures, self._called
        resolved, own_path = self._resolved(layer, watch), self._own_path
        decision, is_recorded = resolved.decision, trace.recorder() is not None
        ids = [one.impl_id for one in resolved.candidates]
        place = ids.index(NATIVE) if NATIVE in ids else len(ids)
        before, after = resolved.candidates[:place], resolved.candidates[place + 1 :]
        has_native = place < len(ids)
        strict = bool(effective(get_policy(), self.manager.snapshot()).strict)

        def made(layer: Layer) -> Callable[..., Any]:
            candidates = before
            if has_native:
                fn = layer.own_path() if watch is None else own_path(layer, watch)
                fn = trace.recorded(op_name, NATIVE, fn) if is_recorded else fn
                native = Candidate(NATIVE, fn, writes=operator.mutates, traceable=True)
                candidates = (*before, native, *after)
            function = guard.guarded(op_name, operator, candidates, failures, strict=strict)
            if watch is None:
                return function
            return called(operator, Resolved(function, decision, candidates), watch)

        return made

    @staticmethod
    def _called(operator: Operator, resolved: Resolved, watch: _Watch | None) -> Callable[..., Any]:
        return resolved.fn if watch is None else opaque(operator, resolved)


_REFERENCE_WARNED = "the reference"


def warn_of_the_reference(name: str, op_name: str, impl_id: str) -> None:
    """Say once what would be faster, where there is a device for it and nobody asked for the reference."""
    manager = get_default_manager()
    asked = get_policy().order(op_name)[0].removeprefix("impl:")
    reference = BackendImplKind.REFERENCE.prefix
    if _REFERENCE_WARNED in seam.said or not impl_id.startswith(reference) or asked.startswith(reference):
        return
    choices = manager.plan.choices if manager.plan else {op_name: impl_id}
    slow = sorted(op for op, chosen in choices.items() if chosen and chosen.startswith(reference))
    wheels = faster_wheels(slow, manager.registry.plugins)
    if wheels and torch_state.has_accelerator():
        seam.said.add(_REFERENCE_WARNED)
        logger.warning(
            "vllm-fl: %s is served by the reference, in plain PyTorch, and so is every layer of %s. A chip's "
            "own kernels are faster: install its wheel and restart. %s",
            name,
            ", ".join(slow),
            "; ".join(f"pip install {wheel.distribution}  # {wheel.purpose}" for wheel in wheels),
        )

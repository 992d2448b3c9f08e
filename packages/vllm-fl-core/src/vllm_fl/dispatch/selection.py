"""The list "Which one runs" of :mod:`vllm_fl.dispatch.manager`, as code."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING
from typing import Any
from typing import NamedTuple

from vllm_fl.dispatch import decision as status
from vllm_fl.dispatch.availability import availability
from vllm_fl.dispatch.calling.binding import adapt
from vllm_fl.dispatch.calling.binding import signature_problem
from vllm_fl.dispatch.calling.predicate import refusal
from vllm_fl.dispatch.common.foreign import describe
from vllm_fl.dispatch.common.foreign import raise_if_from_a_signal
from vllm_fl.dispatch.common.suggest import suggest
from vllm_fl.dispatch.decision import CandidateReport
from vllm_fl.dispatch.decision import Decision
from vllm_fl.dispatch.errors import UnknownOperatorError
from vllm_fl.dispatch.policy.packaged import effective
from vllm_fl.dispatch.tuned import reordered
from vllm_fl.dispatch.types import NATIVE
from vllm_fl.dispatch.types import load
from vllm_fl.dispatch.types import match_token

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Mapping
    from collections.abc import Sequence

    from vllm_fl.dispatch.declaration import Operator
    from vllm_fl.dispatch.policy import SelectionPolicy
    from vllm_fl.dispatch.registry import OpRegistrySnapshot
    from vllm_fl.dispatch.tuned import Measured
    from vllm_fl.dispatch.types import OpImpl


class Asked(NamedTuple):
    """For whom an operator is chosen.

    Attributes:
        with_native: vLLM's own path is a candidate.
        only_traceable: what Dynamo cannot trace is left out, unless it is the first choice.
        layer: calls of one layer, all arguments of each in the contract's order, where it is
            chosen for one. ``supports_layer`` is asked of them; where it answers alike, it is
            asked at no call.
    """

    with_native: bool = False
    only_traceable: bool = False
    layer: tuple[tuple[Any, ...], ...] = ()


def decide(
    op_name: str,
    policy: SelectionPolicy,
    snapshot: OpRegistrySnapshot,
    failed: Mapping[str, str],
    asked: Asked,
) -> Decision:
    """Choose an implementation; what cannot run is a part of the answer.

    Nothing changes by it, and nothing is said: it loads functions and asks backends, once
    for a process, because the answer depends on that.

    Args:
        op_name: the operator.
        policy: the policy in force.
        snapshot: what is registered.
        failed: the implementations that were set aside, and what they raised.
        asked: for whom.

    Raises:
        UnknownOperatorError: no such operator.
    """
    impls = snapshot.impls_by_op.get(op_name, ())
    if not impls and op_name not in snapshot.operators:
        known = {*snapshot.operators, *snapshot.impls_by_op}
        raise UnknownOperatorError(f"there is no operator {op_name!r}.{suggest(op_name, known)}")
    fingerprint = policy.fingerprint()
    policy = effective(policy, snapshot)
    tokens = policy.order(op_name)
    usable: list[CandidateReport] = []
    rejected: list[CandidateReport] = []
    pending = sorted(impls, key=lambda impl: (-(impl.priority or 0), impl.impl_id))
    for token in tokens:
        if token == NATIVE and asked.with_native:
            usable.append(_native(snapshot.operators.get(op_name), is_first=not usable))
        for impl in [impl for impl in pending if match_token(impl, token)]:
            pending.remove(impl)
            why = _rejection(impl, policy, failed, snapshot, asked)
            if why is not None:
                rejected.append(_report(impl, *why))
            elif usable:
                usable.append(_report(impl, status.NEXT, "runs if those before it do not"))
            else:
                usable.append(_report(impl, status.CHOSEN, f"chosen: the first of {token!r}"))
    for impl in pending:
        rejected.append(_report(impl, status.NOT_LISTED, f"the order of {op_name!r} does not list it"))
    decision = Decision(
        op_name,
        usable[0].impl_id if usable else None,
        "plain",
        tuple(tokens),
        _source(op_name, policy),
        fingerprint,
        tuple(usable + rejected),
    )
    return _in_its_form(decision, policy, snapshot, asked) if usable else decision


def _in_its_form(
    decision: Decision, policy: SelectionPolicy, snapshot: OpRegistrySnapshot, asked: Asked
) -> Decision:
    entries = entries_of(decision.op_name, policy.measured(decision.op_name), snapshot, asked)
    if entries:
        lines = [f"{entry}: {reordered(decision, entry).impl_id}" for entry in entries]
        return replace(decision, form="guard", tuned=tuple(lines))
    called = called_in_order(decision, snapshot, asked)
    first = called[0]
    is_asked = first is not None and (
        first.supports is not None
        or (
            first.supports_layer is not None
            and not is_settled(first, snapshot.operators.get(decision.op_name), asked)
        )
    )
    is_plain = not is_asked and (policy.strict or len(called) == 1)
    return replace(decision, form="plain" if is_plain else "guard")


def entries_of(
    op_name: str, measured: Sequence[Measured], snapshot: OpRegistrySnapshot, asked: Asked
) -> Sequence[Measured]:
    """Return what a tuned table says of an operator where it can be followed."""
    # What a compiler traces has no rows to look at, and an undeclared operator no selector.
    return () if asked.only_traceable or op_name not in snapshot.operators else measured


def called_in_order(decision: Decision, snapshot: OpRegistrySnapshot, asked: Asked) -> list[OpImpl | None]:
    """Return what a callable is made of for a decision, in order; None is vLLM's own path."""
    operator = snapshot.operators.get(decision.op_name)
    impls = {impl.impl_id: impl for impl in snapshot.impls_by_op.get(decision.op_name, ())}
    called = [None if report.impl_id == NATIVE else impls[report.impl_id] for report in decision.usable]
    if operator is not None and operator.native_prepares:
        # By the time of a later call nothing is prepared for it.
        called = [impl for place, impl in enumerate(called) if impl is not None or place == 0]
    if asked.only_traceable and (called[0] is None or called[0].traceable):
        called = [impl for impl in called if impl is None or impl.traceable]
    return called


def _source(op_name: str, policy: SelectionPolicy) -> str:
    key = "prefer" if policy.get_per_op_order(op_name) is None else "per_op_order"
    default = "code" if key in policy.explicit else "the defaults"
    return policy.sources.get(f"{key}.{op_name}") or policy.sources.get(key) or default


def _rejection(
    impl: OpImpl,
    policy: SelectionPolicy,
    failed: Mapping[str, str],
    snapshot: OpRegistrySnapshot,
    asked: Asked,
) -> tuple[str, str] | None:
    """Return the status and the reason why an implementation cannot be chosen, or None."""
    if impl.vendor is not None and not policy.is_vendor_allowed(impl.vendor):
        denied = impl.vendor in policy.deny_vendors
        key = "deny_vendors" if denied else "allow_vendors"
        source = policy.sources.get(key, "code")
        return status.DENIED, f"{key} ({source}) {'names' if denied else 'does not name'} {impl.vendor}"
    of_backend, of_operator = availability(impl)
    if of_backend is not None:
        return status.UNAVAILABLE, f"not available: {of_backend}"
    if of_operator is not None:
        return status.MISSING, f"not available: {of_operator}"
    if impl.impl_id in failed:
        return status.FAILED, f"set aside after it raised {failed[impl.impl_id]}"
    try:
        fn, predicates = impl.load(), impl.predicates()
    except BaseException as error:  # noqa: BLE001 - SystemExit too, as of is_available()
        raise_if_from_a_signal(error)
        return status.UNAVAILABLE, f"cannot be loaded: {describe(error)}"
    # What registration and the first question could not see before it was loaded.
    if isinstance(impl.fn, str) and impl.backend is None:
        reason = replace(impl, fn=fn).unavailable_reason()
        if reason is not None:
            return status.UNAVAILABLE, f"not available: {reason}"
    operator = snapshot.operators.get(impl.op_name)
    problem = _problem_of_what_was_loaded(impl, fn, predicates, operator)
    if problem:
        return status.UNAVAILABLE, problem
    reasons = answers_for_the_layer(impl, operator, asked)
    if reasons and all(reasons):
        return status.NOT_THIS_LAYER, f"does not take this layer's inputs: {reasons[0]}"
    return None


def answers_for_the_layer(impl: OpImpl, operator: Operator | None, asked: Asked) -> list[str | None]:
    """Ask ``supports_layer`` of a layer's calls; a reason for each that is refused, None for the others."""
    if impl.supports_layer is None or operator is None:
        return []
    ask = adapt(operator, load(impl.supports_layer), is_predicate=True)
    calls = [operator.call_of(operator.bind(arguments, {})) for arguments in asked.layer]
    return [refusal(ask, tuple(positional), keywords) for positional, keywords in calls]


def is_settled(impl: OpImpl, operator: Operator | None, asked: Asked) -> bool:
    """Whether ``supports_layer`` has agreed to all calls of a layer, and is asked no more."""
    reasons = answers_for_the_layer(impl, operator, asked)
    return bool(reasons) and not any(reasons)


def _problem_of_what_was_loaded(
    impl: OpImpl,
    fn: Callable[..., Any],
    predicates: tuple[Callable[..., Any], ...],
    operator: Operator | None,
) -> str | None:
    if operator is None:
        return None
    problem = signature_problem(operator, fn) if isinstance(impl.fn, str) else None
    named = [ask for ask in (impl.supports_layer, impl.supports) if ask is not None]
    for name, ask in zip(named, predicates, strict=True):
        if problem is None and isinstance(name, str):
            found = signature_problem(operator, ask, is_predicate=True)
            problem = found and f"its predicate {name} cannot be called: {found}"
    return problem


def _report(impl: OpImpl, state: str, reason: str) -> CandidateReport:
    wheel = impl.origin.wheel if impl.origin else "-"
    return CandidateReport(impl.impl_id, impl.kind.value, wheel, impl.priority or 0, state, reason)


def _native(operator: Operator | None, *, is_first: bool) -> CandidateReport:
    state = status.CHOSEN if is_first else status.NEXT
    if is_first:
        reason = "chosen: vLLM's own path"
    elif operator is not None and operator.native_prepares:
        reason = "vLLM's own path, if those before it fail when the layer is built; not at a later call"
    else:
        reason = "vLLM's own path, if those before it do not run"
    return CandidateReport(NATIVE, NATIVE, "vllm", 0, state, reason)

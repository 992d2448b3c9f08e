"""The list "Which one runs" of :mod:`vllm_fl.dispatch.manager`, as code."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vllm_fl.dispatch import decision as status
from vllm_fl.dispatch._binding import signature_problem
from vllm_fl.dispatch._foreign import describe
from vllm_fl.dispatch._foreign import raise_if_from_a_signal
from vllm_fl.dispatch._suggest import suggest
from vllm_fl.dispatch.backend import availability
from vllm_fl.dispatch.decision import CandidateReport
from vllm_fl.dispatch.decision import Decision
from vllm_fl.dispatch.errors import UnknownOperatorError
from vllm_fl.dispatch.policy.packaged import effective
from vllm_fl.dispatch.types import NATIVE
from vllm_fl.dispatch.types import match_token

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm_fl.dispatch.declaration import Operator
    from vllm_fl.dispatch.policy import SelectionPolicy
    from vllm_fl.dispatch.registry import OpRegistrySnapshot
    from vllm_fl.dispatch.types import OpImpl


def decide(
    op_name: str,
    policy: SelectionPolicy,
    snapshot: OpRegistrySnapshot,
    failed: Mapping[str, str],
    *,
    with_native: bool,
) -> Decision:
    """Choose an implementation; what cannot run is a part of the answer.

    Args:
        op_name: the operator.
        policy: the policy in force.
        snapshot: what is registered.
        failed: the implementations that were set aside, and what they raised.
        with_native: vLLM's own path is a candidate.

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
        if token == NATIVE and with_native:
            usable.append(_native(snapshot.operators.get(op_name), is_first=not usable))
        for impl in [impl for impl in pending if match_token(impl, token)]:
            pending.remove(impl)
            why = _rejection(impl, policy, failed, snapshot)
            if why is not None:
                rejected.append(_report(impl, *why))
            elif usable:
                usable.append(_report(impl, status.NEXT, "runs if those before it do not"))
            else:
                usable.append(_report(impl, status.CHOSEN, f"chosen: the first of {token!r}"))
    for impl in pending:
        rejected.append(_report(impl, status.NOT_LISTED, f"the order of {op_name!r} does not list it"))
    return Decision(
        op_name,
        usable[0].impl_id if usable else None,
        "plain",
        tuple(tokens),
        _source(op_name, policy),
        fingerprint,
        tuple(usable + rejected),
    )


def _source(op_name: str, policy: SelectionPolicy) -> str:
    key = "prefer" if policy.get_per_op_order(op_name) is None else "per_op_order"
    default = "code" if key in policy.explicit else "the defaults"
    return policy.sources.get(f"{key}.{op_name}") or policy.sources.get(key) or default


def _rejection(
    impl: OpImpl, policy: SelectionPolicy, failed: Mapping[str, str], snapshot: OpRegistrySnapshot
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
        fn = impl.load()
    except BaseException as error:  # noqa: BLE001 - SystemExit too, as of is_available()
        raise_if_from_a_signal(error)
        return status.UNAVAILABLE, f"cannot be loaded: {describe(error)}"
    if not isinstance(impl.fn, str):
        return None
    # What registration and the first question could not see before it was loaded.
    reason = replace(impl, fn=fn).unavailable_reason()
    if reason is not None:
        return status.UNAVAILABLE, f"not available: {reason}"
    operator = snapshot.operators.get(impl.op_name)
    problem = signature_problem(operator, fn) if operator else None
    return (status.UNAVAILABLE, problem) if problem else None


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

"""From a decision to a callable, and what is said where there is none."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import replace
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.dispatch import _guard
from vllm_fl.dispatch import decision as status
from vllm_fl.dispatch import trace
from vllm_fl.dispatch._binding import adapt
from vllm_fl.dispatch._log import get_logger
from vllm_fl.dispatch._text import printable
from vllm_fl.dispatch.tuned import by_shape
from vllm_fl.dispatch.types import NATIVE
from vllm_fl.dispatch.wheels import install_hint

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Iterable
    from collections.abc import Mapping

    from vllm_fl.dispatch.decision import Decision
    from vllm_fl.dispatch.declaration import Operator
    from vllm_fl.dispatch.registry import OpRegistrySnapshot
    from vllm_fl.dispatch.registry import PluginRecord
    from vllm_fl.dispatch.tuned import Measured

logger = get_logger(__name__)


@dataclass(frozen=True)
class Resolved:
    """An operator as a layer holds it.

    Attributes:
        fn: takes the operator's arguments.
        decision: what it is and why.
        candidates: what ``fn`` is made of, in order.
    """

    fn: Callable[..., Any]
    decision: Decision
    candidates: tuple[_guard.Candidate, ...]


def build(
    decision: Decision,
    snapshot: OpRegistrySnapshot,
    failures: _guard.Failures,
    native: _guard.Candidate | None,
    *,
    strict: bool,
    only_traceable: bool,
    wrap: Callable[[_guard.Candidate], _guard.Candidate] | None,
) -> Resolved:
    """Load what a decision can use and make one callable of it.

    Args:
        decision: with at least one usable candidate.
        snapshot: what it was made from.
        failures: who is told of failures and first successes.
        native: a layer's own path, where the decision has it as a candidate.
        strict: the policy's.
        only_traceable: leave out what Dynamo cannot trace, unless it is the first choice.
        wrap: applied to every candidate but the native one.
    """
    op_name = decision.op_name
    operator = snapshot.operators.get(op_name)
    impls = {impl.impl_id: impl for impl in snapshot.impls_by_op.get(op_name, ())}
    candidates: list[_guard.Candidate] = []
    for report in decision.usable:
        if report.impl_id == NATIVE and native is not None:
            if candidates and operator is not None and operator.native_prepares:
                continue  # by the time of a call nothing is prepared for it
            candidates.append(replace(native, fn=trace.recorded(op_name, NATIVE, native.fn)))
            continue
        impl = impls[report.impl_id]
        writes = impl.writes
        if writes is None:
            writes = operator.mutates if operator else ()
        fn = trace.recorded(op_name, impl.impl_id, adapt(operator, impl.load()))
        supports = impl.supports and adapt(operator, impl.supports, is_predicate=True)
        candidate = _guard.Candidate(impl.impl_id, fn, supports, writes, impl.traceable)
        candidates.append(wrap(candidate) if wrap else candidate)
    if only_traceable and candidates[0].traceable:
        candidates = [candidate for candidate in candidates if candidate.traceable]
    fn = _guard.build(op_name, operator, candidates, failures, strict=strict)
    form = _guard.form(candidates, strict=strict)
    return Resolved(fn, replace(decision, form=form), tuple(candidates))


def with_table(operator: Operator, default: Resolved, by_entry: Mapping[Measured, Resolved]) -> Resolved:
    """Return what chooses by shape between what was resolved for the entries of a tuned table."""
    functions = {entry: resolved.fn for entry, resolved in by_entry.items()}
    lines = [f"{entry}: {resolved.decision.impl_id}" for entry, resolved in by_entry.items()]
    decision = replace(default.decision, form="guard", tuned=tuple(lines))
    return replace(default, fn=by_shape(operator, default.fn, functions), decision=decision)


def nothing_runs(decision: Decision, plugins: Iterable[PluginRecord]) -> str:
    """Say why nothing can run an operator, and what to install."""
    lines = [f"nothing can run {decision.op_name!r}."]
    lines += [printable(f"  {c.impl_id} ({c.distribution}): {c.reason}") for c in decision.candidates]
    failed = [record for record in plugins if record.state in ("failed", "incompatible")]
    lines += [printable(f"  plugin {r.name!r} of {r.distribution} {r.version}: {r.reason}") for r in failed]
    if decision.source != "the defaults":
        lines.append(printable(f"  The order {' > '.join(decision.order)} comes from {decision.source}."))
    if not decision.candidates:
        lines.append("  No implementation is registered.")
    lines.append(install_hint(decision.op_name))
    return "\n".join(lines)


def warn_of_degradation(decision: Decision, warned: set[str]) -> None:
    """Say once per implementation that it was passed over, and what that costs.

    Args:
        decision: with at least one usable candidate.
        warned: the implementations of which it has been said; added to.
    """
    chosen = decision.usable[0]
    rank = {token: index for index, token in enumerate(decision.order)}
    for candidate in decision.candidates:
        if candidate.status != status.UNAVAILABLE or candidate.impl_id in warned:
            continue
        if rank.get(candidate.kind, len(rank)) >= rank.get(chosen.kind, len(rank)):
            continue
        warned.add(candidate.impl_id)
        logger.warning(
            "%s (%s) is preferred for %s but %s. %s runs instead%s; `vllm-fl explain --all` "
            "shows every operator.",
            candidate.impl_id,
            candidate.distribution,
            decision.op_name,
            candidate.reason,
            chosen.impl_id,
            ", in plain PyTorch, which is slower" if chosen.kind == "reference" else "",
        )

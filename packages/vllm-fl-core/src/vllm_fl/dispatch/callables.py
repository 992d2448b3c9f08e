"""From a decision to a callable, and what is said where there is none."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import replace
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.dispatch import decision as status
from vllm_fl.dispatch import trace
from vllm_fl.dispatch.calling import guard
from vllm_fl.dispatch.calling.binding import adapt
from vllm_fl.dispatch.common.log import get_logger
from vllm_fl.dispatch.common.text import printable
from vllm_fl.dispatch.selection import called_in_order
from vllm_fl.dispatch.selection import entries_of
from vllm_fl.dispatch.selection import is_settled
from vllm_fl.dispatch.tuned import by_shape
from vllm_fl.dispatch.tuned import reordered
from vllm_fl.dispatch.types import NATIVE
from vllm_fl.dispatch.types import load
from vllm_fl.dispatch.wheels import install_hint

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Iterable
    from collections.abc import Sequence

    from vllm_fl.dispatch.decision import Decision
    from vllm_fl.dispatch.declaration import Operator
    from vllm_fl.dispatch.registry import OpRegistrySnapshot
    from vllm_fl.dispatch.registry import PluginRecord
    from vllm_fl.dispatch.selection import Asked
    from vllm_fl.dispatch.tuned import Measured
    from vllm_fl.dispatch.types import OpImpl

logger = get_logger(__name__)


@dataclass(frozen=True)
class Resolved:
    """An operator as a layer holds it.

    Attributes:
        fn: takes the operator's arguments.
        decision: what it is and why.
        candidates: what ``fn`` is made of, in order.
        is_settled: a candidate was asked once for the layer, and is asked less at each call.
    """

    fn: Callable[..., Any]
    decision: Decision
    candidates: tuple[guard.Candidate, ...]
    is_settled: bool = False


def callable_of(
    decision: Decision,
    snapshot: OpRegistrySnapshot,
    failures: guard.Failures,
    asked: Asked,
    native: guard.Candidate | None,
    measured: Sequence[Measured],
    *,
    strict: bool,
    wrap: Callable[[guard.Candidate], guard.Candidate] | None,
) -> Resolved:
    """Make one callable of what a decision can use.

    Args:
        decision: with at least one usable candidate.
        snapshot: what it was made from.
        failures: who is told of failures and first successes.
        asked: for whom it was made.
        native: a layer's own path, where the decision has it as a candidate.
        measured: what the policy's tuned table says of the operator.
        strict: the policy's.
        wrap: applied to every candidate but the native one.
    """
    op_name = decision.op_name
    operator = snapshot.operators.get(op_name)

    # Once, and not for each entry of a table, which only changes the order.
    called = called_in_order(decision, snapshot, asked)
    settled = {impl.impl_id for impl in called if impl is not None and is_settled(impl, operator, asked)}

    def made(its: Decision) -> Resolved:
        candidates = []
        for impl in called_in_order(its, snapshot, asked):
            if impl is not None:
                candidate = _candidate(impl, operator, is_asked=impl.impl_id in settled)
                candidates.append(wrap(candidate) if wrap else candidate)
            elif native is not None:
                candidates.append(replace(native, fn=trace.recorded(op_name, NATIVE, native.fn)))
        fn = guard.guarded(op_name, operator, candidates, failures, strict=strict)
        return Resolved(fn, its, tuple(candidates), bool(settled))

    default = made(decision)
    entries = entries_of(op_name, measured, snapshot, asked)
    if not entries or operator is None:
        return default
    functions = {entry: made(reordered(decision, entry)).fn for entry in entries}
    return replace(default, fn=by_shape(operator, default.fn, functions))


def _candidate(impl: OpImpl, operator: Operator | None, *, is_asked: bool) -> guard.Candidate:
    writes = impl.writes
    if writes is None:
        writes = operator.mutates if operator else ()
    fn = trace.recorded(impl.op_name, impl.impl_id, adapt(operator, impl.load()))
    supports, supports_layer = (
        None if ask is None else adapt(operator, load(ask), is_predicate=True)
        for ask in (impl.supports, None if is_asked else impl.supports_layer)
    )
    return guard.Candidate(impl.impl_id, fn, supports, supports_layer, writes, impl.traceable)


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

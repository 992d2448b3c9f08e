"""A decision: what was chosen for an operator, what was not, and why."""

from __future__ import annotations

from dataclasses import asdict
from dataclasses import dataclass
from dataclasses import replace
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.dispatch.common.text import printable

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Why a candidate is where it is.
CHOSEN = "chosen"
NEXT = "next"
DENIED = "denied"
NOT_LISTED = "not-listed"
UNAVAILABLE = "unavailable"
MISSING = "missing"
FAILED = "failed"
NOT_THIS_LAYER = "not-this-layer"


@dataclass(frozen=True)
class CandidateReport:
    """One implementation in a decision.

    Attributes:
        impl_id: its id; ``native`` is vLLM's own path.
        kind: ``flagos``, ``vendor``, ``reference`` or ``native``.
        distribution: the wheel that registered it, with its version.
        priority: its priority inside a token.
        status: ``chosen``, ``next`` (it runs if those before it refuse or fail),
            ``denied``, ``not-listed``, ``unavailable``, ``missing`` (its backend is
            available and lacks this operator), ``failed`` or ``not-this-layer`` (it
            takes other layers' dtypes or sizes).
        reason: the status in a sentence.
    """

    impl_id: str
    kind: str
    distribution: str
    priority: int
    status: str
    reason: str


@dataclass(frozen=True)
class Decision:
    """What runs for an operator and why; ``str()`` is the table that a person reads.

    Attributes:
        op_name: the operator.
        impl_id: what is chosen; None where nothing can run.
        form: ``plain``, ``guard`` or ``opaque``; "Speed" in the docs says what they are.
        order: the tokens that were tried, in order.
        source: where the order came from.
        policy: the fingerprint of the policy.
        candidates: every implementation, the usable ones first and in order.
        tuned: what the policy's tuned table changes, a line for each entry.
    """

    op_name: str
    impl_id: str | None
    form: str
    order: tuple[str, ...]
    source: str
    policy: str
    candidates: tuple[CandidateReport, ...]
    tuned: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the decision as plain values, for JSON."""
        return asdict(self)

    @property
    def usable(self) -> tuple[CandidateReport, ...]:
        """What runs, and what would run after it."""
        return tuple(c for c in self.candidates if c.status in (CHOSEN, NEXT))

    def noted(self, notes: Mapping[str, str]) -> Decision:
        """Return the decision with more said of some implementations, by id."""
        if not notes:
            return self
        candidates = [
            replace(c, reason=f"{c.reason}; {notes[c.impl_id]}") if c.impl_id in notes else c
            for c in self.candidates
        ]
        return replace(self, candidates=tuple(candidates))

    def __str__(self) -> str:
        chosen = f"{self.impl_id} ({self.form})" if self.impl_id else "nothing can run"
        lines = [
            f"{self.op_name}: {chosen}",
            printable(f"order: {' > '.join(self.order)}   from {self.source}   policy {self.policy}"),
            *(printable(f"tuned: {line}") for line in self.tuned),
        ]
        rows: list[tuple[str, ...]] = [("", "implementation", "wheel", "priority", "why")]
        rows += [
            (
                "->" if c.status == CHOSEN else "",
                c.impl_id,
                c.distribution,
                str(c.priority) if c.kind != "native" else "-",
                c.reason,
            )
            for c in self.candidates
        ]
        if len(rows) == 1:
            return "\n".join([*lines, "no implementation is registered"])
        rows = [tuple(map(printable, row)) for row in rows]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        for row in rows:
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
            lines.append("  ".join([*cells, row[4]]).rstrip())
        return "\n".join(lines)

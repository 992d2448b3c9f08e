"""What a check says."""

from __future__ import annotations

from dataclasses import asdict
from dataclasses import dataclass
from typing import Any

PASS = "pass"  # noqa: S105 - no password
WARN = "warn"
FAIL = "fail"
SKIP = "skip"

#: The worst last.
STATUSES = (SKIP, PASS, WARN, FAIL)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a check has found.

    Attributes:
        status: ``pass``, ``warn``, ``fail`` or ``skip``.
        what: what it is, in a sentence.
        why: why it matters; empty where nothing is wrong.
        mend: the command that mends it, or what to do.
    """

    status: str
    what: str
    why: str = ""
    mend: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)


def worst(findings: list[Finding]) -> str:
    """Return the status of a check that found these."""
    return max((finding.status for finding in findings), key=STATUSES.index, default=PASS)

"""What became of one case or of one check."""

from __future__ import annotations

import math
from dataclasses import asdict
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    """How a case ended."""

    PASSED = "passed"
    FAILED = "failed"
    #: The implementation says that it is not for these inputs; the dispatch runs another.
    REFUSED = "refused"
    #: More elements than ``--max-elements``.
    CAPPED = "capped"
    #: A waiver says not to run it.
    SKIPPED = "skipped"
    #: Does not apply here, or cannot be run here.
    NOT_RUN = "not run"


@dataclass(frozen=True)
class Result:
    """What became of one case, or of one check of an implementation.

    Attributes:
        impl_id: the implementation; the backend's name for a check of the whole.
        op: the operator, or what was checked.
        name: the case.
        status: how it ended.
        dtype: the case's dtype, ``""`` for a check.
        ratio: the error in tolerances, before any loosening; None where nothing was compared.
        largest: the largest absolute error.
        note: why, in a sentence.
        is_deterministic: two runs gave the same bytes; None where that was not asked.
        waiver: the reason of the waiver, where one changed the judgement.
        seconds: how long it took.
        is_case: a call that was judged, and no check.
    """

    impl_id: str
    op: str
    name: str
    status: Status
    dtype: str = ""
    ratio: float | None = None
    largest: float | None = None
    note: str = ""
    is_deterministic: bool | None = None
    waiver: str = ""
    seconds: float = 0.0
    is_case: bool = True

    @property
    def is_failure(self) -> bool:
        """Whether it makes the whole fail."""
        return self.status is Status.FAILED

    @property
    def is_loosened(self) -> bool:
        """Whether it passed only because a waiver loosens its tolerances."""
        return self.status is Status.PASSED and bool(self.waiver)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values, for JSON; an infinite ratio is the string ``"inf"``."""
        values = asdict(self) | {"is_loosened": self.is_loosened}
        for name in ("ratio", "largest"):
            if values[name] is not None and not math.isfinite(values[name]):
                values[name] = str(values[name])
        return values

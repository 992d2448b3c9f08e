"""The nearest right name, for error messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def suggest(name: str, known: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` or the list of what is known, or ``""``."""
    from difflib import get_close_matches  # only for an error message

    choices = sorted(known)
    close = get_close_matches(name, choices, n=1, cutoff=0.6)
    if close:
        return f" Did you mean {close[0]!r}?"
    return f" Known: {', '.join(choices)}." if choices else ""

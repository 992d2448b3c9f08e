"""The nearest right name, for error messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?``, or ``""`` where nothing known is near."""
    from difflib import get_close_matches  # only for an error message

    by_lower = {choice.lower(): choice for choice in sorted(known)}
    close = get_close_matches(name.lower(), by_lower, n=1) if isinstance(name, str) else []
    return f" Did you mean {by_lower[close[0]]!r}?" if close else ""


def suggest(name: object, known: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` or the list of what is known, or ``""``."""
    choices = sorted(known)
    return did_you_mean(name, choices) or (f" Known: {', '.join(choices)}." if choices else "")

"""What error messages are made of: the wrong value, and the nearest right name."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_LONGEST = 300


def shown(value: object) -> str:
    """Return ``repr(value)``, shortened where it is long: aliases in YAML make gigabytes of a line."""
    import reprlib  # only for an error message

    short = reprlib.Repr()
    short.maxstring = short.maxother = _LONGEST
    try:
        text = short.repr(value)
    except ValueError:  # Python writes no number of thousands of digits
        return f"a number that is too long to show ({type(value).__name__})"
    except BaseException:  # noqa: BLE001 - a `__repr__` may do anything
        return f"an object of {type(value).__name__} that cannot be shown"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


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

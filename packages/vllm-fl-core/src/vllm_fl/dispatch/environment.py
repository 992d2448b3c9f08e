"""Reading one environment variable: text, a boolean, seconds, names.

What the variables are is the table of :mod:`vllm_fl.dispatch.variables`. The policy file
reads its booleans and names by the same rules.
"""

from __future__ import annotations

import os
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vllm_fl.dispatch.common.suggest import shown
from vllm_fl.dispatch.errors import PolicyError

if TYPE_CHECKING:
    from collections.abc import Iterator

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


@contextmanager
def told_as(prefix: str) -> Iterator[None]:
    """Put ``prefix`` before every PolicyError of the block: ``"file:line: "``, ``"strict "``."""
    try:
        yield
    except PolicyError as error:
        raise PolicyError(f"{prefix}{error}") from None


def variable(name: str) -> str | None:
    """Return an environment variable, None where it is unset or blank."""
    return os.environ.get(name, "").strip() or None


def boolean(value: object) -> bool:
    """Return what 1/0, true/false, yes/no or on/off means.

    Raises:
        PolicyError: anything else.
    """
    text = value.strip().lower() if isinstance(value, str) else shown(value).lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise PolicyError(f"must be one of 1/0, true/false, yes/no, on/off, not {shown(value)}.")


def names(value: object) -> list[str]:
    """Return the names of a list, or of a text with commas between.

    Raises:
        PolicyError: no list, an empty name, one twice, or none at all.
    """
    given = value.split(",") if isinstance(value, str) else value
    if not isinstance(given, list):
        raise PolicyError(f"must be a list of names, not {shown(given)}.")
    found: list[str] = []
    for name in given:
        if not isinstance(name, str) or not name.strip():
            raise PolicyError(f"must hold names, not {shown(name)}.")
        found.append(name.strip())
    if not found:
        raise PolicyError("names nothing; leave it out.")
    twice = sorted(name for name, times in Counter(found).items() if times > 1)
    if twice:
        raise PolicyError(f"names {', '.join(map(shown, twice))} twice.")
    return found


def boolean_variable(name: str, default: bool) -> bool:
    """Return a boolean variable, or ``default`` where it is unset.

    Raises:
        PolicyError: it is none.
    """
    text = variable(name)
    if text is None:
        return default
    with told_as(f"{name}: "):
        return boolean(text)


def seconds_variable(name: str, default: float) -> float:
    """Return a number of seconds, or ``default`` where the variable is unset.

    Raises:
        PolicyError: it is no positive number.
    """
    text = variable(name)
    if text is None:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise PolicyError(f"{name}: must be a positive number of seconds, not {shown(text)}.")
    return seconds


def names_variable(name: str) -> list[str] | None:
    """Return a list with commas between, None where it is unset.

    Raises:
        PolicyError: an empty name, or one twice.
    """
    text = variable(name)
    if text is None:
        return None
    with told_as(f"{name}: "):
        return names(text)

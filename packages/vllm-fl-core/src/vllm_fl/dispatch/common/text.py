"""Text of others on its way to a person: a plug-in's name, version or reason may hold anything.

A terminal obeys control characters, and a line break forges a row of a table or a line of a log.
Whatever is printed or logged goes through here; values are kept as they are.
"""

from __future__ import annotations

import unicodedata


def printable(text: str) -> str:
    """Return one line in which every character can be seen; the others are escaped as in Python.

    Those are the controls, line and paragraph separators, what changes the direction or has no
    width, surrogates, and what is not assigned.
    """
    return text if text.isprintable() else "".join(map(_seen, text))


def printable_lines(text: str) -> str:
    """Return a text of several lines, each as :func:`printable` returns it."""
    return "\n".join(map(printable, text.split("\n")))


def _seen(character: str) -> str:
    # A space of another width, as Chinese has one, is no danger.
    if character.isprintable() or unicodedata.category(character) == "Zs":
        return character
    return character.encode("unicode_escape").decode("ascii")

"""Failures after which no other implementation is tried: no memory, a lost device, a signal.

Another implementation would fail as well, or hide what has happened. What the
libraries of devices say then is a table, fatal_errors.json, with its sources.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING
from typing import Any
from typing import NamedTuple

if TYPE_CHECKING:
    import re
    from collections.abc import Iterator

#: Their text is about the arguments or the program, whatever words it has.
_NOT_OF_A_DEVICE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    NotImplementedError,
    SyntaxError,
    TypeError,
    ValueError,
)
#: A text may be a log of many megabytes; what has happened stands near its beginning.
_READ = 20_000


class _Table(NamedTuple):
    types: frozenset[str]
    patterns: re.Pattern[str]
    passing_types: frozenset[str]
    passing_patterns: re.Pattern[str]


@functools.cache
def _table() -> _Table:
    import json
    import re
    from pathlib import Path

    content = json.loads(Path(__file__).with_name("fatal_errors.json").read_text("utf-8"))
    libraries, passing = content["libraries"], content["passing"]

    def one_of(patterns: list[str]) -> re.Pattern[str]:
        return re.compile("|".join(f"(?:{pattern})" for pattern in patterns), re.IGNORECASE)

    return _Table(
        frozenset(name for library in libraries for name in library.get("types", ())),
        one_of([pattern for library in libraries for pattern in library["patterns"]]),
        frozenset(passing["types"]),
        one_of(passing["patterns"]),
    )


def is_fatal(error: BaseException) -> bool:
    """Whether running another implementation would only hide what has happened.

    Looks into groups, and into what an exception was raised from or while handling.
    """
    return any(map(_is_fatal_itself, _all_of(error)))


def _is_fatal_itself(error: BaseException) -> bool:
    if isinstance(error, (MemoryError, KeyboardInterrupt, SystemExit)):
        return True
    if isinstance(error, _NOT_OF_A_DEVICE):
        return False
    table = _table()
    names = {cls.__name__ for cls in type(error).__mro__}
    text = _text_of(error)
    if names & table.types:
        return not (names & table.passing_types and table.passing_patterns.search(text)) or bool(
            table.patterns.search(text)
        )
    return bool(table.patterns.search(text))


def _text_of(error: BaseException) -> str:
    try:
        return str(error)[:_READ]
    except Exception:  # noqa: BLE001 - a plug-in's exception may do anything
        return ""


def _all_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, the members of a group, and their causes and contexts."""
    seen: set[int] = set()
    frames: set[int] = set()
    waiting: list[BaseException] = [error]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        frames.update(map(id, _frames_of(one)))
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions
        if one.__cause__ is not None:
            waiting.append(one.__cause__)
        context = one.__context__
        if context is not None and not one.__suppress_context__:
            # What the caller was handling already, before this call, is not of this call.
            caught_in = next(_frames_of(context), None)
            if caught_in is None or id(caught_in) in frames:
                waiting.append(context)


def _frames_of(error: BaseException) -> Iterator[Any]:
    entry = error.__traceback__
    while entry is not None:
        yield entry.tb_frame
        entry = entry.tb_next

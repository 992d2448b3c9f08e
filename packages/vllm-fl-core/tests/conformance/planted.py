"""What a planted fault is, and the table of all of them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING
from typing import Any

import right

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Fault:
    """A faulty implementation.

    Attributes:
        name: of what it is.
        op: the operator.
        make: returns the function; a new one each time, so that one that keeps something starts afresh.
        says: what the note of the failure holds.
        found: what finds it, and is run alone: the ``compiled`` check, or a pattern of the names of cases;
            ``*`` for the small ones.
        options: those of ``OpImpl``.
    """

    name: str
    op: str
    make: Callable[[], Callable[..., Any]]
    says: str
    found: str
    options: dict[str, Any]


FAULTS: list[Fault] = []


def fault(op, *, says="", found="*", **options):
    """Take the decorated function as a faulty implementation; its name, with spaces, says of what."""

    def note(function):
        name = function.__name__.replace("_", " ")
        FAULTS.append(Fault(name, op, lambda: function, says, found, options))
        return function

    return note


def faults(ops, *, says, found="*", **options):
    """Take a fault of several operators: the decorated function makes a faulty one of a right one.

    Args:
        ops: the operators.
        says: as of :class:`Fault`.
        found: as of :class:`Fault`.
        options: added to those of a right implementation of the operator.
    """

    def note(make):
        for op in ops:
            name = make.__name__.replace("_", " ")
            whole = {"writes": right.WRITES.get(op, ()), **options}
            FAULTS.append(Fault(name, op, functools.partial(_made, make, op), says, found, whole))
        return make

    return note


def _made(make, op):
    """Return the faulty implementation, with the signature of the right one."""
    faulty = make(right.FUNCTIONS[op])

    @functools.wraps(right.FUNCTIONS[op])
    def called(*args, **kwargs):
        return faulty(*args, **kwargs)

    return called

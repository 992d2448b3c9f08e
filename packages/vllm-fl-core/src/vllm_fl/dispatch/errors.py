"""Every exception that the dispatch raises itself.

An exception of an implementation keeps its own type; see the list "When one
fails" in :mod:`vllm_fl.dispatch.manager`.
"""

from __future__ import annotations

from vllm_fl.dispatch.common.text import printable


class DispatchError(Exception):
    """Base class of what the dispatch raises itself."""


class PolicyError(DispatchError, ValueError):
    """A configuration value is wrong.

    The message names the variable, or the file and line, the value, and the
    nearest right name where there is one. It is one line, in which every
    character can be seen, whatever a path holds.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class RegistrationError(DispatchError, ValueError):
    """An implementation, an operator or a plugin cannot be registered.

    The message names the distribution and entry point, or the caller's
    argument.
    """


class UnknownOperatorError(DispatchError, LookupError):
    """No operator of this name is declared or registered."""


class NoImplementationError(DispatchError, RuntimeError):
    """Nothing can run the operator: the message lists why, and what to install."""


class RefusedBeforeWriting(DispatchError, NotImplementedError):  # noqa: N818 - a refusal, not a fault
    """An implementation does not take these arguments, and has written none of them.

    Raise it from an implementation that may write its arguments, before it writes
    any of them, where ``supports`` cannot tell: the next candidate runs, for this
    call only. ``NotImplementedError`` itself promises nothing there, since torch
    raises it from the middle of a kernel too.
    """

"""Whether a refusal's promise, that nothing was written, is the implementation's own.

Of an implementation that calls another operator, and may have written by then, the
other one's :class:`~vllm_fl.dispatch.RefusedBeforeWriting` promises nothing. Its
traceback tells whose it is.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.dispatch.calling.generated import GUARD
from vllm_fl.dispatch.calling.generated import file_of
from vllm_fl.dispatch.errors import RefusedBeforeWriting

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType

_OURS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_GENERATED = file_of("")

_entrances: set[CodeType] = set()
_handed_out: set[CodeType] = set()


def note_entrance(function: Callable[..., Any]) -> None:
    """Note a function of the dispatch through which operators are called."""
    _entrances.add(function.__code__)


def note_handed_out(function: Any) -> None:
    """Note a resolved operator, which may be the implementation itself."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    if code is not None:
        _handed_out.add(code)


def is_promised(error: BaseException) -> bool:
    """Whether ``error``, as a guard has caught it, is the implementation's own promise."""
    if not isinstance(error, RefusedBeforeWriting) or error.__traceback__ is None:
        return False
    is_inside = False
    entry = error.__traceback__.tb_next  # the first one is the guard
    while entry is not None:
        code = entry.tb_frame.f_code
        if code in _entrances or code.co_filename.startswith(file_of(GUARD)):
            return False
        if not code.co_filename.startswith((_OURS, _GENERATED)):
            if is_inside and code in _handed_out:
                return False
            is_inside = True  # the implementation's own first frame
        entry = entry.tb_next
    return True

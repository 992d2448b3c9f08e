"""The backend's questions, asked as the dispatch does."""

from __future__ import annotations

from typing import Any

from vllm_fl.dispatch import OPERATORS
from vllm_fl.dispatch.calling.binding import adapt
from vllm_fl.dispatch.calling.predicate import refusal
from vllm_fl_flaggems.flaggems import FlagGemsBackend


def asked(op: str, *args: Any, **kwargs: Any) -> bool | str:
    """Ask for the layer, then for the call; True, or the first sentence that says why not."""
    call = OPERATORS[op].signature.bind(*args, **kwargs)
    call.apply_defaults()
    for predicate in FlagGemsBackend().implementation_of(op).predicates():
        reason = refusal(adapt(OPERATORS[op], predicate, is_predicate=True), call.args, call.kwargs)
        if reason is not None:
            return reason
    return True

"""How an operator is called as the dispatch calls it."""

from __future__ import annotations

from typing import Any

from vllm_fl.dispatch import OPERATORS
from vllm_fl.dispatch.calling.binding import adapt


def refusal(backend: Any, op_name: str, *args: Any, **kwargs: Any) -> str | None:
    """What the backend's predicates say against a call, for the layer first; None if they agree."""
    operator = OPERATORS[op_name]
    bound = operator.signature.bind(*args, **kwargs)
    bound.apply_defaults()
    for predicate in backend.implementation_of(op_name).predicates():
        answer = adapt(operator, predicate, is_predicate=True)(*bound.args, **bound.kwargs)
        if answer is not True:
            return answer
    return None


def call(backend: Any, op_name: str, *args: Any, **kwargs: Any) -> Any:
    """Call an operator that the backend's predicates agree to."""
    assert refusal(backend, op_name, *args, **kwargs) is None
    return backend.implementation_of(op_name).load()(*args, **kwargs)

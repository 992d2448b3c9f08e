"""How an operator is called as the dispatch calls it."""

from __future__ import annotations

from typing import Any


def refusal(backend: Any, op_name: str, *args: Any, **kwargs: Any) -> str | None:
    """What ``supports`` says against a call; None if it agrees."""
    answer = backend.implementation_of(op_name).supports(*args, **kwargs)
    return None if answer is True else answer


def call(backend: Any, op_name: str, *args: Any, **kwargs: Any) -> Any:
    """Call an operator that ``supports`` agrees to."""
    implementation = backend.implementation_of(op_name)
    assert implementation.supports(*args, **kwargs) is True
    return implementation.load()(*args, **kwargs)

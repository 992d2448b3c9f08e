"""Every test calls the operators as vLLM does: through the dispatch."""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import Any

import pytest

from vllm_fl.dispatch import OpManager
from vllm_fl.dispatch import OpRegistry
from vllm_fl.dispatch import SelectionPolicy
from vllm_fl.dispatch import policy_context
from vllm_fl_template.register_ops import register_builtins

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Iterator


# <sample>
@pytest.fixture(autouse=True)
def _enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_FL_TEMPLATE_ENABLED", "1")


# </sample>
@pytest.fixture
def manager() -> OpManager:
    """The dispatch with this backend alone."""
    registry = OpRegistry()
    register_builtins(registry)
    return OpManager(registry)


@pytest.fixture
def call(manager: OpManager) -> Iterator[Callable[..., Any]]:
    """Return ``call(op_name, *arguments)``; nothing else can run, and nothing is tried twice."""
    with policy_context(SelectionPolicy.from_dict(prefer="vendor", strict=True)):
        yield manager.call

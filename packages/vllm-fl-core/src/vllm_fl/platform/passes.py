"""vLLM's passes over a compiled graph, without the one that names operators of its libraries."""

from __future__ import annotations

from typing import Any

from vllm.compilation.passes.pass_manager import PostGradPassManager
from vllm.compilation.passes.vllm_inductor_pass import VllmInductorPass


class _Nothing(VllmInductorPass):  # type: ignore[misc]
    def __call__(self, graph: Any) -> None:
        """Leave the graph as it is."""


class ChipPassManager(PostGradPassManager):  # type: ignore[misc]
    """vLLM's, but for its last pass.

    That one puts writes in place back for operators of ``torch.ops._C``, which it names
    without asking whether they are there; on an unknown chip none is, and no graph has one.
    """

    def configure(self, config: Any) -> None:
        """Set up the passes for a configuration."""
        super().configure(config)
        self.fix_functionalization = _Nothing(config)

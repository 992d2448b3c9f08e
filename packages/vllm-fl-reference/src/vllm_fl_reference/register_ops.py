"""The entry point ``vllm_fl.plugin: reference``. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_fl.dispatch import OpRegistry

#: The plugin API that this plugin was written for.
VLLM_FL_PLUGIN_API = 1


def register_builtins(registry: OpRegistry) -> None:
    """Register every operator of the reference."""
    from vllm_fl_reference.reference import ReferenceBackend

    registry.register_backend(ReferenceBackend())

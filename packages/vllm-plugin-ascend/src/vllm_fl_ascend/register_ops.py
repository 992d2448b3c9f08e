"""The entry point ``vllm_fl.plugin: ascend``. Imports no torch and no torch_npu."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_fl_ascend._availability import EMULATED_ENV

if TYPE_CHECKING:
    from vllm_fl.dispatch import OpRegistry

#: The plugin API that this plugin was written for.
VLLM_FL_PLUGIN_API = 1

#: The environment variables that this plugin reads.
VLLM_FL_VARIABLES = (EMULATED_ENV,)


def register_builtins(registry: OpRegistry) -> None:
    """Register every operator of :class:`~vllm_fl_ascend.ascend.AscendBackend`."""
    from vllm_fl_ascend.ascend import AscendBackend

    registry.register_backend(AscendBackend())

"""The entry point ``vllm_fl.plugin: template``. Imports no torch and no vendor library.

vLLM loads it in every one of its processes, also in those that never compute.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_fl.dispatch import OpRegistry

#: The plugin API that this plugin was written for.
VLLM_FL_PLUGIN_API = 1
# <sample>

#: The environment variables that this plugin reads; a misspelt one is reported.
VLLM_FL_VARIABLES = ("VLLM_FL_TEMPLATE_ENABLED",)
# </sample>


def register_builtins(registry: OpRegistry) -> None:
    """Register every operator of :class:`~vllm_fl_template.template.TemplateBackend`."""
    from vllm_fl_template.template import TemplateBackend

    registry.register_backend(TemplateBackend())

"""A plug-in that registers nothing: it lets FlagGems run on the CPU in every process of vLLM.

``VLLM_FL_PLUGIN_MODULES=emulated_flag_gems``, with this folder on PYTHONPATH,
TRITON_INTERPRET=1 and GEMS_VENDOR=arm.
"""

from __future__ import annotations

from typing import Any

import flag_gems_on_cpu


def register(registry: Any) -> None:
    flag_gems_on_cpu.install()

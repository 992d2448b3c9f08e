"""A vLLM platform made of a chip's description: the entry point ``vllm.platform_plugins: fl``.

A wheel describes its chip as data, a :class:`~vllm_fl.platform.description.Chip`; from it
this package makes what vLLM needs of a chip that it does not know. vLLM calls
:func:`platform` in every process, and most of them have no such chip: where no
description is active, nothing but :mod:`~vllm_fl.platform.description` and
:mod:`~vllm_fl.platform.choice` is imported.
"""

from __future__ import annotations

import os

from vllm_fl.platform.names import GROUP
from vllm_fl.platform.names import VARIABLE


def platform() -> str | None:
    """Return the class of vLLM's platform here, None where no description is active.

    It never raises, because vLLM swallows what is raised here and goes on without the
    platform: where something is wrong, it returns a class that raises when vLLM makes it.
    """
    if not os.environ.get(VARIABLE) and not _is_any_installed():
        return None
    try:
        from vllm_fl.platform.choice import for_vllm

        return for_vllm()
    except Exception as error:  # noqa: BLE001 - our fault must not end somebody's server
        from vllm_fl.dispatch import get_logger

        logger = get_logger("vllm_fl.platform")
        logger.error("vllm-fl: no platform is made: %s: %s", type(error).__name__, error)
        return None


def _is_any_installed() -> bool:
    from importlib.metadata import entry_points

    try:
        return bool(entry_points(group=GROUP))
    except Exception:  # noqa: BLE001 - damaged metadata, which `choice` reads with care
        return True

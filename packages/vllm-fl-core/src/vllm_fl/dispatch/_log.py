"""The package's loggers: named, without a handler unless the user asks for one."""

from __future__ import annotations

import logging
import os

ROOT = "vllm_fl"
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def get_logger(name: str = "vllm_fl.dispatch") -> logging.Logger:
    """Return a logger below ``vllm_fl``."""
    return logging.getLogger(name if f"{name}.".startswith(f"{ROOT}.") else f"{ROOT}.{name}")


def set_log_level(level: str | int) -> None:
    """Print the package's log from ``level`` on stderr; as VLLM_FL_LOG_LEVEL does.

    Raises:
        ValueError: no such level.
    """
    root = logging.getLogger(ROOT)
    root.setLevel(level.upper() if isinstance(level, str) else level)
    if not root.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s [%(name)s] %(message)s"))
        root.addHandler(handler)
        root.propagate = False


def level_from_environment() -> str | None:
    """Apply VLLM_FL_LOG_LEVEL; return what is wrong with it, or None.

    An import must not fail for a wrong configuration, so nothing raises here.
    """
    level = os.environ.get("VLLM_FL_LOG_LEVEL", "").strip()
    if not level:
        return None
    if level.upper() not in _LEVELS:
        return f"VLLM_FL_LOG_LEVEL: must be one of {', '.join(_LEVELS)}, not {level!r}."
    set_log_level(level)
    return None

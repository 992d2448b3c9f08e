"""The package's loggers: named, without a handler unless the user asks for one."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import contextmanager
from contextlib import suppress
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.dispatch.common.text import printable
from vllm_fl.dispatch.common.text import printable_lines

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = "vllm_fl"
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def get_logger(name: str = "vllm_fl.dispatch") -> logging.Logger:
    """Return a logger below ``vllm_fl``."""
    return only_printable(logging.getLogger(name if f"{name}.".startswith(f"{ROOT}.") else f"{ROOT}.{name}"))


def only_printable(logger: logging.Logger) -> logging.Logger:
    """Let a logger write each message as one line, in which every character can be seen."""
    logger.addFilter(_only_printable)
    return logger


def _only_printable(record: logging.LogRecord) -> bool:
    with suppress(Exception):  # the handler meets the same, and says so
        record.msg, record.args = printable(record.getMessage()), None
        if record.exc_info and not record.exc_text:
            # A formatter writes this text where there is one, in the place of its own.
            record.exc_text = _traceback(record.exc_info)
    return True


def _traceback(exc_info: Any) -> str:
    import traceback  # only when something has failed

    # Its frames have lines of their own; the text of an exception has one.
    parts = [part.removesuffix("\n") for part in traceback.format_exception(*exc_info)]
    frames = ("Traceback ", " ", "\n")
    return "\n".join(printable_lines(p) if p.startswith(frames) else printable(p) for p in parts)


#: What has been said in this process.
_said: set[str] = set()


def warn_once(message: str, *args: object) -> str:
    """Log a warning, unless this process has said the same before; return its text."""
    line = message % args
    if line not in _said:
        _said.add(line)
        get_logger().warning(message, *args)
    return line


class _StderrHandler(logging.StreamHandler[Any]):
    """Prints on what ``sys.stderr`` is at that moment; another one may have been closed since."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stderr


def set_log_level(level: str | int) -> None:
    """Print the package's log from ``level`` on stderr; as VLLM_FL_LOG_LEVEL does.

    Raises:
        ValueError: no such level.
    """
    root = logging.getLogger(ROOT)
    root.setLevel(level.upper() if isinstance(level, str) else level)
    if not root.handlers:
        handler = _StderrHandler()
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


def _settings() -> dict[str, Any]:
    root = logging.getLogger()
    # A copy first: another thread may make a logger.
    loggers = [one for one in list(root.manager.loggerDict.values()) if isinstance(one, logging.Logger)]
    return {
        "level": root.level,
        "handlers": list(root.handlers),
        "filters": list(root.filters),
        "logging.disable": root.manager.disable,
        "disabled loggers": {one.name for one in (root, *loggers) if one.disabled},
    }


@contextmanager
def root_logger_kept() -> Iterator[list[str]]:
    """Put back what the block changes of the root logger, and which loggers are disabled.

    These belong to the user's program. A logger that the block makes is left as it is.

    Yields:
        A list that is filled at the end with what was changed.
    """
    before = _settings()
    changed: list[str] = []
    try:
        yield changed
    finally:
        after = _settings()
        newly_disabled = after["disabled loggers"] - before["disabled loggers"]
        changed += [name for name in before if name != "disabled loggers" and before[name] != after[name]]
        changed += ["disabled loggers"] if newly_disabled else []
        root = logging.getLogger()
        if "level" in changed:
            root.setLevel(before["level"])
        root.handlers[:], root.filters[:] = before["handlers"], before["filters"]
        if "logging.disable" in changed:
            logging.disable(before["logging.disable"])
        for name in newly_disabled:
            logging.getLogger(name if name != "root" else None).disabled = False

"""Saying which plugin does not come back.

Code that hangs inside this process cannot be ended from inside it; what can be done
is to name it, while it hangs, in the log that somebody reads.
"""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vllm_fl.dispatch._log import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = get_logger(__name__)

#: Some libraries take seconds to import; none is silent for this long.
SLOW_SECONDS = 15.0


@contextmanager
def watched(what: str, advice: str) -> Iterator[None]:
    """Warn once, with a sentence about ``what``, where the block takes too long."""

    def warn() -> None:
        logger.warning("%s for %g seconds now, and this process waits. %s", what, SLOW_SECONDS, advice)

    timer = threading.Timer(SLOW_SECONDS, warn)
    timer.daemon = True
    timer.start()
    process = os.getpid()
    try:
        yield
    finally:
        # A child that was forked in the block has no timer, and perhaps its lock.
        if os.getpid() == process:
            timer.cancel()
            # A process that forks next must have no thread of ours.
            timer.join()

"""Saying which plugin does not come back.

Code that hangs inside this process cannot be ended from inside it; what can be done
is to name it, while it hangs, in the log that somebody reads.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vllm_fl.dispatch.common.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = get_logger(__name__)

#: Some libraries take seconds to import; none is silent for this long.
SLOW_SECONDS = 15.0


class Watch:
    """Warns once of each block that takes too long; a thread for as long as it is entered."""

    def __init__(self) -> None:
        self._block: tuple[str, str, float] | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="vllm-fl-watch", daemon=True)
        self._process = os.getpid()

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # A child that was forked in a block has no such thread, and perhaps its lock.
        if os.getpid() == self._process:
            self._ended.set()
            # A process that forks next must have no thread of ours.
            self._thread.join()

    @contextmanager
    def over(self, what: str, advice: str) -> Iterator[None]:
        """Warn with a sentence about ``what`` where the block takes too long."""
        self._block = (what, advice, time.monotonic())
        try:
            yield
        finally:
            self._block = None

    def _look(self) -> None:
        told = None
        wait = SLOW_SECONDS
        while not self._ended.wait(wait):
            # A block that begins while this waits is not late before it looks again.
            wait = SLOW_SECONDS
            block = self._block
            if block is None or block is told:
                continue
            what, advice, since = block
            left = since + SLOW_SECONDS - time.monotonic()
            if left > 0:
                wait = left
                continue
            told = block
            logger.warning("%s for %g seconds now, and this process waits. %s", what, SLOW_SECONDS, advice)

"""Files that somebody names: opened and read in bounded time, whatever is behind the name."""

from __future__ import annotations

import os
import stat

#: A policy has a few lines, and a table of everything that was measured some hundred kilobytes.
MOST_BYTES = 2**20


def read_text(path: str | os.PathLike[str], most: int = MOST_BYTES) -> str:
    """Return the text of a regular file.

    Raises:
        OSError: it cannot be opened, is a pipe, a socket or a device, or is too large.
        UnicodeError: it is no UTF-8.
    """
    # A pipe that nobody writes to is opened without waiting.
    at_once = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | at_once)) as file:
        mode = os.fstat(file.fileno()).st_mode
        if not stat.S_ISREG(mode):
            raise OSError("it is not a regular file")
        read = file.read(most + 1)
    if len(read) > most:
        raise OSError(f"it is larger than {most:,} bytes")
    return read.decode("utf-8")

"""What the command prints: tables for people, one object for programs."""

from __future__ import annotations

import enum
import json
import os
import sys
from contextlib import contextmanager
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING
from typing import Any
from typing import Literal
from typing import TypeAlias

from vllm_fl.about import generated_by
from vllm_fl.dispatch.common.text import printable
from vllm_fl.dispatch.common.text import printable_lines
from vllm_fl.dispatch.plugins.process_state import put_back

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Sequence
    from types import TracebackType

Colour: TypeAlias = Literal["red", "yellow", "green"]
_ANSI: dict[Colour, int] = {"red": 31, "yellow": 33, "green": 32}

#: Of the object that ``--json`` prints; schema.json, next to this file, says what is in it.
SCHEMA_VERSION = 1


class ExitCode(enum.IntEnum):
    """What every command returns to the shell."""

    OK = 0  #: it is well; there may be warnings
    PROBLEM = 1  #: a problem was found
    USAGE = 2  #: the command line is wrong
    FAULT = 3  #: a fault of vllm-fl itself
    INTERRUPTED = 130  #: Ctrl-C, as shells count it


class Problem(Exception):  # noqa: N818 - what the user reads, ExitCode.PROBLEM
    """The command found a problem; its text says what and what to do."""


class Output:
    """Prints for one run of the command.

    Plugins and vendor libraries print on stdout, also from C; while this is
    entered everything that they print goes to stderr.
    """

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self._stdout = -1
        self._streams: dict[str, Any] = {}

    def __enter__(self) -> Output:
        _open_what_is_closed()
        self._streams = {"stdout": sys.stdout, "stderr": sys.stderr}
        sys.stdout.flush()
        self._stdout = os.dup(1)
        os.dup2(2, 1)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._put_back()
        with suppress(OSError):  # it is full, or nobody reads it, which was said
            sys.stdout.flush()
        os.dup2(self._stdout, 1)
        os.close(self._stdout)

    def _put_back(self) -> None:
        """Print where this did when it began: a plugin may have closed the streams of Python."""
        for name, stream in self._streams.items():
            put_back(name, stream)

    @contextmanager
    def _on_stdout(self) -> Iterator[None]:
        self._put_back()
        sys.stdout.flush()
        os.dup2(self._stdout, 1)
        try:
            yield
            sys.stdout.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise Problem(f"stdout cannot be written: {error.strerror or error}") from None
        finally:
            os.dup2(2, 1)

    def json_object(self, values: dict[str, Any]) -> None:
        """Print the one object of ``--json``."""
        head = {"schema_version": SCHEMA_VERSION, "generated_by": generated_by()}
        with self._on_stdout():
            # JSON escapes every control character but DEL.
            print(json.dumps({**head, **values}, indent=2).replace("\x7f", "\\u007f"))

    def text(self, text: str = "", *, colour: Colour | None = None) -> None:
        """Print for people: on stdout, or on stderr with ``--json``; in colour on a terminal.

        Line breaks are those of the caller: what may hold one of somebody else's goes through
        :func:`~vllm_fl.dispatch.common.text.printable` before.
        """
        if self.as_json:
            self._put_back()
            print(printable_lines(text), file=sys.stderr)
            return
        with self._on_stdout():
            text = printable_lines(text)
            if colour is not None and sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
                text = f"\x1b[{_ANSI[colour]}m{text}\x1b[0m"
            print(text)

    def note(self, text: str) -> None:
        """Print a line about what happens, on stderr."""
        self._put_back()
        print(printable(text), file=sys.stderr)

    def error(self, text: str) -> None:
        """Print what went wrong, on stderr."""
        self._put_back()
        print(printable_lines(f"vllm-fl: {text}"), file=sys.stderr)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Print a table: with rich where it is installed and stdout is a terminal, unless NO_COLOR is set."""
        title = printable(title)
        cells = [[("" if cell is None else printable(str(cell))) for cell in row] for row in rows]
        with self._on_stdout():
            if find_spec("rich") is not None and sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
                _print_rich(title, columns, cells)
            else:
                print(plain_table(title, columns, cells))


def _open_what_is_closed() -> None:
    """Give a process that was started without standard files (``>&-``) ones that lead nowhere."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the first number that is free: this one
        if getattr(sys, name) is None:
            stream = open(number, mode, errors="backslashreplace", closefd=False)  # noqa: SIM115 - kept
            setattr(sys, name, stream)


def plain_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in plain text."""
    lines = [list(columns), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    texts = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines]
    rule = "  ".join("-" * width for width in widths)
    return "\n".join([title, texts[0], rule, *(texts[1:] or ["(none)"]), ""])


def _print_rich(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title), title_justify="left", box=box.SIMPLE_HEAD, title_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    Console().print(table)

"""Asking a question in a process of its own, which may crash, hang or print.

The questions are the functions of :mod:`vllm_fl.doctor.probes`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import vllm_fl
from vllm_fl.child_processes import child

#: Lines of the child's stderr that are kept.
_LINES_KEPT = 12
_BYTES_KEPT = 20_000


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a question.

    Attributes:
        value: the answer; None where there is none.
        problem: what became of the process, in words that follow its name; empty
            where it answered.
        said: the end of what it printed on stderr.
        is_late: it was ended by the time limit: it hangs, or the machine is slow.
    """

    value: Any
    problem: str = ""
    said: str = ""
    is_late: bool = False

    @property
    def last_line(self) -> str:
        """The last line that it printed: of an exception, what it was."""
        return "".join(self.said.splitlines()[-1:])


def ask(question: str, *arguments: str, seconds: float) -> Answer:
    """Ask a question in a new process.

    Args:
        question: a function of :mod:`vllm_fl.doctor.probes`.
        *arguments: its arguments.
        seconds: after them the process and its children are killed.
    """
    with tempfile.TemporaryDirectory(prefix="vllm-fl-doctor-") as folder:
        # A file of its own: whatever is printed on stdout, by Python or by C, is noise.
        answer, noise = Path(folder, "answer.json"), Path(folder, "stderr")
        # As in a server: the current folder is not searched, and the core is this one.
        command = [sys.executable, "-P", "-X", "faulthandler", "-m", "vllm_fl.doctor.probes"]
        paths = [*filter(None, [os.environ.get("PYTHONPATH")]), str(Path(vllm_fl.__file__).parents[1])]
        with (
            noise.open("wb") as stderr,
            child(
                [*command, str(answer), question, *arguments],
                {**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
            ) as process,
        ):
            problem, is_late = _wait(process, seconds)
        said = _end_of(noise).strip().splitlines()[-_LINES_KEPT:]
        try:
            value = json.loads(answer.read_text("utf-8"))
        except (OSError, ValueError):
            return Answer(None, problem or "ended without an answer", "\n".join(said), is_late)
        return Answer(value, said="\n".join(said))


def _end_of(file: Path) -> str:
    """Return the end of what a process printed, which may be without end."""
    with file.open("rb") as opened:
        opened.seek(max(0, file.stat().st_size - _BYTES_KEPT))
        return opened.read(_BYTES_KEPT).decode(errors="replace")


def _wait(process: subprocess.Popen[bytes], seconds: float) -> tuple[str, bool]:
    """Return what became of a process, and whether the time limit ended it."""
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return f"did not come back within {seconds:g} s", True
    if code < 0:
        return f"was killed by {_name(-code)}", False
    return f"ended its process with exit status {code}" if code else "", False


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

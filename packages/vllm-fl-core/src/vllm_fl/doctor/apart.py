"""Asking a question in a process of its own, which may crash, hang or print.

The questions are the functions of :mod:`vllm_fl.doctor.questions`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import vllm_fl

#: Lines of the child's stderr that are kept.
_LINES_KEPT = 12


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a question.

    Attributes:
        value: the answer; None where there is none.
        problem: what became of the process, in words that follow its name; empty
            where it answered.
        said: the end of what it printed on stderr.
    """

    value: Any
    problem: str = ""
    said: str = ""

    @property
    def last_line(self) -> str:
        """The last line that it printed: of an exception, what it was."""
        return "".join(self.said.splitlines()[-1:])


def ask(question: str, *arguments: str, seconds: float) -> Answer:
    """Ask a question in a new process.

    Args:
        question: a function of :mod:`vllm_fl.doctor.questions`.
        *arguments: its arguments.
        seconds: after them the process and its children are killed.
    """
    with tempfile.TemporaryDirectory(prefix="vllm-fl-doctor-") as folder:
        # A file of its own: whatever is printed on stdout, by Python or by C, is noise.
        answer, noise = Path(folder, "answer.json"), Path(folder, "stderr")
        # As in a server: the current folder is not searched, and the core is this one.
        command = [sys.executable, "-P", "-X", "faulthandler", "-m", "vllm_fl.doctor.questions"]
        paths = [*filter(None, [os.environ.get("PYTHONPATH")]), str(Path(vllm_fl.__file__).parents[1])]
        with noise.open("wb") as stderr:
            process = subprocess.Popen(
                [*command, str(answer), question, *arguments],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                start_new_session=True,
            )
            problem = _wait(process, seconds)
        said = noise.read_text(errors="replace").strip().splitlines()[-_LINES_KEPT:]
        try:
            value = json.loads(answer.read_text("utf-8"))
        except (OSError, ValueError):
            return Answer(None, problem or "ended without an answer", "\n".join(said))
        return Answer(value, said="\n".join(said))


def _wait(process: subprocess.Popen[bytes], seconds: float) -> str:
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return f"did not come back within {seconds:g} s"
    finally:
        # Whatever it has started ends with it.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if code < 0:
        return f"was killed by {_name(-code)}"
    return f"ended its process with exit status {code}" if code else ""


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

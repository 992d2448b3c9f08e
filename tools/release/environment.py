"""A bare virtual environment: what a user installs, and nothing of the sources."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from typing import TYPE_CHECKING
from typing import Any

from tools.release.packages import ReleaseError

if TYPE_CHECKING:
    from pathlib import Path


class Environment:
    """A virtual environment that holds nothing, not even pip, until something is installed."""

    def __init__(self, folder: Path, *, shared: Path | None = None) -> None:
        """Make it.

        Args:
            folder: where; it must not exist.
            shared: a folder of packages that it sees, too: a torch that several share.
        """
        venv.create(folder, symlinks=True)
        self.folder = folder
        self.bin = folder / "bin"
        if shared is not None:
            (site,) = folder.glob("lib/python*/site-packages")
            (site / "shared.pth").write_text(f"{shared}\n", encoding="utf-8")

    def run(
        self, *command: str, cwd: Path | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run one of its commands away from the sources, with none of the caller's variables."""
        program, *arguments = command
        return subprocess.run(
            [str(self.bin / program), *arguments],
            cwd=cwd or self.folder,
            env={"PATH": str(self.bin), "HOME": str(self.folder), "PYTHONNOUSERSITE": "1", **variables},
            capture_output=True,
            text=True,
            check=False,
        )

    def python(self, code: str) -> str:
        """Run Python code that must succeed and return what it printed.

        Raises:
            ReleaseError: it failed; with what it printed.
        """
        done = self.run("python", "-c", code)
        if done.returncode:
            raise ReleaseError(f"Python code ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout

    def report(self, *arguments: str) -> dict[str, Any]:
        """Return what ``vllm-fl ... --json`` says, whatever its exit code."""
        done = self.run("vllm-fl", *arguments, "--json")
        try:
            found: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            raise ReleaseError(f"vllm-fl {' '.join(arguments)} --json printed:\n{done.stderr}") from None
        return found

    def pip(self, *arguments: str) -> str:
        """Run the caller's pip on it, with the index that the caller uses, and return what it printed.

        Raises:
            ReleaseError: it failed; with what it printed.
        """
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
        done = subprocess.run(
            [*command, "--python", str(self.bin / "python"), *arguments],
            # What stands on PYTHONPATH would count as installed.
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise ReleaseError(f"pip {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")
        return done.stdout

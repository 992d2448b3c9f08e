"""A bare virtual environment, and the wheels that users install."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tools.release.environment import Environment as Environment

PACKAGES = Path(__file__).parents[2] / "packages"


def build(project: Path, folder: Path, target: str = "wheel") -> Path:
    """Build a project's wheel, or its sdist, with what the caller's environment has."""
    known = set(folder.iterdir())
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    subprocess.run(command, cwd=project, check=True, capture_output=True)
    (built,) = set(folder.iterdir()) - known
    return built

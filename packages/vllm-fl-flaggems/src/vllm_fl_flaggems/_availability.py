"""Whether FlagGems can run here, found out without importing it.

Its import takes seconds, asks every vendor's tools for a device, and fails where
there is none.
"""

from __future__ import annotations

import functools
import os
import re
from importlib import metadata
from importlib.util import find_spec

#: What this was written for; a later 5.x is taken too.
OLDEST = (5, 0, 2)

#: torch's names of the devices that FlagGems has a backend for.
DEVICES = ("cuda", "npu", "mlu", "musa", "gcu", "ptpu", "txda", "aipu")

# flag-gems pins numpy 1.26, which no vLLM takes, hence --no-deps; and what it needs
# beside torch, of which vLLM brings all but the last two.
_MODULES = {
    "flag_gems": "pip install --no-deps flag-gems==5.0.2",
    "packaging": "pip install packaging",
    "yaml": "pip install PyYAML",
    "sqlalchemy": "pip install sqlalchemy==2.0.48",
    "triton": "pip install triton==3.6.0",
}
_VENDORS_TRITON = " (or the Triton of your device's vendor)"


def check() -> None:
    """Return where FlagGems can run.

    Raises:
        ModuleNotFoundError: FlagGems, or what it needs, is not installed; the
            message holds the commands that mend it.
        RuntimeError: its version is another one, or there is no device for it.
    """
    missing = [module for module in _MODULES if find_spec(module) is None]
    if missing:
        commands = " && ".join(_MODULES[module] for module in missing)
        note = _VENDORS_TRITON if "triton" in missing else ""
        raise ModuleNotFoundError(f"to mend it: {commands}{note}", name=missing[0])
    installed = _version("flag-gems")
    if installed is not None and not _is_known(installed):
        raise RuntimeError(
            f"flag-gems {installed} is installed, and this is written for 5.0.2 or a later 5.x; "
            f"to mend it: {_MODULES['flag_gems']}"
        )
    device.cache_clear()  # one that was not there may have appeared
    if device() is None:
        raise RuntimeError(f"torch has no device that FlagGems runs on ({', '.join(DEVICES)})")


@functools.cache
def device() -> str | None:
    """Return torch's name of the device that FlagGems runs on, None where there is none."""
    if is_emulated():
        return "cpu"
    import torch

    for name in DEVICES:
        module = getattr(torch, name, None)
        if module is not None and module.is_available():
            return name
    return None


def is_emulated() -> bool:
    """Whether Triton's interpreter runs the kernels on the CPU.

    For tests alone: FlagGems by itself refuses to start so, and this package's
    tests help it. See ``tests/emulation/gems`` in the repository.
    """
    return os.environ.get("TRITON_INTERPRET") == "1" and os.environ.get("GEMS_VENDOR") == "arm"


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None  # a source tree on the path


def _is_known(version: str) -> bool:
    numbers = tuple(map(int, re.findall(r"\d+", version)[:3]))
    return OLDEST <= numbers < (OLDEST[0] + 1,)

"""FlagGems on the CPU, for every test here: ``TRITON_INTERPRET=1 pytest <this folder>``."""

from __future__ import annotations

import sys
from pathlib import Path

_REPOSITORY = Path(__file__).parents[4]

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(_REPOSITORY / "tests/emulation/gems"))

import flag_gems_on_cpu  # noqa: E402 - found on the path above

flag_gems_on_cpu.install()

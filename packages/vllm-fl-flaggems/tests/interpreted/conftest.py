"""FlagGems on the CPU, for every test here: ``TRITON_INTERPRET=1 pytest <this folder>``."""

from __future__ import annotations

import sys
from pathlib import Path

_REPOSITORY = Path(__file__).parents[4]

# The truth in float64 and the layouts are those of the reference's own tests.
for folder in ("tests/emulation/gems", "packages/vllm-fl-reference/tests"):
    sys.path.insert(0, str(_REPOSITORY / folder))

import flag_gems_on_cpu  # noqa: E402 - found on the path above

flag_gems_on_cpu.install()

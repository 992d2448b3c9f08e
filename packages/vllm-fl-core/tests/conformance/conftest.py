"""Make this directory's helpers importable; what is tested here needs torch."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

collect_ignore_glob = [] if find_spec("torch") else ["test_*.py"]

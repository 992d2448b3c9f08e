"""torch_npu, imported once; it has no types."""

from __future__ import annotations

import importlib
from typing import Any

torch_npu: Any = importlib.import_module("torch_npu")

"""The logger of what happens inside vLLM: a child of vLLM's own, with its format."""

from __future__ import annotations

import logging

logger = logging.getLogger("vllm.plugins.vllm_fl")

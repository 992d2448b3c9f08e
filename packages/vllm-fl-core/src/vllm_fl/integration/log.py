"""The logger of what happens inside vLLM: a child of vLLM's own, with its format."""

from __future__ import annotations

import logging

from vllm_fl.dispatch.common.log import only_printable

logger = only_printable(logging.getLogger("vllm.plugins.vllm_fl"))

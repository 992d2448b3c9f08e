"""What this distribution says of itself, in all that it prints and writes."""

from __future__ import annotations

from vllm_fl.dispatch.common.distributions import CORE
from vllm_fl.dispatch.common.distributions import version_of


def generated_by() -> str:
    """Return ``vllm-fl-core <version>``."""
    return f"{CORE} {version_of(CORE) or '(not installed)'}"

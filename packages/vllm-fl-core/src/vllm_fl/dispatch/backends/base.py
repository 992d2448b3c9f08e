"""The older guide's place for :class:`Backend`."""

from __future__ import annotations

from vllm_fl.dispatch.backend import Backend

__all__ = ["Backend"]

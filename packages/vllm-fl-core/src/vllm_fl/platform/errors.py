"""What is raised where a description is wrong or cannot be used."""

from __future__ import annotations


class DescriptionError(ValueError):
    """A field of a :class:`~vllm_fl.platform.description.Chip` is wrong; the message names it."""


class PlatformError(RuntimeError):
    """No platform can be made; the message names the wheel, its entry point and what to do."""

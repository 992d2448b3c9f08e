"""What the world calls a platform's parts: a group of entry points, and a variable."""

from __future__ import annotations

#: The group of entry points of descriptions.
GROUP = "vllm_fl.platforms"

#: ``none``, or the name of the description that is used.
VARIABLE = "VLLM_FL_PLATFORM"

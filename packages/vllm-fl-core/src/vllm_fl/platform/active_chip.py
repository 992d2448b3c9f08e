"""The description that is active in this process, fixed when this module is imported.

It is imported only where there is one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import Final

from vllm_fl.platform.choice import active

if TYPE_CHECKING:
    from vllm_fl.platform.description import Chip

DESCRIPTION: Final = active()
assert DESCRIPTION.chip is not None
CHIP: Final[Chip] = DESCRIPTION.chip

"""What the operators compute in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def widened(x: Tensor) -> Tensor:
    """Return ``x`` in float32, or as it is where it is float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))

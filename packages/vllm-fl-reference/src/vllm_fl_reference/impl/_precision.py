"""The dtype to compute in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """Return x in float32, or as it is where it is float64. It may be x itself."""
    return x if x.dtype is torch.float64 else x.float()

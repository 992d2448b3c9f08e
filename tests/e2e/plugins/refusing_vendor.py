"""A vendor whose rotary kernel takes one token alone: vLLM's own path has the others."""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import Any

if TYPE_CHECKING:
    from torch import Tensor

VLLM_FL_PLUGIN_API = 1


def rotary_embedding(
    query: Tensor,
    key: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor,
    rotary_interleaved: bool = False,
    inplace: bool = True,
    cos_sin_cache: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    from vllm_fl_reference.impl import rotary

    return rotary.rotary_embedding(query, key, cos, sin, position_ids, rotary_interleaved, inplace)


def _one_token(query: Tensor, *_: Any, **__: Any) -> bool | str:
    return query.shape[0] == 1 or "the kernel takes one token"


def register_builtins(registry: Any) -> None:
    from vllm_fl.dispatch import BackendImplKind
    from vllm_fl.dispatch import OpImpl

    registry.register_impl(
        OpImpl(
            "rotary_embedding",
            "vendor.refusing",
            BackendImplKind.VENDOR,
            rotary_embedding,
            vendor="refusing",
            supports=_one_token,
        )
    )

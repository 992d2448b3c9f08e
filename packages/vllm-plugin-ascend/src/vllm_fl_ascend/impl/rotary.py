"""Rotary position embedding.

torch_npu has two kernels for it. ``_npu_rotary_embedding`` of the atb library
makes its tables of sines and cosines from the argument of the first call in the
process and uses them for every later one, whatever table that one brings: a
second model, a second kind of rotary layer, or a first call on a tiny table would
be silently wrong. So this calls ``npu_mrope``, which keeps nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm_fl_ascend.impl._npu import torch_npu

if TYPE_CHECKING:
    from torch import Tensor


def rotary_embedding(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None,
    rotary_interleaved: bool = False,
    inplace: bool = True,
    cos_sin_cache: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotate the first ``rot`` elements of every head by its position, by ``npu_mrope``.

    Args:
        query: T[n, heads, head], float16, bfloat16 or float32, of any stride;
            written where inplace.
        key: T[n, kv_heads, head], query's dtype; written where inplace.
        cos: T[max, rot / 2], query's dtype, of any stride.
        sin: T[max, rot / 2].
        position_ids: T[n], int32 or int64, rows of cos and sin; None means that
            cos and sin already hold one row per token.
        rotary_interleaved: pairs are ``(2i, 2i + 1)``, not ``(i, i + rot / 2)``.
        inplace: write query and key; else they are untouched.
        cos_sin_cache: T[max, rot], the table that cos and sin are halves of; taken
            as it is.

    Returns:
        (query, key): the arguments themselves where inplace, else new and
        contiguous.
    """
    if not inplace:
        query = query.clone(memory_format=torch.contiguous_format)
        key = key.clone(memory_format=torch.contiguous_format)
    tokens = query.shape[0]
    if not tokens:
        return query, key
    rot = 2 * cos.shape[-1]
    if cos_sin_cache is None or position_ids is None:
        # The rows that are needed, not the whole table, are put side by side.
        if position_ids is not None:
            cos = cos.index_select(0, position_ids)
            sin = sin.index_select(0, position_ids)
        cos_sin_cache = torch.cat((cos, sin), dim=-1)
        position_ids = torch.arange(tokens, device=query.device)
    head_query = query if query.shape[-1] == rot else query[..., :rot]
    head_key = key if key.shape[-1] == rot else key[..., :rot]
    rotated_query, rotated_key = torch_npu.npu_mrope(
        position_ids,
        head_query.reshape(tokens, -1).contiguous(),
        head_key.reshape(tokens, -1).contiguous(),
        cos_sin_cache,
        rot,
        # What its documentation gives for the plain rotation.
        mrope_section=[0, 0, 0],
        rotary_mode="interleave" if rotary_interleaved else "half",
    )
    head_query.copy_(rotated_query.view(head_query.shape))
    head_key.copy_(rotated_key.view(head_key.shape))
    return query, key

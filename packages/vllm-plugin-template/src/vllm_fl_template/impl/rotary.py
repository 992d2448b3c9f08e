"""Rotary position embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm_fl_template.impl.precision import widened

if TYPE_CHECKING:
    from torch import Tensor


def rotary_embedding(
    query: Tensor,
    key: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None,
    rotary_interleaved: bool = False,
    inplace: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Rotate the first ``rot`` elements of every head by its position.

    With ``(a, b)`` the two elements of a pair, ``(a cos - b sin, b cos + a sin)``,
    in float32 or wider and rounded once. What lies beyond ``rot`` is not touched.

    Args:
        query: T[n, heads, head], often a view of a fused qkv; written where inplace.
        key: T[n, kv_heads, head] or None; written where inplace.
        cos: T[max, rot / 2], of any stride.
        sin: T[max, rot / 2].
        position_ids: T[n], int32 or int64, rows of cos and sin; None means that cos
            and sin already hold one row per token.
        rotary_interleaved: pairs are ``(2i, 2i + 1)``, not ``(i, i + rot / 2)``.
        inplace: write query and key; else they are untouched.

    Returns:
        (query, key): the arguments themselves where inplace, else new and contiguous.
    """
    if position_ids is not None:
        cos = cos.index_select(0, position_ids.flatten())
        sin = sin.index_select(0, position_ids.flatten())
    if not inplace:
        query = query.clone(memory_format=torch.contiguous_format)
        key = None if key is None else key.clone(memory_format=torch.contiguous_format)
    _rotate(query, cos, sin, rotary_interleaved)
    if key is not None:
        _rotate(key, cos, sin, rotary_interleaved)
    return query, key


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    half = cos.shape[-1]
    # One row for each token, the same for each of its heads.
    shape = (*x.shape[:-2], 1, half)
    cos, sin = widened(cos).reshape(shape), widened(sin).reshape(shape)
    if interleaved:
        first, second = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    else:
        first, second = x[..., :half], x[..., half : 2 * half]
    a, b = widened(first), widened(second)
    # Both before either is written: of a float32 tensor, widened() is the tensor itself.
    turned = a * cos - b * sin, b * cos + a * sin
    first.copy_(turned[0])
    second.copy_(turned[1])

"""Rotary position embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm_fl_reference.impl._precision import wide

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
    cos_sin_cache: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Rotate the first ``rot`` elements of every head by its position.

    With ``(a, b)`` the two elements of a pair, ``(a cos - b sin, b cos + a
    sin)``, in float32 and rounded once, whatever the dtypes of query and of the
    tables. What lies beyond ``rot`` passes through to the bit.

    Args:
        query: T[..., heads, head] of any stride, often T[n, heads, head] and a
            view of a fused qkv; written where inplace.
        key: T[..., kv_heads, head] or None; written where inplace.
        cos: T[max, rot / 2], of any stride.
        sin: T[max, rot / 2].
        position_ids: int32 or int64, one for each token of query, in the shape of
            its leading dimensions or flat; rows of cos and sin. None means that
            cos and sin already hold one row per token.
        rotary_interleaved: pairs are ``(2i, 2i + 1)``, not ``(i, i + rot / 2)``.
        inplace: write query and key; else they are untouched.
        cos_sin_cache: T[max, rot], the table that cos and sin are halves of: it
            saves one of the two look-ups.

    Returns:
        (query, key): the arguments themselves where inplace, else new and
        contiguous.

    Raises:
        ValueError: query is flat, T[n, heads * head].
    """
    if query.dim() < 3:
        raise ValueError(f"query must be T[..., heads, head], not of shape {tuple(query.shape)}")
    half = cos.shape[-1]
    tokens = query.shape[:-2]
    # Which axis of a head's (2, half) or (half, 2) elements tells a from b.
    pair, table = (-1, (1, half, 1)) if rotary_interleaved else (-2, (1, 1, half))
    if position_ids is not None:
        if position_ids.dim() != 1:
            position_ids = position_ids.flatten()
        if cos_sin_cache is not None:
            rows = wide(cos_sin_cache.index_select(0, position_ids))
            cos, sin = rows.view(*tokens, 2, *table).unbind(-4)
        else:
            cos = cos.index_select(0, position_ids)
            sin = sin.index_select(0, position_ids)
    if position_ids is None or cos_sin_cache is None:
        cos = wide(cos).reshape(*tokens, *table)
        sin = wide(sin).reshape(*tokens, *table)
    # A query of float16 times a table of float32 is computed in float32.
    if not inplace or torch.compiler.is_compiling():
        # A compiler makes of writes to parts of a fused qkv slow copies of the whole.
        new_query = _rotated(query, cos, sin, half, pair)
        new_key = None if key is None else _rotated(key, cos, sin, half, pair)
        if not inplace:
            return new_query, new_key
        query.copy_(new_query)
        if key is not None and new_key is not None:
            key.copy_(new_key)
        return query, key
    both = None if key is None else _adjacent(query, key)
    if both is not None:
        _rotate(both, cos, sin, half, pair)
    else:
        _rotate(query, cos, sin, half, pair)
        if key is not None:
            _rotate(key, cos, sin, half, pair)
    return query, key


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, half: int, pair: int) -> Tensor:
    cos, sin = cos.squeeze(pair), sin.squeeze(pair)
    if pair == -1:
        a, b = x[..., : 2 * half : 2], x[..., 1 : 2 * half : 2]
    else:
        a, b = x[..., :half], x[..., half : 2 * half]
    # As in `_rotate`, so that both have the same bits.
    new = (torch.addcmul(a * cos, b, sin, value=-1), torch.addcmul(b * cos, a, sin))
    turned = (torch.stack(new, -1).flatten(-2) if pair == -1 else torch.cat(new, -1)).to(x.dtype)
    if x.shape[-1] != 2 * half:
        turned = torch.cat((turned, x[..., 2 * half :]), -1)
    return turned.contiguous()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, half: int, pair: int) -> None:
    heads = x.shape[:-1]
    if x.shape[-1] != 2 * half:
        x = x[..., : 2 * half]
    pairs = x.view(*heads, half, 2) if pair == -1 else x.view(*heads, 2, half)
    a, b = pairs.unbind(pair)
    # The last of the table's three axes, or the one before, is the pair's, of size 1.
    one_sin = sin.squeeze(pair)
    turned = pairs * cos
    turned.select(pair, 0).addcmul_(b, one_sin, value=-1)
    turned.select(pair, 1).addcmul_(a, one_sin)
    pairs.copy_(turned)


def _adjacent(query: Tensor, key: Tensor) -> Tensor | None:
    """Return query and key as one tensor, if key's heads follow query's in memory.

    So they do in a fused qkv. With few tokens the time goes into calling torch, and
    this halves the calls.
    """
    if query.requires_grad:
        return None
    shape = query.shape
    stride = query.stride()
    heads = shape[-2]
    if (
        key.shape[-1] != shape[-1]
        or key.shape[:-2] != shape[:-2]
        or key.storage_offset() - query.storage_offset() != heads * stride[-2]
        or key.dtype is not query.dtype
        or not torch._C._is_alias_of(query, key)  # type: ignore[attr-defined]
    ):
        return None
    if key.stride() != stride:
        # The stride of an axis of size 1, such as a single token's, means nothing.
        if key.stride()[-2:] != stride[-2:]:
            return None
        for size, ours, theirs in zip(shape[:-2], stride, key.stride(), strict=False):
            if size != 1 and ours != theirs:
                return None
    return query.as_strided((*shape[:-2], heads + key.shape[-2], shape[-1]), stride)

"""Rotary position embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_fl_flaggems._gems import flag_gems

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

    FlagGems' kernel that works in place is not used. Its threads read the elements
    that others write, with nothing that makes one wait for the other; so the result
    goes through new memory.

    Args:
        query: T[n, heads, head], float16, bfloat16 or float32, of any stride;
            written where inplace.
        key: T[n, kv_heads, head] or None; written where inplace.
        cos: T[max, rot / 2], of any stride; read as float32.
        sin: T[max, rot / 2].
        position_ids: T[n], int32 or int64, rows of cos and sin; None means that
            they already hold one row per token.
        rotary_interleaved: pairs are ``(2i, 2i + 1)``, not ``(i, i + rot / 2)``.
        inplace: write query and key; else they are untouched.
        cos_sin_cache: not used: the kernel takes its halves as they lie.

    Returns:
        (query, key): the arguments themselves where inplace, else new and
        contiguous.
    """
    rot = 2 * cos.shape[-1]
    if not query.numel():
        if inplace:
            return query, key
        return query.new_empty(query.shape), None if key is None else key.new_empty(key.shape)
    turned_query, turned_key = _rotate(
        query[..., :rot], None if key is None else key[..., :rot], cos, sin, position_ids, rotary_interleaved
    )
    query = _placed(query, turned_query, inplace)
    if key is not None and turned_key is not None:
        key = _placed(key, turned_key, inplace)
    return query, key


def _rotate(
    query: Tensor,
    key: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None,
    rotary_interleaved: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return both rotated whole, new."""
    if cos.stride(-1) != 1:
        cos = cos.contiguous()
    if sin.stride(-1) != 1:
        sin = sin.contiguous()
    # It always takes a key: without one, a head of the query is rotated twice.
    other = query[:, :1] if key is None else key
    if position_ids is None:
        # Of one sequence of n tokens the positions are 0 to n - 1.
        query, other = query.unsqueeze(0), other.unsqueeze(0)
    turned, turned_other = flag_gems.apply_rotary_pos_emb(
        query, other, cos, sin, position_ids, rotary_interleaved, False
    )
    if position_ids is None:
        turned, turned_other = turned.squeeze(0), turned_other.squeeze(0)
    return turned, None if key is None else turned_other


def _placed(x: Tensor, turned: Tensor, inplace: bool) -> Tensor:
    """Return x with its first elements replaced by ``turned``: x itself, or new."""
    rot = turned.shape[-1]
    if inplace:
        x[..., :rot].copy_(turned)
        return x
    if rot == x.shape[-1]:
        return turned.contiguous()
    out = x.new_empty(x.shape)
    out[..., :rot].copy_(turned)
    out[..., rot:].copy_(x[..., rot:])
    return out

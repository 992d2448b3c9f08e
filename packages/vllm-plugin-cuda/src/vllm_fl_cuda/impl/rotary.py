"""Rotary position embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import Any

import torch

from vllm_fl_cuda.impl._inputs import FLOATS
from vllm_fl_cuda.impl._inputs import problem
from vllm_fl_cuda.kernels import ROTARY_EMBEDDING

if TYPE_CHECKING:
    from torch import Tensor

_CPU_VECTOR = 8


def _layout_problem(name: str, x: Tensor) -> str | None:
    _, heads, head = x.shape
    stride = x.stride()
    if stride[2] != 1 or (heads > 1 and stride[1] != head):
        return f"the heads of {name} do not follow each other in memory"
    return None


def _cpu_problem(x: Tensor, half: int) -> str | None:
    """Say why the CPU's kernel would end the process; None if it would not.

    In bfloat16, where pairs are halves, it loads vectors of 8 from wherever the
    second half begins.
    """
    parts: list[Any] = [half, x.shape[2], x.stride(0)]
    if not torch.compiler.is_compiling():
        parts.append(x.storage_offset())
    if any(part % _CPU_VECTOR for part in parts):
        return f"the CPU's kernel takes halves of a head in bfloat16 that are aligned to {_CPU_VECTOR}"
    return None


def rotary_embedding_layer(
    query: Tensor, key: Tensor | None, cos: Tensor, sin: Tensor, cos_sin_cache: Tensor | None
) -> bool | str:
    """Whether the kernel takes the dtypes and the sizes of a head and a table."""
    if query.dim() != 3:
        return f"query must be T[tokens, heads, head], not of {query.dim()} dimensions"
    head = query.shape[2]
    reason = problem(ROTARY_EMBEDDING, query)
    if reason is not None:
        return reason
    if key is not None:
        if key.dtype is not query.dtype:
            return f"{ROTARY_EMBEDDING} takes a key of query's dtype {query.dtype}, not {key.dtype}"
        if key.dim() != 3 or key.shape[2] != head:
            return "key must be T[tokens, heads, head], its heads of query's size"
    table = cos if cos_sin_cache is None else cos_sin_cache
    if table.dtype not in FLOATS or sin.dtype is not cos.dtype:
        return f"{ROTARY_EMBEDDING} takes no table of {table.dtype} and {sin.dtype}"
    if table.dtype is not query.dtype and query.device.type == "cpu":
        return f"the CPU's kernel takes a table of query's dtype {query.dtype}, not {table.dtype}"
    if 2 * cos.shape[-1] > head:
        return f"a head of {head} has no {2 * cos.shape[-1]} elements to rotate"
    return True


def rotary_embedding_call(
    query: Tensor,
    key: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None,
    rotary_interleaved: bool = False,
    inplace: bool = True,
    cos_sin_cache: Tensor | None = None,
) -> bool | str:
    """Whether heads lie and divide as the kernel takes them; layers may share one rotation."""
    reason = _layout_problem("query", query) if inplace else None
    if key is not None and reason is None:
        heads, of_key = query.shape[1], key.shape[1]
        if of_key == 0 or heads % of_key:
            return f"{heads} query heads are no multiple of {of_key} key heads"
        reason = _layout_problem("key", key) if inplace else None
    if reason is not None:
        return reason
    if position_ids is not None and position_ids.dim() != 1:
        return "position_ids must be T[tokens]"
    if not rotary_interleaved and query.dtype is torch.bfloat16 and query.device.type == "cpu":
        for x in (query, key):
            reason = None if x is None else _cpu_problem(x, cos.shape[-1])
            if reason is not None:
                return reason
    return True


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

    Args:
        query: T[n, heads, head], float32, float16 or bfloat16, the heads of a token
            next to each other, as in a view of a fused qkv; written where inplace.
        key: T[n, kv_heads, head] or None; likewise.
        cos: T[max, rot / 2]; on a GPU its dtype may differ from query's.
        sin: T[max, rot / 2].
        position_ids: T[n], int32 or int64; None means that cos and sin, or
            cos_sin_cache, hold one row per token.
        rotary_interleaved: pairs are ``(2i, 2i + 1)``, not ``(i, i + rot / 2)``.
        inplace: write query and key; else they are untouched.
        cos_sin_cache: T[max, rot], read where it lies. Without it, the rows of cos
            and sin that are needed are packed first.

    Returns:
        (query, key): the arguments themselves where inplace, else new and
        contiguous.
    """
    if not inplace:
        query = query.clone(memory_format=torch.contiguous_format)
        if key is not None:
            key = key.clone(memory_format=torch.contiguous_format)
    tokens, heads, head = query.shape
    # Of no tokens the kernel would divide by their number.
    if query.numel() == 0:
        return query, key
    if cos_sin_cache is not None:
        cache = cos_sin_cache.contiguous()
    else:
        if position_ids is not None:
            cos, sin = cos.index_select(0, position_ids), sin.index_select(0, position_ids)
            position_ids = None
        cache = torch.cat((cos, sin), dim=-1)
    if position_ids is None:
        position_ids = torch.arange(tokens, device=query.device)
    elif position_ids.dtype is not torch.int64:
        position_ids = position_ids.long()
    # Two dimensions: the CPU's kernel reads three as [batch, sequence, hidden].
    ROTARY_EMBEDDING.call(
        position_ids.contiguous(),
        query.view(tokens, heads * head),
        None if key is None else key.view(tokens, key.shape[1] * head),
        head,
        cache,
        not rotary_interleaved,
    )
    return query, key

"""Rotary position embeddings."""

from __future__ import annotations

from typing import Any

import torch

from vllm_fl.integration.layer import Layer


class RotaryEmbedding(Layer):
    """The rotation of queries and keys by their positions.

    vLLM's forward has the heads of a token in one row, the operator in a dimension of their own.
    """

    module = "vllm.model_executor.layers.rotary_embedding"
    class_name = "RotaryEmbedding"
    vllm_name = "rotary_embedding"
    op_name = "rotary_embedding"
    with_subclasses = True

    def __init__(self, owner: Any) -> None:
        super().__init__(owner)
        self.head_size: int = owner.head_size
        self.is_interleaved = not owner.is_neox_style
        #: The table of sines and cosines that was used last, and its two halves.
        self.tables: tuple[torch.Tensor, ...] = ()

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rotate in place, but where a compiler sees through the implementation."""
        if self.dtype is not None and query.dtype is not self.dtype:
            return self.own(positions, query, key)  # type: ignore[no-any-return]
        cache = self.layer._match_cos_sin_cache_dtype(query)
        is_compiling = torch.compiler.is_compiling()
        if is_compiling:
            cos, sin = cache.chunk(2, dim=-1)
        else:
            # The two views cost as much as the rest of this function.
            if not self.tables or self.tables[0] is not cache:
                self.tables = (cache, *cache.chunk(2, dim=-1))
            _, cos, sin = self.tables
        if positions.dim() != 1:
            positions = positions.flatten()
        tokens, size = positions.shape[0], self.head_size
        heads = query.view(tokens, -1, size)
        key_heads = None if key is None else key.view(tokens, -1, size)
        # What a compiler sees through is fastest where it writes nothing.
        in_place = self.is_opaque or not is_compiling
        new = self.operator(heads, key_heads, cos, sin, positions, self.is_interleaved, in_place, cache)
        if in_place:
            return query, key
        return new[0].view(query.shape), None if key is None else new[1].view(key.shape)

    def native(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        cos: Any,
        sin: Any,
        position_ids: Any,
        rotary_interleaved: bool = False,
        inplace: bool = True,
        cos_sin_cache: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Give vLLM rows, and write what it returns into the operator's arguments."""
        given = [x for x in (query, key) if x is not None]
        rows = [_rows(x, is_new=not inplace) for x in given]
        turned = self.own(position_ids, rows[0], rows[1] if key is not None else None)
        heads = [result.view(x.shape) for x, result in zip(given, turned, strict=False)]
        if not inplace:
            return heads[0], heads[1] if key is not None else None
        # A kernel has written the rows, vLLM's PyTorch path returns new ones.
        for x, row, result, new in zip(given, rows, turned, heads, strict=False):
            if result is not row or not _has_rows(x):
                x.copy_(new)
        return query, key

    def examples(self) -> list[tuple[Any, ...]]:
        """Return two heads of queries and one of keys, at position 0."""
        cache = self.layer.cos_sin_cache[:1].clone()
        cos, sin = cache.chunk(2, dim=-1)
        query = torch.ones(1, 2, self.head_size, dtype=cache.dtype, device=cache.device)
        positions = torch.zeros(1, dtype=torch.int64, device=cache.device)
        return [(query, query[:, :1].clone(), cos, sin, positions, self.is_interleaved, True, cache)]

    def asked_once(self) -> list[tuple[Any, ...]]:
        """Return a call with a key and one without: the head's size and the table are the layer's."""
        (call,) = self.examples()
        return [call, (call[0], None, *call[2:])]


def _rows(x: torch.Tensor, *, is_new: bool) -> torch.Tensor:
    """Return the heads of every token as one row: vLLM's kernel reads three dimensions otherwise."""
    rows = x if _has_rows(x) and not is_new else x.clone(memory_format=torch.contiguous_format)
    return rows.view(x.shape[0], -1)


def _has_rows(x: torch.Tensor) -> bool:
    """Whether the heads of a token lie one after the other; latent attention rotates a part of each."""
    return x.stride(2) == 1 and (x.stride(1) == x.shape[2] or x.shape[1] == 1)


LAYERS: tuple[type[Layer], ...] = (RotaryEmbedding,)

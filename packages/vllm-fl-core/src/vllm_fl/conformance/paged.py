"""Paged attention through one of vLLM's layers, against plain attention in float64.

Requests have their whole history; the cache is only ever written by the backend, and
what no request wrote holds large numbers, so that reading it shows. The truth comes
from the histories and shares neither layout nor table with the backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import Any

import torch

from vllm_fl.conformance import truth
from vllm_fl.conformance.judge import ATTENTION
from vllm_fl.conformance.judge import RIGHT
from vllm_fl.conformance.judge import Expected
from vllm_fl.conformance.judge import relative_to_rms
from vllm_fl.conformance.judge import vacuity
from vllm_fl.conformance.judge import wrong
from vllm_fl.conformance.tensors import moved
from vllm_fl.conformance.tensors import random
from vllm_fl.conformance.vllm_layer import Batch
from vllm_fl.conformance.vllm_layer import VllmLayer
from vllm_fl.conformance.vllm_layer import configured
from vllm_fl.conformance.vllm_layer import selector

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from vllm_fl.conformance.attention_cases import AttentionCase
    from vllm_fl.conformance.judge import Verdict

#: Each step gives the requests, by name, so many new tokens.
_STEPS: tuple[dict[str, int], ...] = (
    {"a": 37, "b": 25, "c": 1},  # prefill
    {"a": 1, "b": 1, "c": 1},  # decode
    {"a": 1, "c": 1, "b": 130, "d": 3},  # decodes, a chunk of a running request, and a new one
    {"a": 1, "b": 30, "c": 2, "d": 100},  # chunks
    {"a": 1, "b": 1, "c": 1, "d": 1},
    {"d": 1, "b": 1, "c": 1, "a": 1},  # the same shapes, and other requests in them
)


def serve(case: AttentionCase, path_of: Callable[[Any], str | None], device: torch.device) -> Verdict:
    """Serve a few requests with a backend, step by step, and judge each step.

    Args:
        case: what is run.
        path_of: takes what vLLM tells of a layer, and returns the path of a class, or None.
        device: where.

    Raises:
        NotImplementedError: the backend says that it is not for this.
    """
    with configured(case) as config:
        path = path_of(selector(case))
        if path is None:
            raise NotImplementedError("returns None: vLLM's own choice")
        requests = _Requests(case, VllmLayer(case, path, config, device))
        verdict = RIGHT
        for number, counts in enumerate(_STEPS, 1):
            verdict += requests.step(number, counts)
    return verdict


class _Requests:
    """Requests with their whole history, and the blocks that each was given."""

    def __init__(self, case: AttentionCase, layer: VllmLayer) -> None:
        self.case = case
        self.layer = layer
        # Never in order; 0 is vLLM's null block.
        order = 1 + torch.randperm(layer.blocks - 1, generator=torch.Generator().manual_seed(1))
        self.free: list[int] = order.tolist()
        self.history: dict[str, tuple[Tensor, Tensor]] = {}
        self.tables: dict[str, list[int]] = {}

    def step(self, number: int, counts: dict[str, int]) -> Verdict:
        """Give each request its new tokens, run the layer, and judge what it returns."""
        case, layer = self.case, self.layer
        tokens = sum(counts.values())
        query, key, value = self._new(number, tokens + case.padding)
        start = 0
        lengths: list[int] = []
        slots: list[int] = []
        expected: list[Tensor] = []
        for name, count in counts.items():
            new = slice(start, start + count)
            keys, values = self.history.get(name, (key[:0], value[:0]))
            begin = keys.shape[0]
            keys, values = torch.cat([keys, key[new]]), torch.cat([values, value[new]])
            self.history[name] = keys, values
            slots += self._slots(name, begin, count)
            lengths.append(begin + count)
            expected.append(truth.attention(query[new], keys, values, layer.scale, case.window))
            start += count
        batch = Batch(
            list(counts.values()), lengths, slots, [self.tables[name] for name in counts], case.padding
        )
        output = torch.full((tokens + case.padding, case.heads[0], case.head), 7.0, dtype=case.dtype)
        # Moved as a whole, views of one buffer stay views.
        there = moved({"query": query, "key": key, "value": value, "output": output}, layer.device)
        before = there["query"].clone()
        layer(**there, batch=batch)
        if not torch.equal(there["query"], before):
            return wrong(f"step {number}: the query was written")
        return _judged(number, there["output"][:tokens].cpu(), torch.cat(expected), case.dtype)

    def _slots(self, name: str, begin: int, count: int) -> list[int]:
        """Return where a request's new tokens go; it is given the blocks that it lacks."""
        table, block = self.tables.setdefault(name, []), self.layer.block
        while len(table) * block < begin + count:
            table.append(self.free.pop())
        return [table[at // block] * block + at % block for at in range(begin, begin + count)]

    def _new(self, number: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value of so many tokens, with a mean of zero."""
        case = self.case
        widths = [heads * case.head for heads in (case.heads[0], case.heads[1], case.heads[1])]
        qkv = random(rows, sum(widths), dtype=torch.float32, seed=number)
        qkv[:, : widths[0]] *= case.peak
        query, key, value = torch.split(qkv.to(case.dtype), widths, -1)
        q, k, v = (part.view(rows, -1, case.head) for part in (query, key, value))
        return (q, k, v) if case.layout == "fused" else (q.contiguous(), k.contiguous(), v.contiguous())


def _judged(number: int, output: Tensor, exact: Tensor, dtype: torch.dtype) -> Verdict:
    def of(outs: tuple[Tensor | None, ...]) -> Verdict:
        return relative_to_rms(outs[0], exact, dtype, ATTENTION[dtype], what=f"step {number}")

    blind = vacuity(Expected((exact.to(dtype),), of))
    return wrong(f"a fault of this case, not of the implementation: {blind}") if blind else of((output,))

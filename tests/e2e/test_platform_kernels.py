"""Plain PyTorch in the place of vLLM's Triton kernels, against their text read as a loop."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from vllm_fl.platform.kernels import slot_mapping

PAD = -1
UNTOUCHED = -7


def by_loop(
    starts: list[int], positions: list[int], blocks: torch.Tensor, size: int, world: int, rank: int, run: int
) -> dict[int, int]:
    """Return the slot of each token, as vLLM's kernel says it."""
    found = {}
    for request, (begin, end) in enumerate(pairwise(starts)):
        for token in range(begin, end):
            block, offset = divmod(positions[token], size * world)
            if offset // run % world != rank:
                found[token] = PAD
                continue
            local = offset // (world * run) * run + offset % run
            found[token] = int(blocks[request, block]) * size + local
    return found


@pytest.mark.parametrize(("world", "rank", "run"), [(1, 0, 1), (2, 0, 1), (2, 1, 1), (2, 1, 4), (4, 2, 2)])
@pytest.mark.parametrize("padding", [0, 3])
def test_slot_mapping(world: int, rank: int, run: int, padding: int) -> None:
    size = 8
    # A prefill, a decode far into its request, an empty one, and a chunk in the middle.
    starts = [0, 5, 6, 6, 17]
    positions = [*range(5), 61, *range(9, 20), *[0] * 10]
    blocks = torch.randperm(64).reshape(8, 8).int()
    tokens = starts[-1] + padding
    slots = torch.full((40,), UNTOUCHED)
    slot_mapping(
        tokens,
        32,
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(positions),
        blocks,
        blocks.stride(0),
        slots,
        size,
        world,
        rank,
        run,
        PAD,
        1024,
    )
    right = by_loop(starts, positions, blocks, size, world, rank, run)
    assert [int(one) for one in slots[: starts[-1]]] == [right[token] for token in range(starts[-1])]
    # Tokens of no request stay as they are, the rest up to the largest batch is padded.
    assert (slots[starts[-1] : tokens] == UNTOUCHED).all()
    assert (slots[tokens:32] == PAD).all()
    assert (slots[32:] == UNTOUCHED).all()

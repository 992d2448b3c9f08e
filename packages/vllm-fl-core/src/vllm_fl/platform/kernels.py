"""Plain PyTorch for the Triton kernels that vLLM's runner launches for every model.

They are used where there is no Triton and the description names none. Nothing in them
waits for the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


def slot_mapping(
    num_tokens: int,
    max_num_tokens: int,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    block_table_stride: int,
    slot_mapping: torch.Tensor,
    KV_CACHE_BLOCK_SIZE: int,  # noqa: N803 - vLLM's kernel calls it so
    TOTAL_CP_WORLD_SIZE: int = 1,  # noqa: N803
    TOTAL_CP_RANK: int = 0,  # noqa: N803
    CP_KV_CACHE_INTERLEAVE_SIZE: int = 1,  # noqa: N803
    PAD_ID: int = -1,  # noqa: N803
    BLOCK_SIZE: int = 1024,  # noqa: N803
    **launch: Any,
) -> None:
    """Write where in the key-value cache each token of a batch goes.

    Args:
        num_tokens: tokens in the batch.
        max_num_tokens: what lies between the two in ``slot_mapping`` becomes ``PAD_ID``.
        query_start_loc: ``[requests + 1]``, the first token of each request, and the end.
        positions: ``[num_tokens]`` or more, the place of each token in its request.
        block_table: ``[requests or more, blocks]``, the blocks of each request.
        block_table_stride: not used: the tensor has it.
        slot_mapping: ``[max_num_tokens]`` or more; written in place.
        KV_CACHE_BLOCK_SIZE: tokens in a block of one rank.
        TOTAL_CP_WORLD_SIZE: ranks that share the context of a request.
        TOTAL_CP_RANK: this one; the tokens of the others become ``PAD_ID``.
        CP_KV_CACHE_INTERLEAVE_SIZE: tokens in a row that one rank keeps.
        PAD_ID: what marks a token that is not kept.
        BLOCK_SIZE: not used: what Triton computes at once.
        **launch: not used: what concerns Triton.
    """
    requests = query_start_loc.shape[0] - 1
    tokens = torch.arange(num_tokens, device=slot_mapping.device)
    # No repeat_interleave, which would ask the device how much there is.
    request = torch.searchsorted(query_start_loc[1:].long().contiguous(), tokens, right=True)
    position = positions[:num_tokens].long()
    virtual_block = KV_CACHE_BLOCK_SIZE * TOTAL_CP_WORLD_SIZE
    offset = position % virtual_block
    row = offset // CP_KV_CACHE_INTERLEAVE_SIZE
    is_local = row % TOTAL_CP_WORLD_SIZE == TOTAL_CP_RANK
    local = row // TOTAL_CP_WORLD_SIZE * CP_KV_CACHE_INTERLEAVE_SIZE + offset % CP_KV_CACHE_INTERLEAVE_SIZE
    block = block_table[request.clamp(max=requests - 1), position // virtual_block].long()
    slots = torch.where(is_local, block * KV_CACHE_BLOCK_SIZE + local, PAD_ID)
    # Tokens behind the last request are padding, and stay as they are.
    kept = torch.where(tokens < query_start_loc[-1], slots, slot_mapping[:num_tokens])
    slot_mapping[:num_tokens] = kept
    slot_mapping[num_tokens:max_num_tokens] = PAD_ID


#: vLLM's name of a kernel, and the function that takes its place.
WITHOUT_TRITON: dict[str, Callable[..., None]] = {
    "vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel": slot_mapping,
}

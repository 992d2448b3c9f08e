"""Which attention backend vLLM gets. Imports no vLLM, which is not everywhere, unless vLLM asks."""

from __future__ import annotations

from typing import Any


def attention_backend(use_mla: bool = False, use_sparse: bool = False, *, selector: Any = None) -> str:
    """Return the path of ``AscendAttentionBackend``.

    Args:
        use_mla: the model uses multi-head latent attention, which there is not.
        use_sparse: the model uses sparse attention, which there is not.
        selector: vLLM's ``AttentionSelectorConfig`` when vLLM asks.

    Raises:
        NotImplementedError: what vLLM asks for and the class lacks.
    """
    if selector is not None:
        from vllm_fl_ascend.impl import attention

        reasons = attention.refusals(selector)
        if reasons:
            raise NotImplementedError("; ".join(reasons))
    return "vllm_fl_ascend.impl.attention.AscendAttentionBackend"

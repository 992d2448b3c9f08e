"""Attention: vLLM's own choice for the device."""

from __future__ import annotations

import threading
from typing import Any

#: A layer of latent attention keeps 512 + 64 elements for each token.
_HEAD, _LATENT = 128, 576

_asking = threading.local()


def attention_backend(use_mla: bool = False, use_sparse: bool = False, *, selector: Any = None) -> str | None:
    """Return the dotted path of the backend that vLLM itself chooses for this device.

    Nothing is preferred here: which of vLLM's backends suits a device, a head size
    and a cache is asked of its platform, the same one that chooses without vllm-fl.

    Args:
        use_mla: the model uses multi-head latent attention.
        use_sparse: the model uses sparse attention.
        selector: vLLM's ``AttentionSelectorConfig`` when vLLM asks; it is passed on
            as it is. Without it, a layer with heads of 128 elements in bfloat16 is
            asked for (576 with use_mla).

    Returns:
        A path; None, for vLLM's own choice, where the user has chosen a backend, and
        where vLLM's platform has come here to ask.

    Raises:
        ValueError: vLLM has no backend for this device and this attention.
    """
    if getattr(_asking, "now", False) or _is_chosen_by_the_user():
        return None
    from vllm.platforms import current_platform

    _asking.now = True
    try:
        if selector is None:
            selector = _selector(use_mla, use_sparse)
        path: str = current_platform.get_attn_backend_cls(None, selector)
    finally:
        _asking.now = False
    return path


def _is_chosen_by_the_user() -> bool:
    from vllm.config import get_current_vllm_config_or_none

    config = getattr(get_current_vllm_config_or_none(), "attention_config", None)
    if config is None:
        return False
    return config.backend is not None or bool(getattr(config, "backend_per_kind", None))


def _selector(use_mla: bool, use_sparse: bool) -> Any:
    import torch
    from vllm.v1.attention.selector import AttentionSelectorConfig

    return AttentionSelectorConfig(
        head_size=_LATENT if use_mla else _HEAD,
        dtype=torch.bfloat16,
        kv_cache_dtype="auto",
        block_size=None,
        use_mla=use_mla,
        use_sparse=use_sparse,
    )

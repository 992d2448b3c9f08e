"""vLLM's attention backend, chosen by the operator ``attention_backend``.

One seam: the platform's ``get_attn_backend_cls``, which every layer of attention
asks through a cache. A backend that the user chose explicitly, or that vLLM chose
for a model, comes in as ``selected_backend`` and is never overridden.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.dispatch import NoImplementationError
from vllm_fl.dispatch import PolicyError
from vllm_fl.dispatch import get_default_manager
from vllm_fl.dispatch import trace
from vllm_fl.dispatch._runtime import is_one_of_several_ranks
from vllm_fl.dispatch.types import NATIVE
from vllm_fl.integration.log import logger

if TYPE_CHECKING:
    from vllm_fl.dispatch._guard import Candidate

OPERATOR = "attention_backend"


def install() -> None:
    """Wrap the selection of the current platform, once."""
    try:
        _install()
    except Exception as error:  # noqa: BLE001 - our fault must not end somebody's server
        logger.error("vllm-fl: vLLM chooses the attention: %s: %s", type(error).__name__, error)
        logger.debug("vllm-fl failed to wrap the selection of attention", exc_info=True)


def _install() -> None:
    from vllm.platforms import current_platform

    platform = type(current_platform)
    original = platform.get_attn_backend_cls
    if hasattr(original, "__vllm_fl__"):
        return

    @functools.wraps(original)
    def get_attn_backend_cls(
        cls: Any, selected_backend: Any, attn_selector_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        ours = None
        if selected_backend is None:
            ours = _chosen(attn_selector_config)
        return ours or original(selected_backend, attn_selector_config, *args, **kwargs)

    get_attn_backend_cls.__vllm_fl__ = True  # type: ignore[attr-defined]
    platform.get_attn_backend_cls = classmethod(get_attn_backend_cls)


def _chosen(config: Any) -> str | None:
    """Return the class path that the dispatch chooses, None for vLLM's own choice."""
    from vllm import envs

    if getattr(envs, "VLLM_BATCH_INVARIANT", False):
        return None
    answered: list[str] = []

    def noting(candidate: Candidate) -> Candidate:
        def ask(*args: Any, **kwargs: Any) -> Any:
            path = candidate.fn(*args, **kwargs)
            answered.append(candidate.impl_id)
            return path

        return replace(candidate, fn=ask)

    try:
        manager = get_default_manager()
        resolved = manager.resolve_with_native(OPERATOR, lambda *_, **__: None, wrap=noting)
        if resolved.decision.impl_id == NATIVE:
            return None
        path: str | None = resolved.fn(config.use_mla, config.use_sparse, selector=config)
        reasons = _reasons_against(path, config) if path else []
    except (PolicyError, NoImplementationError):
        raise
    except Exception as error:
        if is_one_of_several_ranks():
            raise  # alone on another backend than the others, its answers would be wrong
        logger.error("vllm-fl: vLLM chooses the attention: %s: %s", type(error).__name__, error)
        return None
    if path is None:
        return None
    if reasons:
        logger.warning("vllm-fl: %s does not fit: %s; vLLM chooses the attention", path, reasons)
        return None
    logger.info("vllm-fl: attention is served by %s (%s)", answered[-1], path)
    record = trace.recorder()
    if record is not None:
        record.layer("Attention", OPERATOR, answered[-1], "plain")
    return path


def _reasons_against(path: str, config: Any) -> list[str]:
    """Ask the class itself whether it takes the configuration, as vLLM asks its own."""
    from vllm.platforms import current_platform

    module, _, name = path.rpartition(".")
    backend = getattr(import_module(module), name)
    capability = current_platform.get_device_capability()
    if capability is None:
        return []
    return list(backend.validate_configuration(device_capability=capability, **config._asdict()))

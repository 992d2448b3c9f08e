"""A vendor's attention on vLLM's own for CPUs, with what may be wrong about one.

``ATTENTION_VENDOR`` names the answer of the operator: see :data:`ANSWERS`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from typing import Any

if TYPE_CHECKING:
    from collections.abc import Callable

VLLM_FL_PLUGIN_API = 1


def _made(name: str) -> type:
    from vllm.v1.attention.backends import cpu_attn

    class Builder(cpu_attn.CPUAttentionMetadataBuilder):
        def build(self, common_prefix_len: int, common_attn_metadata: Any) -> Any:  # no fast_build
            return super().build(common_prefix_len, common_attn_metadata)

    class Fits(cpu_attn.CPUAttentionBackend):
        @classmethod
        def supports_sliding_window(cls) -> bool:
            return True

    class NoHeads(Fits):
        @classmethod
        def supports_head_size(cls, head_size: int) -> bool:
            return False

    class OldBuilder(Fits):
        @staticmethod
        def get_builder_cls() -> type:
            return Builder

    class OldQuestions(Fits):
        @classmethod
        def validate_configuration(
            cls,
            head_size: int,
            dtype: Any,
            kv_cache_dtype: Any,
            block_size: Any,
            use_mla: bool,
            attn_type: str,
        ) -> list[str]:
            return []

    return {one.__name__: one for one in (Fits, NoHeads, OldBuilder, OldQuestions)}[name]


def __getattr__(name: str) -> Any:
    # Made when asked for: registering a plug-in must not import vLLM's attention.
    if name in {"Fits", "NoHeads", "OldBuilder", "OldQuestions"}:
        return globals().setdefault(name, _made(name))
    raise AttributeError(name)


def _refuses(selector: Any) -> str:
    raise NotImplementedError("the chip has no attention of this kind")


def _dies(selector: Any) -> str:
    raise RuntimeError("the driver is gone")


ANSWERS: dict[str, Callable[[Any], str | None]] = {
    **{
        name: lambda selector, name=name: f"{__name__}.{name}"
        for name in ("Fits", "NoHeads", "OldBuilder", "OldQuestions")
    },
    "None": lambda selector: None,
    "None for this": lambda selector: f"{__name__}.NoHeads" if selector is None else None,
    "refuses": _refuses,
    "dies": _dies,
}


def attention_backend(use_mla: bool = False, use_sparse: bool = False, *, selector: Any = None) -> str | None:
    return ANSWERS[os.environ["ATTENTION_VENDOR"]](selector)


def _takes_no_latent(use_mla: bool = False, *_: Any, **__: Any) -> bool | str:
    return not use_mla or "there is no latent attention on this chip"


def register_builtins(registry: Any) -> None:
    from vllm_fl.dispatch import BackendImplKind
    from vllm_fl.dispatch import OpImpl

    registry.register_impl(
        OpImpl(
            "attention_backend",
            "vendor.attention",
            BackendImplKind.VENDOR,
            attention_backend,
            vendor="attention",
            supports=_takes_no_latent,
        )
    )

"""The entry point ``vllm_fl.plugin: reference``. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_fl.dispatch import OpRegistry

#: The plugin API that this plugin was written for.
VLLM_FL_PLUGIN_API = 1

#: For each operator its module under ``impl`` and the arguments that it writes.
_OPERATORS: dict[str, tuple[str, tuple[str, ...]]] = {
    "silu_and_mul": ("activation", ()),
    "gelu_and_mul": ("activation", ()),
    "rms_norm": ("normalization", ()),
    "rotary_embedding": ("rotary", ("query", "key")),
    "topk_softmax": ("moe", ("topk_weights", "topk_indices", "token_expert_indices")),
    "grouped_topk": ("moe", ()),
    "moe_align_block_size": ("moe", ()),
    "moe_sum": ("moe", ("out",)),
    "fused_experts": ("moe", ()),
    "dynamic_per_token_quant_int8": ("quantization", ()),
    "dynamic_per_token_quant_fp8": ("quantization", ()),
}


def register_builtins(registry: OpRegistry) -> None:
    """Register every operator of the reference.

    The functions are named, not imported: torch is imported when the first of them
    is chosen.
    """
    from vllm_fl.dispatch import BackendImplKind
    from vllm_fl.dispatch import OpImpl

    registry.register_many(
        [
            OpImpl(
                operator,
                "reference.torch",
                BackendImplKind.REFERENCE,
                f"vllm_fl_reference.impl.{module}:{operator}",
                writes=writes,
                traceable=True,
                graph_safe=True,
            )
            for operator, (module, writes) in _OPERATORS.items()
        ]
    )

"""The backend ``vendor.template``: which operators it has, and when they may run.

An operator is one line that names its function under ``impl/``, which is imported when it
is first chosen, never by an import inside a call. What has no line here, another wheel or
vLLM itself computes. The docstrings of :class:`vllm_fl.dispatch.Operators` are the
contracts: shapes, dtypes, what may be written.
"""

from __future__ import annotations

from vllm_fl.dispatch import Backend
from vllm_fl.dispatch import implementation
from vllm_fl_template import _limits


class TemplateBackend(Backend):
    """Operators on the CPU, in plain torch."""

    @property
    def name(self) -> str:
        """The vendor's name in a policy: ``VLLM_FL_PER_OP='rms_norm=vendor:template'``."""
        return "template"

    def is_available(self) -> bool:
        """Whether the library and its device are here.

        It is asked once, in a process that computes. To say no, raise: what the
        exception says is the reason that ``vllm-fl explain`` prints.

        Raises:
            ModuleNotFoundError: torch is not installed.
            RuntimeError: there is no device.
        """
        # <sample>
        import os

        if os.environ.get("VLLM_FL_TEMPLATE_ENABLED") != "1":
            raise RuntimeError(
                "this is the sample that vendors start from; VLLM_FL_TEMPLATE_ENABLED=1 lets it run"
            )
        # </sample>
        # The library first: `import my_kernels` needs no handler, its error is the reason.
        import torch

        # Then the device: `torch.my_device.is_available()`.
        if not torch.cpu.is_available():
            raise RuntimeError("torch finds no CPU")
        return True

    # The plain manner: it takes everything that the contract allows. `traceable` lets
    # vLLM's compiler look into it and fuse it with its neighbours, which plain torch code
    # allows.
    silu_and_mul = implementation("vllm_fl_template.impl.activation:silu_and_mul", traceable=True)
    gelu_and_mul = implementation("vllm_fl_template.impl.activation:gelu_and_mul", traceable=True)

    # A kernel with limits: where one of the questions says no, the next implementation runs.
    # The contract would let it write x and residual; `writes=()` says that it does not,
    # so that no copies of them are kept.
    rms_norm = implementation(
        "vllm_fl_template.impl.normalization:rms_norm",
        supports_layer=_limits.rms_norm_layer,
        supports=_limits.rms_norm_call,
        writes=(),
        traceable=True,
    )

    # It writes its arguments in place, and says which.
    rotary_embedding = implementation(
        "vllm_fl_template.impl.rotary:rotary_embedding", writes=("query", "key"), traceable=True
    )

    # It loops over values, which no compiler can trace: without `traceable` compiled
    # code calls it through a torch operator that vllm-fl makes of it.
    fused_experts = implementation(
        "vllm_fl_template.impl.moe:fused_experts", supports_layer=_limits.fused_experts_layer
    )

    dynamic_per_token_quant_int8 = implementation(
        "vllm_fl_template.impl.quantization:dynamic_per_token_quant_int8", traceable=True
    )

    attention_backend = implementation(
        "vllm_fl_template.impl.selection:attention_backend", supports=_limits.attention_backend
    )

"""The backend: which operators vLLM's compiled kernels serve, and whether they can here.

Imports no torch and no vLLM: the functions and predicates under :mod:`vllm_fl_cuda.impl`
are named, and imported when the first of their module is chosen.
"""

from __future__ import annotations

from vllm_fl.dispatch import Backend
from vllm_fl.dispatch import implementation
from vllm_fl_cuda import kernels


class CudaBackend(Backend):
    """vLLM's compiled kernels, ``vendor.cuda``.

    Attributes:
        device: the type of device whose kernels are asked for: ``cuda``, or ``cpu``
            for the ones that a CPU build of vLLM has, with which the same code is
            tested.

    Raises:
        ValueError: another device.
    """

    def __init__(self, device: str = "cuda") -> None:
        if device not in kernels.DISPATCH_KEYS:
            raise ValueError(f"device must be one of {', '.join(kernels.DISPATCH_KEYS)}, not {device!r}")
        self.device = device

    @property
    def name(self) -> str:
        """The vendor's name."""
        return "cuda"

    def is_available(self) -> bool:
        """Whether the device and vLLM's kernels for it are here.

        Raises:
            ModuleNotFoundError: torch or vLLM is not installed.
            RuntimeError: this PyTorch has no CUDA, there is no device, or vLLM has no
                kernel for it.
        """
        import torch

        if self.device == "cuda":
            if torch.version.cuda is None:
                other = "ROCm" if torch.version.hip else "CPUs"
                raise RuntimeError(f"this PyTorch ({torch.__version__}) is built for {other}, not CUDA")
            if not torch.cuda.is_available():
                raise RuntimeError("PyTorch sees no CUDA device")
        kernels.load()
        # All of them, which binds each: a compiler cannot follow a look-up in a call.
        every = {kernel for needs in kernels.OF_OPERATOR.values() for kernel in needs}
        if not any([kernel.runs_on(self.device) for kernel in every]):  # noqa: C419
            from vllm.platforms import current_platform

            raise RuntimeError(
                f"{kernels.vllm_version()} has no compiled kernel for "
                f"{kernels.DISPATCH_KEYS[self.device]}; its platform here is "
                f"{type(current_platform).__name__}"
            )
        return True

    def missing(self, op_name: str) -> str | None:
        """Say in a sentence which kernel an operator lacks, or None."""
        key = kernels.DISPATCH_KEYS[self.device]
        for kernel in kernels.OF_OPERATOR.get(op_name, ()):
            reason = kernel.missing(key)
            if reason is not None:
                return reason
        if op_name == "fused_experts":
            from vllm.triton_utils import HAS_TRITON

            if not HAS_TRITON:
                return "vLLM's fused_experts needs Triton, and vLLM finds no usable one"
        return None

    silu_and_mul = implementation(
        "vllm_fl_cuda.impl.activation:silu_and_mul",
        supports_layer="vllm_fl_cuda.impl.activation:silu_and_mul_layer",
        traceable=True,
        graph_safe=True,
    )
    gelu_and_mul = implementation(
        "vllm_fl_cuda.impl.activation:gelu_and_mul",
        supports_layer="vllm_fl_cuda.impl.activation:gelu_and_mul_layer",
        traceable=True,
        graph_safe=True,
    )
    rms_norm = implementation(
        "vllm_fl_cuda.impl.normalization:rms_norm",
        supports_layer="vllm_fl_cuda.impl.normalization:rms_norm_layer",
        supports="vllm_fl_cuda.impl.normalization:rms_norm_call",
        traceable=True,
        graph_safe=True,
    )
    rotary_embedding = implementation(
        "vllm_fl_cuda.impl.rotary:rotary_embedding",
        supports_layer="vllm_fl_cuda.impl.rotary:rotary_embedding_layer",
        supports="vllm_fl_cuda.impl.rotary:rotary_embedding_call",
        traceable=True,
        graph_safe=True,
    )
    attention_backend = implementation("vllm_fl_cuda.impl.attention:attention_backend")
    topk_softmax = implementation(
        "vllm_fl_cuda.impl.moe:topk_softmax",
        supports_layer="vllm_fl_cuda.impl.moe:topk_softmax_layer",
        supports="vllm_fl_cuda.impl.moe:topk_softmax_call",
        graph_safe=True,
    )
    grouped_topk = implementation(
        "vllm_fl_cuda.impl.moe:grouped_topk",
        supports_layer="vllm_fl_cuda.impl.moe:grouped_topk_layer",
        graph_safe=True,
    )
    moe_align_block_size = implementation(
        "vllm_fl_cuda.impl.moe:moe_align_block_size",
        supports_layer="vllm_fl_cuda.impl.moe:moe_align_block_size_layer",
        supports="vllm_fl_cuda.impl.moe:moe_align_block_size_call",
        graph_safe=True,
    )
    moe_sum = implementation(
        "vllm_fl_cuda.impl.moe:moe_sum",
        supports_layer="vllm_fl_cuda.impl.moe:moe_sum_layer",
        supports="vllm_fl_cuda.impl.moe:moe_sum_call",
        graph_safe=True,
    )
    fused_experts = implementation(
        "vllm_fl_cuda.impl.moe:fused_experts",
        supports_layer="vllm_fl_cuda.impl.moe:fused_experts_layer",
        supports="vllm_fl_cuda.impl.moe:fused_experts_call",
        graph_safe=True,
    )
    dynamic_per_token_quant_int8 = implementation(
        "vllm_fl_cuda.impl.quantization:dynamic_per_token_quant_int8",
        supports_layer="vllm_fl_cuda.impl.quantization:int8_layer",
        traceable=True,
        graph_safe=True,
    )
    dynamic_per_token_quant_fp8 = implementation(
        "vllm_fl_cuda.impl.quantization:dynamic_per_token_quant_fp8",
        supports_layer="vllm_fl_cuda.impl.quantization:fp8_layer",
        traceable=True,
        graph_safe=True,
    )

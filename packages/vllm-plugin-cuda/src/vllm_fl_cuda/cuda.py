"""The backend: which operators vLLM's compiled kernels serve, and whether they can here.

Imports no torch and no vLLM: the functions under :mod:`vllm_fl_cuda.impl` are
imported when the backend is asked whether it is available, or when the first is
called.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING
from typing import Any
from typing import ClassVar

from vllm_fl.dispatch import Backend
from vllm_fl.dispatch import implementation
from vllm_fl_cuda import kernels

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


class _Later:
    """A function under ``impl`` that is imported when it is first called."""

    everyone: ClassVar[list[_Later]] = []

    def __init__(self, where: str) -> None:
        self.where = where
        self.function: Callable[..., Any] = self._first
        self.everyone.append(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def load(self) -> None:
        module, _, name = self.where.partition(":")
        self.function = getattr(importlib.import_module(f"vllm_fl_cuda.impl.{module}"), name)

    def _first(self, *args: Any, **kwargs: Any) -> Any:
        self.load()
        return self.function(*args, **kwargs)


_silu_and_mul = _Later("activation:silu_and_mul")
_gelu_and_mul = _Later("activation:gelu_and_mul")
_rms_norm = _Later("normalization:rms_norm")
_rotary_embedding = _Later("rotary:rotary_embedding")
_attention_backend = _Later("attention:attention_backend")
_topk_softmax = _Later("moe:topk_softmax")
_grouped_topk = _Later("moe:grouped_topk")
_moe_align_block_size = _Later("moe:moe_align_block_size")
_moe_sum = _Later("moe:moe_sum")
_fused_experts = _Later("moe:fused_experts")
_quant_int8 = _Later("quantization:dynamic_per_token_quant_int8")
_quant_fp8 = _Later("quantization:dynamic_per_token_quant_fp8")


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
        # All of them, and the modules: a compiler follows neither look-up nor import.
        every = {kernel for needs in kernels.OF_OPERATOR.values() for kernel in needs}
        if not any([kernel.runs_on(self.device) for kernel in every]):  # noqa: C419
            from vllm.platforms import current_platform

            raise RuntimeError(
                f"{kernels.vllm_version()} has no compiled kernel for "
                f"{kernels.DISPATCH_KEYS[self.device]}; its platform here is "
                f"{type(current_platform).__name__}"
            )
        for later in _Later.everyone:
            later.load()
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

    @implementation(supports=_Later("activation:supports_silu_and_mul"), traceable=True, graph_safe=True)
    def silu_and_mul(self, x: Tensor) -> Tensor:
        """See :func:`vllm_fl_cuda.impl.activation.silu_and_mul`."""
        return _silu_and_mul(x)  # type: ignore[no-any-return]

    @implementation(supports=_Later("activation:supports_gelu_and_mul"), traceable=True, graph_safe=True)
    def gelu_and_mul(self, x: Tensor, approximate: str = "none") -> Tensor:
        """See :func:`vllm_fl_cuda.impl.activation.gelu_and_mul`."""
        return _gelu_and_mul(x, approximate)  # type: ignore[no-any-return]

    @implementation(supports=_Later("normalization:supports_rms_norm"), traceable=True, graph_safe=True)
    def rms_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor | None, epsilon: float
    ) -> Tensor | tuple[Tensor, Tensor]:
        """See :func:`vllm_fl_cuda.impl.normalization.rms_norm`."""
        return _rms_norm(x, residual, weight, epsilon)  # type: ignore[no-any-return]

    @implementation(supports=_Later("rotary:supports_rotary_embedding"), traceable=True, graph_safe=True)
    def rotary_embedding(
        self,
        query: Tensor,
        key: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        position_ids: Tensor | None,
        rotary_interleaved: bool = False,
        inplace: bool = True,
        cos_sin_cache: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """See :func:`vllm_fl_cuda.impl.rotary.rotary_embedding`."""
        return _rotary_embedding(  # type: ignore[no-any-return]
            query, key, cos, sin, position_ids, rotary_interleaved, inplace, cos_sin_cache
        )

    def attention_backend(
        self, use_mla: bool = False, use_sparse: bool = False, *, selector: Any = None
    ) -> str | None:
        """See :func:`vllm_fl_cuda.impl.attention.attention_backend`."""
        return _attention_backend(use_mla, use_sparse, selector=selector)  # type: ignore[no-any-return]

    @implementation(supports=_Later("moe:supports_topk_softmax"), graph_safe=True)
    def topk_softmax(
        self,
        topk_weights: Tensor,
        topk_indices: Tensor,
        token_expert_indices: Tensor,
        gating_output: Tensor,
        renormalize: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """See :func:`vllm_fl_cuda.impl.moe.topk_softmax`."""
        return _topk_softmax(  # type: ignore[no-any-return]
            topk_weights, topk_indices, token_expert_indices, gating_output, renormalize
        )

    @implementation(supports=_Later("moe:supports_grouped_topk"), graph_safe=True)
    def grouped_topk(
        self,
        scores: Tensor,
        n_group: int,
        topk_group: int,
        topk: int,
        renormalize: bool,
        routed_scaling_factor: float,
        bias: Tensor,
        scoring_func: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """See :func:`vllm_fl_cuda.impl.moe.grouped_topk`."""
        return _grouped_topk(  # type: ignore[no-any-return]
            scores, n_group, topk_group, topk, renormalize, routed_scaling_factor, bias, scoring_func
        )

    @implementation(supports=_Later("moe:supports_moe_align_block_size"), graph_safe=True)
    def moe_align_block_size(
        self,
        topk_ids: Tensor,
        block_size: int,
        num_experts: int,
        expert_map: Tensor | None = None,
        pad_sorted_ids: bool = False,
        ignore_invalid_experts: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See :func:`vllm_fl_cuda.impl.moe.moe_align_block_size`."""
        return _moe_align_block_size(  # type: ignore[no-any-return]
            topk_ids, block_size, num_experts, expert_map, pad_sorted_ids, ignore_invalid_experts
        )

    @implementation(supports=_Later("moe:supports_moe_sum"), graph_safe=True)
    def moe_sum(self, inp: Tensor, out: Tensor) -> Tensor:
        """See :func:`vllm_fl_cuda.impl.moe.moe_sum`."""
        return _moe_sum(inp, out)  # type: ignore[no-any-return]

    @implementation(supports=_Later("moe:supports_fused_experts"), graph_safe=True)
    def fused_experts(
        self,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        *,
        activation: str = "silu",
        apply_router_weight_on_input: bool = False,
        global_num_experts: int = -1,
        expert_map: Tensor | None = None,
    ) -> Tensor:
        """See :func:`vllm_fl_cuda.impl.moe.fused_experts`."""
        return _fused_experts(  # type: ignore[no-any-return]
            hidden_states,
            w1,
            w2,
            topk_weights,
            topk_ids,
            activation=activation,
            apply_router_weight_on_input=apply_router_weight_on_input,
            global_num_experts=global_num_experts,
            expert_map=expert_map,
        )

    @implementation(supports=_Later("quantization:supports_int8"), traceable=True, graph_safe=True)
    def dynamic_per_token_quant_int8(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See :func:`vllm_fl_cuda.impl.quantization.dynamic_per_token_quant_int8`."""
        return _quant_int8(x)  # type: ignore[no-any-return]

    @implementation(supports=_Later("quantization:supports_fp8"), traceable=True, graph_safe=True)
    def dynamic_per_token_quant_fp8(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See :func:`vllm_fl_cuda.impl.quantization.dynamic_per_token_quant_fp8`."""
        return _quant_fp8(x)  # type: ignore[no-any-return]

"""Quantised linear layers: the activations of each token, as int8 or float8_e4m3fn.

``QuantFP8`` is a layer of vLLM's like any other. For int8 there is none: the kernel of
a linear layer calls a function of ``vllm._custom_ops``. That function is wrapped, and the
choice is made when a kernel has prepared its weights, since it may then quantise inside of
its product. Scales from the checkpoint, zero points and groups stay vLLM's.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING
from typing import Any

import torch

from vllm_fl.integration.choice import choose
from vllm_fl.integration.layer import Layer
from vllm_fl.integration.seam import Seam

if TYPE_CHECKING:
    from collections.abc import Callable

# -- float8 -----------------------------------------------------------------------


class QuantFP8(Layer):
    """The scales of each token, and the activations that they quantise to float8_e4m3fn."""

    module = "vllm.model_executor.layers.quantization.input_quant_fp8"
    class_name = "QuantFP8"
    vllm_name = "quant_fp8"
    op_name = "dynamic_per_token_quant_fp8"

    def __init__(self, owner: Any) -> None:
        super().__init__(owner)
        #: vLLM's own forward for calls with an upper bound of the scales, and for a layer that is left.
        self.uncompiled: Callable[..., Any] = owner.dispatch_forward(compile_native=False)

    def forward(
        self,
        x: torch.Tensor,
        scale: torch.Tensor | None = None,
        scale_ub: torch.Tensor | None = None,
        use_triton: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Leave a call with scales, or with an upper bound of them, to vLLM."""
        if scale is not None or scale_ub is not None:
            return self.uncompiled(x, scale, scale_ub, use_triton)  # type: ignore[no-any-return]
        return self.operator(x)  # type: ignore[no-any-return]

    def leave(self) -> None:
        """Let it run vLLM's own path, which another engine's compiler has not seen."""
        super().leave()
        self.owner._forward_method = self.uncompiled

    def examples(self) -> list[tuple[Any, ...]]:
        """Return one row; the layer knows neither its width nor its dtype."""
        return [(torch.ones(1, 128, dtype=torch.get_default_dtype()),)]

    def refuses(self) -> str | None:
        """Refuse scales that are not of each token, and another float8."""
        from vllm.platforms import current_platform

        layer = self.layer
        if layer.static:
            return "the operator has no scales of the checkpoint's"
        if not layer.use_per_token_if_dynamic:
            return f"the operator has a scale for each token, not for {tuple(layer.group_shape)}"
        if layer.num_token_padding is not None:
            return "the operator pads no tokens"
        dtype = current_platform.fp8_dtype()
        if dtype is not torch.float8_e4m3fn:
            return f"the operator gives float8_e4m3fn, this device takes {dtype}"
        return None


LAYERS: tuple[type[Layer], ...] = (QuantFP8,)

# -- int8 -------------------------------------------------------------------------

#: The function that each kernel of vLLM's calls.
_FUNCTIONS = {
    "AiterInt8ScaledMMLinearKernel": "scaled_int8_quant",
    "CPUInt8ScaledMMLinearKernel": "onednn_scaled_int8_quant",
    "CutlassInt8ScaledMMLinearKernel": "scaled_int8_quant",
    "TritonInt8ScaledMMLinearKernel": "scaled_int8_quant",
}

#: What each function calls where it chooses a scale for every token; None for its own code.
chosen: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None] = {}

#: vLLM's own of each, for the scales of every token.
_own: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {}


class Int8Linear(Layer):
    """The quantisation to int8 by the kernel of a linear layer.

    Its owner is the kernel, which has no forward of its own for it: ``_vllm_fl_quantize`` is what
    its function calls.
    """

    module = "vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel"
    class_name = "Int8ScaledMMLinearKernel"
    vllm_name = "int8_linear"
    op_name = "dynamic_per_token_quant_int8"
    attribute = "_vllm_fl_quantize"

    def __init__(self, owner: Any, layer: Any) -> None:
        self.function = _FUNCTIONS.get(type(owner).__name__, "")
        self.reason = self._why_not(owner)
        owner._vllm_fl_quantize = _own[self.function] if self.reason is None else None
        super().__init__(owner, layer)

    def _why_not(self, kernel: Any) -> str | None:
        if not self.function:
            return "it quantises in a way of its own"
        if kernel.config.is_static_input_scheme:
            return "the operator has no scales of the checkpoint's"
        if not kernel.config.input_symmetric:
            return "the operator has no zero points"
        method = getattr(kernel, "linear_method", None)
        if method is not None and "onednn" not in method.__name__:
            return "it quantises inside of its product"
        return None

    def refuses(self) -> str | None:
        """Refuse other scales than those of each token, and kernels that call no function for them."""
        return self.reason

    def examples(self) -> list[tuple[Any, ...]]:
        """Return one row of the layer's width; it does not know its dtype."""
        scales = self.owner._get_layer_params(self.layer)[1]
        width = getattr(self.layer, "input_size_per_partition", 128)
        return [(torch.ones(1, width, dtype=torch.get_default_dtype(), device=scales.device),)]


def install() -> None:
    """Wrap vLLM's two functions, and let every int8 linear layer decide; once."""
    from vllm import _custom_ops as ops
    from vllm.config import get_current_vllm_config
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import Int8ScaledMMLinearKernel

    if chosen:
        return
    for name in set(_FUNCTIONS.values()):
        function = getattr(ops, name)
        _own[name] = functools.partial(_per_token, function)
        chosen[name] = None
        setattr(ops, name, _wrapped(name, function))
    built = Int8ScaledMMLinearKernel.__init__

    @functools.wraps(built)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        built(self, *args, **kwargs)
        prepare, vllm_config = self.process_weights_after_loading, get_current_vllm_config()

        def prepare_and_decide(layer: Any) -> None:
            prepare(layer)
            with set_current_vllm_config(vllm_config):
                _decide_for(self, layer)

        self.process_weights_after_loading = prepare_and_decide

    Int8ScaledMMLinearKernel.__init__ = __init__


INT8 = Seam(Int8Linear.class_name, Int8Linear.vllm_name, install)


def _per_token(function: Callable[..., Any], x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    quantized, scales, _ = function(x)
    return quantized, scales


def _decide_for(kernel: Any, layer: Any) -> None:
    its = Int8Linear(kernel, layer)
    choose(its)
    if its.reason is None:
        # It keeps no kernel alive, nor its weights.
        operator = kernel._vllm_fl_quantize
        caller = "linear_method" if hasattr(kernel, "linear_method") else "apply_weights"
        setattr(kernel, caller, _choosing(its.function, operator, getattr(kernel, caller)))
        chosen[its.function] = operator


def _choosing(name: str, operator: Callable[..., Any], apply: Callable[..., Any]) -> Callable[..., Any]:
    """Return what a kernel calls for its product, with its own engine's choice for the function.

    A compiler traces it while the engine is built, and the choice is that engine's then.
    """

    @functools.wraps(apply)
    def apply_with_choice(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            chosen[name] = operator
        return apply(*args, **kwargs)

    return apply_with_choice


def _wrapped(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def quantize(
        input: torch.Tensor,  # noqa: A002 - vLLM's name
        scale: torch.Tensor | None = None,
        azp: torch.Tensor | None = None,
        symmetric: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        operator = chosen[name]
        if operator is None or scale is not None or azp is not None or not symmetric:
            return own(input, scale, azp, symmetric)  # type: ignore[no-any-return]
        quantized, scales = operator(input.reshape(-1, input.shape[-1]))
        return quantized.view(input.shape), scales, None

    return quantize

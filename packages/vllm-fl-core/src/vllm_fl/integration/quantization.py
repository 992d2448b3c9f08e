"""Quantised linear layers: the activations of each token, as int8 or float8_e4m3fn.

``QuantFP8`` is a layer of vLLM's like any other. For int8 there is none: the kernel of
a linear layer calls a function of ``vllm._custom_ops``. That function is wrapped, and the
choice is made when a kernel has prepared its weights, since it may then quantise inside of
its product. Scales from the checkpoint, zero points and groups stay vLLM's.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING
from typing import Any

import torch

from vllm_fl.integration.bindings import Binding
from vllm_fl.integration.bindings import DecidesWhenBuilt
from vllm_fl.integration.log import logger

if TYPE_CHECKING:
    from collections.abc import Callable

# -- float8 -----------------------------------------------------------------------


class Fp8(DecidesWhenBuilt):
    """Keeps vLLM's own forward, for calls with an upper bound of the scales."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._vllm_fl_own = self.dispatch_forward(compile_native=False)  # type: ignore[attr-defined]


def _fp8_forward(
    self: Any,
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    scale_ub: torch.Tensor | None = None,
    use_triton: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    if scale is not None or scale_ub is not None:
        return self._vllm_fl_own(x, scale, scale_ub, use_triton)  # type: ignore[no-any-return]
    return self._vllm_fl_operator(x)  # type: ignore[no-any-return]


def _why_not_fp8(layer: Any) -> str | None:
    from vllm.platforms import current_platform

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


FP8 = Binding(
    "vllm.model_executor.layers.quantization.input_quant_fp8",
    "QuantFP8",
    "quant_fp8",
    "dynamic_per_token_quant_fp8",
    _fp8_forward,
    lambda own: own,
    # The layer knows neither its width nor its dtype.
    lambda layer: [(torch.ones(1, 128, dtype=torch.get_default_dtype()),)],
    _why_not_fp8,
    mixin=Fp8,
)

BINDINGS = (FP8,)

# -- int8 -------------------------------------------------------------------------

#: The function that each kernel of vLLM's calls.
_FUNCTIONS = {
    "AiterInt8ScaledMMLinearKernel": "scaled_int8_quant",
    "CPUInt8ScaledMMLinearKernel": "onednn_scaled_int8_quant",
    "CutlassInt8ScaledMMLinearKernel": "scaled_int8_quant",
    "TritonInt8ScaledMMLinearKernel": "scaled_int8_quant",
}

#: What each function calls where it chooses a scale for every token; None for its own code.
_chosen: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None] = {}


@dataclass(frozen=True)
class _Linear:
    kernel: Any
    layer: Any


def _why_not_int8(linear: _Linear) -> str | None:
    kernel = linear.kernel
    if type(kernel).__name__ not in _FUNCTIONS:
        return "it quantises in a way of its own"
    if kernel.config.is_static_input_scheme:
        return "the operator has no scales of the checkpoint's"
    if not kernel.config.input_symmetric:
        return "the operator has no zero points"
    method = getattr(kernel, "linear_method", None)
    if method is not None and "onednn" not in method.__name__:
        return "it quantises inside of its product"
    return None


def _int8_examples(linear: _Linear) -> list[tuple[Any, ...]]:
    scales = linear.kernel._get_layer_params(linear.layer)[1]
    width = getattr(linear.layer, "input_size_per_partition", 128)
    return [(torch.ones(1, width, dtype=torch.get_default_dtype(), device=scales.device),)]


INT8 = Binding(
    "vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel",
    "Int8ScaledMMLinearKernel",
    "int8_linear",
    "dynamic_per_token_quant_int8",
    lambda self, x: self._vllm_fl_operator(x),
    lambda own: own,
    _int8_examples,
    _why_not_int8,
    attribute="_vllm_fl_quantize",
)


def install(decide: Callable[..., None]) -> None:
    """Wrap vLLM's two functions, and let every int8 linear layer decide; once."""
    try:
        _install(decide)
    except Exception as error:  # noqa: BLE001 - our fault must not end somebody's server
        logger.error("vllm-fl: vLLM quantises to int8 itself: %s: %s", type(error).__name__, error)
        logger.debug("vllm-fl failed to wrap the quantisation to int8", exc_info=True)


def _install(decide: Callable[..., None]) -> None:
    from vllm import _custom_ops as ops
    from vllm.config import get_current_vllm_config
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import Int8ScaledMMLinearKernel

    if _chosen:
        return
    own = {name: getattr(ops, name) for name in set(_FUNCTIONS.values())}
    for name, function in own.items():
        _chosen[name] = None
        setattr(ops, name, _wrapped(name, function))
    built = Int8ScaledMMLinearKernel.__init__

    @functools.wraps(built)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        built(self, *args, **kwargs)
        prepare, vllm_config = self.process_weights_after_loading, get_current_vllm_config()

        def prepare_and_decide(layer: Any) -> None:
            prepare(layer)
            with set_current_vllm_config(vllm_config):
                _decide_for(self, layer, own, decide)

        self.process_weights_after_loading = prepare_and_decide

    Int8ScaledMMLinearKernel.__init__ = __init__


def _decide_for(
    kernel: Any, layer: Any, own: dict[str, Callable[..., Any]], decide: Callable[..., None]
) -> None:
    linear = _Linear(kernel, layer)
    name = _FUNCTIONS.get(type(kernel).__name__, "scaled_int8_quant")
    is_served = _why_not_int8(linear) is None
    kernel._vllm_fl_quantize = (lambda x: own[name](x)[:2]) if is_served else None
    decide(kernel, INT8, linear)
    if is_served:
        # Not the kernel's method, which would keep its weights alive.
        operator = getattr(kernel, "_vllm_fl_operator", None) or kernel._vllm_fl_quantize
        caller = "linear_method" if hasattr(kernel, "linear_method") else "apply_weights"
        setattr(kernel, caller, _choosing(name, operator, getattr(kernel, caller)))
        _chosen[name] = operator


def _choosing(name: str, operator: Callable[..., Any], apply: Callable[..., Any]) -> Callable[..., Any]:
    """Return what a kernel calls for its product, with its own engine's choice for the function.

    A compiler traces it while the engine is built, and the choice is that engine's then.
    """

    @functools.wraps(apply)
    def apply_with_choice(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            _chosen[name] = operator
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
        operator = _chosen[name]
        if operator is None or scale is not None or azp is not None or not symmetric:
            return own(input, scale, azp, symmetric)  # type: ignore[no-any-return]
        quantized, scales = operator(input.reshape(-1, input.shape[-1]))
        return quantized.view(input.shape), scales, None

    return quantize

"""vLLM's own path of an operator without an engine: a layer built alone, for measuring it.

The layer is vLLM's, with its custom operators on; its own path takes the operator's
arguments, as for a candidate inside vLLM. Where a version of vLLM builds a layer in
another way, the path is not measured, and nothing else is lost.
"""

from __future__ import annotations

import functools
import logging
from contextlib import contextmanager
from contextlib import suppress
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.dispatch.common.foreign import describe

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Iterator
    from collections.abc import Mapping

    from vllm_fl.integration.layer import Layer


class UnreachableError(RuntimeError):
    """vLLM's own path cannot be called alone; the message says why."""


def native_path(op_name: str, arguments: Mapping[str, Any], *, compiled: bool = False) -> Callable[..., Any]:
    """Return vLLM's own path as a function of the operator's arguments.

    Args:
        op_name: the operator.
        arguments: of one call, by name: the sizes, weights and tables that the layer is built with.
        compiled: the forward that vLLM's compiler is given, instead of the one that runs eagerly.

    Raises:
        UnreachableError: vLLM is not here, or the path is a part of something larger.
    """
    build = _BUILDERS.get(op_name)
    if build is None:
        raise UnreachableError(_PARTS.get(op_name, "vLLM has no layer for it"))
    try:
        with _inside_vllm():
            return build(arguments, compiled)
    except UnreachableError:
        raise
    except Exception as error:
        raise UnreachableError(f"vLLM's layer cannot be built alone: {describe(error)}") from error


@contextmanager
def _inside_vllm() -> Iterator[None]:
    # What vLLM says of a configuration without a model is of no use to anybody here.
    level = logging.getLogger("vllm").level
    try:
        import vllm.config as vllm_config

        logging.getLogger("vllm").setLevel(logging.ERROR)
        with vllm_config.set_current_vllm_config(_config(vllm_config)):
            yield
    except ImportError as error:
        raise UnreachableError(f"vLLM is not installed: {describe(error)}") from error
    finally:
        logging.getLogger("vllm").setLevel(level)


def _config(vllm_config: Any) -> Any:
    global _made
    if _made is None:
        from vllm.platforms import current_platform

        compilation = vllm_config.CompilationConfig(mode=0, custom_ops=["all"])
        _made = vllm_config.VllmConfig(compilation_config=compilation)
        for name in ("import_kernels", "import_ir_kernels"):
            getattr(current_platform, name, lambda: None)()
        # As a worker does: without it an eager norm is PyTorch's.
        with suppress(AttributeError, ImportError):
            import vllm.ir

            _made.kernel_config.ir_op_priority.set_default()
            vllm.ir.set_default_torch_wrap(compilation.ir_enable_torch_wrap)
    return _made


#: vLLM's configuration; making one takes a second.
_made: Any = None


def _forward(layer: Any, compiled: bool) -> Callable[..., Any]:
    forward: Callable[..., Any] = layer.forward_native if compiled else layer._forward_method
    return forward


def _adapted(kind: type[Layer], layer: Any, compiled: bool) -> Callable[..., Any]:
    its = kind(layer)
    its.own = _forward(layer, compiled)
    return its.own_path()


def _activation(name: str, arguments: Mapping[str, Any], compiled: bool) -> Callable[..., Any]:
    from vllm.model_executor.layers import activation

    from vllm_fl.integration import activation as ours

    keywords = {"approximate": arguments["approximate"]} if "approximate" in arguments else {}
    return _adapted(getattr(ours, name), getattr(activation, name)(**keywords), compiled)


def _norm(arguments: Mapping[str, Any], compiled: bool) -> Callable[..., Any]:
    from vllm.model_executor.layers.layernorm import RMSNorm

    from vllm_fl.integration import normalization

    weight = arguments["weight"]
    layer = RMSNorm(weight.shape[0], arguments["epsilon"], dtype=weight.dtype)
    layer.weight.data = weight
    return _adapted(normalization.RMSNorm, layer, compiled)


def _rotary(arguments: Mapping[str, Any], compiled: bool) -> Callable[..., Any]:
    from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

    from vllm_fl.integration import rotary

    cache = arguments["cos_sin_cache"]
    head, rotary_dim = arguments["query"].shape[-1], cache.shape[-1]
    is_neox = not arguments["rotary_interleaved"]
    layer = RotaryEmbedding(head, rotary_dim, cache.shape[0], 10000.0, is_neox, cache.dtype)
    layer.cos_sin_cache = cache
    return _adapted(rotary.RotaryEmbedding, layer, compiled)


def _fp8(arguments: Mapping[str, Any], compiled: bool) -> Callable[..., Any]:
    import vllm.model_executor.layers.quantization.utils.quant_utils as utils
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8

    return _forward(QuantFP8(static=False, group_shape=utils.GroupShape.PER_TOKEN), compiled)


def _int8(arguments: Mapping[str, Any], compiled: bool) -> Callable[..., Any]:
    from vllm import _custom_ops

    on_cpu = arguments["x"].device.type == "cpu"
    name = "onednn_scaled_int8_quant" if on_cpu else "scaled_int8_quant"
    own = getattr(_custom_ops, name)
    return lambda x: own(x)[:2]


_BUILDERS: Mapping[str, Callable[[Mapping[str, Any], bool], Callable[..., Any]]] = {
    "silu_and_mul": functools.partial(_activation, "SiluAndMul"),
    "gelu_and_mul": functools.partial(_activation, "GeluAndMul"),
    "rms_norm": _norm,
    "rotary_embedding": _rotary,
    "dynamic_per_token_quant_fp8": _fp8,
    "dynamic_per_token_quant_int8": _int8,
}
_ROUTER = "vLLM's router is a part of a layer of experts, which takes a model to build"
#: Of these vLLM's own path is a part of something that is built with a model.
_PARTS = {
    "topk_softmax": _ROUTER,
    "grouped_topk": _ROUTER,
    "moe_align_block_size": "it is a step inside of vLLM's experts",
    "moe_sum": "it is a step inside of vLLM's experts",
    "fused_experts": "vLLM prepares the weights of its experts when it loads a model",
}

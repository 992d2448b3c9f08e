"""vLLM's own path as a candidate: it does what the operator's contract says, for what models pass.

An implementation that refuses leaves its arguments to it. What it computes is compared with the
reference; what the contract lets nobody write is left alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import Any

import pytest

from vllm_fl.dispatch.declaration import declaration_of
from vllm_fl.dispatch.ops import Operators
from vllm_fl.integration import moe
from vllm_fl.integration import replace
from vllm_fl_reference.impl import activation
from vllm_fl_reference.impl import moe as reference_moe
from vllm_fl_reference.impl import normalization
from vllm_fl_reference.impl import quantization as reference_quantization
from vllm_fl_reference.impl import rotary

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Iterator

    import torch

    from vllm_fl.integration.layer import Layer

_REFERENCE: dict[str, Callable[..., Any]] = {
    "silu_and_mul": activation.silu_and_mul,
    "gelu_and_mul": activation.gelu_and_mul,
    "rms_norm": normalization.rms_norm,
    "rotary_embedding": rotary.rotary_embedding,
    "topk_softmax": reference_moe.topk_softmax,
    "grouped_topk": reference_moe.grouped_topk,
    "dynamic_per_token_quant_fp8": reference_quantization.dynamic_per_token_quant_fp8,
}


@pytest.fixture(params=["all", "none"], ids=["kernels", "PyTorch"])
def own_vllm(request: pytest.FixtureRequest) -> Iterator[None]:
    """Layers are vLLM's own, on its kernels or on its PyTorch path."""
    from vllm.config import CompilationConfig
    from vllm.config import VllmConfig
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.custom_op import op_registry_oot

    before = dict(op_registry_oot)
    op_registry_oot.clear()
    compilation = CompilationConfig(mode=0, custom_ops=[request.param])
    with set_current_vllm_config(VllmConfig(compilation_config=compilation)):
        yield
    op_registry_oot.update(before)


def _layer(class_name: str) -> type[Layer]:
    return next(layer for layer in replace.LAYERS if layer.class_name == class_name)


def _random(*shape: int, seed: int = 7) -> torch.Tensor:
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _copied(values: dict[str, Any]) -> dict[str, Any]:
    """Return the same values in the same layouts, in memory of their own."""
    import torch

    def copy(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        new = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        return new.copy_(value)

    return {name: copy(value) for name, value in values.items()}


def _check(layer: Layer, values: dict[str, Any], *, tolerance: float = 1e-5) -> None:
    """Compare `native` with the reference on one set of arguments, given by place and by name."""
    import torch

    native, op_name = layer.own_path(), layer.op_name
    operator = declaration_of(getattr(Operators, op_name))
    assert operator is not None
    assert list(values) == list(operator.signature.parameters)[: len(values)]
    wanted_args = _copied(values)
    wanted = _REFERENCE[op_name](**wanted_args)
    for by_name in (False, True):
        args = _copied(values)
        result = native(**args) if by_name else native(*args.values())
        for one, other in zip(_tuple(result), _tuple(wanted), strict=True):
            assert (one is None) is (other is None)
            if other is not None:
                assert one.dtype == other.dtype
                assert one.shape == other.shape
                torch.testing.assert_close(*(x.float() for x in (one, other)), rtol=tolerance, atol=tolerance)
        donated = op_name == "rms_norm" and values["residual"] is not None
        written = operator.mutates if values.get("inplace", True) else ()
        for name, value in args.items():
            if not isinstance(value, torch.Tensor) or donated or name == "token_expert_indices":
                continue
            if name in written and op_name != "rms_norm":
                torch.testing.assert_close(value, wanted_args[name], rtol=tolerance, atol=tolerance)
                assert any(value is one for one in _tuple(result))
            else:
                assert torch.equal(value, values[name]), name


def _tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _activation_layouts() -> dict[str, torch.Tensor]:
    return {
        "2-D": _random(5, 64),
        "3-D": _random(2, 3, 64),
        "rows of something wider": _random(5, 96)[:, :64],
        "every second element": _random(5, 128)[:, ::2],
        "no tokens": _random(0, 64),
    }


@pytest.mark.parametrize("layout", _activation_layouts())
def test_silu_and_mul(own_vllm: None, layout: str) -> None:
    from vllm.model_executor.layers.activation import SiluAndMul

    layer = SiluAndMul(compile_native=False)
    _check(_layer("SiluAndMul")(layer), {"x": _activation_layouts()[layout]})


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("layout", _activation_layouts())
def test_gelu_and_mul(own_vllm: None, layout: str, approximate: str) -> None:
    from vllm.model_executor.layers.activation import GeluAndMul

    values: dict[str, Any] = {"x": _activation_layouts()[layout], "approximate": approximate}
    _check(_layer("GeluAndMul")(GeluAndMul(approximate)), values)
    if approximate == "none":
        _check(_layer("GeluAndMul")(GeluAndMul()), {"x": values["x"]})


@pytest.mark.parametrize("class_name", ["RMSNorm", "GemmaRMSNorm"])
@pytest.mark.parametrize("has_weight", [True, False], ids=["weight", "no weight"])
@pytest.mark.parametrize("residual", ["none", "plain", "strided"])
@pytest.mark.parametrize("layout", ["2-D", "3-D", "heads of something wider", "rows of something wider"])
def test_rms_norm(own_vllm: None, layout: str, residual: str, has_weight: bool, class_name: str) -> None:
    from vllm.model_executor.layers import layernorm

    if class_name == "RMSNorm":
        layer = layernorm.RMSNorm(32, 1e-5, has_weight=has_weight)
    elif has_weight:
        layer = layernorm.GemmaRMSNorm(32, 1e-5)
    else:
        pytest.skip("Gemma's norm has a weight")
    if has_weight:
        layer.weight.data.copy_(_random(32, seed=9))
    weight = layer.weight.data if has_weight else None
    x = {
        "2-D": _random(5, 32),
        "3-D": _random(2, 3, 32),
        "heads of something wider": _random(5, 6, 32)[:, :4],
        "rows of something wider": _random(5, 48)[:, :32],
    }[layout]
    more = _random(*x.shape[:-1], 64, seed=8)
    its = {"none": None, "plain": more[..., :32].contiguous(), "strided": more[..., :32]}[residual]
    if class_name == "GemmaRMSNorm":
        weight = weight + 1.0
    values = {"x": x, "residual": its, "weight": weight, "epsilon": 1e-5}
    _check(_layer(class_name)(layer), values)


def _heads(layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries of four heads and keys of two, of 32 elements each, as models pass them."""
    fused = _random(5, 8 * 32)
    query, key = fused[:, :128].view(5, 4, 32), fused[:, 128:192].view(5, 2, 32)
    if layout == "a fused projection":
        return query, key
    if layout == "contiguous":
        return query.contiguous(), key.contiguous()
    if layout == "a slice of every head":
        # Latent attention: the queries are the end of wider heads, the key is the end of a row.
        return _random(5, 4, 48)[..., 16:], _random(5, 96)[:, 64:].unsqueeze(1)
    return _random(5, 4, 64)[..., ::2], _random(5, 32, 2).transpose(1, 2)


@pytest.mark.parametrize("inplace", [True, False], ids=["in place", "new"])
@pytest.mark.parametrize("has_key", [True, False], ids=["key", "no key"])
@pytest.mark.parametrize("rotary_dim", [32, 16], ids=["whole", "partial"])
@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize(
    "layout", ["a fused projection", "contiguous", "a slice of every head", "every second element"]
)
def test_rotary_embedding(
    own_vllm: None, layout: str, is_neox: bool, rotary_dim: int, has_key: bool, inplace: bool
) -> None:
    import torch
    from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

    layer = RotaryEmbedding(
        head_size=32,
        rotary_dim=rotary_dim,
        max_position_embeddings=64,
        base=10000.0,
        is_neox_style=is_neox,
        dtype=torch.float32,
    )
    query, key = _heads(layout)
    cos, sin = layer.cos_sin_cache.chunk(2, dim=-1)
    values = {
        "query": query,
        "key": key if has_key else None,
        "cos": cos,
        "sin": sin,
        "position_ids": torch.tensor([0, 3, 17, 63, 5]),
        "rotary_interleaved": not is_neox,
        "inplace": inplace,
        "cos_sin_cache": layer.cos_sin_cache,
    }
    _check(_layer("RotaryEmbedding")(layer), values)


@pytest.mark.parametrize("logits", ["plain", "rows of something wider"])
@pytest.mark.parametrize("renormalize", [True, False], ids=["renormalised", "plain"])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_topk_softmax(own_vllm: None, dtype: str, renormalize: bool, logits: str) -> None:
    import torch
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    router = CPURouter(top_k=2, global_num_experts=8, renormalize=renormalize)
    values = {
        "topk_weights": torch.zeros(5, 2),
        "topk_indices": torch.zeros(5, 2, dtype=getattr(torch, dtype)),
        "token_expert_indices": torch.zeros(5, 2, dtype=torch.int32),
        "gating_output": _random(5, 8) if logits == "plain" else _random(5, 12)[:, :8],
        "renormalize": renormalize,
    }
    _check(moe.Router(router), values)


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
def test_grouped_topk(own_vllm: None, scoring: str) -> None:
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    router = CPURouter(
        top_k=2,
        global_num_experts=8,
        renormalize=True,
        use_grouped_topk=True,
        num_expert_group=4,
        topk_group=2,
        scoring_func=scoring,
        e_score_correction_bias=_random(8, seed=5),
        routed_scaling_factor=2.5,
    )
    names = declaration_of(Operators.grouped_topk).signature.parameters
    values = dict(zip(names, moe.GroupedRouter(router).arguments(_random(5, 8)), strict=True))
    _check(moe.GroupedRouter(router), values)


def test_quantisation_to_fp8(own_vllm: None) -> None:
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    layer = QuantFP8(static=False, group_shape=GroupShape.PER_TOKEN, compile_native=False)
    # vLLM's CPU build has no kernel for it. One step of float8 may differ: it multiplies by the reciprocal.
    values = {"x": _random(5, 64)}
    its = _layer("QuantFP8")(layer)
    its.own = layer.forward_native
    _check(its, values, tolerance=0.13)


def test_every_layer_is_tried() -> None:
    """The experts' own path takes prepared weights, and is no candidate behind another one."""
    tried = {layer.op_name for layer in (*replace.LAYERS, moe.GroupedRouter)} - {"fused_experts"}
    assert tried == set(_REFERENCE)

"""Against vLLM: its layers' own methods, and its compiled kernels."""

from __future__ import annotations

import pytest
import torch
from reference_layouts import random

pytest.importorskip("vllm")

from vllm.config import VllmConfig
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.activation import GeluAndMul
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms import current_platform

from vllm_fl_reference.impl.activation import gelu_and_mul
from vllm_fl_reference.impl.activation import silu_and_mul
from vllm_fl_reference.impl.normalization import rms_norm
from vllm_fl_reference.impl.quantization import dynamic_per_token_quant_int8
from vllm_fl_reference.impl.rotary import rotary_embedding

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
TOKENS = pytest.mark.parametrize("tokens", [1, 7, 64])

TOLERANCE = {torch.float32: {"rtol": 2e-6, "atol": 2e-6}, torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-3}}


@pytest.fixture(autouse=True)
def _config():
    with set_current_vllm_config(VllmConfig()):
        yield


@pytest.fixture(scope="module")
def kernels():
    """vLLM's compiled operators, where this build has them for the CPU."""
    current_platform.import_kernels()

    def find(name):
        found = getattr(torch.ops._C, name, None)
        if found is None or not torch._C._dispatch_has_kernel_for_dispatch_key(f"_C::{name}", "CPU"):
            pytest.skip(f"this vLLM has no compiled {name}")
        return found

    return find


# The layers' own methods


@DTYPES
@TOKENS
@pytest.mark.parametrize("layer", ["silu", "none", "tanh"])
def test_activations_of_the_layers(layer, tokens, dtype):
    x = random(tokens, 96, dtype=dtype, scale=2.0)
    native = SiluAndMul() if layer == "silu" else GeluAndMul(approximate=layer)
    ours = silu_and_mul(x) if layer == "silu" else gelu_and_mul(x, layer)
    if dtype is torch.float32:
        assert torch.equal(ours, native.forward_native(x))
    else:
        # The layer rounds the activation before it multiplies; we round once.
        torch.testing.assert_close(ours, native.forward_native(x), **TOLERANCE[dtype])


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16, None], ids=["w32", "w16", "none"])
@DTYPES
@TOKENS
@pytest.mark.parametrize("hidden", [64, 769])
def test_rms_norm_is_the_layers_to_the_bit(hidden, tokens, dtype, weight_dtype):
    layer = RMSNorm(hidden, eps=1e-5, has_weight=weight_dtype is not None, dtype=weight_dtype)
    weight = None
    if weight_dtype is not None:
        layer.weight.data = weight = random(hidden, dtype=weight_dtype, seed=2)
    x = random(tokens, hidden + 8, dtype=dtype)[:, :hidden]
    residual = random(tokens, hidden, dtype=dtype, seed=1)
    assert torch.equal(rms_norm(x, None, weight, 1e-5), layer.forward_native(x))
    ours = rms_norm(x, residual, weight, 1e-5)
    theirs = layer.forward_native(x.clone(), residual.clone())
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize("neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize(("head", "rot"), [(64, 64), (80, 32), (128, 64)])
@TOKENS
def test_rotary_of_the_layer(tokens, head, rot, neox):
    layer = RotaryEmbedding(head, rot, 256, 10000.0, neox, torch.float32)
    qkv = random(tokens, 14 * head)
    query, key, _ = qkv.split([9 * head, 3 * head, 2 * head], -1)
    positions = torch.arange(tokens) * 3
    want = layer.forward_native(positions, query.clone(), key.clone())
    cache = layer.cos_sin_cache
    got = rotary_embedding(
        query.view(tokens, 9, head),
        key.view(tokens, 3, head),
        *cache.chunk(2, -1),
        positions,
        not neox,
        True,
        cache,
    )
    for out, expected in zip(got, want, strict=True):
        torch.testing.assert_close(out.flatten(1), expected, **TOLERANCE[torch.float32])


# The compiled kernels


@DTYPES
@TOKENS
@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"])
def test_compiled_activations(kernels, name, tokens, dtype):
    x = random(tokens, 2 * 64, dtype=dtype, scale=2.0)
    want = torch.empty(tokens, 64, dtype=dtype)
    kernels(name)(want, x)
    ours = {"gelu_and_mul": gelu_and_mul, "gelu_tanh_and_mul": lambda x: gelu_and_mul(x, "tanh")}
    torch.testing.assert_close(ours.get(name, silu_and_mul)(x), want, **TOLERANCE[dtype])


@DTYPES
@TOKENS
def test_compiled_norms(kernels, tokens, dtype):
    x, residual = random(2, tokens, 128, dtype=dtype).unbind(0)
    weight = random(128, dtype=dtype, seed=2)
    want = torch.empty_like(x)
    kernels("rms_norm")(want, x, weight, 1e-5)
    torch.testing.assert_close(rms_norm(x, None, weight, 1e-5), want, **TOLERANCE[dtype])
    normed, summed = rms_norm(x, residual, weight, 1e-5)
    kernels("fused_add_rms_norm")(x, residual, weight, 1e-5)
    torch.testing.assert_close(normed, x, **TOLERANCE[dtype])
    assert torch.equal(summed, residual)


@pytest.mark.parametrize("neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize("rot", [64, 32])
@DTYPES
@TOKENS
def test_compiled_rotary(kernels, tokens, dtype, rot, neox):
    angles = torch.outer(torch.arange(256.0), 10000.0 ** (-torch.arange(rot // 2) / (rot // 2)))
    cache = torch.cat([angles.cos(), angles.sin()], -1).to(dtype)
    positions = (torch.arange(tokens) * 3).flip(0)
    views = []
    for _ in range(2):
        query, key, _v = random(tokens, 14 * 64, dtype=dtype).split([9 * 64, 3 * 64, 2 * 64], -1)
        views.append((query, key))
    # The kernel takes [tokens, heads, head] for another layout: it must get two axes.
    kernels("rotary_embedding")(positions, *views[0], 64, cache, neox)
    query, key = (x.unflatten(1, (-1, 64)) for x in views[1])
    rotary_embedding(query, key, *cache.chunk(2, -1), positions, not neox, True, cache)
    for ours, theirs in zip(views[1], views[0], strict=True):
        if dtype is torch.bfloat16:
            assert torch.equal(ours, theirs)
        else:
            torch.testing.assert_close(ours, theirs, **TOLERANCE[dtype])


@DTYPES
@TOKENS
def test_compiled_int8(kernels, tokens, dtype):
    x = random(tokens, 128, dtype=dtype)
    q, scales = torch.empty(tokens, 128, dtype=torch.int8), torch.empty(tokens, 1)
    kernels("dynamic_scaled_int8_quant")(q, x, scales, None)
    ours, our_scales = dynamic_per_token_quant_int8(x)
    torch.testing.assert_close(our_scales, scales, rtol=1.3e-6, atol=0)
    assert (ours.int() - q.int()).abs().max() <= 1
    assert (ours != q).double().mean() < 0.01

"""Against the own methods of vLLM's layers; its compiled kernels: test_reference_kernels.py."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm")

from vllm.config import VllmConfig
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.activation import GeluAndMul
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from vllm_fl.conformance.tensors import random
from vllm_fl_reference.impl.activation import gelu_and_mul
from vllm_fl_reference.impl.activation import silu_and_mul
from vllm_fl_reference.impl.normalization import rms_norm
from vllm_fl_reference.impl.rotary import rotary_embedding

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
TOKENS = pytest.mark.parametrize("tokens", [1, 7, 64])

TOLERANCE = {torch.float32: {"rtol": 2e-6, "atol": 2e-6}, torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-3}}


@pytest.fixture(autouse=True)
def _config():
    with set_current_vllm_config(VllmConfig()):
        yield


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

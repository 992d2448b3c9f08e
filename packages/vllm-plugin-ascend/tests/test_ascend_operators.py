"""Activations, norms, rotary embedding and quantisation: what the kernels are asked and what comes back."""

from __future__ import annotations

import pytest
import torch
from ascend_cases import FLOATING
from ascend_cases import HALVES
from ascend_cases import call
from ascend_cases import close
from ascend_cases import fresh
from ascend_cases import random
from ascend_cases import refusal
from ascend_cases import strided
from ascend_cases import unchanged

from vllm_fl_reference.impl import activation
from vllm_fl_reference.impl import normalization
from vllm_fl_reference.impl import quantization
from vllm_fl_reference.impl import rotary

SHAPES = ((0, 32), (1, 2), (7, 34), (2, 19, 64))


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("shape", [*SHAPES, (32,)])
@pytest.mark.parametrize("layout", [lambda x: x, strided], ids=["whole", "sliced"])
def test_gated_activations(backend, npu, dtype, shape, layout):
    x = layout(random(*shape, dtype=dtype, scale=3))
    check = unchanged(x)
    for name, arguments, kernel, truth in (
        ("silu_and_mul", (), "npu_swiglu", activation.silu_and_mul),
        ("gelu_and_mul", ("none",), "npu_geglu", activation.gelu_and_mul),
        ("gelu_and_mul", ("tanh",), "npu_geglu", activation.gelu_and_mul),
    ):
        npu.calls.clear()
        out = call(backend, name, x, *arguments)
        close(out, truth(x, *arguments))
        fresh(out, x)
        check()
        assert npu.calls == ({kernel: 1} if x.numel() else {})


def test_the_first_half_is_activated(backend):
    x = torch.tensor([[3.0, -2.0]])
    assert call(backend, "silu_and_mul", x).item() == pytest.approx(-2 * 3 * torch.sigmoid(x[0, 0]).item())
    assert call(backend, "gelu_and_mul", x).item() == pytest.approx(-5.9919, abs=1e-3)


def test_activations_refuse(backend):
    assert "odd" in refusal(backend, "silu_and_mul", random(2, 3))
    assert "float64" in refusal(backend, "silu_and_mul", random(2, 4).double())
    assert "8 dimensions" in refusal(backend, "gelu_and_mul", random(1, 1, 1, 1, 1, 1, 1, 1, 2))
    with pytest.raises(ValueError, match="approximate"):
        backend.gelu_and_mul(random(2, 4), "sigmoid")


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", [lambda x: x, strided], ids=["whole", "sliced"])
def test_rms_norm(backend, npu, dtype, shape, layout):
    x, residual = (layout(random(*shape, dtype=dtype, seed=s)) for s in (0, 1))
    weight = random(shape[-1], dtype=dtype, seed=2)
    check = unchanged(x, residual, weight)
    out = call(backend, "rms_norm", x, None, weight, 1e-5)
    close(out, normalization.rms_norm(x, None, weight, 1e-5))
    fresh(out, x, residual, weight)
    outs = call(backend, "rms_norm", x, residual, weight, 1e-5)
    for mine, right in zip(outs, normalization.rms_norm(x, residual, weight, 1e-5), strict=True):
        close(mine, right)
        fresh(mine, x, residual, weight)
    fresh(outs[0], outs[1])
    check()
    assert npu.calls == ({"npu_rms_norm": 1, "npu_add_rms_norm": 1} if x.numel() else {})


def test_rms_norm_epsilon_reaches_the_kernel(backend):
    x = torch.full((1, 8), 1e-3)
    for residual in (None, torch.zeros(1, 8)):
        out = call(backend, "rms_norm", x, residual, torch.ones(8), 1.0)
        assert (out if residual is None else out[0]).max().item() == pytest.approx(1e-3, rel=1e-3)


def test_rms_norm_refuses(backend):
    x, weight = random(2, 8, dtype=torch.bfloat16), random(8)
    assert "needs a weight" in refusal(backend, "rms_norm", x, None, None, 1e-6)
    assert "x's dtype" in refusal(backend, "rms_norm", x, None, weight, 1e-6)
    assert "2 to 8" in refusal(backend, "rms_norm", x[0], None, weight.bfloat16(), 1e-6)
    assert "residual" in refusal(backend, "rms_norm", x, x.float(), weight.bfloat16(), 1e-6)


def _table(rot: int, dtype: torch.dtype) -> torch.Tensor:
    angles = torch.outer(torch.arange(50.0), 0.7 ** torch.arange(rot / 2))
    return torch.cat([angles.cos(), angles.sin()], -1).to(dtype)


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rot", [64, 32])
@pytest.mark.parametrize("tokens", [0, 1, 9])
@pytest.mark.parametrize("positions", ["int32", "int64", "gathered", "without cache"])
@pytest.mark.parametrize("inplace", [True, False])
def test_rotary(backend, npu, dtype, interleaved, rot, tokens, positions, inplace):
    cache = _table(rot, dtype)
    cos, sin = cache.chunk(2, -1)
    qkv = random(tokens, 6 * 64, dtype=dtype)
    ids = (torch.arange(tokens) * 7 + 3) % 50
    if positions == "int32":
        ids = ids.int()
    if positions == "gathered":
        cos, sin, ids = cos[ids], sin[ids], None

    def arguments():
        fused = qkv.clone()
        query = fused[:, : 3 * 64].view(tokens, 3, 64)
        key = fused[:, 3 * 64 : 5 * 64].view(tokens, 2, 64)
        packed = cache if positions.startswith("int") else None
        return (query, key, cos, sin, ids, interleaved, inplace, packed), fused

    mine, fused = arguments()
    theirs, _ = arguments()
    outs = call(backend, "rotary_embedding", *mine)
    for out, right in zip(outs, rotary.rotary_embedding(*theirs), strict=True):
        close(out, right)
        assert torch.equal(out[..., rot:], right[..., rot:])
    assert (outs[0] is mine[0] and outs[1] is mine[1]) is inplace
    if inplace:
        assert torch.equal(fused[:, 5 * 64 :], qkv[:, 5 * 64 :])
    else:
        assert torch.equal(fused, qkv)
        fresh(outs[0], *mine[:2])
        fresh(outs[1], *mine[:2])
    assert npu.calls == ({"npu_mrope": 1} if tokens else {})


def test_rotary_keeps_nothing_between_calls(backend):
    """A second model has another table: the atb kernel would go on with the first one."""
    query, key = random(4, 2, 32), random(4, 1, 32, seed=1)
    for cache in (
        _table(32, torch.float32),
        _table(32, torch.float32).flip(0),
        _table(32, torch.float32)[:5],
    ):
        cos, sin = cache.chunk(2, -1)
        ids = torch.arange(4)
        outs = call(backend, "rotary_embedding", query, key, cos, sin, ids, False, False, cache)
        close(outs[0], rotary.rotary_embedding(query, key, cos, sin, ids, False, False)[0])


def test_rotary_refuses(backend):
    cos, sin = _table(64, torch.bfloat16).chunk(2, -1)
    query = random(3, 2, 64, dtype=torch.bfloat16)
    ids = torch.arange(3)
    assert "key" in refusal(backend, "rotary_embedding", query, None, cos, sin, ids)
    assert "table" in refusal(backend, "rotary_embedding", query, query, cos.float(), sin.float(), ids)
    assert "multiples of 32" in refusal(
        backend, "rotary_embedding", query, query, cos[:, :8], sin[:, :8], ids
    )
    assert "T[n, heads" in refusal(backend, "rotary_embedding", query.flatten(1), query, cos, sin, ids)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", [(0, 16), (1, 17), (5, 64)])
def test_int8(backend, npu, dtype, shape):
    x = strided(random(*shape, dtype=dtype))
    if shape[0] > 1:
        x[1] = 0
        x[2, 3] = 100
    check = unchanged(x)
    q, scales = call(backend, "dynamic_per_token_quant_int8", x)
    right_q, right_scales = quantization.dynamic_per_token_quant_int8(x)
    assert q.dtype is torch.int8
    close(scales, right_scales)
    assert (q.int() - right_q.int()).abs().max().item() <= 1 if q.numel() else q.shape == x.shape
    if shape[0] > 1:
        assert not q[1].any()
        assert scales[1].item() > 0
    fresh(q, x)
    fresh(scales, x)
    check()
    assert npu.calls == ({"npu_dynamic_quant": 1} if x.numel() else {})


def test_int8_refuses_float32(backend):
    assert "float32" in refusal(backend, "dynamic_per_token_quant_int8", random(2, 8))

"""The reference and vLLM's compiled kernels, each against float64 and with its own rounding.

Ours round to nearest, as the contract says. Without AVX512-BF16 vLLM's vectorised kernels
truncate to bfloat16, so that no test may ask for equal bits.
"""

from __future__ import annotations

import pytest
import torch

from vllm_fl.conformance import truth
from vllm_fl.conformance.tensors import named
from vllm_fl.conformance.tensors import random
from vllm_fl_reference.impl.activation import gelu_and_mul
from vllm_fl_reference.impl.activation import silu_and_mul
from vllm_fl_reference.impl.normalization import rms_norm
from vllm_fl_reference.impl.quantization import dynamic_per_token_quant_int8
from vllm_fl_reference.impl.rotary import rotary_embedding

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=named)
TOKENS = pytest.mark.parametrize("tokens", [1, 7, 64])

kernels = torch.ops._C


def faithful(out, exact, absolute=2e-6, before=0.0):
    """Fail unless each element is one of the two numbers of its dtype that are next to the exact one.

    Both what is rounded to nearest and what is truncated are.

    Args:
        out: the result.
        exact: in float64.
        absolute: allowed for the computation in float32.
        before: how many roundings of the same kind are allowed in what is rounded.
    """
    eps = torch.finfo(out.dtype).eps
    mantissa, _ = exact.frexp()
    unit = torch.where(exact == 0, 0, (exact / mantissa / 2).abs() * eps)
    error = (out.double() - exact).abs()
    beyond = error - unit - before * eps * exact.abs() - absolute
    assert (beyond <= 0).all(), f"off by {error[beyond > 0][0]} at {exact[beyond > 0][0]}"


def truncated(x):
    """Return float32 values as bfloat16, toward zero."""
    return (x.view(torch.int32) & -0x10000).view(torch.float32).bfloat16()


@DTYPES
@TOKENS
@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"])
def test_activations(name, tokens, dtype):
    x = random(tokens, 2 * 64, dtype=dtype, scale=2.0)
    theirs = torch.empty(tokens, 64, dtype=dtype)
    getattr(kernels, name)(theirs, x)
    ours, kind = {
        "silu_and_mul": (silu_and_mul, "silu"),
        "gelu_and_mul": (gelu_and_mul, "gelu"),
        "gelu_tanh_and_mul": (lambda x: gelu_and_mul(x, "tanh"), "gelu_tanh"),
    }[name]
    exact = truth.gated(x, kind)
    # A processor's erf may be off by 1.5e-7, and both factors of it come to 30 here.
    absolute = 2e-6 if name == "silu_and_mul" else 1e-5
    faithful(ours(x), exact, absolute)
    faithful(theirs, exact, absolute)


@DTYPES
@TOKENS
def test_rms_norm(tokens, dtype):
    x = random(tokens, 128, dtype=dtype)
    weight = random(128, dtype=dtype, seed=2)
    theirs = torch.empty_like(x)
    kernels.rms_norm(theirs, x, weight, 1e-5)
    exact, _ = truth.rms_norm(x, None, weight, 1e-5)
    # The contract rounds to the weight's dtype before it multiplies.
    faithful(rms_norm(x, None, weight, 1e-5), exact, before=1)
    faithful(theirs, exact)


@DTYPES
@TOKENS
def test_rms_norm_with_a_residual(tokens, dtype):
    x, residual = random(2, tokens, 128, dtype=dtype).unbind(0)
    weight = random(128, dtype=dtype, seed=2)
    normed, summed = rms_norm(x, residual, weight, 1e-5)
    exact, total = truth.rms_norm(x, residual, weight, 1e-5)
    their_normed, their_sum = x.clone(), residual.clone()
    kernels.fused_add_rms_norm(their_normed, their_sum, weight, 1e-5)
    faithful(normed, exact, before=1)
    faithful(summed, total)
    faithful(their_sum, total)
    # They normalise the sum that they have rounded, which the contract does not.
    faithful(their_normed, exact, before=1)


@pytest.mark.parametrize("tokens", [1, 64])
def test_a_sum_in_bfloat16_is_rounded_or_truncated_and_that_everywhere(tokens):
    """A sum has one right float32, so that this is to the bit on every processor."""
    x, residual = random(2, tokens, 128, dtype=torch.bfloat16).unbind(0)
    _, summed = rms_norm(x, residual, None, 1e-5)
    wide = x.float() + residual.float()
    assert torch.equal(summed, wide.bfloat16())
    theirs = residual.clone()
    kernels.fused_add_rms_norm(x.clone(), theirs, torch.ones(128, dtype=torch.bfloat16), 1e-5)
    assert torch.equal(theirs, wide.bfloat16()) or torch.equal(theirs, truncated(wide))


@pytest.mark.parametrize("neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize("rot", [64, 32])
@DTYPES
@TOKENS
def test_rotary(tokens, dtype, rot, neox):
    angles = torch.outer(torch.arange(256.0), 10000.0 ** (-torch.arange(rot // 2) / (rot // 2)))
    cache = torch.cat([angles.cos(), angles.sin()], -1).to(dtype)
    positions = (torch.arange(tokens) * 3).flip(0)
    views = []
    for _ in range(2):
        query, key, _v = random(tokens, 14 * 64, dtype=dtype).split([9 * 64, 3 * 64, 2 * 64], -1)
        views.append((query, key))
    exact = [
        truth.rotary(x.unflatten(1, (-1, 64)), *cache.chunk(2, -1), positions, not neox) for x in views[0]
    ]
    # The kernel takes [tokens, heads, head] for another layout: it must get two axes.
    kernels.rotary_embedding(positions, *views[0], 64, cache, neox)
    query, key = (x.unflatten(1, (-1, 64)) for x in views[1])
    rotary_embedding(query, key, *cache.chunk(2, -1), positions, not neox, True, cache)
    for ours, theirs, rotated in zip((query, key), views[0], exact, strict=True):
        faithful(ours, rotated)
        faithful(theirs.unflatten(1, (-1, 64)), rotated)


@DTYPES
@TOKENS
def test_int8(tokens, dtype):
    x = random(tokens, 128, dtype=dtype)
    q, scales = torch.empty(tokens, 128, dtype=torch.int8), torch.empty(tokens, 1)
    kernels.dynamic_scaled_int8_quant(q, x, scales, None)
    ours, our_scales = dynamic_per_token_quant_int8(x)
    torch.testing.assert_close(our_scales, scales, rtol=1.3e-6, atol=0)
    assert (ours.int() - q.int()).abs().max() <= 1
    # Only what lies in the middle of two codes may go either way.
    exact = x.double() / scales.double()
    for codes in (ours, q):
        assert ((codes.double() - exact).abs() <= 0.5 + 1e-4).all()

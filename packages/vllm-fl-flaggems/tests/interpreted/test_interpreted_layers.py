"""Activations, normalisation and rotation: against float64 and against the reference, in small sizes.

In the interpreter the conformance kit runs what has few elements; see test_interpreted_conformance.py.
"""

from __future__ import annotations

import pytest
import torch
from flaggems_asked import asked
from judged import close
from judged import fresh

from vllm_fl.conformance import truth
from vllm_fl.conformance.tensors import contiguous
from vllm_fl.conformance.tensors import every_other
from vllm_fl.conformance.tensors import named
from vllm_fl.conformance.tensors import odd_stride
from vllm_fl.conformance.tensors import random
from vllm_fl.conformance.tensors import transposed
from vllm_fl_flaggems.impl.activation import gelu_and_mul
from vllm_fl_flaggems.impl.activation import silu_and_mul
from vllm_fl_flaggems.impl.normalization import rms_norm
from vllm_fl_flaggems.impl.rotary import rotary_embedding
from vllm_fl_reference.impl import activation as reference_activation
from vllm_fl_reference.impl import normalization as reference_normalization
from vllm_fl_reference.impl import rotary as reference_rotary

DTYPES = (torch.float32, torch.float16)
LAYOUTS = (contiguous, odd_stride, transposed, every_other)

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=named)
by_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)


def near(out: torch.Tensor, reference: torch.Tensor) -> None:
    """Two roundings of one value differ by a step at most."""
    assert out.dtype is reference.dtype
    rtol = {torch.float32: 4e-6, torch.float16: 2**-10}[out.dtype]
    torch.testing.assert_close(out, reference, rtol=rtol, atol=2e-6)


# -- activations --------------------------------------------------------------


@by_dtype
@by_layout
@pytest.mark.parametrize("shape", [(5, 14), (2, 3, 32), (1, 2)], ids=str)
def test_silu_and_mul(shape, layout, dtype):
    x = layout(random(*shape, dtype=dtype, scale=3))
    kept = x.clone()
    assert asked("silu_and_mul", x) is True
    out = silu_and_mul(x)
    close(out, truth.gated(x, "silu"), dtype)
    near(out, reference_activation.silu_and_mul(x))
    fresh(out, x)
    assert torch.equal(x, kept)


@by_dtype
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("layout", [contiguous, odd_stride], ids=lambda f: f.__name__)
def test_gelu_and_mul(layout, approximate, dtype):
    x = layout(random(2, 3, 30, dtype=dtype, scale=2))
    assert asked("gelu_and_mul", x, approximate) is True
    out = gelu_and_mul(x, approximate)
    close(out, truth.gated(x, "gelu" if approximate == "none" else "gelu_tanh"), dtype)
    near(out, reference_activation.gelu_and_mul(x, approximate))
    fresh(out, x)


def test_another_gelu_is_the_callers_fault():
    with pytest.raises(ValueError, match="approximate"):
        gelu_and_mul(random(1, 4), "sigmoid")


@pytest.mark.parametrize("function", [silu_and_mul, gelu_and_mul])
def test_large_values_and_not_a_number(function):
    x = torch.tensor([[1e4, -1e4, float("nan"), 2.0, 1.0, 1.0, 1.0, float("nan")]])
    out = function(x)
    assert out[0, 0] == 1e4
    assert out[0, 1] == 0
    assert out[0, 2:].isnan().all()


@by_dtype
def test_no_tokens(dtype):
    for shape in ((0, 8), (3, 0, 8)):
        x = random(*shape, dtype=dtype)
        half = (*shape[:-1], 4)
        for out in (silu_and_mul(x), gelu_and_mul(x)):
            assert out.shape == half
            assert out.dtype is dtype
        assert rms_norm(x, None, None, 1e-6).shape == x.shape
        assert [out.shape for out in rms_norm(x, x.clone(), None, 1e-6)] == [x.shape] * 2
    query, key = random(0, 2, 8, dtype=dtype), random(0, 1, 8, dtype=dtype)
    cos = sin = random(4, 4)
    positions = torch.zeros(0, dtype=torch.int64)
    assert rotary_embedding(query, key, cos, sin, positions) == (query, key)
    out, none = rotary_embedding(query, None, cos, sin, positions, inplace=False)
    assert out.shape == query.shape
    assert out is not query
    assert none is None


# -- normalisation ------------------------------------------------------------


@by_dtype
@by_layout
@pytest.mark.parametrize("shape", [(4, 24), (2, 3, 33), (3, 1)], ids=str)
def test_rms_norm(shape, layout, dtype):
    x = layout(random(*shape, dtype=dtype))
    kept = x.clone()
    weight = random(shape[-1], dtype=dtype, seed=1)
    assert asked("rms_norm", x, None, weight, 1e-5) is True
    out = rms_norm(x, None, weight, 1e-5)
    # One rounding, where the contract has two: both are within its tolerance.
    close(out, truth.rms_norm(x, None, weight, 1e-5)[0], dtype)
    torch.testing.assert_close(
        out,
        reference_normalization.rms_norm(x, None, weight, 1e-5),
        rtol=2e-3 if dtype.itemsize == 2 else 4e-6,
        atol=2e-6,
    )
    fresh(out, x, weight)
    assert torch.equal(x, kept)


@by_dtype
@by_layout
@pytest.mark.parametrize("shape", [(4, 24), (2, 3, 33)], ids=str)
def test_add_rms_norm(shape, layout, dtype):
    x, residual = layout(random(*shape, dtype=dtype)), layout(random(*shape, dtype=dtype, seed=1))
    weight = random(shape[-1], dtype=torch.float32, seed=2)
    normed_truth, total_truth = truth.rms_norm(x, residual, weight, 1e-6)
    reference = reference_normalization.rms_norm(x, residual, weight, 1e-6)
    assert asked("rms_norm", x, residual, weight, 1e-6) is True
    normed, total = rms_norm(x, residual, weight, 1e-6)
    close(normed, normed_truth, dtype)
    close(total, total_truth, dtype)
    near(normed, reference[0])
    assert torch.equal(total, reference[1])
    assert normed.is_contiguous()
    assert total.is_contiguous()
    assert not torch._C._is_alias_of(normed, total)


def test_a_strided_input_is_not_written_and_what_is_returned_is_right():
    """FlagGems' own function leaves a strided x as it is; that is why the result counts."""
    x, residual = odd_stride(random(3, 8)), random(3, 8, seed=1)
    kept = x.clone()
    normed, total = rms_norm(x, residual, None, 1e-6)
    assert torch.equal(x, kept)
    assert normed is not x
    expected = reference_normalization.rms_norm(kept, random(3, 8, seed=1), None, 1e-6)
    near(normed, expected[0])
    near(total, expected[1])


@by_dtype
def test_x_and_residual_may_be_one_tensor(dtype):
    x = random(3, 8, dtype=dtype)
    expected = reference_normalization.rms_norm(x, x, None, 1e-6)
    normed, total = rms_norm(x, x, None, 1e-6)
    near(normed, expected[0])
    near(total, expected[1])


@by_dtype
@pytest.mark.parametrize("residual", [False, True])
def test_weights(residual, dtype):
    x = random(3, 8, dtype=dtype)
    for weight in (None, random(8, seed=3), random(16, dtype=dtype, seed=3)[::2]):
        second = random(3, 8, dtype=dtype, seed=1) if residual else None
        expected = truth.rms_norm(x, second, weight, 1e-5)[0]
        out = rms_norm(x.clone(), second, weight, 1e-5)
        close(out[0] if residual else out, expected, dtype)


def test_norm_extremes():
    zeros = rms_norm(torch.zeros(2, 8, dtype=torch.float16), None, None, 1e-6)
    assert torch.equal(zeros, torch.zeros_like(zeros))
    large = torch.full((1, 64), 6e4, dtype=torch.float16)  # its square is no float16
    near(rms_norm(large, None, None, 1e-6), torch.ones_like(large))


def test_a_row_that_takes_the_looping_kernel():
    x, weight = random(2, 5125), random(5125, seed=1)
    close(rms_norm(x, None, weight, 1e-6), truth.rms_norm(x, None, weight, 1e-6)[0], torch.float32)


# -- rotation -----------------------------------------------------------------


def tables(rows: int, rot: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    angles = torch.outer(torch.arange(float(rows)), 0.5 ** torch.arange(rot / 2))
    cache = torch.cat([angles.cos(), angles.sin()], -1)
    return cache, *cache.chunk(2, -1)


def fused(
    n: int, heads: int, kv_heads: int, head: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return query and key as views of one qkv."""
    qkv = random(n, (heads + 2 * kv_heads) * head, dtype=dtype)
    query, key, _ = qkv.split([heads * head, kv_heads * head, kv_heads * head], -1)
    return query.view(n, heads, head), key.view(n, kv_heads, head)


@by_dtype
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(("head", "rot"), [(16, 16), (20, 12), (6, 6)])
@pytest.mark.parametrize("positions", [torch.int32, torch.int64, None], ids=named)
def test_rotary(positions, head, rot, inplace, interleaved, dtype):
    n = 5
    query, key = fused(n, 3, 1, head, dtype)
    cache, cos, sin = tables(40, rot)
    ids = [7, 0, 39, 7, 3]
    if positions is None:
        cos, sin, cache = cos[ids], sin[ids], None
        position_ids = None
    else:
        position_ids = torch.tensor(ids, dtype=positions)
    kept = query.clone(), key.clone()
    expected = [truth.rotary(x[..., :rot], cos, sin, position_ids, interleaved) for x in kept]
    other = reference_rotary.rotary_embedding(*kept, cos, sin, position_ids, interleaved, False, cache)
    assert asked("rotary_embedding", query, key, cos, sin, position_ids, interleaved, inplace, cache) is True
    outs = rotary_embedding(query, key, cos, sin, position_ids, interleaved, inplace, cache)
    for x, before, out, right, theirs in zip((query, key), kept, outs, expected, other, strict=True):
        close(out[..., :rot], right, dtype)
        torch.testing.assert_close(out, theirs, rtol=2**-10 if dtype.itemsize == 2 else 4e-6, atol=1e-6)
        assert torch.equal(out[..., rot:], before[..., rot:])
        if inplace:
            assert out is x
        else:
            assert torch.equal(x, before)
            fresh(out, x)


@by_dtype
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("inplace", [False, True])
def test_rotary_without_a_key(inplace, heads, dtype):
    query = random(4, heads, 8, dtype=dtype)
    _, cos, sin = tables(16, 8)
    position_ids = torch.tensor([3, 2, 15, 0])
    expected = truth.rotary(query, cos, sin, position_ids, False)
    out, none = rotary_embedding(query, None, cos, sin, position_ids, False, inplace)
    close(out, expected, dtype)
    assert none is None
    assert (out is query) is inplace


def test_rotary_tables_of_any_dtype_and_stride():
    query, key = fused(3, 2, 2, 8, torch.float16)
    _, cos, sin = tables(8, 8)
    position_ids = torch.tensor([1, 9, 5, 9, 7, 9])[::2]
    expected = truth.rotary(query, cos, sin, position_ids, False)
    for table in (torch.Tensor.contiguous, odd_stride, lambda x: x.t().contiguous().t()):
        out, _ = rotary_embedding(query, key, table(cos), table(sin), position_ids, False, False)
        close(out, expected, torch.float16)
    narrow = [table.half() for table in (cos, sin)]
    out, _ = rotary_embedding(query, key, *narrow, position_ids, False, False)
    close(out, truth.rotary(query, *narrow, position_ids, False), torch.float16)

"""Every operator against the same formula in float64, and its limits."""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import Any

import pytest
import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from vllm_fl.dispatch import OpManager

    Call = Callable[..., Any]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = ((0, 16), (1, 2), (7, 34), (2, 19, 64))


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def sliced(x: Tensor) -> Tensor:
    """Return the same values as a view of a wider tensor."""
    wider = torch.full((*x.shape[:-1], x.shape[-1] + 3), torch.nan, dtype=x.dtype)
    wider[..., : x.shape[-1]] = x
    return wider[..., : x.shape[-1]]


def close(out: Tensor, truth: Tensor, dtype: torch.dtype) -> None:
    """One rounding to ``dtype``, and a little for float32."""
    assert out.dtype is dtype
    assert out.is_contiguous()
    precision = torch.finfo(dtype).eps if dtype is not torch.float32 else 1e-5
    torch.testing.assert_close(out.double(), truth, rtol=2 * precision, atol=precision / 10)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", [lambda x: x, sliced], ids=["whole", "sliced"])
def test_gated_activations(call: Call, dtype: torch.dtype, shape: Any, layout: Any) -> None:
    x = layout(random(*shape, dtype=dtype))
    before = x.clone()
    gate, up = x.double().chunk(2, dim=-1)
    close(call("silu_and_mul", x), functional.silu(gate) * up, dtype)
    for approximate in ("none", "tanh"):
        truth = functional.gelu(gate, approximate=approximate) * up
        close(call("gelu_and_mul", x, approximate), truth, dtype)
    assert torch.equal(x, before)


def test_activations_refuse_what_is_no_activation(call: Call) -> None:
    with pytest.raises(ValueError, match="odd"):
        call("silu_and_mul", random(2, 3))
    with pytest.raises(ValueError, match="approximate"):
        call("gelu_and_mul", random(2, 4), "sigmoid")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", [lambda x: x, sliced], ids=["whole", "sliced"])
def test_rms_norm(call: Call, dtype: torch.dtype, shape: Any, layout: Any) -> None:
    x, residual = (layout(random(*shape, dtype=dtype, seed=seed)) for seed in (1, 2))
    weight = random(shape[-1], dtype=dtype, seed=3)
    before = x.clone(), residual.clone()

    def truth(total: Tensor) -> Tensor:
        return total / torch.sqrt(total.square().mean(-1, keepdim=True) + 1e-5) * weight.double()

    close(call("rms_norm", x, None, weight, 1e-5), truth(x.double()), dtype)
    normed, summed = call("rms_norm", x, residual, weight, 1e-5)
    close(normed, truth(x.double() + residual.double()), dtype)
    close(summed, x.double() + residual.double(), dtype)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


def test_rms_norm_leaves_to_others_what_it_cannot(call: Call) -> None:
    x = random(2, 8, dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match="needs a weight"):
        call("rms_norm", x, None, None, 1e-5)
    with pytest.raises(NotImplementedError, match="weight of x's dtype"):
        call("rms_norm", x, None, torch.ones(8), 1e-5)
    with pytest.raises(NotImplementedError, match="residual of x's dtype"):
        call("rms_norm", x, random(2, 8), torch.ones(8, dtype=torch.bfloat16), 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rot", [8, 16])
def test_rotary_embedding(
    call: Call, dtype: torch.dtype, index: torch.dtype, interleaved: bool, rot: int
) -> None:
    qkv = random(5, (3 + 2 + 2) * 16, dtype=dtype)
    query, key, _ = qkv.split([48, 32, 32], dim=-1)
    query, key = query.view(5, 3, 16), key.view(5, 2, 16)
    angles = random(32, rot // 2, seed=1).double()
    positions = torch.tensor([3, 0, 31, 3, 7], dtype=index)

    def truth(x: Tensor) -> Tensor:
        cos, sin = (table[positions.long()].unsqueeze(1) for table in (angles.cos(), angles.sin()))
        pairs = x[..., :rot].double().unflatten(-1, (-1, 2) if interleaved else (2, -1))
        a, b = pairs.unbind(-1 if interleaved else -2)
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1 if interleaved else -2)
        return torch.cat((turned.flatten(-2), x[..., rot:].double()), dim=-1)

    truths = truth(query), truth(key)
    tables = angles.cos().float(), angles.sin().float()
    before = query.clone()
    new = call("rotary_embedding", query, key, *tables, positions, interleaved, False)
    assert torch.equal(query, before)
    written = call("rotary_embedding", query, key, *tables, positions, interleaved, True)
    assert written[0] is query
    assert written[1] is key
    for found, right in zip((*new, query.contiguous(), key.contiguous()), truths * 2, strict=True):
        close(found, right, dtype)
    # Without a key, and with one row of the tables for each token.
    rows = (table[positions.long()] for table in tables)
    alone, none = call("rotary_embedding", before.clone(), None, *rows, None, interleaved)
    close(alone, truths[0], dtype)
    assert none is None


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_fused_experts(call: Call, activation: str, tokens: int) -> None:
    x = random(tokens, 16)
    w1, w2 = random(5, 24, 16, seed=1), random(5, 16, 12, seed=2)
    ids = torch.stack([torch.randperm(5, generator=torch.Generator().manual_seed(t))[:2] for t in range(9)])
    ids = ids[:tokens].int()
    weights = random(tokens, 2, seed=3).softmax(-1)
    truth = torch.zeros(tokens, 16, dtype=torch.float64)
    for token in range(tokens):
        for slot in range(2):
            expert = int(ids[token, slot])
            gate, up = (w1[expert].double() @ x[token].double()).chunk(2)
            act = functional.silu(gate) if activation == "silu" else functional.gelu(gate)
            truth[token] += weights[token, slot].double() * (w2[expert].double() @ (act * up))
    out = call("fused_experts", x, w1, w2, weights, ids, activation=activation)
    torch.testing.assert_close(out.double(), truth, rtol=1e-5, atol=1e-4)
    for refused in (
        {"activation": "relu"},
        {"apply_router_weight_on_input": True},
        {"expert_map": torch.arange(5, dtype=torch.int32)},
    ):
        with pytest.raises(NotImplementedError):
            call("fused_experts", x, w1, w2, weights, ids, **refused)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 16), (1, 1), (7, 33)])
def test_dynamic_per_token_quant_int8(call: Call, dtype: torch.dtype, shape: Any) -> None:
    x = sliced(random(*shape, dtype=dtype))
    q, scales = call("dynamic_per_token_quant_int8", x)
    assert q.dtype is torch.int8
    torch.testing.assert_close(
        scales.double(), x.double().abs().amax(-1, keepdim=True) / 127, rtol=1e-6, atol=0
    )
    error = (q.double() * scales.double() - x.double()).abs()
    assert (error <= scales.double() * 0.501).all()


def test_a_row_of_zeros_is_quantised(call: Call) -> None:
    q, scales = call("dynamic_per_token_quant_int8", torch.zeros(2, 8))
    assert not q.any()
    assert (scales > 0).all()


def test_what_is_traceable_is_traced_in_one_graph(manager: OpManager, call: Call) -> None:
    silu_and_mul = manager.resolve("silu_and_mul")
    x = random(4, 32)
    compiled = torch.compile(silu_and_mul, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), silu_and_mul(x))

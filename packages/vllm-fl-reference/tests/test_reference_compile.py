"""Every operator is traced whole, with dynamic shapes, and gives what eager gives."""

from __future__ import annotations

import pytest
import torch
from reference_cases import CASES
from reference_cases import call

from vllm_fl_reference.impl.activation import silu_and_mul
from vllm_fl_reference.impl.normalization import rms_norm
from vllm_fl_reference.impl.rotary import rotary_embedding


@pytest.fixture(autouse=True)
def _forget():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def same(outs, expected):
    outs = outs if isinstance(outs, tuple) else (outs,)
    for out, want in zip(outs, expected, strict=True):
        assert out.dtype is want.dtype
        assert out.stride() == want.stride()
        # A compiler may contract a multiplication and an addition where eager does not,
        # which now and then tips a rounding.
        narrow = {torch.bfloat16: 2**-7, torch.float8_e4m3fn: 2**-3}.get(out.dtype, 1e-5)
        torch.testing.assert_close(out.double(), want.double(), rtol=narrow, atol=1e-6)


def traced(case):
    """Return what is compiled: a function of a case's arguments, by name.

    Query and key are split from their qkv inside, as in a layer. (torch 2.13 fails
    on two views of one buffer that are arguments of a graph and written there.)
    """

    def function(arguments):
        if "qkv" not in arguments:
            return call(case.function, arguments)
        qkv = arguments["qkv"]
        views = {"query": qkv[:, :64].view(-1, 4, 16), "key": qkv[:, 64:96].view(-1, 2, 16)}
        rest = {name: value for name, value in arguments.items() if name != "qkv"}
        query, key = call(case.function, views | rest)
        return query * 1, key * 1

    return function


def fed(case, n):
    arguments = case.arguments(n, torch.bfloat16)
    if "query" in arguments:
        qkv = arguments.pop("query").as_strided((n, 128), (128, 1)).clone()
        del arguments["key"]
        arguments = {"qkv": qkv} | arguments
    return arguments


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_graph_serves_every_number_of_tokens(case):
    """vLLM drops the guards: a second graph here would be a wrong result there."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    function = traced(case)
    run = torch.compile(function, backend=backend, fullgraph=True)
    with torch.inference_mode():
        # From many to few, fewer than there are experts, and back.
        for n in (41, 7, 2, 333):
            arguments, plain = fed(case, n), fed(case, n)
            for value in arguments.values():
                if isinstance(value, torch.Tensor) and value.shape[0] == n:
                    torch._dynamo.mark_dynamic(value, 0)
            outs, expected = run(arguments), function(plain)
            same(outs, expected if isinstance(expected, tuple) else (expected,))
            for name, value in arguments.items():
                if isinstance(value, torch.Tensor):
                    same(value, (plain[name],))
    assert len(graphs) == 1


def test_inductor_leaves_its_inputs_alone():
    """A layer's run of operators: the residual stream must outlive every one of them."""
    angles = torch.outer(torch.arange(64.0), 0.5 ** torch.arange(4.0))
    cache = torch.cat([angles.cos(), angles.sin()], -1)

    def layer(x, residual, weight, positions):
        normed, summed = rms_norm(x, residual, weight, 1e-5)
        query, key, value = normed.split([16, 8, 8], -1)
        query, key = rotary_embedding(
            query.view(-1, 2, 8), key.view(-1, 1, 8), *cache.chunk(2, -1), positions, False, True, cache
        )
        gated = silu_and_mul(normed)
        alone = rms_norm(x, None, None, 1e-5)
        return query * 2, key * 2, value + 1, gated * 3, summed * 2, normed * 2, alone * 2

    run = torch.compile(layer, fullgraph=True, dynamic=True)
    with torch.inference_mode():
        for n in (9, 4):
            generator = torch.Generator().manual_seed(n)
            x, residual = torch.randn(2, n, 32, generator=generator).unbind(0)
            weight = torch.linspace(0.5, 1.5, 32)
            kept = [x.clone(), residual.clone()]
            positions = torch.arange(n)
            outs = run(x, residual, weight, positions)
            assert torch.equal(x, kept[0])
            assert torch.equal(residual, kept[1])
            for out, want in zip(outs, layer(x, residual, weight, positions), strict=True):
                torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)

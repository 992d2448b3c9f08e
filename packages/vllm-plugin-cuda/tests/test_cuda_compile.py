"""What is said to be traceable is: one graph for every number of tokens, predicates in it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from vllm_fl.dispatch import OpManager
from vllm_fl.dispatch import OpRegistry
from vllm_fl.dispatch import SelectionPolicy
from vllm_fl.dispatch import policy_context
from vllm_fl_cuda.cuda import CudaBackend


@pytest.fixture
def backend():
    torch._dynamo.reset()
    registry = OpRegistry()
    registry.register_backend(CudaBackend("cpu"))
    manager = OpManager(registry)
    # With every question in front of the kernel, and nothing else that could run.
    with policy_context(SelectionPolicy.from_dict(prefer="vendor", strict=True)):
        traced = (name for name, (impl,) in registry.snapshot().impls_by_op.items() if impl.traceable)
        available = [name for name in traced if manager.explain(name).impl_id]
        resolved = {name: manager.resolve_with_native(name, None).fn for name in available}
    yield SimpleNamespace(**resolved)
    torch._dynamo.reset()


def test_a_layer_is_one_graph_of_vllms_operators(backend):
    """And leaves alone what is not donated: the input of the norm without a residual."""
    graphs = []

    def compiler(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("inductor")(graph, inputs)

    def layer(x, residual, weight, positions, cache):
        normed, summed = backend.rms_norm(x, residual, weight, 1e-5)
        query, key, value = normed.split([16, 8, 8], -1)
        query, key = query.view(-1, 2, 8), key.view(-1, 1, 8)
        cos, sin = cache.chunk(2, -1)
        query, key = backend.rotary_embedding(query, key, cos, sin, positions, False, True, cache)
        gated = backend.silu_and_mul(normed)
        other = backend.gelu_and_mul(normed, "tanh")
        heads = backend.rms_norm(normed.view(-1, 2, 16)[..., :8], None, None, 1e-5)
        codes, scales = backend.dynamic_per_token_quant_int8(normed)
        return (
            query * 2,
            key * 2,
            value + 1,
            gated * 3,
            other * 2,
            summed * 2,
            normed * 2,
            heads,
            codes,
            scales,
        )

    run = torch.compile(layer, backend=compiler, fullgraph=True, dynamic=True)
    made = []
    with torch.inference_mode():
        for tokens in (33, 9, 4, 333):
            generator = torch.Generator().manual_seed(tokens)
            x, residual = torch.randn(2, tokens, 32, generator=generator).unbind(0)
            cache = torch.randn(64, 8, generator=generator)
            rest = torch.linspace(0.5, 1.5, 32), torch.arange(tokens) % 64, cache
            expected = layer(x.clone(), residual.clone(), *rest)
            for out, want in zip(run(x.clone(), residual.clone(), *rest), expected, strict=True):
                assert out.stride() == want.stride()
                torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
            made.append(len(graphs))
    # The first call may start over, and then makes two; no later one makes another.
    assert made == made[:1] * 4
    called = {str(node.target) for node in graphs[-1].graph.nodes if node.op == "call_function"}
    assert {
        "_C.fused_add_rms_norm.default",
        "_C.rotary_embedding.default",
        "_C.silu_and_mul.default",
    } <= called


def test_what_is_not_donated_is_not_written(backend):
    """A compiler must know what a kernel writes; x is read again behind it."""

    def function(x, weight):
        return backend.rms_norm(x, None, weight, 1e-5) + x, backend.silu_and_mul(x).sum() + x.sum()

    x, weight = torch.randn(7, 32), torch.ones(32)
    kept = x.clone()
    got = torch.compile(function, fullgraph=True)(x, weight)
    assert torch.equal(x, kept)
    for out, want in zip(got, function(x, weight), strict=True):
        torch.testing.assert_close(out, want)

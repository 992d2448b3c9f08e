"""Inductor itself, of which the conformance kit does not ask: it traces, and generates no code."""

from __future__ import annotations

import torch

from vllm_fl_reference.impl.activation import silu_and_mul
from vllm_fl_reference.impl.normalization import rms_norm
from vllm_fl_reference.impl.rotary import rotary_embedding


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

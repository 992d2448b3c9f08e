"""The opaque form and the trial of a layer: what is called at run time, and what its results must be.

The layers are built by hand in this process, for a compiler, with implementations that break a promise.
"""

from __future__ import annotations

import gc
import logging
import weakref
from typing import TYPE_CHECKING
from typing import Any

import pytest
from evidence import is_served

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


def _impl(fn: Callable[..., Any], op_name: str, name: str, **more: Any) -> Any:
    from vllm_fl.dispatch import BackendImplKind
    from vllm_fl.dispatch import OpImpl

    return OpImpl(op_name, f"vendor.unit.{name}", BackendImplKind.VENDOR, fn, vendor="unit", **more)


def _random(*shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(dtype or torch.float32)


def _check(ours: Any, theirs: Any, *, exact: bool = True) -> None:
    import torch

    ours, theirs = ([one] if not isinstance(one, tuple) else one for one in (ours, theirs))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, **({"rtol": 0, "atol": 0} if exact else {}))


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    """Return a function that returns what the log says, with nothing said before."""
    from vllm_fl.integration import results
    from vllm_fl.integration import seam

    monkeypatch.setattr(seam, "said", set())
    monkeypatch.setattr(results, "_warned", set())
    for name in ("vllm", seam.logger.name):
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    caplog.set_level(logging.INFO, seam.logger.name)
    return lambda: caplog.text


def _compiled(layer: Any) -> Callable[..., Any]:
    import torch

    torch._dynamo.reset()
    return torch.compile(lambda *args: layer(*args), fullgraph=True, dynamic=True)  # type: ignore[no-any-return]


def _silu(x: Any) -> Any:
    from vllm_fl_reference.impl import activation

    return activation.silu_and_mul(x)


def test_opaque_may_write_what_it_is_given(compiled: Callable[..., Any]) -> None:
    import torch
    from vllm.model_executor.layers.layernorm import RMSNorm

    from vllm_fl_reference.impl import normalization

    def in_place(x: Any, residual: Any, weight: Any, epsilon: float) -> Any:
        # Both are donated where there is a residual; without one x is not.
        result = normalization.rms_norm(x, residual, weight, epsilon)
        return result if residual is None else (x.copy_(result[0]), residual.copy_(result[1]))

    layer = compiled(RMSNorm, 32, impls=[_impl(in_place, "rms_norm", "writes")], order=["vendor"])
    args = [_random(5, 64, dtype=torch.float32)[:, ::2] for _ in range(2)]
    kept = [a.clone() for a in args]

    def call(*a: Any) -> Any:
        return layer(*a), sum(a)

    result, untouched = torch.compile(call, fullgraph=True)(*args)
    _check(result, RMSNorm.forward_native(layer, *[a.clone() for a in kept]), exact=False)
    _check(untouched, sum(kept), exact=False)


def _returns_x(x: Any, residual: Any, weight: Any, epsilon: float) -> Any:
    return x if residual is None else (x, residual.clone())


def _strided(x: Any) -> Any:
    return x[..., ::2]


@pytest.mark.parametrize(
    ("class_name", "impl", "complaint"),
    [
        ("RMSNorm", _returns_x, "returns one of its arguments"),
        ("SiluAndMul", _strided, "returns a tensor that is not contiguous"),
    ],
)
def test_opaque_result_that_a_compiler_would_misread(
    compiled: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
    class_name: str,
    impl: Callable[..., Any],
    complaint: str,
) -> None:
    """It is found when the layer is built, and the next candidate takes the layer."""
    import torch
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.layernorm import RMSNorm

    cls, args = {"RMSNorm": (RMSNorm, (32,)), "SiluAndMul": (SiluAndMul, ())}[class_name]
    op_name = {"RMSNorm": "rms_norm", "SiluAndMul": "silu_and_mul"}[class_name]
    impls = [_impl(impl, op_name, "bad", writes=())]
    layer = compiled(cls, *args, impls=impls, order=["vendor", "reference"])
    assert complaint in caplog.text
    assert "vendor.unit.bad" in caplog.text
    x = _random(5, 32, dtype=torch.float32)
    _check(
        layer(x),
        cls.forward_native(layer, x) if class_name == "RMSNorm" else cls.forward_native(x),
        exact=False,
    )


def _refuses(x: Any) -> Any:
    raise NotImplementedError("not for these inputs")


def _dies(x: Any) -> Any:
    raise RuntimeError("no such kernel")


@pytest.mark.parametrize("impl", [_refuses, _dies])
def test_opaque_gives_way_to_the_layers_own_path(
    compiled: Callable[..., Any], impl: Callable[..., Any]
) -> None:
    """A compiler makes more of it than of a call that always ends there."""
    import torch
    from vllm.model_executor.layers.activation import SiluAndMul

    layer = compiled(SiluAndMul, impls=[_impl(impl, "silu_and_mul", "bad")], order=["vendor", "native"])
    assert not is_served(layer)
    x = _random(5, 32, dtype=torch.float32)
    _check(layer(x), SiluAndMul.forward_native(x), exact=False)


def test_explicit_implementation_that_fails_is_raised(compiled: Callable[..., Any]) -> None:
    from vllm.model_executor.layers.activation import SiluAndMul

    with pytest.raises(Exception, match=r"vendor\.unit\.bad failed on its first call.*no such kernel"):
        compiled(SiluAndMul, impls=[_impl(_dies, "silu_and_mul", "bad")], order=["vendor"])


# -- what a later call returns ------------------------------------------------------------


def _other_strides(result: Any) -> Any:
    import torch

    return torch.stack([result, result], -1)[..., 0]


@pytest.mark.parametrize("is_compiled", [True, False], ids=["compiled", "called"])
@pytest.mark.parametrize(
    ("break_it", "complaint"),
    [
        (lambda x, result: _other_strides(result), "returns a tensor that is not contiguous"),
        (
            lambda x, result: x[..., :16].copy_(result) if x.shape[0] < 0 else result.t().contiguous().t(),
            "not contiguous",
        ),
        (
            lambda x, result: x.view(-1)[: result.numel()].view_as(result).copy_(result),
            "one of its arguments",
        ),
    ],
    ids=["other strides", "transposed", "a view of its argument"],
)
def test_a_result_that_differs_with_the_rows_is_copied(
    compiled: Callable[..., Any],
    said: Callable[[], str],
    break_it: Callable[..., Any],
    complaint: str,
    is_compiled: bool,
) -> None:
    """It is right for one row, as the trial has it, and another one from two rows on."""
    from vllm.model_executor.layers.activation import SiluAndMul

    def impl(x: Any) -> Any:
        return _silu(x) if x.shape[0] == 1 else break_it(x, _silu(x))

    layer = compiled(SiluAndMul, impls=[_impl(impl, "silu_and_mul", "rows", writes=())], order=["vendor"])
    call = _compiled(layer) if is_compiled else layer
    for rows in (1, 2, 16, 2):
        x = _random(rows, 32)
        kept = x.clone()
        result = call(x)
        assert result.is_contiguous()
        assert result.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
        _check(result, SiluAndMul.forward_native(kept), exact=False)
    warnings = [line for line in said().splitlines() if complaint in line]
    assert len(warnings) == 1
    assert "vendor.unit.rows of silu_and_mul" in warnings[0]
    assert "float32[2x32]" in warnings[0]


def test_two_results_in_one_memory_are_copied(compiled: Callable[..., Any], said: Callable[[], str]) -> None:
    from vllm.model_executor.layers.layernorm import RMSNorm

    from vllm_fl_reference.impl import normalization

    def impl(x: Any, residual: Any, weight: Any, epsilon: float) -> Any:
        import torch

        result = normalization.rms_norm(x, residual, weight, epsilon)
        if residual is None or x.shape[0] == 1:
            return result
        return tuple(torch.stack(result).unbind())

    layer = compiled(RMSNorm, 32, impls=[_impl(impl, "rms_norm", "one", writes=())], order=["vendor"])
    args = [_random(5, 32), _random(5, 32).flip(0)]
    result = _compiled(layer)(*[a.clone() for a in args])
    assert result[0].untyped_storage().data_ptr() != result[1].untyped_storage().data_ptr()
    _check(result, RMSNorm.forward_native(layer, *args), exact=False)
    assert "returns one of its arguments or of its other results" in said()


@pytest.mark.parametrize(
    ("break_it", "returned"),
    [
        (lambda result: result.double(), "float64[4x16]"),
        (lambda result: result[:-1], "float32[3x16]"),
        (lambda result: None, "None"),
        (lambda result: (result, result), "float32[4x16], float32[4x16]"),
        (lambda result: result.tolist(), "list"),
    ],
    ids=["dtype", "shape", "None", "two", "a list"],
)
@pytest.mark.parametrize("order", [["vendor"], ["vendor", "reference"], ["vendor", "native"]], ids="|".join)
def test_a_result_of_another_kind_is_an_error_of_the_implementation(
    compiled: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
    break_it: Callable[..., Any],
    returned: str,
    order: list[str],
) -> None:
    from vllm.model_executor.layers.activation import SiluAndMul

    def impl(x: Any) -> Any:
        return _silu(x) if x.shape[0] == 1 else break_it(_silu(x))

    layer = compiled(SiluAndMul, impls=[_impl(impl, "silu_and_mul", "kind", writes=())], order=order)
    call, x = _compiled(layer), _random(4, 32)
    if order == ["vendor"]:
        with pytest.raises(RuntimeError, match=r"vendor\.unit\.kind of silu_and_mul returns") as caught:
            call(x)
        text = str(caught.value)
    else:
        _check(call(x), SiluAndMul.forward_native(x), exact=False)
        text = caplog.text
    if "list" not in returned:
        assert f"returns {returned} where float32[4x16] is promised, for float32[4x32]" in text


def test_an_operator_that_writes_its_arguments_and_did_not(
    compiled: Callable[..., Any], said: Callable[[], str]
) -> None:
    import torch
    from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

    from vllm_fl_reference.impl import rotary

    def impl(
        query: Any,
        key: Any,
        cos: Any,
        sin: Any,
        position_ids: Any,
        rotary_interleaved: bool = False,
        inplace: bool = True,
        cos_sin_cache: Any = None,
    ) -> Any:
        its = inplace and query.shape[0] == 1
        return rotary.rotary_embedding(query, key, cos, sin, position_ids, rotary_interleaved, its)

    layer = compiled(
        RotaryEmbedding,
        head_size=32,
        rotary_dim=32,
        max_position_embeddings=64,
        base=10000.0,
        is_neox_style=True,
        dtype=torch.float32,
        impls=[_impl(impl, "rotary_embedding", "new")],
        order=["vendor"],
    )
    positions, query, key = torch.tensor([3, 9, 27]), _random(3, 128), _random(3, 64)
    wanted = layer.forward_native(positions, query.clone(), key.clone())
    _check(tuple(_compiled(layer)(positions, query, key)), tuple(wanted), exact=False)
    assert "returns a new tensor and does not write its argument" in said()


@pytest.mark.parametrize("mode", [0, 3], ids=["eager", "compiled"])
@pytest.mark.parametrize("traceable", [False, True])
def test_an_argument_that_is_returned_or_written_is_found_when_the_layer_is_built(
    compiled: Callable[..., Any], caplog: pytest.LogCaptureFixture, mode: int, traceable: bool
) -> None:
    """In every form, and whatever the implementation says that it writes: without a residual x is kept."""
    from vllm.model_executor.layers.layernorm import RMSNorm

    from vllm_fl_reference.impl import normalization

    def impl(x: Any, residual: Any, weight: Any, epsilon: float) -> Any:
        result = normalization.rms_norm(x, residual, weight, epsilon)
        return x.copy_(result) if residual is None else result

    bad = _impl(impl, "rms_norm", "alias", traceable=traceable)
    layer = compiled(RMSNorm, 32, impls=[bad], order=["vendor", "reference"], mode=mode)
    assert "vendor.unit.alias raised for rms_norm and is set aside" in caplog.text
    x = _random(5, 32)
    kept = x.clone()
    _check(layer(x), RMSNorm.forward_native(layer, kept), exact=False)
    _check(x, kept)


def test_what_is_donated_is_tried_again(
    compiled: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The compiler's tensors are not written, so that a failure at any call is passed on."""
    from vllm.model_executor.layers.layernorm import RMSNorm

    from vllm_fl_reference.impl import normalization

    def impl(x: Any, residual: Any, weight: Any, epsilon: float) -> Any:
        if x.shape[0] > 4:
            x.zero_()
            raise RuntimeError("launch failed")
        return normalization.rms_norm(x, residual, weight, epsilon)

    layer = compiled(RMSNorm, 32, impls=[_impl(impl, "rms_norm", "dies")], order=["vendor", "native"])
    call = _compiled(layer)
    for rows in (2, 8):
        args = [_random(rows, 32), _random(rows, 32).flip(0)]
        _check(call(*[a.clone() for a in args]), RMSNorm.forward_native(layer, *args), exact=False)
    assert "launch failed" in caplog.text


# -- vLLM's own path inside of it ---------------------------------------------------------


def _few_rows(x: Any, *_: Any) -> Any:
    return x.shape[0] <= 4 or "at most 4 rows"


@pytest.mark.parametrize("how", ["predicate", "exception"])
def test_every_layer_has_its_own_path(compiled: Callable[..., Any], how: str) -> None:
    """Two norms share a graph, and one refuses what only vLLM's own path can do with its weights."""
    import torch
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm
    from vllm.model_executor.layers.layernorm import RMSNorm

    from vllm_fl.dispatch import RefusedBeforeWriting
    from vllm_fl_reference.impl import normalization

    rows: list[int] = []

    def impl(x: Any, residual: Any, weight: Any, epsilon: float) -> Any:
        if how == "exception" and _few_rows(x) is not True:
            raise RefusedBeforeWriting(_few_rows(x))
        rows.append(x.shape[0])
        return normalization.rms_norm(x, residual, weight, epsilon)

    one = _impl(impl, "rms_norm", "few", supports=_few_rows if how == "predicate" else None)
    for cls in (RMSNorm, GemmaRMSNorm):
        layers = [compiled(cls, 32, impls=[one], order=["vendor", "native"]) for _ in range(2)]
        for i, layer in enumerate(layers):
            layer.weight.data.copy_(_random(32) * (i + 1))
            assert is_served(layer)
        rows.clear()
        torch._dynamo.reset()

        def call(x: Any, residual: Any, layers: Any = layers) -> Any:
            x = layers[0](x)
            return layers[1](x, residual)

        graph = torch.compile(call, fullgraph=True, dynamic=True)
        for n in (2, 16, 3):
            # As the heads of a fused projection: vLLM's PyTorch keeps other strides than the fake.
            x, residual = _random(32, n).t(), _random(32, n).flip(0).t()
            wanted = cls.forward_native(layers[1], cls.forward_native(layers[0], x), residual)
            _check(graph(x, residual), wanted, exact=False)
        assert rows == [2, 2, 3, 3]


@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "gptj"])
def test_native_rotary_inside_of_it(compiled: Callable[..., Any], is_neox: bool) -> None:
    import torch
    from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

    from vllm_fl_reference.impl import rotary

    layers = [
        compiled(
            RotaryEmbedding,
            head_size=32,
            rotary_dim=32,
            max_position_embeddings=64,
            base=base,
            is_neox_style=is_neox,
            dtype=torch.float32,
            impls=[_impl(rotary.rotary_embedding, "rotary_embedding", "few", supports=_few_rows)],
            order=["vendor", "native"],
        )
        for base in (10000.0, 500.0)
    ]
    for layer in layers:
        call = _compiled(layer)
        for n in (2, 16):
            positions = torch.arange(n) * 3 % 64
            query, key, _ = _random(n, 8 * 32).split([128, 64, 64], dim=-1)
            wanted = layer.forward_native(positions, query.clone(), key.clone())
            query, key = call(positions, query, key)
            _check((query, key), tuple(wanted), exact=False)


def test_a_layers_ticket_is_an_input_of_the_graph(compiled: Callable[..., Any]) -> None:
    """Not a constant: a graph from the cache would call the layers of the process that made it."""
    import torch
    from vllm.model_executor.layers.activation import SiluAndMul

    impl = _impl(_silu, "silu_and_mul", "plain")
    layers = [compiled(SiluAndMul, impls=[impl], order=["vendor", "native"]) for _ in range(3)]
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    torch.compile(lambda x: layers[2](layers[1](layers[0](x))), fullgraph=True, backend=backend)(
        _random(3, 32)
    )
    (graph,) = graphs
    calls = [node for node in graph.graph.nodes if "silu_and_mul__vendor_unit_plain" in str(node.target)]
    assert len(calls) == len({node.args[-1] for node in calls}) == 3
    assert all(node.args[-1].op == "placeholder" for node in calls)


def test_two_engines_keep_their_own_choices(compiled: Callable[..., Any]) -> None:
    """One choice comes first in both; what follows it is each engine's own."""
    from vllm.model_executor.layers.activation import SiluAndMul

    few = _impl(_silu, "silu_and_mul", "few", supports=_few_rows)
    twice = _impl(lambda x: 2 * _silu(x), "silu_and_mul", "twice", priority=1)
    first = compiled(SiluAndMul, impls=[few], order=["vendor", "native"])
    second = compiled(SiluAndMul, impls=[few, twice], order=["vendor"])
    graphs = _compiled(first), _compiled(second)
    x = _random(8, 32)
    for _ in range(2):
        _check(graphs[0](x), SiluAndMul.forward_native(x), exact=False)
        _check(graphs[1](x), 2 * SiluAndMul.forward_native(x), exact=False)


def test_what_fails_in_one_layer_is_called_by_none(compiled: Callable[..., Any]) -> None:
    from vllm.model_executor.layers.activation import SiluAndMul

    calls: list[int] = []

    def impl(x: Any) -> Any:
        calls.append(x.shape[0])
        if len(calls) == 3:
            raise RuntimeError("launch failed")
        return _silu(x)

    one = _impl(impl, "silu_and_mul", "once", writes=())
    layers = [compiled(SiluAndMul, impls=[one], order=["vendor", "native"]) for _ in range(2)]
    x = _random(2, 32)
    for layer in (*layers, *layers):
        _check(layer(x), SiluAndMul.forward_native(x), exact=False)
    assert calls == [1, 2, 2]


def test_a_layer_that_is_gone_leaves_nothing_behind(compiled: Callable[..., Any]) -> None:
    from vllm.model_executor.layers.layernorm import RMSNorm

    from vllm_fl.integration import opaque

    def impl(x: Any, residual: Any, weight: Any, epsilon: float) -> Any:
        raise NotImplementedError

    gc.collect()
    before = len(opaque._kernels)
    silent = _impl(impl, "rms_norm", "few", supports=lambda *_: True)
    layer = compiled(RMSNorm, 32, impls=[silent], order=["vendor", "reference", "native"])
    assert len(opaque._kernels) > before
    weight = weakref.ref(layer.weight)
    del layer
    gc.collect()
    assert weight() is None
    assert len(opaque._kernels) <= before


# -- what the trial says ------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0, 3], ids=["eager", "compiled"])
@pytest.mark.parametrize("how", ["predicate", "exception"])
def test_a_choice_that_refused_its_trial_is_named(
    compiled: Callable[..., Any], said: Callable[[], str], mode: int, how: str
) -> None:
    from vllm.model_executor.layers.activation import SiluAndMul

    from vllm_fl.integration import choice

    def many_rows(x: Any) -> Any:
        return x.shape[0] > 1 or "at least two rows"

    def impl(x: Any) -> Any:
        if how == "exception" and many_rows(x) is not True:
            raise NotImplementedError(many_rows(x))
        return _silu(x)

    one = _impl(impl, "silu_and_mul", "many", writes=(), supports=many_rows if how == "predicate" else None)
    for order, other in ((["vendor", "reference"], "reference.torch"), (["vendor", "native"], "native")):
        layer = compiled(SiluAndMul, impls=[one], order=order, mode=mode)
        assert is_served(layer)
        line = f"vendor.unit.many refused the trial of one row (at least two rows), which {other} ran"
        assert line in said()
        # And so does the decision, which is what `explain` shows.
        found = choice.get_default_manager().explain("silu_and_mul").candidates
        (first,) = [one for one in found if one.impl_id == "vendor.unit.many"]
        assert "refused the trial of SiluAndMul with one row (at least two rows)" in first.reason


@pytest.mark.parametrize("how", ["predicate", "exception"])
def test_what_takes_no_rows_leaves_a_compilers_layer_to_vllm(
    compiled: Callable[..., Any], said: Callable[[], str], how: str
) -> None:
    from vllm.model_executor.layers.activation import SiluAndMul

    def impl(x: Any) -> Any:
        raise NotImplementedError("no float32")

    supports = (lambda x: "no float32") if how == "predicate" else None
    one = _impl(impl, "silu_and_mul", "half", supports=supports)
    layer = compiled(SiluAndMul, impls=[one], order=["vendor", "native"])
    assert not is_served(layer)
    assert "SiluAndMul stays vLLM's own: vendor.unit.half does not take its inputs: no float32" in said()

"""How a class of vLLM's layers is served by an operator: one :class:`Binding` each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from typing import Any
from typing import ClassVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


class Served:
    """What every class begins with that takes the place of one of vLLM's."""

    vllm_fl_binding: ClassVar[Binding]
    #: ``decide(owner, binding, layer)`` of layers.py, which imports this module.
    vllm_fl_decide: ClassVar[Callable[..., None]]


class DecidesWhenBuilt(Served):
    """Chooses its forward at the end of its constructor."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.vllm_fl_decide(self, self.vllm_fl_binding, self)


@dataclass(frozen=True)
class Binding:
    """How a class of layers is served by an operator.

    Attributes:
        module: where vLLM defines the class.
        class_name: its name.
        vllm_name: vLLM's own name of it, as in ``+rms_norm``.
        op_name: the operator.
        forward: the layer's forward, ``forward(layer, operator, *arguments)``.
        native: calls the layer's own forward with the operator's arguments.
        refuses: says why an instance needs vLLM's own path, or None.
        examples: tiny arguments of the operator, for first calls.
        with_subclasses: serve every subclass that has no forward of its own.
        keywords: the operator's keyword arguments, fixed for an instance.
        mixin: what the class that takes its place does first; it says when the
            choice is made.
        attribute: where an instance keeps the forward that it calls; None in one that
            calls none, and that ``refuses``.
        stacks: it can be built on another plug-in's subclass of the class.
        is_traced: a compiler may look into it, where the implementation can be traced.
    """

    module: str
    class_name: str
    vllm_name: str
    op_name: str
    forward: Callable[..., Any]
    native: Callable[..., Any]
    examples: Callable[[Any], list[tuple[Any, ...]]]
    refuses: Callable[[Any], str | None] = lambda layer: None
    with_subclasses: bool = False
    keywords: Callable[[Any], dict[str, Any]] = lambda layer: {}
    mixin: type[Served] = DecidesWhenBuilt
    attribute: str = "_forward_method"
    stacks: bool = True
    is_traced: bool = True


def _silu_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self._vllm_fl_operator(x)  # type: ignore[no-any-return]


def _gelu_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self._vllm_fl_operator(x, self.approximate)  # type: ignore[no-any-return]


def _rms_forward(self: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
    has_weight = self.pass_weight if residual is None else self.pass_weight_add
    weight = self.weight.data if has_weight else None
    return self._vllm_fl_operator(x, residual, weight, self.variance_epsilon)


def _gemma_forward(self: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
    return self._vllm_fl_operator(x, residual, self.weight.float() + 1.0, self.variance_epsilon)


def _norm_native(own: Callable[..., Any]) -> Callable[..., Any]:
    def native(x: torch.Tensor, residual: torch.Tensor | None, weight: Any, epsilon: float) -> Any:
        return own(x) if residual is None else own(x, residual)

    return native


def _rotary_forward(
    self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    cache = self._match_cos_sin_cache_dtype(query)
    if torch.compiler.is_compiling():
        cos, sin = cache.chunk(2, dim=-1)
    else:
        # The two views cost as much as the rest of this function.
        tables = self._vllm_fl_tables
        if tables is None or tables[0] is not cache:
            tables = self._vllm_fl_tables = (cache, *cache.chunk(2, dim=-1))
        _, cos, sin = tables
    if positions.dim() != 1:
        positions = positions.flatten()
    tokens = positions.shape[0]
    heads = query.view(tokens, -1, self.head_size)
    key_heads = None if key is None else key.view(tokens, -1, self.head_size)
    # What a compiler sees through is fastest where it writes nothing.
    in_place = self._vllm_fl_is_opaque or not torch.compiler.is_compiling()
    new = self._vllm_fl_operator(
        heads, key_heads, cos, sin, positions, not self.is_neox_style, in_place, cache
    )
    if in_place:
        return query, key
    return new[0].view(query.shape), None if key is None else new[1].view(key.shape)


def _rotary_native(own: Callable[..., Any]) -> Callable[..., Any]:
    def native(
        query: torch.Tensor,
        key: torch.Tensor | None,
        cos: Any,
        sin: Any,
        position_ids: Any,
        rotary_interleaved: bool = False,
        inplace: bool = True,
        cos_sin_cache: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        given = [x for x in (query, key) if x is not None]
        rows = [_rows(x, is_new=not inplace) for x in given]
        turned = own(position_ids, rows[0], rows[1] if key is not None else None)
        heads = [result.view(x.shape) for x, result in zip(given, turned, strict=False)]
        if not inplace:
            return heads[0], heads[1] if key is not None else None
        # A kernel has written the rows, vLLM's PyTorch path returns new ones.
        for x, row, result, new in zip(given, rows, turned, heads, strict=False):
            if result is not row or not _has_rows(x):
                x.copy_(new)
        return query, key

    return native


def _rows(x: torch.Tensor, *, is_new: bool) -> torch.Tensor:
    """Return the heads of every token as one row: vLLM's kernel reads three dimensions otherwise."""
    rows = x if _has_rows(x) and not is_new else x.clone(memory_format=torch.contiguous_format)
    return rows.view(x.shape[0], -1)


def _has_rows(x: torch.Tensor) -> bool:
    """Whether the heads of a token lie one after the other; latent attention rotates a part of each."""
    return x.stride(2) == 1 and (x.stride(1) == x.shape[2] or x.shape[1] == 1)


def _ones(layer: Any, *shape: int) -> torch.Tensor:
    # No random numbers: the model's own come from the same generator.
    weight = getattr(layer, "weight", None)
    device = weight.device if isinstance(weight, torch.Tensor) else None
    return torch.ones(shape, device=device)


def _norm_examples(layer: Any) -> list[tuple[Any, ...]]:
    x = _ones(layer, 1, layer.weight.shape[0])
    weight = layer.weight.data.clone()
    return [(x.clone(), residual, weight, layer.variance_epsilon) for residual in (None, x)]


def _rotary_examples(layer: Any) -> list[tuple[Any, ...]]:
    cache = layer.cos_sin_cache[:1].clone()
    cos, sin = cache.chunk(2, dim=-1)
    query = torch.ones(1, 2, layer.head_size, dtype=cache.dtype, device=cache.device)
    positions = torch.zeros(1, dtype=torch.int64, device=cache.device)
    return [(query, query[:, :1].clone(), cos, sin, positions, not layer.is_neox_style, True, cache)]


def _variance_size(layer: Any) -> str | None:
    if getattr(layer, "variance_size_override", None) is None:
        return None
    return "the operator has no variance_size_override"


BINDINGS = (
    Binding(
        "vllm.model_executor.layers.activation",
        "SiluAndMul",
        "silu_and_mul",
        "silu_and_mul",
        _silu_forward,
        lambda own: own,
        lambda layer: [(_ones(layer, 1, 128),)],
    ),
    Binding(
        "vllm.model_executor.layers.activation",
        "GeluAndMul",
        "gelu_and_mul",
        "gelu_and_mul",
        _gelu_forward,
        lambda own: lambda x, approximate="none": own(x),
        lambda layer: [(_ones(layer, 1, 128), layer.approximate)],
    ),
    Binding(
        "vllm.model_executor.layers.layernorm",
        "RMSNorm",
        "rms_norm",
        "rms_norm",
        _rms_forward,
        _norm_native,
        _norm_examples,
        _variance_size,
    ),
    Binding(
        "vllm.model_executor.layers.layernorm",
        "GemmaRMSNorm",
        "gemma_rms_norm",
        "rms_norm",
        _gemma_forward,
        _norm_native,
        _norm_examples,
    ),
    Binding(
        "vllm.model_executor.layers.rotary_embedding",
        "RotaryEmbedding",
        "rotary_embedding",
        "rotary_embedding",
        _rotary_forward,
        _rotary_native,
        _rotary_examples,
        with_subclasses=True,
    ),
)

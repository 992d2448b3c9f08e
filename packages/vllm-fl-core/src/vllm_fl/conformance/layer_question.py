"""Whether ``supports_layer`` answers alike for every call of a layer.

A layer of vLLM asks it once, and its answer then holds for any number of rows, any strides
and any values. So it is asked of the same arguments with others: none takes memory, because
all their elements are one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_fl.conformance.case import MANY
from vllm_fl.dispatch.calling.predicate import refusal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_fl.conformance.case import Arguments
    from vllm_fl.conformance.dispatched import Dispatched

#: The last one has more elements than 32 bits count.
_ROWS = (0, 1, 2, 16, 83, 256, 1024, 8192, MANY, 2**31)


class ReadsValuesError(RuntimeError):
    """A predicate computed something."""


class _NothingRuns(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets tensors be looked at and viewed, and nothing be computed of them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returns = func._schema.returns
        if returns and all(one.alias_info is not None and not one.alias_info.is_write for one in returns):
            return func(*args, **(kwargs or {}))
        raise ReadsValuesError(f"it runs {func}, and may not read values")


def layer_problem(dispatched: Dispatched, arguments: Arguments) -> str:
    """Say of which arguments ``supports_layer`` answers otherwise; ``""`` where of none."""
    ask = dispatched.supports_layer
    if ask is None:
        return ""

    def answer(given: Arguments) -> str | None:
        args, kwargs = dispatched.bound(given)
        return refusal(ask, tuple(args), kwargs)

    first = answer(arguments)
    for what, others in _others(arguments, dispatched.row_arguments):
        with _NothingRuns():  # type: ignore[no-untyped-call]
            other = answer(others)
        if (first is None) != (other is None):
            return (
                f"supports_layer answers {_said(first)!r} for these arguments and {_said(other)!r} for the "
                f"same ones {what}: a layer asks it once, so that rows, strides and values are for supports"
            )
    return ""


def _said(refused: str | None) -> str:
    return "True" if refused is None else refused


def _others(arguments: Arguments, row_arguments: tuple[str, ...]) -> Iterator[tuple[str, Arguments]]:
    """Yield what differs in nothing that never changes for a layer."""
    yield "without a look at their values", arguments
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    strided = {name: _strided(value, tuple(value.shape)) for name, value in tensors.items()}
    yield "with other strides", {**arguments, **strided}
    by_rows = {name: value for name, value in tensors.items() if name in row_arguments}
    # What has one dimension has rows beside what has more, and is a row by itself.
    lengths = {value.shape[0] for value in by_rows.values() if value.dim() > 1}
    by_rows = {name: value for name, value in by_rows.items() if value.dim() and value.shape[0] in lengths}
    for rows in _ROWS if by_rows else ():
        made = {name: _strided(value, (rows, *value.shape[1:])) for name, value in by_rows.items()}
        yield f"with {rows} rows and other strides", {**arguments, **made}


def _strided(value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor of a shape, all of whose elements are one that is not the first of its memory."""
    return value.new_zeros(2)[1].expand(shape)

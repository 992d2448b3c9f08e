"""Tuned tables: which implementation was the fastest, for the shapes that were measured.

A policy file names a table by its key ``tuned``; the table is YAML too::

    rms_norm:
      - {dtype: bfloat16, last: 4096, max_rows: 16, order: [vendor.acme, native]}
      - {dtype: bfloat16, last: 4096, max_rows: 65536, order: [reference.torch]}

An entry holds for up to ``max_rows`` rows of a tensor with that last dimension and
dtype: the operator's selector, its first argument where the declaration names no
other. Of several entries the one with the fewest rows holds. What ``order`` names
comes first there, and the policy's own order after it; where nothing was measured,
that order holds alone. Traced code never looks at rows, so that a compiler's graph
has the policy's order, or the opaque form, which looks.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from dataclasses import asdict
from dataclasses import dataclass
from dataclasses import replace
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.dispatch import _runtime
from vllm_fl.dispatch import decision as status
from vllm_fl.dispatch._suggest import did_you_mean
from vllm_fl.dispatch._suggest import shown
from vllm_fl.dispatch.errors import PolicyError

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Mapping
    from collections.abc import Sequence

    from vllm_fl.dispatch.decision import Decision
    from vllm_fl.dispatch.declaration import Operator


@dataclass(frozen=True, slots=True)
class Measured:
    """One entry of a table.

    Attributes:
        dtype: of the selector, without ``torch.``.
        last: its last dimension.
        max_rows: the most rows that it holds for.
        order: implementation ids and ``native``, the fastest first.
    """

    dtype: str
    last: int
    max_rows: int
    order: tuple[str, ...]

    def __str__(self) -> str:
        return f"up to {self.max_rows} rows of {self.last}, {self.dtype}"


def check_table(value: object) -> tuple[tuple[str, tuple[Measured, ...]], ...]:
    """Return a table as tuples, its entries by rows.

    Args:
        value: a mapping, or pairs, of operators and lists of entries; an entry is a
            mapping with the attributes of :class:`Measured`, or one of those.

    Raises:
        PolicyError: anything else, or two entries for the same shapes.
    """
    if not isinstance(value, (dict, tuple)):
        raise PolicyError(f"tuned must map operators to lists of entries, not {shown(value)}.")
    pairs = value.items() if isinstance(value, dict) else value
    return tuple(sorted((_operator(op_name), _entries(op_name, entries)) for op_name, entries in pairs))


def _operator(op_name: object) -> str:
    if not isinstance(op_name, str):
        raise PolicyError(f"an operator's name must be a string, not {shown(op_name)}.")
    return op_name


def _entries(op_name: str, entries: object) -> tuple[Measured, ...]:
    if not isinstance(entries, (list, tuple)) or not entries:
        raise PolicyError(f"the table of {shown(op_name)} must be a list of entries, not {shown(entries)}.")
    found = [entry if isinstance(entry, Measured) else check_entry(op_name, entry) for entry in entries]
    found.sort(key=lambda one: (one.dtype, one.last, one.max_rows))
    for one, other in itertools.pairwise(found):
        if (one.dtype, one.last, one.max_rows) == (other.dtype, other.last, other.max_rows):
            raise PolicyError(f"the table of {shown(op_name)} has two entries for {one}.")
    return tuple(found)


def check_entry(op_name: str, value: object) -> Measured:
    """Return one entry of an operator's table, given as a mapping.

    Raises:
        PolicyError: it is none.
    """
    keys = tuple(Measured.__slots__)
    if not isinstance(value, dict):
        raise PolicyError(f"an entry of {shown(op_name)} must map {', '.join(keys)}, not {shown(value)}.")
    for key in value:
        if key not in keys:
            raise PolicyError(
                f"unknown key {shown(key)} of {shown(op_name)}; keys are {', '.join(keys)}."
                f"{did_you_mean(key, keys)}"
            )
    missing = [key for key in keys if key not in value]
    if missing:
        raise PolicyError(f"an entry of {shown(op_name)} lacks {', '.join(missing)}.")
    dtype, order = value["dtype"], value["order"]
    if not isinstance(dtype, str) or not dtype.isidentifier():
        raise PolicyError(f"dtype of {shown(op_name)} must be a name such as bfloat16, not {shown(dtype)}.")
    for key in ("last", "max_rows"):
        if isinstance(value[key], bool) or not isinstance(value[key], int) or value[key] < 1:
            raise PolicyError(f"{key} of {shown(op_name)} must be at least 1, not {shown(value[key])}.")
    if not isinstance(order, (list, tuple)) or not order or not all(isinstance(one, str) for one in order):
        raise PolicyError(f"order of {shown(op_name)} must be a list of ids, not {shown(order)}.")
    if len(set(order)) != len(order):
        raise PolicyError(f"order of {shown(op_name)} names an implementation twice: {', '.join(order)}.")
    return Measured(dtype, value["last"], value["max_rows"], tuple(order))


def to_plain(table: Sequence[tuple[str, tuple[Measured, ...]]]) -> dict[str, list[dict[str, Any]]]:
    """Return a table as plain values; :func:`check_table` takes them back."""
    return {
        op_name: [{**asdict(entry), "order": list(entry.order)} for entry in entries]
        for op_name, entries in table
    }


def reordered(decision: Decision, entry: Measured) -> Decision:
    """Return the decision for an entry's shapes: what it names first, then the rest."""
    usable = {candidate.impl_id: candidate for candidate in decision.usable}
    order = [impl_id for impl_id in entry.order if impl_id in usable]
    order += [impl_id for impl_id in usable if impl_id not in order]
    candidates = [
        replace(usable[impl_id], status=status.NEXT if place else status.CHOSEN)
        for place, impl_id in enumerate(order)
    ]
    rest = [candidate for candidate in decision.candidates if candidate.impl_id not in usable]
    return replace(decision, impl_id=order[0], candidates=(*candidates, *rest))


def by_shape(
    operator: Operator, default: Callable[..., Any], functions: Mapping[Measured, Callable[..., Any]]
) -> Callable[..., Any]:
    """Return one callable that looks at the selector's shape and calls one of ``functions``.

    Args:
        operator: its declaration names the selector.
        default: what is called for other shapes, and traced.
        functions: what is called, by entry.
    """
    parameters = list(operator.signature.parameters)
    name = operator.selector or parameters[0]
    place = parameters.index(name)
    shapes: dict[tuple[str, int], tuple[list[int], list[Callable[..., Any]]]] = {}
    for entry, function in sorted(functions.items(), key=lambda item: item[0].max_rows):
        limits, called = shapes.setdefault((entry.dtype, entry.last), ([], []))
        limits.append(entry.max_rows)
        called.append(function)
    # Dynamo folds torch's own function to a constant and never looks at the rest.
    is_tracing = _runtime.tracing_probe()

    def choose(*args: Any, **kwargs: Any) -> Any:
        if is_tracing():
            return default(*args, **kwargs)
        tensor = args[place] if place < len(args) else kwargs.get(name)
        shape = getattr(tensor, "shape", None)
        if not shape:
            return default(*args, **kwargs)
        found = shapes.get((str(tensor.dtype).removeprefix("torch."), shape[-1]))  # type: ignore[union-attr]
        if found is None:
            return default(*args, **kwargs)
        limits, called = found
        rows = 1
        for size in shape[:-1]:
            rows *= size
        at = bisect_left(limits, rows)
        return (called[at] if at < len(limits) else default)(*args, **kwargs)

    choose.__name__ = choose.__qualname__ = operator.name
    choose.__doc__ = operator.doc
    return choose

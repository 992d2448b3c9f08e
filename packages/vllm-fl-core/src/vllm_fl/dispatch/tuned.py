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

An entry may have a ``layout``, ``contiguous`` or ``strided``, with ``+residual`` where that
optional tensor is given; without one it holds for all of them. It may have a ``mode``,
``eager``, ``graph`` or ``compile``, in which it was measured; without one it holds for
all. So far the choice at a call is that of ``eager``: the others are read, shown and kept.
The key ``about`` says where the table was measured.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_left
from dataclasses import asdict
from dataclasses import dataclass
from dataclasses import replace
from typing import TYPE_CHECKING
from typing import Any
from typing import TypeAlias

from vllm_fl.dispatch import decision as status
from vllm_fl.dispatch.calling import torch_state
from vllm_fl.dispatch.common.suggest import did_you_mean
from vllm_fl.dispatch.common.suggest import shown
from vllm_fl.dispatch.errors import PolicyError

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Mapping
    from collections.abc import Sequence

    from vllm_fl.dispatch.decision import Decision
    from vllm_fl.dispatch.declaration import Operator


#: The modes of an entry, and those that a call looks at.
MODES = ("eager", "graph", "compile")
_IN_FORCE = ("eager", None)

#: The key of a table that is no operator, and what may stand in it: text, or texts by name.
ABOUT = "about"
_ABOUT = {
    "card": str,
    "driver": str,
    "date": str,
    "by": str,
    "shapes": str,
    "versions": dict,
    "conformance": dict,
}
_LAYOUT = re.compile(r"(contiguous|strided)(\+[a-z][a-z0-9_]*)*")


@dataclass(frozen=True)
class Measured:
    """One entry of a table.

    Attributes:
        dtype: of the selector, without ``torch.``.
        last: its last dimension.
        max_rows: the most rows that it holds for.
        order: implementation ids and ``native``, the fastest first.
        mode: in which it was measured; None means all.
        layout: of the selector, with the optional tensors that are given; None means all.
    """

    dtype: str
    last: int
    max_rows: int
    order: tuple[str, ...]
    mode: str | None = None
    layout: str | None = None

    @property
    def place(self) -> tuple[str, int, str, str, int]:
        """Where it stands: no two entries of an operator have the same."""
        return (self.dtype, self.last, self.layout or "", self.mode or "", self.max_rows)

    def __str__(self) -> str:
        text = f"up to {self.max_rows} rows of {self.last}, {self.dtype}"
        text += f", {self.layout}" if self.layout else ""
        if self.mode in _IN_FORCE:
            return text + (f", {self.mode}" if self.mode else "")
        return f"{text}, {self.mode} (kept, not looked at yet)"


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
    found.sort(key=lambda one: one.place)
    for one, other in itertools.pairwise(found):
        if one.place == other.place:
            raise PolicyError(f"the table of {shown(op_name)} has two entries for {one}.")
    return tuple(found)


def check_entry(op_name: str, value: object) -> Measured:
    """Return one entry of an operator's table, given as a mapping.

    Raises:
        PolicyError: it is none.
    """
    keys = tuple(Measured.__dataclass_fields__)
    if not isinstance(value, dict):
        raise PolicyError(f"an entry of {shown(op_name)} must map {', '.join(keys)}, not {shown(value)}.")
    for key in value:
        if key not in keys:
            raise PolicyError(
                f"unknown key {shown(key)} of {shown(op_name)}; keys are {', '.join(keys)}."
                f"{did_you_mean(key, keys)}"
            )
    missing = [key for key in keys if key not in value and key not in ("mode", "layout")]
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
    mode, layout = value.get("mode"), value.get("layout")
    if mode is not None and mode not in MODES:
        raise PolicyError(
            f"mode of {shown(op_name)} must be one of {', '.join(MODES)}, not {shown(mode)}."
            f"{did_you_mean(mode, MODES)}"
        )
    if layout is not None and not (isinstance(layout, str) and _LAYOUT.fullmatch(layout)):
        raise PolicyError(
            f"layout of {shown(op_name)} must be contiguous or strided, with +NAME for an optional tensor "
            f"that is given, not {shown(layout)}."
        )
    return Measured(dtype, value["last"], value["max_rows"], tuple(order), mode, layout)


def check_about(key: object, value: object) -> None:
    """Check one key of what a table says of itself.

    Raises:
        PolicyError: an unknown key, or a value of another type.
    """
    if not isinstance(key, str) or key not in _ABOUT:
        raise PolicyError(
            f"unknown key {shown(key)} of {ABOUT}; keys are {', '.join(_ABOUT)}.{did_you_mean(key, _ABOUT)}"
        )
    if _ABOUT[key] is dict:
        texts = [*value.keys(), *value.values()] if isinstance(value, dict) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise PolicyError(f"{key} of {ABOUT} must map names to texts, not {shown(value)}.")
    # A card without a driver of its own has none.
    elif not isinstance(value, str) and (value is not None or key != "driver"):
        raise PolicyError(f"{key} of {ABOUT} must be a text, not {shown(value)}.")


def to_plain(table: Sequence[tuple[str, tuple[Measured, ...]]]) -> dict[str, list[dict[str, Any]]]:
    """Return a table as plain values; :func:`check_table` takes them back."""
    return {op_name: [_plain(entry) for entry in entries] for op_name, entries in table}


def _plain(entry: Measured) -> dict[str, Any]:
    values = {key: value for key, value in asdict(entry).items() if value is not None}
    return {**values, "order": list(entry.order)}


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
    name = operator.selector or next(iter(operator.signature.parameters))
    (place,) = operator.places([name])
    shapes = _by_layout(functions)
    present = [one for form in operator.forms for one in form.present]
    optional = dict(zip(present, operator.places(present), strict=True))
    # Dynamo folds torch's own function to a constant and never looks at the rest.
    is_tracing = torch_state.tracing_probe()

    def layout_of(tensor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        text = "contiguous" if tensor.is_contiguous() else "strided"
        for one, at in optional.items():
            if (args[at] if at < len(args) else kwargs.get(one)) is not None:
                text += f"+{one}"
        return text

    def choose(*args: Any, **kwargs: Any) -> Any:
        if is_tracing():
            return default(*args, **kwargs)
        tensor = args[place] if place < len(args) else kwargs.get(name)
        shape = getattr(tensor, "shape", None)
        if not shape:
            return default(*args, **kwargs)
        layouts = shapes.get((str(tensor.dtype).removeprefix("torch."), shape[-1]))  # type: ignore[union-attr]
        if layouts is None:
            return default(*args, **kwargs)
        # Nobody asks for the layout where none was measured apart.
        limits, called = layouts[None]
        if len(layouts) > 1:
            limits, called = layouts.get(layout_of(tensor, args, kwargs), layouts[None])
        rows = 1
        for size in shape[:-1]:
            rows *= size
        at = bisect_left(limits, rows)
        return (called[at] if at < len(limits) else default)(*args, **kwargs)

    choose.__name__ = choose.__qualname__ = operator.name
    choose.__doc__ = operator.doc
    return choose


_Choices: TypeAlias = "tuple[list[int], list[Callable[..., Any]]]"


def _by_layout(
    functions: Mapping[Measured, Callable[..., Any]],
) -> dict[tuple[str, int], dict[str | None, _Choices]]:
    """Return what a call looks at: by dtype and last dimension, by layout, the limits and functions.

    None is any other layout. Of two entries for as many rows the one that names its layout holds,
    then the one that names its mode.
    """
    entries = [entry for entry in functions if entry.mode in _IN_FORCE]
    found: dict[tuple[str, int], dict[str | None, _Choices]] = {}
    for one in entries:
        found.setdefault((one.dtype, one.last), {None: ([], [])}).setdefault(one.layout, ([], []))
    for (dtype, last), layouts in found.items():
        for layout, (limits, called) in layouts.items():
            its = [e for e in entries if (e.dtype, e.last) == (dtype, last) and e.layout in (layout, None)]
            its.sort(key=lambda e: (e.max_rows, e.layout is None, e.mode is None))
            limits += [entry.max_rows for entry in its]
            called += [functions[entry] for entry in its]
    return found

"""What is measured: an operator, its sizes, its layout and its dtype, without the rows.

A file of shapes is YAML::

    rows: [1, 16, 256]         # tokens; the default list where it is left out
    dtype: bfloat16
    shapes:
      silu_and_mul: [{last: 28672}]
      rms_norm:
        - {last: 4096, layout: contiguous+residual}
        - {last: 128, heads: 32, room: 6144, layout: strided}
"""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import field
from typing import TYPE_CHECKING
from typing import Any

import yaml

from vllm_fl.dispatch.common.bounded_yaml import Loader
from vllm_fl.dispatch.common.bounded_yaml import check_size
from vllm_fl.dispatch.common.files import read_text
from vllm_fl.dispatch.common.suggest import did_you_mean
from vllm_fl.dispatch.common.suggest import shown

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Mapping
    from pathlib import Path

DTYPES = ("bfloat16", "float16", "float32")
CONTIGUOUS, STRIDED, RESIDUAL = "contiguous", "strided", "+residual"


class ShapesError(ValueError):
    """What was asked for cannot be measured; the message names the file and the line."""


@dataclass(frozen=True)
class Family:
    """One operator with fixed sizes; it is measured with several numbers of tokens.

    Attributes:
        op: the operator.
        sizes: by name, as :data:`SIZES` lists them for the operator.
        layout: ``contiguous`` or ``strided``, and ``+residual`` where one is added.
        dtype: of the activations.
        tokens: only these numbers of tokens; those of the run where it is empty.
    """

    op: str
    sizes: tuple[tuple[str, Any], ...]
    layout: str = CONTIGUOUS
    dtype: str = "bfloat16"
    tokens: tuple[int, ...] = ()

    def __getitem__(self, name: str) -> Any:
        return dict(self.sizes).get(name, SIZES[self.op].get(name))

    def __str__(self) -> str:
        return " ".join(f"{name} {value}" for name, value in self.sizes)


#: The sizes of every operator that can be measured, each with its default; None: it must be given.
SIZES: Mapping[str, Mapping[str, Any]] = {
    "silu_and_mul": {"last": None},
    "gelu_and_mul": {"last": None, "approximate": "none"},
    # `heads`: the norm of each head; `room`: the width of the tensor that it is a view of.
    "rms_norm": {"last": None, "heads": 0, "room": 0},
    # `room`: the width of a head in memory, of which `last` are rotated or passed through.
    "rotary_embedding": {
        "last": None,
        "heads": None,
        "kv_heads": None,
        "rotary": 0,
        "room": 0,
        "interleaved": False,
    },
    "topk_softmax": {"last": None, "k": None},
    "grouped_topk": {"last": None, "k": None, "groups": None, "kept": None},
    "moe_align_block_size": {"last": None, "experts": None, "block": 64},
    "moe_sum": {"last": None, "k": None},
    "fused_experts": {"last": None, "inner": None, "experts": None, "k": None},
    "dynamic_per_token_quant_int8": {"last": None},
    "dynamic_per_token_quant_fp8": {"last": None},
}
#: What may be strided, and what may have a residual.
_STRIDED = ("rms_norm", "rotary_embedding", "dynamic_per_token_quant_int8", "dynamic_per_token_quant_fp8")
_WITH_RESIDUAL = ("rms_norm",)


def family(op: str, layout: str = CONTIGUOUS, dtype: str = "bfloat16", **sizes: Any) -> Family:
    """Make a family and check it.

    Raises:
        ShapesError: an unknown operator, size, layout or dtype, or a size that is missing.
    """
    known = SIZES.get(op)
    if known is None:
        raise ShapesError(f"{shown(op)} cannot be measured.{did_you_mean(op, SIZES)}")
    for name, value in sizes.items():
        if name not in known:
            raise ShapesError(
                f"{op} has no size {shown(name)}; it has {', '.join(known)}.{did_you_mean(name, known)}"
            )
        if isinstance(known[name], (bool, str)):
            right = type(value) is type(known[name])
        else:
            right = type(value) is int and value >= (1 if known[name] is None else 0)
        if not right:
            raise ShapesError(f"{name} of {op} cannot be {shown(value)}.")
    missing = [name for name, default in known.items() if default is None and name not in sizes]
    if missing:
        raise ShapesError(f"{op} lacks {', '.join(missing)}.")
    layouts = layouts_of(op)
    if layout not in layouts:
        raise ShapesError(f"layout of {op} must be one of {', '.join(layouts)}, not {shown(layout)}.")
    if dtype not in DTYPES:
        raise ShapesError(
            f"dtype must be one of {', '.join(DTYPES)}, not {shown(dtype)}.{did_you_mean(dtype, DTYPES)}"
        )
    return Family(op, tuple(sizes.items()), layout, dtype)


def layouts_of(op: str) -> list[str]:
    """Return the layouts in which an operator can be measured."""
    layouts = [CONTIGUOUS, *([STRIDED] if op in _STRIDED else [])]
    return layouts + ([one + RESIDUAL for one in layouts] if op in _WITH_RESIDUAL else [])


@dataclass(frozen=True)
class Selection:
    """What a run measures.

    Attributes:
        families: in order, each once.
        source: where they come from, for people.
        rows: the numbers of tokens that the source gives; empty where it gives none.
        notes: what of the source is left out, and why.
    """

    families: tuple[Family, ...]
    source: str
    rows: tuple[int, ...] = ()
    notes: tuple[str, ...] = field(default=())

    def of(self, operators: Iterable[str]) -> Selection:
        """Return the part that is of these operators; all of it where there are none.

        Raises:
            ShapesError: an operator that cannot be measured, or that is not here.
        """
        wanted = list(operators)
        for op in wanted:
            if op not in SIZES:
                raise ShapesError(f"{shown(op)} cannot be measured.{did_you_mean(op, SIZES)}")
            if all(one.op != op for one in self.families):
                raise ShapesError(f"{self.source} has no {op}.")
        found = tuple(one for one in self.families if not wanted or one.op in wanted)
        if not found:
            raise ShapesError(f"{self.source} has nothing that can be measured.")
        return Selection(found, self.source, self.rows, self.notes)


def from_file(path: Path, dtype: str) -> Selection:
    """Read a file of shapes.

    Args:
        path: the file.
        dtype: of what the file gives none.

    Raises:
        ShapesError: it cannot be read, or is wrong; with its line.
    """
    try:
        root = Loader(read_text(path)).get_single_node()
        check_size(root)
    except (OSError, UnicodeError, ValueError) as error:
        raise ShapesError(f"{path}: cannot be read: {error}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        raise ShapesError(f"{path}:{mark.line + 1 if mark else 1}: invalid YAML: {error.problem}.") from None
    except yaml.YAMLError as error:
        raise ShapesError(f"{path}: invalid YAML: {error}.") from None
    return _Reader(path).whole(root, dtype)


class _Reader:
    def __init__(self, path: Path) -> None:
        self.path = path

    def whole(self, root: Any, dtype: str) -> Selection:
        given = self.mapping(root)
        for key, (node, _) in given.items():
            if key not in ("rows", "dtype", "shapes"):
                known = ("rows", "dtype", "shapes")
                keys = ", ".join(known)
                self.wrong(node, f"unknown key {shown(key)}; keys are {keys}.{did_you_mean(key, known)}")
        if "shapes" not in given:
            self.wrong(root, "shapes is missing: it maps operators to lists of sizes.")
        dtype = self.value(given["dtype"][1]) if "dtype" in given else dtype
        rows: tuple[int, ...] = ()
        if "rows" in given:
            found = self.value(given["rows"][1])
            if not isinstance(found, list) or not all(type(one) is int and one > 0 for one in found):
                self.wrong(given["rows"][0], f"rows must be a list of numbers, not {shown(found)}.")
            rows = tuple(sorted(set(found)))
        families = []
        for op, (key_node, node) in self.mapping(given["shapes"][1]).items():
            if not isinstance(node, yaml.SequenceNode):
                self.wrong(key_node, f"{op} must be a list of sizes.")
            for one in node.value:
                values = {key: self.value(value) for key, (_, value) in self.mapping(one).items()}
                try:
                    families.append(family(op, **{"dtype": dtype, **values}))
                except ShapesError as error:
                    self.wrong(one, str(error))
        return Selection(tuple(dict.fromkeys(families)), str(self.path), rows)

    def mapping(self, node: Any) -> dict[str, tuple[Any, Any]]:
        if not isinstance(node, yaml.MappingNode):
            self.wrong(node, "must be a mapping of keys to values.")
        found: dict[str, tuple[Any, Any]] = {}
        for key_node, value_node in node.value:
            key = self.value(key_node)
            if not isinstance(key, str) or key in found:
                self.wrong(key_node, f"{shown(key)} must be a name, and stand once.")
            found[key] = key_node, value_node
        return found

    def value(self, node: Any) -> Any:
        try:
            return yaml.SafeLoader("").construct_object(node, deep=True)
        except (yaml.YAMLError, ValueError) as error:
            return self.wrong(node, f"invalid YAML: {error}.")

    def wrong(self, node: Any, text: str) -> Any:
        line = node.start_mark.line + 1 if node is not None else 1
        raise ShapesError(f"{self.path}:{line}: {text}")

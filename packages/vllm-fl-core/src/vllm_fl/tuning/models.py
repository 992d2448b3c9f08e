"""Shapes from a model's ``config.json``, from a recorded trace, or of a usual model."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.dispatch.common.files import read_text
from vllm_fl.dispatch.trace import NEWEST
from vllm_fl.dispatch.trace import merge
from vllm_fl.tuning.shapes import DTYPES
from vllm_fl.tuning.shapes import RESIDUAL
from vllm_fl.tuning.shapes import SIZES
from vllm_fl.tuning.shapes import STRIDED
from vllm_fl.tuning.shapes import Selection
from vllm_fl.tuning.shapes import ShapesError
from vllm_fl.tuning.shapes import family

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from vllm_fl.tuning.shapes import Family

#: A mixture of experts with the sizes of a model that one accelerator holds, and of one for a CPU.
_LARGE = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 14336,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "quantization_config": {},
}
_SMALL = {
    **_LARGE,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "intermediate_size": 3072,
    "moe_intermediate_size": 256,
    "num_experts": 16,
    "num_experts_per_tok": 2,
}
_GROUPS = {"n_group": 8, "topk_group": 4}

#: How configurations call the number of experts.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_SILU = ("silu", "swish")
_GELU = {"gelu": "none", "gelu_pytorch_tanh": "tanh", "gelu_new": "tanh", "gelu_fast": "tanh"}
#: Both quantisations go by the name of none of them.
_QUANTIZED = ("dynamic_per_token_quant_int8", "dynamic_per_token_quant_fp8")


def usual(dtype: str, *, is_small: bool) -> Selection:
    """Return every operator with the sizes of a usual model."""
    config = _SMALL if is_small else _LARGE
    families = [*_families(config, dtype)]
    families += [one for one in _families({**config, **_GROUPS}, dtype) if one.op == "grouped_topk"]
    families.append(family("gelu_and_mul", dtype=dtype, last=2 * config["intermediate_size"]))  # type: ignore[operator]
    return Selection(tuple(dict.fromkeys(families)), "the default list")


def from_model(folder: Path, dtype: str | None) -> Selection:
    """Return the shapes that a model's layers call their operators with.

    ``config.json`` does not say whether a model has norms of its heads, so that they are
    always among them.

    Args:
        folder: of the model, or its ``config.json``.
        dtype: instead of the model's own.

    Raises:
        ShapesError: there is no such file, or it describes no transformer.
    """
    path = folder / "config.json" if folder.is_dir() else folder
    try:
        config = json.loads(read_text(path))
        text = config.get("text_config", config)
        quantization = config.get("quantization_config", text.get("quantization_config"))
        own = str(text.get("dtype") or text.get("torch_dtype") or config.get("torch_dtype") or "bfloat16")
        used = dtype or (own if own in DTYPES else "bfloat16")
        families = [*_families({**text, "quantization_config": quantization}, used)]
    except (OSError, UnicodeError) as error:
        raise ShapesError(f"{path}: cannot be read: {error}") from None
    except (AttributeError, TypeError, ValueError, KeyError, ZeroDivisionError) as error:
        raise ShapesError(f"{path}: is no configuration of a transformer: {error!r}.") from None
    notes = []
    act = str(text.get("hidden_act", "silu"))
    if act not in _SILU and act not in _GELU:
        notes.append(f"{path}: no operator has the activation {act!r}")
    return Selection(tuple(dict.fromkeys(families)), str(path), notes=tuple(notes))


def _families(config: dict[str, Any], dtype: str) -> Iterator[Family]:
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    experts = next((int(config[key]) for key in _EXPERTS if config.get(key)), 0)
    yield family("rms_norm", f"contiguous{RESIDUAL}", dtype, last=hidden)
    yield family("rms_norm", dtype=dtype, last=hidden)
    if config.get("kv_lora_rank"):
        yield from _latent(config, dtype, heads)
    else:
        head = int(config.get("head_dim") or hidden // heads)
        rotary = int(head * float(config.get("partial_rotary_factor") or 1)) // 2 * 2
        room = (heads + 2 * kv_heads) * head
        for count in dict.fromkeys((heads, kv_heads)):
            yield family("rms_norm", STRIDED, dtype, last=head, heads=count, room=room)
        part: dict[str, Any] = {} if rotary == head else {"rotary": rotary}
        yield family("rotary_embedding", STRIDED, dtype, last=head, heads=heads, kv_heads=kv_heads, **part)
    inner = int(config.get("moe_intermediate_size") or config.get("intermediate_size") or 0)
    dense = int(config.get("intermediate_size") or 0)
    if experts and not config.get("moe_intermediate_size"):
        dense = 0  # it is the experts'
    if dense:
        yield from _activation(str(config.get("hidden_act", "silu")), dense, dtype)
    if experts:
        yield from _of_experts(config, dtype, hidden, inner, experts)
    if config.get("quantization_config") is not None:
        for op in _QUANTIZED:
            for width in dict.fromkeys((hidden, dense or inner)):
                yield family(op, dtype=dtype, last=width)


def _latent(config: dict[str, Any], dtype: str, heads: int) -> Iterator[Family]:
    """Yield what multi-head latent attention calls."""
    rope, rank = int(config["qk_rope_head_dim"]), int(config["kv_lora_rank"])
    query = int(config.get("q_lora_rank") or 0)
    for last in filter(None, (query, rank)):
        yield family("rms_norm", STRIDED, dtype, last=last, room=query + rank + rope)
    room = rope + int(config["qk_nope_head_dim"])
    yield family(
        "rotary_embedding", STRIDED, dtype, last=rope, heads=heads, kv_heads=1, room=room, interleaved=True
    )


def _activation(name: str, inner: int, dtype: str) -> Iterator[Family]:
    if name in _SILU:
        yield family("silu_and_mul", dtype=dtype, last=2 * inner)
    elif name in _GELU:
        yield family("gelu_and_mul", dtype=dtype, last=2 * inner, approximate=_GELU[name])


def _of_experts(
    config: dict[str, Any], dtype: str, hidden: int, inner: int, experts: int
) -> Iterator[Family]:
    k = int(config["num_experts_per_tok"])
    if config.get("n_group"):
        groups: dict[str, Any] = {"groups": int(config["n_group"]), "kept": int(config["topk_group"])}
        yield family("grouped_topk", dtype=dtype, last=experts, k=k, **groups)
    else:
        yield family("topk_softmax", dtype=dtype, last=experts, k=k)
    yield family("moe_align_block_size", dtype=dtype, last=k, experts=experts)
    yield family("moe_sum", dtype=dtype, last=hidden, k=k)
    yield family("fused_experts", dtype=dtype, last=hidden, inner=inner, experts=experts, k=k)


# -- a trace ----------------------------------------------------------------------

_TENSOR = re.compile(r"(\w+)\[([\dx]*)\]")


def from_trace(folder: Path) -> Selection:
    """Return the shapes that the newest run in a folder of ``VLLM_FL_TRACE_DIR`` called.

    A trace has dtypes and shapes, and no strides: three-dimensional arguments are taken for
    views of a fused projection, as models pass them.

    Raises:
        ShapesError: there is no run.
    """
    try:
        record = merge(folder, NEWEST)
    except (OSError, LookupError) as error:
        raise ShapesError(f"{folder}: {error}") from None
    tokens: dict[Family, set[int]] = {}
    notes: dict[str, None] = {}
    for entry in record["operators"]:
        for signature in entry["signatures"]:
            made = _traced(entry["op"], [part.strip() for part in signature.split(",")])
            if made is None:
                notes[f"{folder}: {entry['op']}({signature}) cannot be measured"] = None
            elif made[1]:
                tokens.setdefault(made[0], set()).add(made[1])
    if not tokens:
        raise ShapesError(f"{folder}: no call of an operator that can be measured was recorded.")
    families = [replace(one, tokens=tuple(sorted(its))) for one, its in tokens.items()]
    return Selection(tuple(families), str(folder), notes=tuple(notes))


def _traced(op: str, parts: list[str]) -> tuple[Family, int] | None:
    """Return what a line such as ``bfloat16[4x4096], None, bfloat16[4096], 1e-06`` means, and its tokens."""
    if op not in SIZES:
        return None
    tensors = []
    for part in parts:
        match = _TENSOR.fullmatch(part)
        shape = tuple(map(int, filter(None, match[2].split("x")))) if match else ()
        tensors.append((match[1], shape) if match else ("", ()))
    try:
        made = _of_tensors(op, parts, tensors)
        return made and (made[0], made[1])
    except (IndexError, ValueError):
        return None


def _of_tensors(
    op: str, parts: list[str], tensors: list[tuple[str, tuple[int, ...]]]
) -> tuple[Family, int] | None:
    dtype, first = tensors[0]
    last, rows = first[-1], math.prod(first[:-1])
    if op in ("silu_and_mul", *_QUANTIZED):
        return family(op, dtype=dtype, last=last), rows
    if op == "gelu_and_mul":
        kind = parts[1].strip("'") if len(parts) > 1 else "none"
        return family(op, dtype=dtype, last=last, approximate=kind), rows
    if op == "rms_norm":
        added = RESIDUAL if tensors[1][1] else ""
        if len(first) == 2:
            return family(op, f"contiguous{added}", dtype, last=last), rows
        heads = first[-2]
        return family(op, STRIDED + added, dtype, last=last, heads=heads, room=3 * heads * last), first[0]
    if op == "rotary_embedding":
        kv_heads, rotary = (tensors[1][1] or first)[-2], 2 * tensors[2][1][-1]
        part: dict[str, Any] = {} if rotary == last else {"rotary": rotary}
        part |= {"interleaved": True} if parts[5:6] == ["True"] else {}
        return family(op, STRIDED, dtype, last=last, heads=first[-2], kv_heads=kv_heads, **part), first[0]
    if op == "topk_softmax":
        dtype, gating = tensors[3]
        return family(op, dtype=dtype, last=gating[-1], k=last), gating[0]
    if op == "grouped_topk":
        groups, kept, k = map(int, parts[1:4])
        return family(op, dtype=dtype, last=last, k=k, groups=groups, kept=kept), rows
    if op == "moe_align_block_size":
        return family(op, last=last, block=int(parts[1]), experts=int(parts[2])), rows
    if op == "moe_sum":
        return family(op, dtype=dtype, last=last, k=first[-2]), first[0]
    if op == "fused_experts":
        experts, inner, k = tensors[1][1][0], tensors[2][1][-1], tensors[4][1][-1]
        return family(op, dtype=dtype, last=last, inner=inner, experts=experts, k=k), rows
    return None

"""Gives a checkpoint weights of eight bits, as compressed-tensors writes them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file
from safetensors.torch import save_file

if TYPE_CHECKING:
    from pathlib import Path

EIGHT_BITS = {
    "fp8": (torch.float8_e4m3fn, "float", 448),
    "int8": (torch.int8, "int", 127),
}


def quantize(folder: Path, model: str) -> None:
    """Quantise the linear layers of a checkpoint in place, and say so in its ``config.json``.

    Each output has a float32 scale of its own; activations are quantised by token.

    Args:
        folder: with ``config.json`` and one ``model.safetensors``.
        model: a key of :data:`EIGHT_BITS`.
    """
    dtype, kind, most = EIGHT_BITS[model]
    tensors = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if not name.endswith("proj.weight"):
            tensors[name] = weight
            continue
        scale = weight.float().abs().amax(1, keepdim=True) / most
        scaled = weight.float() / scale
        tensors[name] = (scaled if kind == "float" else scaled.round()).to(dtype)
        tensors[f"{name}_scale"] = scale
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    bits = {"num_bits": 8, "type": kind, "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**bits, "strategy": "channel", "dynamic": False},
        "input_activations": {**bits, "strategy": "token", "dynamic": True},
    }
    scheme = {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": scheme}))

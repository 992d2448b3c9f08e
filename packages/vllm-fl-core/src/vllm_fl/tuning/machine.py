"""Where something was measured: the card, its driver and the versions that matter."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any

import torch

from vllm_fl.about import generated_by

if TYPE_CHECKING:
    from collections.abc import Mapping


def machine(device: torch.device, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``{"card", "driver", "date", "by", "versions"}`` of this process and a device.

    Args:
        device: where it is measured.
        found: what ``vllm-fl env --json`` prints.
    """
    versions = {one["name"]: one["version"] for one in found["packages"] if one["version"]}
    return {
        "card": card(device),
        "driver": _driver(found["devices"]),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "by": generated_by(),
        # What runs, which metadata need not know: a wheel for one device has its own name.
        "versions": {**versions, "torch": str(torch.__version__)},
    }


def card(device: torch.device) -> str:
    """Return a device's name, such as ``NVIDIA H200``; of a CPU its model."""
    if device.type != "cpu":
        name = getattr(torch.get_device_module(device), "get_device_name", None)
        return str(name(device)) if name is not None else device.type
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else 'CPU'}, {torch.get_num_threads()} threads"


def _driver(devices: list[dict[str, Any]]) -> str | None:
    found = [f"{one['driver']} {one['driver_version']}" for one in devices if one["driver_version"]]
    return found[0] if found else None

"""The NPU, for a vLLM that does not know it: the entry point ``vllm_fl.platforms: ascend``.

vllm-fl makes vLLM's platform of it, unless vllm-ascend or another wheel brings one. No
card has run it: the README says what has been checked.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vllm_fl.platform.description import Chip
from vllm_fl_ascend import _availability

CHIP = Chip(
    name="Ascend NPU",
    probe="vllm_fl_ascend.chip:probe",
    device_type="npu",
    torch_module="torch.npu",
    # It registers the device and HCCL, and opens no card.
    imports=("torch_npu",),
    dist_backend="hccl",
    visible_devices="ASCEND_RT_VISIBLE_DEVICES",
    ray_key="NPU",
    ray_noset=("RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES",),
    pin_memory=True,
    # What the attention of this wheel takes.
    block_size=128,
    # torch_npu has an allocator and a guard: torch.accelerator answers for it by itself.
    cuda_names={
        name: f"torch.npu:{name}" for name in ("Stream", "Event", "current_stream", "stream", "set_stream")
    },
    compute_units="vllm_fl_ascend.chip:compute_units",
    # No graphs: the attention reads lengths on the host at each step. No compilation:
    # Inductor knows no NPU, and vLLM's other backend has not been tried.
)


def probe() -> bool | str:
    """Say whether a card is here, or why not; torch and the card are left alone."""
    if _availability.emulated():
        return True
    if find_spec("torch_npu") is None:
        return "torch_npu is not installed"
    if not any(Path("/dev").glob("davinci[0-9]*")):
        return "there is no /dev/davinci*: no card, or its driver is not loaded"
    return True


def compute_units(index: int = 0) -> int:
    """Return how many cores for matrices a card has."""
    import torch

    properties: Any = torch.npu.get_device_properties(index)  # type: ignore[attr-defined]
    return int(properties.cube_core_num)

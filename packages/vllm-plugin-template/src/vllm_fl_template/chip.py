"""The chip, for a vLLM that does not know it: the entry point ``vllm_fl.platforms: template``.

From this description vllm-fl makes vLLM's platform; docs/platform.md has every field. It
is data: what is named here as ``"module:attribute"`` is imported when the chip is used.
The chip described here is made up. It is the CPU, which PyTorch takes for no
accelerator, so that everything that vLLM asks of one stands in ``device.py``; the torch
of a real chip has most of it, and the description is shorter.
"""

from __future__ import annotations

from pathlib import Path

from vllm_fl.platform.description import Chip

_DEVICE = "vllm_fl_template.device"

CHIP = Chip(
    name="Template CPU",
    probe="vllm_fl_template.chip:probe",
    # torch.device("cpu"), and what torch.cuda is for CUDA. Of a chip whose library brings
    # both: device_type="npu", torch_module="torch.npu", imports=("torch_npu",).
    device_type="cpu",
    torch_module=_DEVICE,
    # For a chip that is not a part of PyTorch it is "PrivateUse1", which is the default.
    dispatch_key="CPU",
    # One may not write torch.device("cpu:1").
    indexed=False,
    dist_backend="gloo",
    dtypes=("bfloat16", "float16", "float32"),
    compile_backend="inductor",
    # vLLM calls these by torch.cuda's name.
    cuda_names={
        name: f"{_DEVICE}:{name}" for name in ("Stream", "Event", "current_stream", "stream", "set_stream")
    },
    # A chip with an allocator and a guard in PyTorch needs none of these.
    accelerator={
        name: f"{_DEVICE}:{name}"
        for name in (
            "Stream",
            "Event",
            "current_device_index",
            "current_stream",
            "device_count",
            "empty_cache",
            "empty_host_cache",
            "get_memory_info",
            "is_available",
            "max_memory_allocated",
            "memory_allocated",
            "memory_reserved",
            "memory_stats",
            "reset_peak_memory_stats",
            "set_device_index",
            "set_stream",
            "synchronize",
        )
    },
)


def probe() -> bool | str:
    """Say whether the chip is here, or why not.

    Every process of vLLM asks, and some of them fork afterwards: look for the driver, and
    leave torch and the device alone.
    """
    # <sample>
    import os

    if os.environ.get("VLLM_FL_TEMPLATE_ENABLED") == "1":
        return True
    # </sample>
    return Path("/dev/template0").exists() or "there is no /dev/template0"

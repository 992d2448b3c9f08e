"""vLLM makes its platform of the NPU's description, and imports the worker, over the real torch_npu."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_ASK = """
import json, os
from vllm.platforms import current_platform as platform
import torch
from vllm.config import VllmConfig

config = VllmConfig()
from vllm_fl.platform.worker import ChipWorker

print(json.dumps({
    "platform": [platform.device_type, platform.device_name, platform.dispatch_key, platform.dist_backend],
    "variables": [platform.device_control_env_var, *platform.ray_noset_device_env_vars],
    "ray": platform.ray_device_key,
    "worker": [config.parallel_config.worker_cls, ChipWorker.__name__],
    "compiled": config.compilation_config.mode.name, "graphs": config.compilation_config.cudagraph_mode.name,
    "device": config.device_config.device.type,
    "bound": [torch.cuda.Stream is torch.npu.Stream, torch.cuda.Event is torch.npu.Event],
    "handed on": os.environ["VLLM_FL_PLATFORM"],
}))
os._exit(0)
"""


def test_the_platform(card: Mapping[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _ASK],
        env={**os.environ, **card, "VLLM_FL_PLATFORM": "ascend"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "platform": ["npu", "npu", "PrivateUse1", "hccl"],
        "variables": ["ASCEND_RT_VISIBLE_DEVICES", "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES"],
        "ray": "NPU",
        "worker": ["vllm_fl.platform.worker.ChipWorker", "ChipWorker"],
        "compiled": "NONE",
        "graphs": "NONE",
        "device": "npu",
        "bound": [True, True],
        "handed on": "ascend",
    }

"""The description of the NPU: what it names is in the real torch_npu, and takes what vLLM gives."""

from __future__ import annotations

import functools
import inspect
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any

import pytest

from vllm_fl_ascend import _availability
from vllm_fl_ascend import chip
from vllm_fl_ascend.chip import CHIP

if TYPE_CHECKING:
    from types import SimpleNamespace

#: What vLLM gives to each name, with and without what may be left out.
CALLS: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "Stream": [((), {}), (("npu:0",), {})],
    "Event": [((), {}), ((), {"enable_timing": True}), ((), {"blocking": True})],
    "current_stream": [((), {}), (("npu:0",), {})],
    "stream": [((object(),), {})],
    "set_stream": [((object(),), {})],
}
OF_THE_MODULE = {
    "set_device": [(("npu:0",), {})],
    "device_count": [((), {})],
    "manual_seed_all": [((0,), {})],
    "get_device_properties": [((0,), {})],
    "current_device": [((), {})],
    "synchronize": [((), {})],
}


def _load(reference: str) -> Any:
    module, _, path = reference.partition(":")
    return functools.reduce(getattr, path.split("."), import_module(module))


def test_what_it_names_is_in_torch_npu(npu: SimpleNamespace) -> None:
    for module in CHIP.imports:
        import_module(module)
    assert set(CHIP.cuda_names) == set(CALLS)
    found = {name: _load(reference) for name, reference in CHIP.cuda_names.items()}
    module = import_module(CHIP.torch_module)
    found |= {name: getattr(module, name) for name in OF_THE_MODULE}
    for name, calls in {**CALLS, **OF_THE_MODULE}.items():
        for args, kwargs in calls:
            inspect.signature(found[name]).bind(*args, **kwargs)


def test_torch_knows_the_device(npu: SimpleNamespace) -> None:
    import torch

    import_module("torch_npu")
    assert torch.device(f"{CHIP.device_type}:0").type == CHIP.device_type
    assert torch._C._get_privateuse1_backend_name() == CHIP.device_type
    # Its allocator answers here, so that nothing of torch.accelerator has to be bound.
    assert torch.accelerator.memory_stats() == {}
    assert torch.distributed.Backend.backend_capability[CHIP.dist_backend] == [CHIP.device_type]


def test_the_attention_takes_its_blocks() -> None:
    pytest.importorskip("vllm")
    from vllm_fl_ascend.impl.attention import AscendAttentionBackend

    assert CHIP.block_size in AscendAttentionBackend.get_supported_kernel_block_sizes()


@pytest.mark.parametrize(
    ("library", "nodes", "answer"),
    [
        (True, ["davinci0", "davinci_manager"], True),
        (True, ["davinci_manager"], "there is no /dev/davinci*: no card, or its driver is not loaded"),
        (False, ["davinci0"], "torch_npu is not installed"),
    ],
)
def test_the_probe(monkeypatch: pytest.MonkeyPatch, library: bool, nodes: list[str], answer: Any) -> None:
    monkeypatch.setattr(_availability, "emulated", lambda: False)
    monkeypatch.setattr(chip, "find_spec", lambda name: object() if library else None)
    monkeypatch.setattr(Path, "glob", lambda self, pattern: [n for n in map(Path, nodes) if n.match(pattern)])
    assert chip.probe() == answer


def test_reading_it_imports_no_torch() -> None:
    looked_at = "print({'torch', 'torch_npu'} & {*sys.modules})"
    code = f"import sys\nfrom vllm_fl_ascend import chip\nchip.probe()\n{looked_at}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "set()\n", done.stderr

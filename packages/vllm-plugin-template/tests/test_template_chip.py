"""The description of the chip: what it names is there, and reading it imports nothing heavy."""

from __future__ import annotations

import functools
import subprocess
import sys
from importlib import import_module
from typing import Any

from vllm_fl_template.chip import CHIP
from vllm_fl_template.chip import probe

#: Fields whose values are written "module:attribute".
_MAPPINGS = ("cuda_names", "accelerator", "triton_kernels")
_NAMES = ("probe", "communicator", "graph_wrapper", "attention", "total_memory", "worker", "runner")


def _load(reference: str) -> Any:
    module, _, path = reference.partition(":")
    return functools.reduce(getattr, path.split("."), import_module(module))


def test_what_it_names_is_there() -> None:
    for module in (*CHIP.imports, CHIP.torch_module):
        import_module(module)
    references = [one for field in _MAPPINGS for one in getattr(CHIP, field).values()]
    references += [one for one in (getattr(CHIP, field) for field in _NAMES) if one]
    assert all(callable(_load(one)) for one in references)


def test_the_module_of_the_device_has_what_a_worker_needs() -> None:
    module = import_module(CHIP.torch_module)
    assert all(callable(getattr(module, name)) for name in ("device_count", "manual_seed_all", "set_device"))


def test_the_probe_answers() -> None:
    answer = probe()
    assert answer is True or (isinstance(answer, str) and answer)


def test_reading_it_imports_no_torch() -> None:
    code = "import sys\nfrom vllm_fl_template.chip import probe\nprobe()\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "False\n", done.stderr

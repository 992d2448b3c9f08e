"""The entry point: what it registers, and what it does not import."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from vllm_fl.dispatch import OPERATORS
from vllm_fl.dispatch import BackendImplKind
from vllm_fl_template import register_ops
from vllm_fl_template.template import TemplateBackend

if TYPE_CHECKING:
    from vllm_fl.dispatch import OpManager


def test_every_operator_is_registered_as_the_vendors(manager: OpManager) -> None:
    found = manager.registry.snapshot().impls_by_op
    assert set(found) >= {name for name in OPERATORS if name in vars(TemplateBackend)}
    for (impl,) in found.values():
        assert impl.impl_id == "vendor.template"
        assert impl.kind is BackendImplKind.VENDOR
        assert impl.vendor == "template"
        assert impl.unavailable_reason() is None


def test_what_is_written_and_what_is_traced(manager: OpManager) -> None:
    found = {name: impls[0] for name, impls in manager.registry.snapshot().impls_by_op.items()}
    assert found["rotary_embedding"].writes == ("query", "key")
    assert found["rms_norm"].writes == ()
    assert found["silu_and_mul"].traceable
    assert not found["fused_experts"].traceable


def test_registering_imports_no_torch_and_no_vllm() -> None:
    program = (
        "import sys\n"
        "from vllm_fl.dispatch import OpRegistry\n"
        "from vllm_fl_template.register_ops import register_builtins\n"
        "register_builtins(OpRegistry())\n"
        "print(sorted({'torch', 'vllm', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr


def test_without_the_library_it_says_so() -> None:
    program = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from vllm_fl_template.template import TemplateBackend\n"
        "print(TemplateBackend().implementations()[0].unavailable_reason())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("torch is not installed: "), done.stderr


def test_the_entry_point_names_the_module() -> None:
    try:
        entries = importlib.metadata.distribution("vllm-plugin-template").entry_points
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the wheel is not installed")
    (entry,) = [e for e in entries if e.group == "vllm_fl.plugin"]
    assert entry.name == "template"
    assert entry.load() is register_ops

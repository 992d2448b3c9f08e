"""The entry point: what it registers, and what it does not import."""

from __future__ import annotations

import importlib.metadata
import inspect
import subprocess
import sys

import pytest

from vllm_fl.dispatch import BackendImplKind
from vllm_fl.dispatch import OpRegistry
from vllm_fl.dispatch.ops import OPERATORS
from vllm_fl_reference import register_ops


@pytest.fixture
def impls():
    registry = OpRegistry()
    register_ops.register_builtins(registry)
    return [impl for impls in registry.snapshot().impls_by_op.values() for impl in impls]


def test_every_operator_is_registered_once(impls):
    assert sorted(impl.op_name for impl in impls) == sorted(set(OPERATORS) - {"attention_backend"})
    for impl in impls:
        assert impl.impl_id == "reference.torch"
        assert impl.kind is BackendImplKind.REFERENCE
        assert impl.traceable
        assert impl.graph_safe


def test_each_name_loads_the_plain_function(impls):
    for impl in impls:
        function = impl.load()
        assert inspect.isfunction(function)
        assert function.__name__ == impl.op_name
        assert set(impl.writes or ()) <= set(inspect.signature(function).parameters)


def test_without_torch_it_says_so():
    program = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from vllm_fl_reference.reference import ReferenceBackend\n"
        "print(ReferenceBackend().implementations()[0].unavailable_reason())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("torch is not installed: "), done.stderr


@pytest.mark.parametrize(
    "statement",
    [
        "import vllm_fl_reference.register_ops",
        "import vllm_fl_reference.register_ops as r\n"
        "from vllm_fl.dispatch import OPERATORS, OpRegistry\n"
        "registry = OpRegistry()\n"
        "r.register_builtins(registry)\n"
        "assert len(registry.snapshot().impls_by_op) == len(OPERATORS) - 1",
    ],
    ids=["import", "register"],
)
def test_no_torch_and_no_vllm_is_imported(statement):
    program = f"{statement}\nimport sys\nprint(sorted({{'torch', 'vllm', 'numpy'}} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_the_entry_point_names_the_module():
    try:
        files = importlib.metadata.distribution("vllm-fl-reference").entry_points
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the wheel is not installed")
    (entry,) = [e for e in files if e.group == "vllm_fl.plugin"]
    assert entry.load() is register_ops

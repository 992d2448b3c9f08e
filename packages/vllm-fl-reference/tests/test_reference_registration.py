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


class Recorder:
    """A registry that only remembers."""

    def __init__(self) -> None:
        self.impls = []

    def register_many(self, impls):
        self.impls += impls


@pytest.fixture
def impls():
    registry = Recorder()
    register_ops.register_builtins(registry)
    return registry.impls


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
        assert set(impl.writes) <= set(inspect.signature(function).parameters)


def test_a_real_registry_takes_them():
    registry = OpRegistry()
    register_ops.register_builtins(registry)


@pytest.mark.parametrize(
    "statement",
    [
        "import vllm_fl_reference.register_ops",
        "import vllm_fl_reference.register_ops as r\n"
        "from vllm_fl.dispatch.ops import OPERATORS\n"
        "class Registry:\n"
        "    def register_many(self, impls): assert len(list(impls)) == len(OPERATORS) - 1\n"
        "r.register_builtins(Registry())",
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

"""That nothing made the dispatch slower by a mistake: counted in calls, which no machine changes.

A lock, a hash of a policy or a logger on the way to a kernel is a call more. What it
costs in time is the benchmark's to say: `hatch run bench dispatch`.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any

import pytest

from vllm_fl.dispatch import OPERATORS
from vllm_fl.dispatch import BackendImplKind
from vllm_fl.dispatch import OpImpl
from vllm_fl.dispatch import OpManager
from vllm_fl.dispatch import OpRegistry
from vllm_fl.dispatch import SelectionPolicy
from vllm_fl.dispatch import manager as manager_module
from vllm_fl.dispatch import resolve_op
from vllm_fl.dispatch import set_global_policy

if TYPE_CHECKING:
    from collections.abc import Callable

SOURCE = Path(__file__).parents[3] / "tests" / "benchmarks" / "dispatch.py"
#: Loading a plugin and registering what it has, in function calls; it takes about 2,000.
CALLS_OF_A_PLUGIN = 10_000


@pytest.fixture(scope="module")
def bench() -> Any:
    if not SOURCE.is_file():
        pytest.skip("the benchmarks are not a part of the source distribution")
    spec = importlib.util.spec_from_file_location("benchmark_of_the_dispatch", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


#: Counted, and not timed: a busy machine makes no more of them.
COUNTED_RESOLVE = """
import sys
import vllm_fl.dispatch as dispatch
calls = 0
def count(frame, event, argument):
    global calls
    calls += event in ("call", "c_call")
sys.setprofile(count)
dispatch.resolve_op("op_0")
sys.setprofile(None)
print(calls, len([r for r in dispatch.get_discovered_plugins() if r.state == "loaded"]))
"""


def test_import_is_of_nothing_heavy(bench: Any) -> None:
    assert bench.import_time(runs=1)["heavy"] == []


def test_a_first_resolve_takes_as_much_for_every_plugin(bench: Any, tmp_path: Path) -> None:
    """Twice as many plugins are twice as much work, and not four times."""
    calls = {}
    for plugins in (20, 40, 80):
        packages = tmp_path / str(plugins)
        packages.mkdir()
        bench.install_plugins(packages, plugins)
        for _ in range(2):  # the second time with compiled bytecode
            counted, loaded = map(int, bench._python(COUNTED_RESOLVE, tmp_path / "cache", packages).split())
        assert loaded >= plugins
        calls[plugins] = counted
    first, second = calls[40] - calls[20], calls[80] - calls[40]
    assert second < 2.5 * first, calls
    assert first / 20 < CALLS_OF_A_PLUGIN, calls


def test_with_strict_it_is_the_implementation_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def norm(x: Any, residual: Any, weight: Any, epsilon: float) -> Any:
        return x

    class Kernels:
        def norm(self, x: Any, residual: Any, weight: Any, epsilon: float) -> Any:
            return x

    method = Kernels().norm
    for fn in (norm, method, lambda *args, **kwargs: args):
        registry = OpRegistry()
        registry.register_many(
            OpImpl("rms_norm", f"vendor.{v}", BackendImplKind.VENDOR, fn, v, p)
            for v, p in (("a", 2), ("b", 1))
        )
        monkeypatch.setattr(manager_module, "_default", OpManager(registry))
        set_global_policy(SelectionPolicy(strict=True))
        assert resolve_op("rms_norm") is fn
        set_global_policy(SelectionPolicy())
        assert resolve_op("rms_norm") is not fn


def test_a_guard_calls_the_implementation_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """No lock, no getpid, no binding, no logging: counted in function calls, whatever the machine."""
    registry = OpRegistry()
    calls: list[str] = []

    def kernel(x: Any) -> Any:
        return x

    registry.register_many(
        OpImpl("silu_and_mul", f"vendor.{v}", BackendImplKind.VENDOR, kernel, v) for v in ("a", "b")
    )
    monkeypatch.setattr(manager_module, "_default", OpManager(registry))
    op, call = resolve_op("silu_and_mul"), manager_module.call_op
    call("silu_and_mul", 1)

    def profile(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            calls.append(frame.f_code.co_name)
        elif event == "c_call":
            calls.append(argument.__qualname__)

    def names_of(function: Callable[[], Any]) -> list[str]:
        calls.clear()
        sys.setprofile(profile)
        try:
            function()
        finally:
            sys.setprofile(None)
        return [name for name in calls if name not in ("setprofile", "<lambda>")]

    through_call_op = ["call_op", "ContextVar.get", "silu_and_mul", "kernel"]
    assert names_of(lambda: op(1)) == ["silu_and_mul", "kernel"]
    assert names_of(lambda: call("silu_and_mul", 1)) == through_call_op
    # A policy with an order for every operator costs a call nothing.
    set_global_policy(SelectionPolicy.from_dict(per_op_order={name: ["vendor"] for name in OPERATORS}))
    call("silu_and_mul", 1)
    assert names_of(lambda: call("silu_and_mul", 1)) == through_call_op
    assert names_of(lambda: resolve_op("silu_and_mul")(1))[-2:] == ["silu_and_mul", "kernel"]

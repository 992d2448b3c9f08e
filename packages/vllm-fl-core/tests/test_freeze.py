"""Freezing: every choice of a process is fixed, has a fingerprint, and cannot be changed until a thaw."""

from __future__ import annotations

import json
import textwrap
from dataclasses import FrozenInstanceError
from typing import TYPE_CHECKING
from typing import Any

import pytest

from vllm_fl.dispatch import BackendImplKind
from vllm_fl.dispatch import OpImpl
from vllm_fl.dispatch import OpManager
from vllm_fl.dispatch import OpRegistry
from vllm_fl.dispatch import Plan
from vllm_fl.dispatch import PolicyError
from vllm_fl.dispatch import SelectionPolicy
from vllm_fl.dispatch import UnknownOperatorError
from vllm_fl.dispatch import call_op
from vllm_fl.dispatch import get_default_manager
from vllm_fl.dispatch import get_policy
from vllm_fl.dispatch import manager as manager_module
from vllm_fl.dispatch import policy_context
from vllm_fl.dispatch import reset_default_manager
from vllm_fl.dispatch import reset_global_policy
from vllm_fl.dispatch import resolve_op
from vllm_fl.dispatch import set_global_policy
from vllm_fl.dispatch import with_allowed_vendors
from vllm_fl.dispatch import with_denied_vendors
from vllm_fl.dispatch import with_preference
from vllm_fl.dispatch import with_strict_mode
from vllm_fl.dispatch.registry import PluginRecord
from vllm_fl.dispatch.types import Origin

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable
    from pathlib import Path

OP = "silu_and_mul"


def impl(vendor: str, priority: int = 100, op: str = OP, version: str = "1.0") -> OpImpl:
    origin = Origin(f"wheel-{vendor}", version, vendor)
    return OpImpl(
        op,
        f"vendor.{vendor}",
        BackendImplKind.VENDOR,
        lambda x: (vendor, x),
        vendor,
        priority,
        origin=origin,
    )


def only(*vendors: str) -> SelectionPolicy:
    return SelectionPolicy.from_dict(per_op_order={OP: [f"vendor:{vendor}" for vendor in vendors]})


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> OpManager:
    """The default manager, with vendors a and b; it finds no plugins."""
    manager = OpManager(OpRegistry())
    manager.registry.register_many([impl("a", 300), impl("b", 200)])
    monkeypatch.setattr(manager_module, "_default", manager)
    return manager


# -- the plan ---------------------------------------------------------------------


def test_the_plan_has_every_operator(manager: OpManager) -> None:
    manager.registry.register_impl(impl("b", op="my_op", version="2.0"))
    plan = manager.freeze()
    assert manager.plan is plan
    assert manager.frozen
    assert plan.choices[OP] == "vendor.a"
    assert plan.choices["my_op"] == "vendor.b"
    assert plan.choices["rms_norm"] is None
    assert set(plan.choices) == {*manager.registry.snapshot().operators, "my_op"}
    assert plan.wheels == {"wheel-a": "1.0", "wheel-b": "2.0"}
    assert plan.policy == get_policy().fingerprint()
    assert len(plan.fingerprint) == 16
    assert int(plan.fingerprint, 16) >= 0
    json.dumps([dict(plan.choices), plan.wheels])
    with pytest.raises(FrozenInstanceError):
        plan.fingerprint = "0"  # type: ignore[misc]


def test_freezing_twice_is_freezing_once(manager: OpManager) -> None:
    assert manager.freeze() is manager.freeze({"other": 1})
    manager.thaw()
    assert (manager.frozen, manager.plan) == (False, None)
    manager.thaw()
    assert not manager.frozen


def test_a_frozen_process_runs_its_plan(manager: OpManager) -> None:
    kept = resolve_op(OP)
    manager.freeze()
    assert call_op(OP, 1) == kept(1) == resolve_op(OP)(1) == ("a", 1)
    with pytest.raises(UnknownOperatorError):
        call_op("silu_and_mull", 1)
    assert manager.explain(OP).impl_id == "vendor.a"


def test_freezing_with_a_wrong_configuration(monkeypatch: pytest.MonkeyPatch, manager: OpManager) -> None:
    monkeypatch.setenv("VLLM_FL_PREFER", "venbor")
    with pytest.raises(PolicyError, match="VLLM_FL_PREFER"):
        manager.freeze()
    assert not manager.frozen


def test_a_failure_while_frozen_is_set_aside_all_the_same(manager: OpManager) -> None:
    def fails(x: Any) -> Any:
        raise ValueError

    manager.registry.register_impl(OpImpl(OP, "vendor.z", BackendImplKind.VENDOR, fails, "z", 900))
    plan = manager.freeze()
    assert plan.choices[OP] == "vendor.z"
    assert call_op(OP, 1) == call_op(OP, 1) == ("a", 1)
    assert manager.get_failed_impls() == {OP: {"vendor.z"}}
    assert manager.plan is plan


# -- the fingerprint -----------------------------------------------------------------


def fingerprint(
    *impls: OpImpl, policy: SelectionPolicy | None = None, extra: dict[str, Any] | None = None
) -> str:
    manager = OpManager(OpRegistry())
    manager.registry.register_many(impls)
    set_global_policy(policy or SelectionPolicy())
    try:
        return manager.freeze(extra).fingerprint
    finally:
        manager.thaw()


def test_the_fingerprint_differs_with_all_that_matters() -> None:
    both = impl("a", 300), impl("b", 200)
    base = fingerprint(*both)
    others = {
        "policy": fingerprint(*both, policy=SelectionPolicy(strict=True)),
        "choice and policy": fingerprint(*both, policy=only("b")),
        "choice": fingerprint(impl("a", 300), impl("b", 400)),
        "version": fingerprint(impl("a", 300, version="1.1"), impl("b", 200)),
        "extra": fingerprint(*both, extra={"layers": ["RMSNorm"]}),
        "other extra": fingerprint(*both, extra={"layers": ["SiluAndMul"]}),
        "another operator": fingerprint(*both, impl("a", op="my_op")),
    }
    assert len({base, *others.values()}) == 1 + len(others), others


def test_the_fingerprint_is_the_same_for_what_does_not_matter() -> None:
    a, b = impl("a", 300), impl("b", 200)
    base = fingerprint(a, b)
    assert fingerprint(a, b) == fingerprint(b, a) == base
    assert fingerprint(a, b, extra={}) == base
    # A wheel that is not chosen does not change what was compiled.
    assert fingerprint(a, impl("b", 200, version="9.9")) == base
    assert fingerprint(a, b, extra={"x": 1, "y": 2}) == fingerprint(a, b, extra={"y": 2, "x": 1})


def test_the_choices_are_the_candidates_where_none_are_given() -> None:
    registry = OpRegistry()
    registry.register_many([impl("a", 300), impl("b", 200)])
    choices = {OP: "vendor.a", "rms_norm": None}

    def plan(**more: Any) -> Plan:
        return Plan.of(choices, SelectionPolicy(), registry.snapshot(), {}, **more)

    named = {OP: ("vendor.a",), "rms_norm": ()}
    assert plan().candidates == named
    assert plan() == plan(candidates=named)
    # Another one may be in a graph: it counts, although it is not the choice.
    both = plan(candidates={OP: ("vendor.a", "vendor.b"), "rms_norm": ()})
    assert (both.choices, both.wheels) == (plan().choices, plan().wheels)
    assert both.fingerprint != plan().fingerprint


def test_the_plan_covers_the_modules_of_the_plugins_that_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What registers may be another module than what runs."""
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("registers_a", "registers_b"):
        (tmp_path / f"{name}.py").write_text("def register(registry): ...\n")
    registry = OpRegistry()
    registry.register_many([impl("a", 300), impl("b", 200)])
    plugins = [
        PluginRecord(vendor, f"wheel-{vendor}", "1.0", f"registers_{vendor}:register", 1, "loaded")
        for vendor in ("a", "b")
    ]

    def modules(*vendors: str) -> set[str]:
        candidates = {OP: tuple(f"vendor.{vendor}" for vendor in vendors)}
        choices = {OP: candidates[OP][0]}
        plan = Plan.of(
            choices, SelectionPolicy(), registry.snapshot(), {}, candidates=candidates, plugins=plugins
        )
        return {name for name in plan.code if name.startswith("registers")}

    assert modules("a") == {"registers_a"}
    assert modules("b", "a") == {"registers_a", "registers_b"}


def test_two_fresh_processes_agree(
    tmp_path: Path, python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    (tmp_path / "one_plugin.py").write_text(
        textwrap.dedent(
            """
            from vllm_fl.dispatch import OpImpl
            def register(registry):
                registry.register_many(
                    OpImpl(op, f"vendor.{v}", "vendor", lambda x: x, v)
                    for v in ("one", "two") for op in ("silu_and_mul", "my_op", "another"))
            """
        )
    )
    code = "from vllm_fl.dispatch import *; print(get_default_manager().freeze({'a': [1]}).fingerprint)"

    def run(**variables: str) -> str:
        done = python(code, tmp_path, VLLM_FL_PLUGIN_MODULES="one_plugin", **variables)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    first = run(PYTHONHASHSEED="1")
    assert len(first) == 16
    assert run(PYTHONHASHSEED="2", VLLM_FL_LOG_LEVEL="ERROR") == first
    assert run(PYTHONHASHSEED="1", VLLM_FL_PREFER="vendor") != first


# -- what is an error until a thaw ------------------------------------------------------


CHANGES: dict[str, Callable[[], Any]] = {
    "set_global_policy": lambda: set_global_policy(SelectionPolicy()),
    "reset_global_policy": reset_global_policy,
    "policy_context": lambda: policy_context(SelectionPolicy()).__enter__(),
    "with_preference": lambda: with_preference("vendor").__enter__(),
    "with_strict_mode": lambda: with_strict_mode().__enter__(),
    "with_allowed_vendors": lambda: with_allowed_vendors("a").__enter__(),
    "with_denied_vendors": lambda: with_denied_vendors("a").__enter__(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_policy_change_raises(manager: OpManager, name: str) -> None:
    set_global_policy(only("b"))
    policy = get_policy()
    manager.freeze()
    with pytest.raises(RuntimeError, match=r"frozen.*thaw\(\)"):
        CHANGES[name]()
    assert get_policy() is policy
    assert call_op(OP, 1) == ("b", 1)
    manager.thaw()
    entered = CHANGES[name]
    if name.startswith(("set", "reset")):
        entered()
    else:
        with policy_context(SelectionPolicy()):
            assert call_op(OP, 1) == ("a", 1)


def test_a_policy_can_be_changed_after_a_thaw(manager: OpManager) -> None:
    manager.freeze()
    manager.thaw()
    set_global_policy(only("b"))
    assert call_op(OP, 1) == ("b", 1)
    with policy_context(only("a")):
        assert call_op(OP, 1) == ("a", 1)
    assert manager.freeze().choices[OP] == "vendor.b"


def test_a_registration_is_recorded_and_used_after_a_thaw(
    manager: OpManager, caplog: pytest.LogCaptureFixture
) -> None:
    plan = manager.freeze()
    manager.registry.register_impl(impl("late", 900))
    manager.registry.register_impl(impl("later", 800, op="my_op"))
    assert call_op(OP, 1) == ("a", 1)
    assert manager.explain(OP).impl_id == "vendor.a"
    with pytest.raises(UnknownOperatorError):
        call_op("my_op", 1)
    assert manager.freeze() is plan
    warnings = [r.getMessage() for r in caplog.records]
    assert warnings == ["something was registered after the dispatch was frozen; it is used after thaw()"]
    manager.thaw()
    assert call_op(OP, 1) == ("late", 1)
    assert call_op("my_op", 1) == ("later", 1)
    caplog.clear()
    manager.freeze()
    manager.registry.register_impl(impl("latest", 950))
    assert len(caplog.records) == 1


def test_a_frozen_manager_that_is_reset_holds_nobody(manager: OpManager) -> None:
    manager.freeze()
    reset_default_manager()
    set_global_policy(SelectionPolicy())
    assert not manager.frozen


def test_a_frozen_manager_that_is_dropped_holds_nobody() -> None:
    import gc

    other = OpManager(OpRegistry())
    other.freeze()
    with pytest.raises(RuntimeError):
        set_global_policy(SelectionPolicy())
    del other
    gc.collect()
    set_global_policy(SelectionPolicy())


# -- contexts that are entered already ---------------------------------------------------


def test_a_context_that_was_entered_before_the_freeze(manager: OpManager) -> None:
    """The plan holds there, too, for all that is asked."""
    with policy_context(only("b")):
        assert call_op(OP, 1) == ("b", 1)
        import threading

        thread = threading.Thread(target=manager.freeze)  # with the global policy
        thread.start()
        thread.join()
        assert manager.plan is not None
        assert manager.plan.choices[OP] == "vendor.a"
        assert call_op(OP, 1) == resolve_op(OP)(1) == ("a", 1)
        assert manager.explain(OP).impl_id == manager.get_selected_impl_id(OP) == "vendor.a"
        native = manager.resolve_with_native(OP, lambda x: ("native", x))
        assert native.decision.impl_id == "vendor.a"
        manager.thaw()
        assert call_op(OP, 1) == ("b", 1)
    assert call_op(OP, 1) == ("a", 1)


def test_a_freeze_inside_a_context_keeps_its_policy(manager: OpManager) -> None:
    policy = only("b")
    with policy_context(policy):
        plan = manager.freeze()
        assert call_op(OP, 1) == ("b", 1)
    assert plan.policy == policy.fingerprint()
    assert plan.choices[OP] == "vendor.b"
    assert call_op(OP, 1) == resolve_op(OP)(1) == ("b", 1)
    assert manager.explain(OP).impl_id == "vendor.b"
    manager.thaw()
    assert call_op(OP, 1) == ("a", 1)


def test_a_callable_kept_from_before_keeps_its_choice(manager: OpManager) -> None:
    with policy_context(only("b")):
        kept = resolve_op(OP)
    manager.freeze()
    assert kept(1) == ("b", 1)
    manager.thaw()
    set_global_policy(only("a"))
    assert kept(1) == ("b", 1)


def test_the_default_manager_is_what_freezes(manager: OpManager) -> None:
    assert get_default_manager() is manager
    manager.freeze()
    reset_default_manager()
    assert get_default_manager() is not manager

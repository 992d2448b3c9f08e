"""The list "Which one runs" of ``vllm_fl.dispatch.manager``, as a table."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING
from typing import Any
from typing import NamedTuple

import pytest

from vllm_fl.dispatch import BackendImplKind
from vllm_fl.dispatch import NoImplementationError
from vllm_fl.dispatch import OpImpl
from vllm_fl.dispatch import OpManager
from vllm_fl.dispatch import OpRegistry
from vllm_fl.dispatch import SelectionPolicy
from vllm_fl.dispatch import UnknownOperatorError
from vllm_fl.dispatch import call_op
from vllm_fl.dispatch import callables
from vllm_fl.dispatch import get_default_manager
from vllm_fl.dispatch import match_token
from vllm_fl.dispatch import policy_context
from vllm_fl.dispatch import resolve_op
from vllm_fl.dispatch import set_global_policy
from vllm_fl.dispatch.calling import binding
from vllm_fl.dispatch.calling import guard

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("no_plugins")

OP = "silu_and_mul"


def make(spec: str, op_name: str = OP) -> OpImpl:
    """Make one that returns its id; ``vendor.acme@120!`` has priority 120 and is not available."""
    impl_id, _, priority = spec.removesuffix("!").partition("@")
    prefix, vendor = impl_id.split(".")[:2]
    kind = BackendImplKind("flagos" if prefix == "default" else prefix)

    def fn(x: object) -> str:
        return impl_id

    if spec.endswith("!"):
        fn._is_available = lambda: "the device is away"  # type: ignore[attr-defined]
    is_vendor = kind is BackendImplKind.VENDOR
    return OpImpl(
        op_name, impl_id, kind, fn, vendor if is_vendor else None, int(priority) if priority else None
    )


def manager_of(*specs: str) -> OpManager:
    registry = OpRegistry()
    registry.register_many([make(spec) for spec in specs])
    return OpManager(registry)


class Row(NamedTuple):
    """One case: a policy, what is registered, and what must come out of it."""

    policy: dict[str, Any]
    impls: str
    usable: str
    rest: str = ""


def order(*tokens: str, **more: Any) -> dict[str, Any]:
    return {"per_op_order": {OP: list(tokens)}, **more}


FLAGOS, TORCH, ACME = "default.flagos", "reference.torch", "vendor.acme"
ALL = f"{TORCH} {ACME} {FLAGOS}"

TABLE = [
    # The kinds, in the order of `prefer`.
    Row({}, ALL, f"{FLAGOS} {ACME} {TORCH}"),
    Row({"prefer": "flagos"}, ALL, f"{FLAGOS} {ACME} {TORCH}"),
    Row({"prefer": "vendor"}, ALL, f"{ACME} {FLAGOS} {TORCH}"),
    Row({"prefer": "reference"}, ALL, f"{TORCH} {FLAGOS} {ACME}"),
    Row({"prefer": "native"}, ALL, f"{FLAGOS} {ACME} {TORCH}"),  # there is none outside vLLM
    Row({"prefer": "vendor"}, f"{TORCH} {FLAGOS}", f"{FLAGOS} {TORCH}"),
    Row({}, TORCH, TORCH),
    # A kind goes before a priority.
    Row({}, f"{FLAGOS}@1 {ACME}@999", f"{FLAGOS} {ACME}"),
    Row({"prefer": "reference"}, f"{FLAGOS} {TORCH}@-5", f"{TORCH} {FLAGOS}"),
    # Inside one token: by priority, then by impl_id.
    Row({}, "vendor.b vendor.a vendor.c", "vendor.a vendor.b vendor.c"),
    Row({}, "vendor.a@1 vendor.b@3 vendor.c@2", "vendor.b vendor.c vendor.a"),
    Row({}, "vendor.b@7 vendor.a@7 vendor.c@8", "vendor.c vendor.a vendor.b"),
    Row({}, "vendor.acme.slow vendor.acme", "vendor.acme vendor.acme.slow"),
    Row({}, "vendor.acme vendor.acme.fast@101", "vendor.acme.fast vendor.acme"),
    Row({}, "default.b default.a default.c@151", "default.c default.a default.b"),
    Row({}, "reference.torch reference.numpy", "reference.numpy reference.torch"),
    # What is not available.
    Row({}, f"{FLAGOS}! {ACME} {TORCH}", f"{ACME} {TORCH}", f"unavailable:{FLAGOS}"),
    Row({}, f"{FLAGOS}! {ACME}! {TORCH}", TORCH, f"unavailable:{FLAGOS} unavailable:{ACME}"),
    Row({"prefer": "vendor"}, f"{ACME}! {TORCH}", TORCH, f"unavailable:{ACME}"),
    Row({}, "vendor.a@9! vendor.b@1", "vendor.b", "unavailable:vendor.a"),
    # An operator's own order is exclusive.
    Row(order("vendor"), ALL, ACME, f"not-listed:{FLAGOS} not-listed:{TORCH}"),
    Row(order("reference", "vendor"), ALL, f"{TORCH} {ACME}", f"not-listed:{FLAGOS}"),
    Row(order("vendor", prefer="reference"), ALL, ACME, f"not-listed:{FLAGOS} not-listed:{TORCH}"),
    Row(order("flagos"), f"{FLAGOS}! {TORCH}", "", f"unavailable:{FLAGOS} not-listed:{TORCH}"),
    Row(order("native"), TORCH, "", f"not-listed:{TORCH}"),
    Row(order("native", "reference"), TORCH, TORCH),
    Row({"per_op_order": {"rms_norm": ["vendor"]}}, ALL, f"{FLAGOS} {ACME} {TORCH}"),
    # Tokens of one vendor and of one implementation.
    Row(order("vendor:b", "vendor"), "vendor.a@9 vendor.b vendor.c", "vendor.b vendor.c vendor.a"),
    Row(order("vendor:b"), "vendor.a vendor.b vendor.b.x@200", "vendor.b.x vendor.b", "not-listed:vendor.a"),
    Row(order("vendor:cuda"), "vendor.a", "", "not-listed:vendor.a"),
    Row(
        order("impl:vendor.b.x", "reference"),
        f"vendor.b vendor.b.x {TORCH}",
        f"vendor.b.x {TORCH}",
        "not-listed:vendor.b",
    ),
    Row(
        order("impl:vendor.b", "vendor:b"),
        "vendor.b@1 vendor.b.x vendor.b.y@2",
        "vendor.b vendor.b.x vendor.b.y",
    ),
    Row(order("vendor:b", "impl:vendor.b.y"), "vendor.b vendor.b.y", "vendor.b vendor.b.y"),
    Row(order("impl:default.flagos", "impl:reference.torch"), ALL, f"{FLAGOS} {TORCH}", f"not-listed:{ACME}"),
    Row(order(f"impl:{ACME}", "reference"), f"{ACME}! {TORCH}", TORCH, f"unavailable:{ACME}"),
    # Vendors that are denied, or not allowed.
    Row({"deny_vendors": ["acme"]}, ALL, f"{FLAGOS} {TORCH}", f"denied:{ACME}"),
    Row({"deny_vendors": ["acme"]}, "vendor.acme.x vendor.b", "vendor.b", "denied:vendor.acme.x"),
    Row({"allow_vendors": ["b"]}, f"{ALL} vendor.b", f"{FLAGOS} vendor.b {TORCH}", f"denied:{ACME}"),
    Row({"allow_vendors": ["b"], "deny_vendors": ["b"]}, "vendor.b", "", "denied:vendor.b"),
    Row(order(f"impl:{ACME}", deny_vendors=["acme"]), ACME, "", f"denied:{ACME}"),
    Row({"deny_vendors": ["acme"]}, f"{ACME}! {TORCH}", TORCH, f"denied:{ACME}"),  # the wish comes first
    Row(
        order("vendor", deny_vendors=["a"]),
        f"vendor.a vendor.b {TORCH}",
        "vendor.b",
        f"denied:vendor.a not-listed:{TORCH}",
    ),
    # Nothing at all.
    Row({}, f"{FLAGOS}! {ACME}!", "", f"unavailable:{FLAGOS} unavailable:{ACME}"),
    Row({"deny_vendors": ["acme"]}, ACME, "", f"denied:{ACME}"),
]


@pytest.mark.parametrize("row", TABLE)
def test_which_one_runs(row: Row) -> None:
    manager = manager_of(*row.impls.split())
    with policy_context(SelectionPolicy.from_dict(**row.policy)):
        decision = manager.explain(OP)
        usable, rest = row.usable.split(), row.rest.split()
        assert [c.impl_id for c in decision.usable] == usable
        assert [f"{c.status}:{c.impl_id}" for c in decision.candidates[len(usable) :]] == rest
        assert [c.status for c in decision.usable] == ["chosen", *["next"] * (len(usable) - 1)][: len(usable)]
        assert decision.impl_id == (usable[0] if usable else None)
        if not usable:
            for ask in (
                manager.resolve,
                manager.get_selected_impl_id,
                manager.resolve_candidates,
                manager.call,
            ):
                with pytest.raises(NoImplementationError):
                    ask(OP)
            return
        assert manager.call(OP, 1) == usable[0] == manager.resolve(OP)(1)
        assert manager.get_selected_impl_id(OP) == usable[0]
        assert [impl.impl_id for impl in manager.resolve_candidates(OP)] == usable


@pytest.mark.parametrize("row", [row for row in TABLE if " " in row.impls])
def test_the_order_of_registration_changes_nothing(row: Row) -> None:
    with policy_context(SelectionPolicy.from_dict(**row.policy)):
        there = manager_of(*row.impls.split()).explain(OP)
        back = manager_of(*reversed(row.impls.split())).explain(OP)
    assert there == back


NATIVE_TABLE = [
    ({}, f"{FLAGOS} {ACME} {TORCH} native"),
    ({"prefer": "vendor"}, f"{ACME} {FLAGOS} {TORCH} native"),
    ({"prefer": "native"}, f"native {FLAGOS} {ACME} {TORCH}"),
    (order("native"), "native"),
    (order("vendor", "native", "reference"), f"{ACME} native {TORCH}"),
    (order("vendor"), ACME),
    ({"deny_vendors": ["acme"], "prefer": "vendor"}, f"{FLAGOS} {TORCH} native"),
]


@pytest.mark.parametrize(("policy", "usable"), NATIVE_TABLE)
def test_with_the_path_of_a_layer(policy: dict[str, Any], usable: str) -> None:
    manager = manager_of(*ALL.split())
    with policy_context(SelectionPolicy.from_dict(**policy)):
        decision = manager.explain(OP, native=True)
        resolved = manager.resolve_with_native(OP, lambda x: "native")
    assert [c.impl_id for c in decision.usable] == usable.split()
    assert [c.impl_id for c in resolved.candidates] == usable.split()
    assert resolved.decision.impl_id == decision.impl_id == resolved.fn(1)


def test_a_layer_falls_back_to_its_own_path_where_nothing_is_registered() -> None:
    resolved = OpManager(OpRegistry()).resolve_with_native(OP, lambda x: "native")
    assert resolved.fn(1) == "native"
    assert resolved.decision.impl_id == "native"


@pytest.mark.parametrize(
    ("spec", "token", "expected"),
    [
        (FLAGOS, "flagos", True),
        (FLAGOS, "default", False),
        (FLAGOS, "vendor", False),
        (ACME, "vendor", True),
        (ACME, "vendor:acme", True),
        (ACME, "vendor:acm", False),
        ("vendor.acme.fast", "vendor:acme", True),
        ("vendor.acme.fast", "impl:vendor.acme", False),
        ("vendor.acme.fast", "impl:vendor.acme.fast", True),
        (TORCH, "reference", True),
        (TORCH, "impl:reference.torch", True),
        (TORCH, "native", False),
        (TORCH, "vendor:torch", False),
        (TORCH, "", False),
    ],
)
def test_match_token(spec: str, token: str, *, expected: bool) -> None:
    assert match_token(make(spec), token) is expected


# -- reasons ------------------------------------------------------------------------------


def reasons(manager: OpManager) -> dict[str, str]:
    return {c.impl_id: c.reason for c in manager.explain(OP).candidates}


def test_every_candidate_has_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_FL_PER_OP", f"{OP}=vendor|reference")
    monkeypatch.setenv("VLLM_FL_DENY_VENDORS", "cuda")
    manager = manager_of(FLAGOS, ACME, "vendor.cuda", "vendor.b!", TORCH)
    assert reasons(manager) == {
        ACME: "chosen: the first of 'vendor'",
        TORCH: "runs if those before it do not",
        "vendor.b": "not available: the device is away",
        "vendor.cuda": "deny_vendors (VLLM_FL_DENY_VENDORS) names cuda",
        FLAGOS: f"the order of '{OP}' does not list it",
    }


def test_a_vendor_that_is_not_allowed() -> None:
    set_global_policy(SelectionPolicy.from_dict(allow_vendors=["acme"]))
    assert reasons(manager_of(ACME, "vendor.b"))["vendor.b"] == "allow_vendors (code) does not name b"


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (
            "no_such_module:fn",
            "cannot be loaded: no_such_module is not installed: No module named 'no_such_module'",
        ),
        (
            "json:no_such_function",
            "cannot be loaded: AttributeError: module 'json' has no attribute 'no_such_function'",
        ),
        ("json:__name__", "cannot be loaded: TypeError: json:__name__ is 'json', not a function"),
        ("leaves:fn", "cannot be loaded: SystemExit: 3"),
        ("lazy:two", f"it requires 'y', which nobody passes; the contract is {OP}(x), defined in "),
        ("lazy:away", "not available: its device is away"),
        ("lazy:backend.silu_and_mul", "not available: RuntimeError: no driver"),
    ],
)
def test_what_is_loaded_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fn: str, reason: str) -> None:
    (tmp_path / "leaves.py").write_text("import sys; sys.exit(3)")
    (tmp_path / "lazy.py").write_text(LAZY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "lazy", raising=False)
    registry = OpRegistry()
    registry.register_many([OpImpl(OP, ACME, BackendImplKind.VENDOR, fn, "acme"), make(TORCH)])
    manager = OpManager(registry)
    assert reasons(manager)[ACME].startswith(reason)
    assert manager.call(OP, 1) == TORCH


LAZY = """
from vllm_fl.dispatch import Backend

def two(x, y): ...
def away(x): ...
away._is_available = lambda: "its device is away"

class Lazy(Backend):
    name = "lazy"
    def is_available(self): raise RuntimeError("no driver")
    def silu_and_mul(self, x): return x

backend = Lazy()
"""


def test_a_module_is_imported_when_first_chosen_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "chosen_late.py").write_text(
        "print('imported')\nclass A:\n    @staticmethod\n    def f(x): return x + 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    registry = OpRegistry()
    registry.register_impl(OpImpl(OP, ACME, BackendImplKind.VENDOR, "chosen_late:A.f", "acme"))
    manager = OpManager(registry)
    assert "chosen_late" not in sys.modules
    assert manager.call(OP, 1) == 2
    monkeypatch.delitem(sys.modules, "chosen_late")
    assert manager.resolve(OP)(2) == 3
    assert "chosen_late" not in sys.modules


# -- nothing can run ------------------------------------------------------------------------


def failure(ask: Callable[[], object]) -> str:
    with pytest.raises(NoImplementationError) as caught:
        ask()
    assert isinstance(caught.value, RuntimeError)
    return str(caught.value)


def test_nothing_is_registered_says_what_to_install() -> None:
    lines = failure(lambda: call_op(OP, 1)).splitlines()
    assert lines[:3] == [f"nothing can run '{OP}'.", "  No implementation is registered.", "Install one of:"]
    assert "  pip install vllm-fl-reference  # any device, in plain PyTorch" in lines
    assert len(lines) == 7


def test_a_wheel_is_named_only_for_the_operators_that_it_has() -> None:
    message = failure(lambda: resolve_op("dynamic_per_token_quant_fp8"))
    assert "vllm-plugin-cuda" in message
    assert "vllm-plugin-ascend" not in message


def test_nothing_runs_says_why_of_each_and_where_the_order_is_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_FL_PER_OP", f"{OP}=vendor")
    manager = manager_of(f"{ACME}!", FLAGOS)
    message = failure(lambda: manager.call(OP, 1))
    assert f"  {ACME} (-): not available: the device is away\n" in message
    assert f"  {FLAGOS} (-): the order of '{OP}' does not list it\n" in message
    assert "  The order vendor comes from VLLM_FL_PER_OP.\n" in message
    assert "Install one of:" in message


def test_an_unknown_operator_names_the_nearest() -> None:
    for ask in (call_op, resolve_op, get_default_manager().explain):
        with pytest.raises(UnknownOperatorError) as caught:
            ask("silu_and_mull")
        assert isinstance(caught.value, LookupError)
        assert str(caught.value) == "there is no operator 'silu_and_mull'. Did you mean 'silu_and_mul'?"


def test_an_unknown_operator_that_is_near_nothing_lists_what_there_is() -> None:
    with pytest.raises(UnknownOperatorError, match=r"there is no operator 'zzz'\. Known: .*, silu_and_mul, "):
        call_op("zzz")


def test_an_operator_that_nobody_declared() -> None:
    registry = get_default_manager().registry
    registry.register_many([make("vendor.acme", "flash_something"), make("default.x!", "flash_something")])
    assert call_op("flash_something", 1) == "vendor.acme"
    with pytest.raises(UnknownOperatorError, match=r"Did you mean 'flash_something'\?"):
        call_op("flash_somethin")
    set_global_policy(SelectionPolicy.from_dict(per_op_order={"flash_something": ["flagos"]}))
    message = failure(lambda: call_op("flash_something", 1))
    assert message.endswith("No known wheel implements it.")


# -- who is asked, and the decision -----------------------------------------------------------


def test_a_decision_is_what_runs_after_every_change() -> None:
    manager = get_default_manager()
    registry = manager.registry
    seen = []

    def look() -> None:
        seen.append(call_op(OP, 1))
        assert manager.explain(OP).impl_id == seen[-1]

    registry.register_impl(make(TORCH))
    look()
    kept = resolve_op(OP)
    registry.register_impl(make(ACME))
    look()
    with policy_context(SelectionPolicy.from_dict(deny_vendors=["acme"])):
        look()
    look()
    set_global_policy(SelectionPolicy.from_dict(prefer="reference"))
    look()
    assert seen == [TORCH, ACME, TORCH, ACME, TORCH]
    assert kept(1) == TORCH


def test_the_table_that_a_person_reads() -> None:
    manager = manager_of(ACME, f"{FLAGOS}!")
    decision = manager.explain(OP)
    assert str(decision).splitlines() == [
        f"{OP}: vendor.acme (plain)",
        f"order: flagos > vendor > reference > native   from the defaults   policy {decision.policy}",
        "    implementation  wheel  priority  why",
        "->  vendor.acme     -      100       chosen: the first of 'vendor'",
        "    default.flagos  -      150       not available: the device is away",
    ]
    assert decision.to_dict()["candidates"][0]["impl_id"] == ACME
    assert str(OpManager(OpRegistry()).explain(OP)).splitlines()[0] == f"{OP}: nothing can run"


def test_degradation_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    manager = manager_of(f"{FLAGOS}!", TORCH)
    for _ in range(3):
        manager.call(OP, 1)
        manager.explain(OP)
    (message,) = [record.getMessage() for record in caplog.records]
    assert message == (
        f"{FLAGOS} (-) is preferred for {OP} but not available: the device is away. {TORCH} runs instead, "
        "in plain PyTorch, which is slower; `vllm-fl explain --all` shows every operator."
    )


def test_asking_has_no_effects(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """`explain` says what a call would do, its form and its tuned lines; nothing is built or said."""

    def built(*_: Any, **__: Any) -> Any:
        raise AssertionError("something was built")

    manager = manager_of(f"{FLAGOS}!", ACME, TORCH)
    entries = [{"dtype": "bfloat16", "last": 64, "max_rows": 16, "order": [TORCH]}]
    set_global_policy(SelectionPolicy.from_dict(tuned={OP: entries}))
    with monkeypatch.context() as context:
        for module in (guard, binding):
            context.setattr(module, "generated", built)
        context.setattr(callables, "callable_of", built)
        first, second = manager.explain(OP), manager.explain(OP, native=True)
        assert manager.get_selected_impl_id(OP) == ACME
    assert (first.form, first.tuned) == ("guard", (f"up to 16 rows of 64, bfloat16: {TORCH}",))
    assert second.usable[-1].impl_id == "native"
    assert not caplog.records
    assert manager._table == {}
    manager.call(OP, 1)
    assert len(caplog.records) == 1, "the warning had not been taken for said"


def test_nothing_is_warned_of_where_nothing_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    manager = manager_of(FLAGOS, f"{ACME}!", TORCH)
    manager.call(OP, 1)
    set_global_policy(SelectionPolicy.from_dict(prefer="vendor", deny_vendors=["acme"]))
    manager.call(OP, 1)
    assert not caplog.records

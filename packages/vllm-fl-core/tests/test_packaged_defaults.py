"""A vendor's packaged defaults: when they apply, what lies over them, and what a bad entry costs."""

from __future__ import annotations

import dataclasses
import gc
import json
import weakref
from typing import TYPE_CHECKING
from typing import Any
from typing import ClassVar

import pytest

from vllm_fl.cli import main
from vllm_fl.dispatch import Backend
from vllm_fl.dispatch import OpImpl
from vllm_fl.dispatch import OpManager
from vllm_fl.dispatch import OpRegistry
from vllm_fl.dispatch import SelectionPolicy
from vllm_fl.dispatch import availability as availability_module
from vllm_fl.dispatch import get_policy
from vllm_fl.dispatch import manager as manager_module
from vllm_fl.dispatch import policy_context
from vllm_fl.dispatch import reset_global_policy
from vllm_fl.dispatch import set_global_policy
from vllm_fl.dispatch import with_denied_vendors
from vllm_fl.dispatch import with_strict_mode
from vllm_fl.dispatch.backend import forget_availability
from vllm_fl.dispatch.common import log
from vllm_fl.dispatch.policy import packaged
from vllm_fl.dispatch.policy.keys import KEYS
from vllm_fl.dispatch.policy.packaged import effective
from vllm_fl.dispatch.policy.packaged import lies_below
from vllm_fl.dispatch.policy.shipping import received
from vllm_fl.dispatch.policy.shipping import shipped
from vllm_fl.dispatch.types import Origin

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Mapping
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("no_plugins")


@pytest.fixture(autouse=True)
def nothing_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_said", set())


def backend(vendor: str, defaults: Any, *, available: bool = True) -> Backend:
    class Packaged(Backend):
        name = vendor

        def is_available(self) -> bool:
            return available

        def silu_and_mul(self, x: object) -> object:
            return x

        @property
        def default_policy(self) -> Mapping[str, Any]:
            if isinstance(defaults, BaseException):
                raise defaults
            return defaults

    return Packaged()


def manager_with(*backends: Backend) -> OpManager:
    registry = OpRegistry()
    for one in backends:
        origin = Origin(f"vllm-plugin-{one.name}", "1.2", one.name)
        impls = [
            OpImpl(i.op_name, i.impl_id, i.kind, i.fn, i.vendor, origin=origin) for i in one.implementations()
        ]
        registry.commit(impls=tuple(impls), backends=(one,), origin=origin)
    return OpManager(registry)


def order_and_source(manager: OpManager) -> tuple[str, str]:
    decision = manager.explain("silu_and_mul")
    return " ".join(decision.order), decision.source


def in_force(manager: OpManager) -> dict[str, Any]:
    """Return what holds, where that is not the built-in default."""
    found = effective(manager._policy_in_force(), manager.snapshot()).to_dict()
    defaults = {name: key.type.plain(key.type.default) for name, key in KEYS.items()}
    return {name: found[name] for name in KEYS if found[name] != defaults[name]}


PLAIN = ("flagos vendor reference native", "the defaults")
VENDOR_FIRST = "vendor flagos reference native"
ACME = "the packaged defaults of acme (vllm-plugin-acme 1.2)"


# -- when they apply ---------------------------------------------------------------------


def test_those_of_the_only_available_vendor_apply() -> None:
    manager = manager_with(
        backend("acme", {"prefer": "vendor"}), backend("beta", {"prefer": "native"}, available=False)
    )
    assert order_and_source(manager) == (VENDOR_FIRST, ACME)
    assert not get_policy().is_explicit_for("silu_and_mul")


def test_with_two_available_vendors_neither_ones_apply() -> None:
    manager = manager_with(backend("acme", {"prefer": "vendor"}), backend("beta", {}))
    assert order_and_source(manager) == PLAIN


def test_those_of_a_vendor_that_is_not_available_do_not_apply() -> None:
    assert order_and_source(manager_with(backend("acme", {"prefer": "vendor"}, available=False))) == PLAIN


@pytest.mark.parametrize("values", [{"deny_vendors": ["acme"]}, {"allow_vendors": ["cuda"]}])
def test_those_of_a_vendor_that_may_not_be_chosen_do_not_apply(values: dict[str, Any]) -> None:
    """Its order would leave nothing to run."""
    manager = manager_with(backend("acme", {"per_op_order": {"silu_and_mul": ["vendor"]}}))
    set_global_policy(SelectionPolicy.from_dict(**values))
    assert order_and_source(manager) == PLAIN


# -- what lies over them -----------------------------------------------------------------

#: What the wheel says, and what is said over it: as keys of a file, and what must hold.
DEFAULTS = {
    "prefer": "vendor",
    "strict": "on",
    "deny_vendors": ["ascend"],
    "allow_vendors": ["acme", "template"],
    "per_op_order": {"silu_and_mul": "vendor", "rms_norm": ["reference"]},
}
PACKAGED = {
    "prefer": "vendor",
    "strict": True,
    "deny_vendors": ["ascend"],
    "allow_vendors": ["acme", "template"],
    "per_op_order": {"silu_and_mul": ["vendor"], "rms_norm": ["reference"]},
}
OVER = [
    ({}, PACKAGED),
    ({"prefer": "reference"}, {**PACKAGED, "prefer": "reference"}),
    # What is the built-in default may be said over a packaged one.
    ({"prefer": "flagos"}, {k: v for k, v in PACKAGED.items() if k != "prefer"}),
    ({"strict": False}, {k: v for k, v in PACKAGED.items() if k != "strict"}),
    ({"deny_vendors": ["cuda"]}, {**PACKAGED, "deny_vendors": ["cuda"]}),
    ({"deny_vendors": ["+cuda"]}, {**PACKAGED, "deny_vendors": ["ascend", "cuda"]}),
    ({"deny_vendors": ["+ascend"]}, PACKAGED),
    ({"allow_vendors": ["acme"]}, {**PACKAGED, "allow_vendors": ["acme"]}),
    ({"allow_vendors": ["+cuda"]}, {**PACKAGED, "allow_vendors": ["acme", "cuda", "template"]}),
    (
        {"per_op_order": {"rms_norm": ["native"], "moe_sum": ["vendor"]}},
        {
            **PACKAGED,
            "per_op_order": {"silu_and_mul": ["vendor"], "rms_norm": ["native"], "moe_sum": ["vendor"]},
        },
    ),
    ({"defaults": "none"}, {"defaults": "none"}),
    ({"defaults": "none", "deny_vendors": ["+cuda"]}, {"defaults": "none", "deny_vendors": ["cuda"]}),
    # To add to a list that allows everybody forbids nobody.
    ({"defaults": "none", "allow_vendors": ["+cuda"]}, {"defaults": "none"}),
    ({"defaults": "none", "strict": True}, {"defaults": "none", "strict": True}),
    ({"defaults": "packaged"}, PACKAGED),
]


def by_variables(values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in values.items():
        text = str(value)
        if isinstance(value, list):
            text = ",".join(value)
        if isinstance(value, dict):
            text = ";".join(f"{op}={'|'.join(order)}" for op, order in value.items())
        monkeypatch.setenv(KEYS[name].variable, text)


def by_file(values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "policy.yaml").write_text(json.dumps(values))
    monkeypatch.setenv("VLLM_FL_CONFIG", str(tmp_path / "policy.yaml"))


def in_code(values: dict[str, Any]) -> SelectionPolicy:
    return SelectionPolicy.from_dict(**values)


def by_code(values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_global_policy(in_code(values))


def by_shipping(values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the front end's policy reaches a worker."""
    set_global_policy(received(json.loads(json.dumps(shipped(in_code(values))))))


@pytest.mark.parametrize("say", [by_variables, by_file, by_code, by_shipping])
@pytest.mark.parametrize(("values", "expected"), OVER)
def test_whoever_says_it_it_lies_over_them(
    say: Callable[..., None],
    values: dict[str, Any],
    expected: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager = manager_with(backend("acme", DEFAULTS))
    say(values, tmp_path, monkeypatch)
    assert in_force(manager) == expected
    assert not set(in_force(manager).get("per_op_order", ())) - {"silu_and_mul", "rms_norm", "moe_sum"}
    is_said = "prefer" in values or "silu_and_mul" in values.get("per_op_order", ())
    assert manager._policy_in_force().is_explicit_for("silu_and_mul") == is_said


@pytest.mark.parametrize(("values", "expected"), OVER)
def test_a_context_lies_over_them_and_not_over_the_global_policy(
    values: dict[str, Any], expected: dict[str, Any]
) -> None:
    manager = manager_with(backend("acme", DEFAULTS))
    set_global_policy(SelectionPolicy.from_dict(prefer="native", per_op_order={"moe_sum": ["native"]}))
    with policy_context(in_code(values)):
        assert in_force(manager) == expected


def test_a_context_that_changes_the_policy_in_force_keeps_them() -> None:
    manager = manager_with(backend("acme", DEFAULTS))
    with with_strict_mode():
        assert in_force(manager) == PACKAGED
    with with_denied_vendors("cuda"):
        assert in_force(manager) == {**PACKAGED, "deny_vendors": ["ascend", "cuda"]}
    set_global_policy(SelectionPolicy.from_dict(deny_vendors=["cuda"]))
    with with_denied_vendors("metax"):
        assert in_force(manager) == {**PACKAGED, "deny_vendors": ["cuda", "metax"]}


def test_where_each_value_comes_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(manager_module, "_default", manager_with(backend("acme", DEFAULTS)))

    def shown() -> dict[str, str]:
        assert main(["policy", "show", "--json"]) == 0
        return {row["key"]: row["source"] for row in json.loads(capfd.readouterr().out)["values"]}

    file = tmp_path / "policy.yaml"
    file.write_text("strict: off\ndeny_vendors: [+cuda]\nper_op_order:\n  rms_norm: native\n")
    monkeypatch.setenv("VLLM_FL_CONFIG", str(file))
    assert {name: source for name, source in shown().items() if source != "default"} == {
        "prefer": ACME,
        "strict": f"{file}:1",
        "allow_vendors": ACME,
        "deny_vendors": f"{file}:2, added to {ACME}",
        "per_op_order.rms_norm": f"{file}:4",
        "per_op_order.silu_and_mul": ACME,
    }
    # What code says has no place of its own, and is not the wheel's for that.
    set_global_policy(SelectionPolicy.from_dict(prefer="native", per_op_order={"rms_norm": ["native"]}))
    found = shown()
    assert found["prefer"] == found["per_op_order.rms_norm"] == "code"
    assert found["strict"] == found["per_op_order.silu_and_mul"] == ACME
    set_global_policy(SelectionPolicy(defaults="none"))
    assert set(shown().values()) == {"default", "code"}


# -- once for a policy and a snapshot ------------------------------------------------------


class Counted(dict[str, Any]):
    """Packaged defaults that count how often they are read."""

    read = 0

    def items(self) -> Any:
        type(self).read += 1
        return super().items()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Return how often they were read since the last question."""
    monkeypatch.setattr(Counted, "read", 0)

    def since() -> int:
        found, Counted.read = Counted.read, 0
        return found

    return since


def test_they_are_laid_below_a_policy_once(reads: Callable[[], int]) -> None:
    manager = manager_with(backend("acme", Counted(prefer="vendor")))
    manager.freeze()
    assert reads() == 1
    manager.explain("silu_and_mul")
    policy, snapshot = manager._policy_in_force(), manager.snapshot()
    assert lies_below(policy, snapshot).policy.prefer == "vendor"
    assert effective(policy, snapshot) is effective(policy, snapshot)
    assert reads() == 0
    manager.thaw()
    for _ in range(2):
        # An equal one has places of its own.
        assert effective(dataclasses.replace(policy), snapshot).prefer == "vendor"
        assert reads() == 1
    with with_strict_mode():
        for _ in range(3):
            assert manager.explain("silu_and_mul").source == ACME
    assert reads() == 1


def test_what_was_registered_later_counts(reads: Callable[[], int]) -> None:
    manager = manager_with(backend("acme", Counted(prefer="vendor")))
    assert order_and_source(manager) == (VENDOR_FIRST, ACME)
    manager.registry.register_backend(backend("beta", {}))
    assert order_and_source(manager) == PLAIN
    assert reads() == 1


@pytest.mark.parametrize(
    "happens",
    [forget_availability, availability_module._availability._answers_of_parent],
    ids=["device", "fork"],
)
def test_what_is_available_now_counts(happens: Callable[[], None]) -> None:
    """A device appears, or a child asks for itself."""
    here = [False]

    class Late(Backend):
        name = "late"
        default_policy: ClassVar = {"prefer": "vendor"}

        def is_available(self) -> bool:
            return here[0]

        def silu_and_mul(self, x: object) -> object:
            return x

    manager = manager_with(Late())
    policy, snapshot = get_policy(), manager.snapshot()
    assert effective(policy, snapshot).prefer == "flagos"
    here[0] = True
    assert effective(policy, snapshot).prefer == "flagos"
    happens()
    assert effective(policy, snapshot).prefer == "vendor"


def test_what_was_laid_below_by_an_answer_for_one_call_is_not_kept() -> None:
    found: list[str] = []

    class Asks(Backend):
        name = "asks"
        default_policy: ClassVar = {"prefer": "vendor"}

        def is_available(self) -> bool:
            if found:
                return False
            found.append("")
            found[0] = effective(policy, snapshot).prefer
            return True

        def silu_and_mul(self, x: object) -> object:
            return x

    manager = manager_with(Asks())
    policy, snapshot = SelectionPolicy(), manager.snapshot()
    assert effective(policy, snapshot).prefer == "vendor"
    assert found == ["flagos"]
    assert effective(policy, snapshot).prefer == "vendor"


def test_contexts_that_have_ended_are_not_kept_for_ever() -> None:
    manager = manager_with(backend("acme", {"prefer": "vendor"}))
    for _ in range(200):
        assert effective(SelectionPolicy(), manager.snapshot()).prefer == "vendor"
    assert len(packaged._laid) <= packaged._KEPT
    gone = weakref.ref(manager.snapshot())
    del manager
    gc.collect()
    assert gone() is None


# -- what a bad entry costs ----------------------------------------------------------------

TWO = {"prefer": "vendor", "per_op_order": {"silu_and_mul": "vendor", "rms_norm": ["reference"]}}
HELD = {"prefer": "vendor", "per_op_order": {"silu_and_mul": ["vendor"], "rms_norm": ["reference"]}}


def with_order(**orders: Any) -> dict[str, Any]:
    return {**TWO, "per_op_order": {**TWO["per_op_order"], **orders}}  # type: ignore[dict-item]


#: Packaged defaults, what holds of them, and what is said of each entry that does not.
ENTRIES: list[tuple[Any, dict[str, Any], list[str]]] = [
    ({**TWO, "prefer": "vendr"}, {"per_op_order": HELD["per_op_order"]}, ["prefer must be one of "]),
    ({**TWO, "prefer": None}, {"per_op_order": HELD["per_op_order"]}, ["prefer must be one of "]),
    ({**TWO, "strict": "maybe"}, HELD, ["strict must be one of 1/0"]),
    ({**TWO, "prefers": "vendor"}, HELD, ["unknown key 'prefers'; keys are "]),
    ({**TWO, 1: "vendor"}, HELD, ["unknown key 1; keys are "]),
    ({**TWO, "tuned": {}}, HELD, ["tuned has no meaning in packaged defaults."]),
    ({**TWO, "defaults": "none"}, HELD, ["defaults has no meaning in packaged defaults."]),
    ({**TWO, "per_op_order": ["x"]}, {"prefer": "vendor"}, ["per_op_order must map operators to orders"]),
    # An operator that a newer core knows.
    (with_order(moe_of_tomorrow="vendor"), HELD, ["per_op_order: unknown operator 'moe_of_tomorrow'."]),
    (with_order(**{"": "vendor"}), HELD, ["per_op_order: unknown operator ''."]),
    (with_order(moe_sum=3), HELD, ["per_op_order: the order of 'moe_sum' must be a list of tokens, not 3."]),
    (with_order(moe_sum=[]), HELD, ["per_op_order: the order of 'moe_sum' is empty."]),
    (
        {**TWO, "per_op_order": {1: "vendor", **TWO["per_op_order"]}},  # type: ignore[dict-item]
        HELD,
        ["per_op_order: unknown operator 1."],
    ),
    # One token of an order.
    (
        with_order(rms_norm=["vendor:nobody", "quick", None, "reference", "reference"]),
        HELD,
        [
            "per_op_order.rms_norm: unknown vendor 'nobody'.",
            "per_op_order.rms_norm: 'quick' in the order of 'rms_norm' is no token",
            "per_op_order.rms_norm: None in the order of 'rms_norm' is no token",
            "per_op_order.rms_norm: the order of 'rms_norm' names a token twice: reference|reference.",
        ],
    ),
    (
        with_order(rms_norm="impl:vendor.x | reference"),
        HELD,
        ["per_op_order.rms_norm: unknown implementation"],
    ),
    (
        with_order(moe_sum=["vendor:nobody"]),
        HELD,
        [
            "per_op_order.moe_sum: unknown vendor 'nobody'.",
            "per_op_order.moe_sum: nothing is left of this order.",
        ],
    ),
    # Vendors: to allow one who is not here is a mistake, to deny one is none.
    (
        {**TWO, "allow_vendors": ["acme", "nobody"]},
        {**HELD, "allow_vendors": ["acme"]},
        ["allow_vendors: unknown v"],
    ),
    (
        {**TWO, "allow_vendors": "nobody"},
        HELD,
        ["allow_vendors: unknown vendor", "allow_vendors names nothing"],
    ),
    ({**TWO, "allow_vendors": 3}, HELD, ["allow_vendors must be a list of names, not 3."]),
    (
        {**TWO, "deny_vendors": ["cuda", 1]},
        {**HELD, "deny_vendors": ["cuda"]},
        ["deny_vendors: deny_vendors must h"],
    ),
    (
        {**TWO, "deny_vendors": ["cuda", "cuda"]},
        {**HELD, "deny_vendors": ["cuda"]},
        ["deny_vendors: names 'cuda' t"],
    ),
    (
        {**TWO, "allow_vendors": ["acme", "cuda"], "deny_vendors": ["cuda"]},
        {**HELD, "deny_vendors": ["cuda"]},
        ["allow_vendors names a vendor that deny_vendors names too."],
    ),
    (
        {**TWO, "deny_vendors": ["nobody"]},
        {**HELD, "deny_vendors": ["nobody"]},
        ["denies vendor 'nobody', which"],
    ),
]


@pytest.mark.parametrize(("defaults", "held", "problems"), ENTRIES)
def test_a_bad_entry_costs_that_entry_and_one_line(
    caplog: pytest.LogCaptureFixture, defaults: Any, held: dict[str, Any], problems: list[str]
) -> None:
    manager = manager_with(backend("acme", defaults))
    for _ in range(2):
        assert in_force(manager) == held
        assert manager.call("silu_and_mul", 3) == 3
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == len(problems)
    for line, problem in zip(said, problems, strict=True):
        assert line.startswith(f"{ACME}: {problem}")
        assert line.endswith(" It is left out, and the rest holds.") or "denies" in line


@pytest.mark.parametrize(
    ("defaults", "problem"),
    [
        (["prefer"], "must be a mapping of keys to values, not ['prefer']."),
        ("prefer: vendor", "must be a mapping of keys to values, not 'prefer: vendor'."),
        (None, "must be a mapping of keys to values, not None."),
        (OSError("no such table"), "OSError: no such table."),
        (SystemExit(3), "SystemExit: 3."),
    ],
)
def test_what_cannot_be_read_at_all_costs_all_of_it_and_one_line(
    caplog: pytest.LogCaptureFixture, defaults: Any, problem: str
) -> None:
    manager = manager_with(backend("acme", defaults))
    for _ in range(2):
        assert order_and_source(manager) == PLAIN
        assert manager.call("silu_and_mul", 3) == 3
    (line,) = [record.getMessage() for record in caplog.records]
    assert problem in line
    assert line.startswith(f"{ACME}: ")
    assert line.endswith(" They are not used.")


def test_what_does_not_hold_is_a_note_of_the_policy(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def notes(*backends: Backend) -> list[str]:
        reset_global_policy()
        monkeypatch.setattr(manager_module, "_default", manager_with(*backends))
        assert main(["policy", "show"]) == 0
        text = capfd.readouterr().out
        assert main(["policy", "show", "--json"]) == 0
        found: list[str] = json.loads(capfd.readouterr().out)["notes"]
        assert all(f"note: {line}\n" in text for line in found)
        return found

    acme = backend("acme", with_order(moe_of_tomorrow="vendor"))
    (line,) = notes(acme)
    assert line.startswith(f"{ACME}: per_op_order: unknown operator 'moe_of_tomorrow'.")
    assert notes(acme, backend("beta", {})) == [
        "acme, beta are available: the packaged defaults of none apply"
    ]
    monkeypatch.setenv("VLLM_FL_DENY_VENDORS", "acme,nvida")
    assert notes(acme) == [
        "VLLM_FL_DENY_VENDORS: denies vendor 'nvida', which nothing here has.",
        "acme may not be chosen, so that its packaged defaults do not apply",
    ]

"""What a right configuration means, where it comes from, and who sees it."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import logging
import pickle
import threading
from typing import TYPE_CHECKING
from typing import Any

import pytest

from vllm_fl.dispatch import PREFER_DEFAULT
from vllm_fl.dispatch import PREFER_REFERENCE
from vllm_fl.dispatch import PREFER_VENDOR
from vllm_fl.dispatch import PolicyError
from vllm_fl.dispatch import SelectionPolicy
from vllm_fl.dispatch import get_default_manager
from vllm_fl.dispatch import get_policy
from vllm_fl.dispatch import policy_context
from vllm_fl.dispatch import policy_from_config
from vllm_fl.dispatch import reset_default_manager
from vllm_fl.dispatch import reset_global_policy
from vllm_fl.dispatch import set_global_policy
from vllm_fl.dispatch import with_allowed_vendors
from vllm_fl.dispatch import with_denied_vendors
from vllm_fl.dispatch import with_preference
from vllm_fl.dispatch import with_strict_mode
from vllm_fl.dispatch.common import log
from vllm_fl.dispatch.environment import boolean
from vllm_fl.dispatch.policy.keys import KEYS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("no_plugins")


def settings(policy: SelectionPolicy) -> dict[str, Any]:
    """Return what a policy says where that is not the default."""
    plain = policy.to_dict()
    return {name: plain[name] for name in KEYS if plain[name] != default(name)}


def default(name: str) -> Any:
    """Return a key's default as plain values."""
    value_type = KEYS[name].type
    return value_type.plain(value_type.default)


ENVIRONMENTS = [
    ({}, {}),
    ({"PREFER": "vendor"}, {"prefer": "vendor"}),
    ({"PREFER": " Reference "}, {"prefer": "reference"}),
    ({"PREFER": "native"}, {"prefer": "native"}),
    ({"PREFER": "  "}, {}),
    ({"STRICT": "1"}, {"strict": True}),
    ({"STRICT": "OFF"}, {}),
    ({"PER_OP": "rms_norm=vendor"}, {"per_op_order": {"rms_norm": ["vendor"]}}),
    (
        {"PER_OP": " rms_norm = vendor:cuda | impl:reference.torch ; moe_sum=native; "},
        {"per_op_order": {"moe_sum": ["native"], "rms_norm": ["vendor:cuda", "impl:reference.torch"]}},
    ),
    ({"ALLOW_VENDORS": "cuda, ascend"}, {"allow_vendors": ["ascend", "cuda"]}),
    ({"DENY_VENDORS": "cuda"}, {"deny_vendors": ["cuda"]}),
    (
        {"ALLOW_VENDORS": "cuda", "DENY_VENDORS": "ascend"},
        {"allow_vendors": ["cuda"], "deny_vendors": ["ascend"]},
    ),
    ({"DENY_VENDORS": "+cuda, +metax"}, {"deny_vendors": ["+cuda", "+metax"]}),
    ({"ALLOW_VENDORS": "+cuda"}, {"allow_vendors": ["+cuda"]}),
    ({"DEFAULTS": " None "}, {"defaults": "none"}),
    ({"DEFAULTS": "packaged"}, {}),
    ({"PREFER_ENABLED": "no", "OOT_ENABLED": "0"}, {}),
]

FILES = [
    ("", {}),
    ("# nothing yet\n", {}),
    ("\ufeffprefer: vendor\n", {"prefer": "vendor"}),
    ("prefer: VENDOR\nstrict: yes\n", {"prefer": "vendor", "strict": True}),
    ("strict: 'off'\n", {}),
    ("strict: 1\n", {"strict": True}),
    ('{"prefer": "vendor"}', {"prefer": "vendor"}),
    ("deny_vendors: [cuda, ascend]\n", {"deny_vendors": ["ascend", "cuda"]}),
    ("deny_vendors: cuda, ascend\n", {"deny_vendors": ["ascend", "cuda"]}),
    ("deny_vendors: [+cuda, +ascend]\n", {"deny_vendors": ["+ascend", "+cuda"]}),
    ("deny_vendors: +cuda, +ascend\n", {"deny_vendors": ["+ascend", "+cuda"]}),
    ("defaults: none\n", {"defaults": "none"}),
    ("defaults: Packaged\n", {}),
    ("allow_vendors:\n- cuda\n", {"allow_vendors": ["cuda"]}),
    (
        "per_op_order:\n  rms_norm: [vendor, 'vendor:cuda']\n",
        {"per_op_order": {"rms_norm": ["vendor", "vendor:cuda"]}},
    ),
    ("per_op_order:\n  rms_norm: vendor | native\n", {"per_op_order": {"rms_norm": ["vendor", "native"]}}),
    ("per_op_order: {}\n", {}),
]


@pytest.mark.parametrize(("variables", "expected"), ENVIRONMENTS)
def test_variables(
    monkeypatch: pytest.MonkeyPatch, variables: Mapping[str, str], expected: dict[str, Any]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"VLLM_FL_{name}", value)
    policy = get_policy()
    assert settings(policy) == expected
    assert get_policy() is policy


@pytest.mark.parametrize(("text", "expected"), FILES)
def test_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, expected: dict[str, Any]) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(text, encoding="utf-8")
    monkeypatch.setenv("VLLM_FL_CONFIG", str(file))
    policy = get_policy()
    assert settings(policy) == expected
    assert policy == policy_from_config(str(file))


def test_a_source_is_a_variable_or_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VLLM_FL_PER_OP", "rms_norm=vendor")
    assert get_policy().sources == {"per_op_order": "VLLM_FL_PER_OP"}
    file = tmp_path / "policy.yaml"
    file.write_text("strict: on\nper_op_order:\n  moe_sum: vendor\n  rms_norm: flagos\n")
    policy = policy_from_config(str(file))
    assert policy.sources["strict"] == f"{file}:1"
    assert policy.sources["per_op_order.rms_norm"] == f"{file}:4"


def test_a_file_replaces_the_variables_and_one_warning_names_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("strict: on\n")
    monkeypatch.setenv("VLLM_FL_CONFIG", str(file))
    monkeypatch.setenv("VLLM_FL_PREFER", "vendor")
    monkeypatch.setenv("VLLM_FL_DENY_VENDORS", "not, even, right,")
    with caplog.at_level(logging.WARNING):
        assert settings(get_policy()) == {"strict": True}
        get_policy()
        get_default_manager().ensure_initialized()
    assert [record.getMessage() for record in caplog.records] == [
        f"VLLM_FL_CONFIG={file} replaces VLLM_FL_PREFER, VLLM_FL_DENY_VENDORS, which is set too."
    ]


def test_a_file_alone_warns_of_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "policy.yaml").write_text("strict: on\n")
    monkeypatch.setenv("VLLM_FL_CONFIG", str(tmp_path / "policy.yaml"))
    monkeypatch.setenv("VLLM_FL_LOG_LEVEL", "warning")
    get_policy()
    assert not caplog.records


@pytest.mark.parametrize("value", [1, "1", True, "true", "TRUE", "Yes", " on ", "True"])
def test_true(value: object) -> None:
    assert boolean(value) is True


@pytest.mark.parametrize("value", [0, "0", False, "false", "No", "OFF"])
def test_false(value: object) -> None:
    assert boolean(value) is False


@pytest.mark.parametrize("value", ["", "y", "n", "t", "2", "-1", "enable", None, 1.0, [], "01"])
def test_no_boolean(value: object) -> None:
    with pytest.raises(PolicyError, match=r"must be one of 1/0, true/false, yes/no, on/off, not "):
        boolean(value)


# -- values ---------------------------------------------------------------------------


def test_constants() -> None:
    assert (PREFER_DEFAULT, PREFER_VENDOR, PREFER_REFERENCE) == ("flagos", "vendor", "reference")


@pytest.mark.parametrize(
    ("prefer", "order"),
    [
        (None, ["flagos", "vendor", "reference", "native"]),
        ("flagos", ["flagos", "vendor", "reference", "native"]),
        ("vendor", ["vendor", "flagos", "reference", "native"]),
        ("reference", ["reference", "flagos", "vendor", "native"]),
        ("native", ["native", "flagos", "vendor", "reference"]),
    ],
)
def test_default_order(prefer: str | None, order: list[str]) -> None:
    policy = SelectionPolicy.from_dict(prefer=prefer)
    assert policy.get_default_order() == order == policy.order("rms_norm")
    assert policy.get_per_op_order("rms_norm") is None


def test_from_dict_keeps_its_meaning() -> None:
    policy = SelectionPolicy.from_dict(
        prefer="VENDOR",
        strict=True,
        per_op_order={"rms_norm": ["vendor:cuda", "reference"], "moe_sum": ("flagos",)},
        deny_vendors={"a"},
        allow_vendors=["b", "c"],
    )
    assert policy.prefer == "vendor"
    assert policy.strict is True
    assert policy.per_op_order_dict == {"rms_norm": ["vendor:cuda", "reference"], "moe_sum": ["flagos"]}
    assert policy.get_per_op_order("rms_norm") == ["vendor:cuda", "reference"] == policy.order("rms_norm")
    assert policy.deny_vendors == frozenset({"a"})
    assert policy.allow_vendors == frozenset({"b", "c"})


def test_from_dict_with_nothing() -> None:
    policy = SelectionPolicy.from_dict(per_op_order={}, deny_vendors=[], allow_vendors=[])
    assert policy == SelectionPolicy() == SelectionPolicy.from_dict()
    assert policy.explicit == frozenset()
    assert policy.allow_vendors is None  # nothing listed allows everything


@pytest.mark.parametrize(
    ("deny", "allow", "allowed"),
    [
        ([], None, {"a", "b", "c"}),
        (["a"], None, {"b", "c"}),
        ([], ["a"], {"a"}),
        (["a"], ["a", "b"], {"b"}),
        (["a", "b", "c"], None, set()),
    ],
)
def test_is_vendor_allowed(deny: list[str], allow: list[str] | None, allowed: set[str]) -> None:
    policy = SelectionPolicy.from_dict(deny_vendors=deny, allow_vendors=allow)
    assert {vendor for vendor in "abc" if policy.is_vendor_allowed(vendor)} == allowed


BAD_VALUES = [
    ({"prefer": "best"}, "prefer must be one of flagos, vendor, reference, native, not 'best'."),
    ({"prefer": 1}, "prefer must be one of flagos, vendor, reference, native, not 1."),
    ({"strict": "yes"}, "strict must be True or False, not 'yes'."),
    ({"strict": 1}, "strict must be True or False, not 1."),
    (
        {"per_op_order": {"rms_norm": "vendor"}},
        "the order of 'rms_norm' must be a list of tokens, not 'vendor'.",
    ),
    ({"per_op_order": {"rms_norm": []}}, "the order of 'rms_norm' is empty."),
    ({"per_op_order": {1: ["vendor"]}}, "an operator's name must be a string, not 1."),
    ({"per_op_order": {"rms_norm": [None]}}, "None in the order of 'rms_norm' is no token; tokens are "),
    ({"deny_vendors": "cuda"}, "deny_vendors must be a list of vendor names, not 'cuda'."),
    ({"deny_vendors": [" "]}, "deny_vendors must hold vendor names, not ' '."),
    ({"deny_vendors": ["+a", "b"]}, "deny_vendors must have a + before every name"),
    ({"defaults": False}, "defaults must be one of packaged, none, not False."),
    ({"allow_vendors": [1]}, "allow_vendors must hold vendor names, not 1."),
]


@pytest.mark.parametrize(("values", "message"), BAD_VALUES)
def test_a_bad_value_in_code(values: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError) as caught:
        SelectionPolicy.from_dict(**values)
    assert str(caught.value).startswith(message)


def test_a_policy_never_changes() -> None:
    order = ["vendor"]
    deny = {"a"}
    policy = SelectionPolicy.from_dict(per_op_order={"rms_norm": order}, deny_vendors=deny)
    for field in dataclasses.fields(policy):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(policy, field.name, None)
    fingerprint = policy.fingerprint()
    order.append("flagos")
    deny.add("b")
    policy.get_per_op_order("rms_norm").append("flagos")  # type: ignore[union-attr]
    policy.order("rms_norm").append("flagos")
    policy.order("moe_sum").clear()
    policy.per_op_order_dict["moe_sum"] = ["flagos"]
    policy.to_dict()["deny_vendors"].append("b")
    assert policy.fingerprint() == fingerprint
    assert policy.order("rms_norm") == ["vendor"]
    assert policy.order("moe_sum") == ["flagos", "vendor", "reference", "native"]
    assert policy.deny_vendors == {"a"}


DIFFERENT = [
    SelectionPolicy(),
    SelectionPolicy(prefer="flagos"),  # asked for in so many words
    SelectionPolicy(prefer="vendor"),
    SelectionPolicy(prefer="native"),
    SelectionPolicy(strict=True),
    SelectionPolicy(strict=False),
    SelectionPolicy(per_op_order=(("rms_norm", ("vendor",)),)),
    SelectionPolicy(per_op_order=(("rms_norm", ("vendor", "flagos")),)),
    SelectionPolicy(per_op_order=(("rms_norm", ("flagos", "vendor")),)),
    SelectionPolicy(per_op_order=(("moe_sum", ("vendor",)),)),
    SelectionPolicy(deny_vendors=frozenset({"a"})),
    SelectionPolicy(deny_vendors=frozenset({"a", "b"})),
    SelectionPolicy(allow_vendors=frozenset({"a"})),
    SelectionPolicy(allow_vendors=frozenset()),
    SelectionPolicy(allow_vendors=frozenset({"+a"})),
    SelectionPolicy(deny_vendors=frozenset({"+a"})),
    SelectionPolicy(defaults="none"),
    SelectionPolicy(defaults="packaged"),
]


def test_fingerprints_differ_where_policies_do() -> None:
    for one, other in itertools.combinations(DIFFERENT, 2):
        assert one != other
        assert one.fingerprint() != other.fingerprint(), (one, other)
    assert all(len(policy.fingerprint()) == 16 and int(policy.fingerprint(), 16) >= 0 for policy in DIFFERENT)


def test_fingerprints_differ_only_there() -> None:
    one = SelectionPolicy(
        per_op_order=(("rms_norm", ("vendor",)), ("moe_sum", ("flagos",))),
        deny_vendors=frozenset({"a", "b"}),
        sources={"per_op_order": "here"},
    )
    other = SelectionPolicy.from_dict(
        per_op_order={"moe_sum": ["flagos"], "rms_norm": ["vendor"]}, deny_vendors=["b", "a"]
    )
    assert one == other
    assert hash(one) == hash(other)
    assert one.fingerprint() == other.fingerprint()


@pytest.mark.parametrize("policy", DIFFERENT)
def test_a_policy_reaches_another_process(policy: SelectionPolicy) -> None:
    plain = json.loads(json.dumps(policy.to_dict()))
    again = SelectionPolicy.from_dict(**plain)
    assert again == policy == pickle.loads(pickle.dumps(policy))
    assert again.to_dict() == policy.to_dict()
    assert again.fingerprint() == policy.fingerprint()


# -- the global policy and contexts ------------------------------------------------------


def test_set_and_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_FL_PREFER", "reference")
    mine = SelectionPolicy.from_dict(prefer="vendor")
    before = set_global_policy(mine)
    assert before.prefer == "reference"
    assert get_policy() is mine
    assert set_global_policy(before) is mine
    monkeypatch.setenv("VLLM_FL_PREFER", "native")
    assert get_policy().prefer == "reference"
    reset_global_policy()
    assert get_policy().prefer == "native"


def test_a_policy_in_code_replaces_a_wrong_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_FL_PREFER", "wrong")
    set_global_policy(SelectionPolicy.from_dict(prefer="vendor"))
    assert get_policy().prefer == "vendor"
    reset_global_policy()
    with pytest.raises(PolicyError, match="VLLM_FL_PREFER"):
        get_policy()


@pytest.mark.parametrize("wrong", [None, "vendor", {"prefer": "vendor"}, SelectionPolicy])
def test_only_a_policy_is_a_policy(wrong: Any) -> None:
    with pytest.raises(TypeError, match="set_global_policy takes a SelectionPolicy, not "):
        set_global_policy(wrong)
    with (
        pytest.raises(TypeError, match="policy_context takes a SelectionPolicy, not "),
        policy_context(wrong),
    ):
        pass


def test_contexts_nest_and_end() -> None:
    with with_preference("Vendor"):
        assert settings(get_policy()) == {"prefer": "vendor"}
        with with_strict_mode(), with_denied_vendors("cuda"):
            with with_denied_vendors("ascend"), with_allowed_vendors("cuda", "ascend"):
                assert settings(get_policy()) == {
                    "prefer": "vendor",
                    "strict": True,
                    "deny_vendors": ["+ascend", "+cuda"],
                    "allow_vendors": ["ascend", "cuda"],
                }
            assert settings(get_policy()) == {"prefer": "vendor", "strict": True, "deny_vendors": ["+cuda"]}
            with policy_context(SelectionPolicy()) as inner:
                assert get_policy() is inner
                assert settings(inner) == {}
        assert settings(get_policy()) == {"prefer": "vendor"}
    assert settings(get_policy()) == {}


def test_a_context_ends_with_an_exception() -> None:
    with pytest.raises(ZeroDivisionError), with_preference("vendor"):
        raise ZeroDivisionError
    assert get_policy().prefer == "flagos"


def test_a_context_keeps_the_global_policy_and_says_what_it_changed() -> None:
    set_global_policy(SelectionPolicy.from_dict(strict=True, per_op_order={"rms_norm": ["vendor"]}))
    with with_preference("vendor"):
        policy = get_policy()
        assert policy.strict
        assert policy.get_per_op_order("rms_norm") == ["vendor"]
        assert policy.explicit == {"strict", "per_op_order", "prefer"}
        assert policy.sources["prefer"] == "a context manager"


def test_a_context_is_over_the_global_policy_also_when_that_changes() -> None:
    with with_preference("vendor"):
        set_global_policy(SelectionPolicy.from_dict(prefer="reference"))
        assert get_policy().prefer == "vendor"
    assert get_policy().prefer == "reference"


@pytest.mark.parametrize(
    "enter",
    [
        lambda: with_preference("vendr"),
        lambda: with_denied_vendors(""),
        lambda: with_allowed_vendors(1),  # type: ignore[arg-type]
    ],
)
def test_a_bad_context(enter: Any) -> None:
    with pytest.raises(PolicyError), enter():
        pass


@pytest.mark.parametrize(
    ("enter", "message"),
    [
        (
            lambda: with_allowed_vendors("cudda"),
            "a context manager: unknown vendor 'cudda'. Did you mean 'cuda'?",
        ),
        (
            lambda: policy_context(SelectionPolicy.from_dict(per_op_order={"rms_nrom": ["vendor"]})),
            "the policy set in code: unknown operator 'rms_nrom'. Did you mean 'rms_norm'?",
        ),
    ],
)
def test_a_wrong_name_in_a_context_is_ignored_nowhere(enter: Any, message: str) -> None:
    manager = get_default_manager()
    manager.ensure_initialized()
    for use in (get_policy, lambda: manager.explain("rms_norm"), lambda: manager.resolve("rms_norm")):
        with enter(), pytest.raises(PolicyError) as caught:
            use()
        assert str(caught.value) == message


def test_threads_do_not_see_each_others_contexts() -> None:
    seen: dict[str, str] = {}
    together = threading.Barrier(4)

    def work(prefer: str | None) -> None:
        together.wait()
        if prefer is None:
            together.wait()
            seen["none"] = get_policy().prefer
            together.wait()
            return
        with with_preference(prefer):
            together.wait()
            seen[prefer] = get_policy().prefer
            together.wait()

    with with_preference("native"):
        threads = [threading.Thread(target=work, args=(p,)) for p in ("vendor", "reference", "flagos", None)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
    assert seen == {"vendor": "vendor", "reference": "reference", "flagos": "flagos", "none": "flagos"}


def test_tasks_do_not_see_each_others_contexts() -> None:
    async def work(prefer: str | None) -> list[str]:
        if prefer is None:
            await asyncio.sleep(0)
            return [get_policy().prefer]
        with with_preference(prefer):
            before = get_policy().prefer
            await asyncio.sleep(0.01)
            return [before, get_policy().prefer]

    async def main() -> list[list[str]]:
        return await asyncio.gather(*map(work, ("vendor", "reference", None)))

    assert asyncio.run(main()) == [["vendor", "vendor"], ["reference", "reference"], ["flagos"]]


def test_a_frozen_manager_fixes_the_policy_until_it_is_forgotten() -> None:
    manager = get_default_manager()
    manager.freeze()
    changes = (
        lambda: set_global_policy(SelectionPolicy()),
        reset_global_policy,
        with_strict_mode().__enter__,
    )
    for change in changes:
        with pytest.raises(RuntimeError, match=r"while the dispatch is frozen: .*thaw\(\) first"):
            change()
    reset_default_manager()  # the test still holds it
    set_global_policy(SelectionPolicy.from_dict(prefer="vendor"))
    assert get_policy().prefer == "vendor"


# -- denying what is not here ------------------------------------------------------------


def deny_by_variable(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("VLLM_FL_DENY_VENDORS", name)
    return "VLLM_FL_DENY_VENDORS"


def deny_by_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "policy.yaml").write_text(f"strict: on\ndeny_vendors: [{name}]\n")
    monkeypatch.setenv("VLLM_FL_CONFIG", str(tmp_path / "policy.yaml"))
    return f"{tmp_path / 'policy.yaml'}:2"


def deny_in_code(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    set_global_policy(SelectionPolicy.from_dict(deny_vendors=[name]))
    return "the policy set in code"


@pytest.mark.parametrize("deny", [deny_by_variable, deny_by_file, deny_in_code])
@pytest.mark.parametrize(
    ("name", "hint"), [("metax", ""), ("+metax", ""), ("cudda", " Did you mean 'cuda'?")]
)
def test_denying_who_is_not_here_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    deny: Any,
    name: str,
    hint: str,
) -> None:
    """One list is for every server of a fleet."""
    monkeypatch.setattr(log, "_said", set())
    place = deny(name, tmp_path, monkeypatch)
    for _ in range(2):
        assert not get_policy().is_vendor_allowed(name.removeprefix("+"))
        get_default_manager().ensure_initialized()
        reset_default_manager()
    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    vendor = name.removeprefix("+")
    assert lines == [("WARNING", f"{place}: denies vendor '{vendor}', which nothing here has.{hint}")]


@pytest.mark.parametrize(
    "values", [{"allow_vendors": ["metax"]}, {"per_op_order": {"rms_norm": ["vendor:metax"]}}]
)
def test_allowing_or_ordering_who_is_not_here_is_an_error(values: dict[str, Any]) -> None:
    set_global_policy(SelectionPolicy.from_dict(**values))
    with pytest.raises(PolicyError, match="the policy set in code: unknown vendor 'metax'"):
        get_policy()

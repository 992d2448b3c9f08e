"""The table of a policy's keys: whatever knows a key knows it from there, and from nowhere else."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any

import pytest

import vllm_fl
from vllm_fl.dispatch import PolicyError
from vllm_fl.dispatch import SelectionPolicy
from vllm_fl.dispatch import get_policy
from vllm_fl.dispatch import policy_from_config
from vllm_fl.dispatch.policy.keys import KEYS
from vllm_fl.dispatch.policy.shipping import received
from vllm_fl.dispatch.variables import VARIABLES

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_fl.dispatch.policy.keys import Key

pytestmark = pytest.mark.usefixtures("no_plugins")

#: A value of each key beside its default, as code says it.
VALUES: dict[str, Any] = {
    "prefer": "vendor",
    "strict": True,
    "per_op_order": {"rms_norm": ["vendor:cuda", "reference"], "moe_sum": ["native"]},
    "allow_vendors": ["cuda"],
    "deny_vendors": ["ascend", "template"],
    "tuned": {"rms_norm": [{"dtype": "float16", "last": 8, "max_rows": 4, "order": ["reference.torch"]}]},
    "defaults": "none",
}


def test_every_key_is_tried_here() -> None:
    assert set(VALUES) == set(KEYS)


def test_every_key_is_an_attribute_of_a_policy() -> None:
    assert set(KEYS) <= {field.name for field in dataclasses.fields(SelectionPolicy)}


@pytest.mark.parametrize("key", KEYS.values(), ids=lambda key: key.name)
def test_a_default_is_a_value(key: Key) -> None:
    default = getattr(SelectionPolicy(), key.name)
    assert default == key.type.default
    if default is not None:
        plain = json.loads(json.dumps(key.type.plain(default)))
        assert key.type.check(key.name, plain) == default


@pytest.mark.parametrize("key", KEYS.values(), ids=lambda key: key.name)
def test_a_value_is_the_same_wherever_it_is_said(
    key: Key, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    in_code = SelectionPolicy.from_dict(**{key.name: VALUES[key.name]})
    assert in_code.explicit == {key.name}
    held = getattr(in_code, key.name)
    assert held != key.type.default
    assert in_code.to_dict()[key.name] == VALUES[key.name]
    for name in (key.name, *key.older):
        file = tmp_path / f"{name}.yaml"
        file.write_text(json.dumps({name: VALUES[key.name]}))
        assert policy_from_config(str(file)) == in_code
        assert SelectionPolicy.from_dict(**{name: VALUES[key.name]}) == in_code
    if key.variable:
        monkeypatch.setenv(key.variable, key.type.written(held))
        assert get_policy() == in_code


@pytest.mark.parametrize("key", KEYS.values(), ids=lambda key: key.name)
def test_a_variable_says_what_the_key_says(key: Key) -> None:
    if key.variable:
        assert VARIABLES[key.variable].meaning.startswith(key.meaning)
    assert not key.meaning.endswith(".")


# -- a new key is a row of the table and an attribute of the value, and nothing else ---------

ROW = """
    Key(
        "made_up",
        Choice("one", options=("one", "two")),
        "how many",
        "VLLM_FL_MADE_UP",
        older=("made_down",),
    ),
"""

SCRIPT = """
import json, os, sys
from pathlib import Path
from vllm_fl import cli
from vllm_fl.dispatch import *
from vllm_fl.dispatch import discovery
from vllm_fl.dispatch.policy.packaged import effective
from vllm_fl.dispatch.policy.shipping import received, shipped
from vllm_fl.dispatch.variables import VARIABLES, unread_variables

discovery._installed = list
found, file = {}, Path("policy.yaml")


def refused(text):
    file.write_text(text)
    try:
        return str(policy_from_config(file))
    except PolicyError as error:
        return str(error)


class Acme(Backend):
    name = "acme"
    default_policy = {"made_up": "two"}

    def is_available(self):
        return True

    def silu_and_mul(self, x):
        return x


file.write_text("made_down: TWO\\n")
by_file = policy_from_config(file)
found["file"] = by_file.made_up
found["same in code"] = SelectionPolicy.from_dict(made_up="two") == by_file
found["default"] = SelectionPolicy().made_up
found["another fingerprint"] = SelectionPolicy().fingerprint() != by_file.fingerprint()
found["back"] = SelectionPolicy.from_dict(**by_file.to_dict()) == by_file
found["shipped"] = shipped(by_file)
found["received"] = received(found["shipped"]) == by_file
found["wrong"] = refused("strict: on\\nmade_up: twoo\\n")
found["unknown"] = refused("made_upp: two\\n")

os.environ["VLLM_FL_MADE_UP"] = "two"
reset_global_policy()
found["variable"] = get_policy().made_up
found["row"] = [VARIABLES["VLLM_FL_MADE_UP"].meaning, VARIABLES["VLLM_FL_MADE_UP"].default]
found["unread"] = unread_variables([])
cli.main(["policy", "show"])
os.environ["VLLM_FL_MADE_UP"] = "three"
reset_global_policy()
cli.main(["policy", "show"])
del os.environ["VLLM_FL_MADE_UP"]
reset_global_policy()

registry = OpRegistry()
registry.register_backend(Acme())
found["packaged"] = effective(get_policy(), registry.snapshot()).made_up
found["over"] = effective(SelectionPolicy(made_up="one"), registry.snapshot()).made_up
print(json.dumps(found))
"""


@pytest.fixture
def with_a_key(tmp_path: Path) -> Path:
    """Return a folder with a copy of the core that has one key more."""
    core = tmp_path / "core" / "vllm_fl"
    shutil.copytree(Path(vllm_fl.__file__).parent, core, ignore=shutil.ignore_patterns("__pycache__"))
    table, value = core / "dispatch/policy/keys.py", core / "dispatch/policy/value.py"
    text = table.read_text("utf-8")
    assert text.count("\n_ALL = (\n") == 1
    table.write_text(text.replace("\n_ALL = (\n", f"\n_ALL = ({ROW}"), "utf-8")
    text = value.read_text("utf-8")
    last = "    sources: Mapping[str, str] = field(default_factory=dict, compare=False)\n"
    assert text.count(last) == 1
    value.write_text(text.replace(last, f"{last}    made_up: str = _UNSET\n"), "utf-8")
    return core.parent


def test_a_new_key_is_known_everywhere(
    with_a_key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python: Callable[..., Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    done = python(f"import sys; sys.path.insert(0, {str(with_a_key)!r})\n{SCRIPT}")
    assert done.returncode == 0, done.stderr
    *shown, last = done.stdout.splitlines()
    found = json.loads(last)
    parcel = found.pop("shipped")
    assert parcel["policy"]["made_up"] == "two"
    known = ", ".join(("made_up", *KEYS))
    assert found == {
        "file": "two",
        "same in code": True,
        "default": "one",
        "another fingerprint": True,
        "back": True,
        "received": True,
        "wrong": "policy.yaml:2: made_up must be one of one, two, not 'twoo'. Did you mean 'two'?",
        "unknown": f"policy.yaml:1: unknown key 'made_upp'; keys are {known}. Did you mean 'made_up'?",
        "variable": "two",
        "row": ["how many", "one"],
        "unread": {},
        "packaged": "two",
        "over": "one",
    }
    assert ["made_up", "two", "VLLM_FL_MADE_UP"] in [line.split() for line in shown]
    assert "VLLM_FL_MADE_UP: made_up must be one of one, two, not 'three'." in done.stderr
    # A worker whose core is older is this process.
    with pytest.raises(PolicyError) as caught:
        received({**parcel, "core": "99.0"})
    message = str(caught.value)
    assert message.startswith("the policy that the front end sent: unknown key 'made_up'; keys are prefer, ")
    assert "The front end has vllm-fl-core 99.0, this process " in message
    assert message.endswith(": install the same version where both run.")


# -- plain values that are no policy ---------------------------------------------------------

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"made_up": 1}, f"unknown key 'made_up'; keys are {', '.join(KEYS)}."),
    ({"cls": 1}, "unknown key 'cls'; keys are "),
    ({"prefer": None}, "prefer must be one of flagos, vendor, reference, native, not None."),
    ({"prefer": ["vendor"]}, "prefer must be one of "),
    ({"strict": "on"}, "strict must be True or False, not 'on'."),
    ({"strict": None}, "strict must be True or False, not None."),
    ({"per_op_order": 3}, "per_op_order must map operators to orders, not 3."),
    ({"per_op_order": [["rms_norm"]]}, "per_op_order must map operators to orders, not [['rms_norm']]."),
    ({"per_op_order": {"rms_norm": 3}}, "the order of 'rms_norm' must be a list of tokens, not 3."),
    ({"op_backends": {}}, "per_op_order and op_backends are one key; give one of them."),
    ({"deny_vendors": 3}, "deny_vendors must be a list of vendor names, not 3."),
    ({"deny_vendors": None}, "deny_vendors must be a list of vendor names, not None."),
    ({"allow_vendors": [None]}, "allow_vendors must hold vendor names, not None."),
    ({"tuned": [1]}, "tuned must map operators to lists of entries, not [1]."),
    ({"tuned": {"rms_norm": [{}]}}, "an entry of 'rms_norm' lacks dtype, last, max_rows, order."),
    ({"defaults": 0}, "defaults must be one of packaged, none, not 0."),
    ({"explicit": 3}, "explicit must be a list of keys, not 3."),
    ({"explicit": ["made_up"]}, "unknown key 'made_up'; keys are "),
    ({"explicit": [["prefer"]]}, "unknown key ['prefer']; keys are "),
]


@pytest.mark.parametrize(("changed", "problem"), WRONG)
def test_what_is_no_policy(changed: dict[str, Any], problem: str) -> None:
    whole = {**SelectionPolicy().to_dict(), **changed}
    with pytest.raises(PolicyError) as caught:
        SelectionPolicy.from_dict(**whole)
    assert str(caught.value).startswith(problem)
    with pytest.raises(PolicyError) as caught:
        received({"policy": whole, "fingerprint": "", "core": "1.0"})
    assert str(caught.value).startswith(f"the policy that the front end sent: {problem}")
    assert " The front end has vllm-fl-core 1.0, this process " in str(caught.value)


@pytest.mark.parametrize("name", [*KEYS, "explicit"])
def test_a_policy_that_lacks_a_key(name: str) -> None:
    whole = SelectionPolicy().to_dict()
    del whole[name]
    problem = f"{name} is missing." if name in KEYS else "explicit must be a list of keys, not None."
    if name in KEYS:
        with pytest.raises(PolicyError) as caught:
            SelectionPolicy.from_dict(**whole)
        assert str(caught.value) == problem
    with pytest.raises(PolicyError) as caught:
        received({"policy": whole, "fingerprint": "", "core": None})
    assert str(caught.value).startswith(f"the policy that the front end sent: {problem} ")
    assert "vllm-fl-core of an unknown version, this process " in str(caught.value)


@pytest.mark.parametrize("sent", [None, [], "prefer", {1: "vendor"}])
def test_what_is_sent_is_no_mapping(sent: Any) -> None:
    with pytest.raises(PolicyError, match=r"^the policy that the front end sent: must be a mapping of keys"):
        received({"policy": sent, "fingerprint": ""})


def test_what_two_cores_read_otherwise() -> None:
    with pytest.raises(PolicyError, match=r"the front end sent 0123\. The front end has vllm-fl-core 9,"):
        received({"policy": SelectionPolicy().to_dict(), "fingerprint": "0123", "core": "9"})

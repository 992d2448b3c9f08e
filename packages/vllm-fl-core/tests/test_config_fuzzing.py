"""Whatever a file or a variable holds: a policy that says just that, or an error that names the place."""

from __future__ import annotations

import json
import os
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING
from typing import Any
from unittest import mock

import pytest
import yaml
from hypothesis import HealthCheck
from hypothesis import example
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from vllm_fl.dispatch import PolicyError
from vllm_fl.dispatch import SelectionPolicy
from vllm_fl.dispatch import get_policy
from vllm_fl.dispatch import reset_default_manager
from vllm_fl.dispatch import reset_global_policy
from vllm_fl.dispatch import trace
from vllm_fl.dispatch.environment import seconds_variable
from vllm_fl.dispatch.policy import KINDS
from vllm_fl.dispatch.policy.keys import KEYS
from vllm_fl.dispatch.policy.keys import key_of
from vllm_fl.dispatch.policy.shipping import received
from vllm_fl.dispatch.policy.shipping import shipped

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("no_plugins")

# The same examples in every run: a change is judged by its own faults, not by luck.
fuzzed = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

# -- what is right, what is nearly right, and what is anything -----------------

OPERATORS = ("rms_norm", "silu_and_mul", "moe_sum")
VENDORS = ("cuda", "ascend")
TOKENS = (*KINDS, "vendor:cuda", "impl:reference.torch")
BOOLEANS = (True, False, 0, 1, "yes", "off")

orders = st.lists(st.sampled_from(TOKENS), min_size=1, max_size=4, unique=True)
vendors = st.lists(st.sampled_from(VENDORS), min_size=1, max_size=1)
right = {
    "prefer": st.sampled_from((*KINDS, "Vendor", " flagos ")),
    "strict": st.sampled_from(BOOLEANS),
    "per_op_order": st.dictionaries(
        st.sampled_from(OPERATORS), orders | orders.map("|".join), min_size=1, max_size=3
    ),
    "allow_vendors": vendors | vendors.map(",".join),
    "deny_vendors": vendors | vendors.map(lambda names: [f"+{name}" for name in names]),
    "defaults": st.sampled_from(("packaged", "none", " None ")),
}
documents = st.fixed_dictionaries({}, optional=right)

#: What YAML makes of a text is a wide field: dates, numbers in base 60, tags, anchors.
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=12)
    | st.binary(max_size=4)
    | st.dates()
    | st.datetimes()
    | st.sampled_from((*TOKENS, *VENDORS, *OPERATORS, *right, "vendr", "rmsnorm", "vendor:", "impl:x", ""))
)
names = st.text(max_size=8) | st.sampled_from((*right, "op_backends", "Prefer", "per_op", "<<", "=", "~"))
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names | scalars, inner, max_size=4),
    max_leaves=12,
)

#: Text that has a meaning in YAML somewhere.
PIECES = (
    *("prefer: vendor\n", "strict: on\n", "per_op_order:\n", "  rms_norm: [vendor, native]\n"),
    *(
        "deny_vendors: [cuda]\n",
        "- ",
        "  ",
        "\n",
        "\t",
        ": ",
        "? ",
        "&a ",
        "*a ",
        "<<: *a\n",
        "---\n",
        "...\n",
    ),
    *(
        "!!int ",
        "!!bool ",
        "!!float ",
        "!!timestamp ",
        "!!binary ",
        "!!set ",
        "!!omap ",
        "!!pairs ",
        "!!str ",
    ),
    *(
        "!!python/name:os.system ",
        "!x ",
        "%YAML 1.1\n",
        "%TAG ! x\n",
        "[",
        "]",
        "{",
        "}",
        ",",
        '"',
        "'",
        "|\n",
    ),
    *(">\n", "#", "\x00", "\x07", "\ufeff", "\x85", "\u2028", "0x", "1:99", "2026-99-99", ".inf", "~", "\\u"),
)
scraps = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=14).map("".join)


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """A process that has read nothing, with these variables and no other of ours."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_FL_")}
    with mock.patch.dict(os.environ, {**others, **variables}, clear=True):
        reset_default_manager()
        reset_global_policy()
        yield


# -- files ----------------------------------------------------------------------


def read(file: Path, text: str | bytes) -> SelectionPolicy | None:
    """Return the policy of a file; None where it is refused, which names a line of the file."""
    data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    file.write_bytes(data)
    with environment(VLLM_FL_CONFIG=str(file)):
        try:
            return get_policy()
        except PolicyError as error:
            message = str(error)
    assert len(message) < 1500, message
    if message.startswith(f"VLLM_FL_CONFIG={file}: cannot be read: 'utf-8' codec"):
        return None
    place = re.match(rf"{re.escape(str(file))}:(\d+): \S", message)
    assert place, message
    lines = len(re.split(r"\r\n|[\n\r\x85\u2028\u2029]", data.decode()))
    assert 1 <= int(place[1]) <= lines, message
    return None


def same(policy: SelectionPolicy, document: dict[str, Any]) -> None:
    """Check that a policy says all that a document says, and nothing else."""
    document = {key_of(name).name: value for name, value in document.items()}
    given_names = {"allow_vendors", "deny_vendors"} & set(document)
    assert policy.explicit == set(document) <= set(right)
    assert policy.prefer == str(document.get("prefer", default("prefer"))).strip().lower()
    assert policy.defaults == str(document.get("defaults", default("defaults"))).strip().lower()
    assert policy.strict == (str(document.get("strict", "no")).lower() in ("1", "true", "yes", "on"))
    wanted = {
        op_name: [token.strip() for token in order.split("|")] if isinstance(order, str) else order
        for op_name, order in document.get("per_op_order", {}).items()
    }
    assert policy.per_op_order_dict == wanted
    for key in given_names:
        value = document[key]
        listed = value.split(",") if isinstance(value, str) else value
        assert set(policy.to_dict()[key]) == {name.strip() for name in listed}
    assert set(policy.sources) >= set(document)
    # And it is the same one in another process.
    assert received(json.loads(json.dumps(shipped(policy)))) == policy


def default(name: str) -> Any:
    return KEYS[name].type.default


@fuzzed
@given(documents, st.randoms())
def test_a_right_document_is_taken_whole(tmp_path: Path, document: dict[str, Any], random: Any) -> None:
    allowed = set(document.get("allow_vendors", ()))
    denied = {name.removeprefix("+") for name in document.get("deny_vendors", ())}
    if isinstance(document.get("allow_vendors"), str):
        allowed = {document["allow_vendors"]}
    text = yaml.safe_dump(
        document,
        sort_keys=random.random() < 0.5,
        default_flow_style=random.choice((True, False, None)),
        explicit_start=random.random() < 0.5,
    )
    policy = read(tmp_path / "policy.yaml", text)
    if allowed & denied:
        assert policy is None
    else:
        assert policy is not None
        same(policy, document)


@fuzzed
@given(documents, st.sampled_from((*right, "other")), names, anything, st.integers(0, 9))
def test_a_document_with_one_thing_changed(
    tmp_path: Path, document: dict[str, Any], key: str, name: str, value: Any, place: int
) -> None:
    """Another value, another key, or another token in an order."""
    changed = dict(document)
    if key == "other":
        changed[name] = value
    elif key == "per_op_order" and document.get(key) and place > 4:
        changed[key] = {**document[key], name: value}
    else:
        changed[key] = value
    accepts_only_what_it_says(tmp_path / "policy.yaml", yaml.safe_dump(changed, sort_keys=False))


@fuzzed
@given(documents, st.integers(0, 400), st.integers(0, 5), st.sampled_from(PIECES) | st.text(max_size=2))
def test_a_document_with_some_text_changed(
    tmp_path: Path, document: dict[str, Any], start: int, length: int, piece: str
) -> None:
    text = yaml.safe_dump(document, default_flow_style=None)
    start %= len(text) + 1
    accepts_only_what_it_says(tmp_path / "policy.yaml", text[:start] + piece + text[start + length :])


@fuzzed
@given(anything)
def test_any_document(tmp_path: Path, document: Any) -> None:
    accepts_only_what_it_says(tmp_path / "policy.yaml", yaml.safe_dump(document))


# What no constructor of PyYAML expects, what is too deep, too long to print, or grows when printed.
BOMB = "a: &a [x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in ("ab", "bc", "cd", "de")
)


@fuzzed
@given(scraps | st.text())
@example("strict: !!bool maybe\n")
@example("prefer: flagos\nstrict: !!timestamp soon\n")
@example("strict: !!int ''\n")
@example("per_op_order:\n  rms_norm: !!float x\n")
@example("? !!int x\n: 1\n")
@example("strict: 0x" + "f" * 5000 + "\n")
@example("deny_vendors: [cuda, 0x" + "f" * 5000 + "]\n")
@example("prefer: " + "[\n" * 3000)
@example("? " * 2000 + "\n")
@example("prefer: &a [*a]\n")
@example("? &a [*a]\n: 1\n")
@example("!!omap {prefer: vendor}\n")
@example("x: {<<: 1}\n")
@example("strict: on\n<<: {prefer: vendor}\n")
@example("prefer: " + "v" * 100_000)
@example(BOMB)
@example("prefer: &a [x]\ndeny_vendors: [*a]\n")
@example("prefer: !!binary '*'\n")
@example("\ud800")
def test_any_text(tmp_path: Path, text: str) -> None:
    accepts_only_what_it_says(tmp_path / "policy.yaml", text)


@fuzzed
@given(st.binary() | scraps.map(lambda text: text.encode("utf-16", "surrogatepass")))
def test_any_bytes(tmp_path: Path, data: bytes) -> None:
    accepts_only_what_it_says(tmp_path / "policy.yaml", data)


wholes = documents.map(
    lambda document: SelectionPolicy.from_dict(
        **{
            name: value
            for name, value in document.items()
            if name in ("prefer", "defaults") or (name.endswith("vendors") and isinstance(value, list))
        }
    ).to_dict()
)


@fuzzed
@given(wholes, st.sampled_from((*KEYS, "explicit", "other")), names, anything)
def test_a_shipped_policy_with_one_thing_changed(
    whole: dict[str, Any], key: str, name: str, value: Any
) -> None:
    """Whatever another core sent, it is a policy that says so, or a PolicyError that names both cores."""
    changed = {**whole, name if key == "other" else key: value}
    try:
        policy = SelectionPolicy.from_dict(**changed)
    except PolicyError:
        with pytest.raises(PolicyError, match=r"vllm-fl-core 1\.0, this process ") as caught:
            received({"policy": changed, "fingerprint": "", "core": "1.0"})
        assert len(str(caught.value)) < 1500
    else:
        assert SelectionPolicy.from_dict(**policy.to_dict()) == policy


def accepts_only_what_it_says(file: Path, text: str | bytes) -> None:
    policy = read(file, text)
    if policy is not None:
        # An accepted document is one that everybody reads so.
        same(policy, yaml.safe_load(file.read_text("utf-8")) or {})


@fuzzed
@given(documents, st.integers(0, 5), st.sampled_from(("prefr", "Strict", "allow", "per_op_order ", "zz")))
def test_the_line_is_that_of_the_fault(tmp_path: Path, document: dict[str, Any], at: int, wrong: str) -> None:
    blocks = [yaml.safe_dump({key: value}) for key, value in document.items()]
    blocks.insert(at % (len(blocks) + 1), f"{wrong!r}: 1\n")
    file = tmp_path / "policy.yaml"
    file.write_text("".join(blocks))
    line = "".join(blocks[: blocks.index(f"{wrong!r}: 1\n")]).count("\n") + 1
    with environment(VLLM_FL_CONFIG=str(file)), pytest.raises(PolicyError) as caught:
        get_policy()
    assert str(caught.value).startswith(f"{file}:{line}: unknown key {wrong!r}; keys are ")


# -- variables --------------------------------------------------------------------

#: A NUL cannot be in a variable; what is no UTF-8 can, and Python shows it as a surrogate.
texts = st.text(
    st.characters(codec="utf-8", exclude_characters="\0")
    | st.characters(min_codepoint=0xDC80, max_codepoint=0xDCFF)
)
bits = (
    *TOKENS,
    *VENDORS,
    *OPERATORS,
    *",;|=: \n",
    "true",
    "0",
    "on",
    "vendr",
    "vllm_fl",
    ".",
    "..",
    "nan",
    "1e999",
)
near = st.lists(st.sampled_from(bits) | texts, max_size=6).map("".join)
right_texts = (
    st.dictionaries(st.sampled_from(OPERATORS), orders, min_size=1).map(
        lambda given: ";".join(f"{op_name} = {'|'.join(order)}" for op_name, order in given.items())
    )
    | st.permutations(VENDORS).map(", ".join)
    | st.sampled_from((*KINDS, "1", "Off", "WARNING", "none", "+cuda, +ascend"))
)
#: The key that each variable sets.
BY_VARIABLE = {key.variable.removeprefix("VLLM_FL_"): key.name for key in KEYS.values() if key.variable}
OTHERS = ("CONFIG", "PREFER_ENABLED", "OOT_ENABLED", "PLUGINS", "PLUGIN_MODULES", "LOG_LEVEL")


@pytest.mark.parametrize("name", [*BY_VARIABLE, *OTHERS])
@fuzzed
@given(value=near | texts | right_texts)
@example("")
@example(" \n ")
@example("x" * 100_000)
@example("\udcff")
@example("../x")
@example("./policy.yaml\n")
def test_any_value_of_a_variable(name: str, value: str) -> None:
    name = f"VLLM_FL_{name}"
    with environment(**{name: value}):
        try:
            policy = get_policy()
        except PolicyError as error:
            message = str(error)
        else:
            message = ""
    if message:
        assert re.match(rf"{name}[:=]", message), message
        assert value.strip()
        return
    short = name.removeprefix("VLLM_FL_")
    is_policy = short in BY_VARIABLE and bool(value.strip())
    assert policy.explicit == ({BY_VARIABLE[short]} if is_policy else set())
    # Nothing of the text is dropped: what is left of it, beside the punctuation, are the names.
    if is_policy and short != "STRICT":
        said = [policy.prefer] if short == "PREFER" else []
        said += [policy.defaults] if short == "DEFAULTS" else []
        said += [*(policy.to_dict()["allow_vendors"] or ()), *policy.to_dict()["deny_vendors"]]
        said += [text for op_name, order in policy.per_op_order for text in (op_name, *order)]
        words = re.split(r"[,;|=]", value.lower() if short in ("PREFER", "DEFAULTS") else value)
        assert sorted(filter(None, map(str.strip, words))) == sorted(said)


@fuzzed
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "PREFER": st.sampled_from((*KINDS, "vendr")),
            "STRICT": st.sampled_from(("1", "no", "maybe")),
            "PER_OP": st.sampled_from(
                ("rms_norm=native", "rms_norm=vendor:cuda|reference;moe_sum=flagos", "rms=x")
            ),
            "ALLOW_VENDORS": st.sampled_from(("cuda", "cuda,ascend", "cuda,")),
            "DENY_VENDORS": st.sampled_from(("ascend", "+ascend", "metax", "ac.send")),
        },
    )
)
def test_variables_together(values: dict[str, str]) -> None:
    wrong = ("vendr", "maybe", "rms=x", "cuda,", "ac.send")
    both = "ascend" in values.get("ALLOW_VENDORS", "") and "ascend" in values.get("DENY_VENDORS", "")
    named = {f"VLLM_FL_{name}": value for name, value in values.items()}
    with environment(**named):
        try:
            policy = get_policy()
        except PolicyError as error:
            place = str(error).partition(":")[0]
            assert named[place] in wrong or (both and place == "VLLM_FL_DENY_VENDORS")
            return
    assert not both
    assert not set(wrong) & set(values.values())
    keys = {name: BY_VARIABLE[name] for name in values}
    assert policy.explicit == set(keys.values())
    assert policy.sources == {**policy.sources, **{key: f"VLLM_FL_{name}" for name, key in keys.items()}}


@fuzzed
@given(texts | st.floats().map(str) | st.sampled_from(("0", "-1", "nan", "inf", "1e999", "1_0", "1e-999")))
def test_any_time_limit(value: str) -> None:
    with environment(VLLM_FL_RANKS_TIMEOUT=value):
        try:
            seconds = seconds_variable("VLLM_FL_RANKS_TIMEOUT", 120.0)
        except PolicyError as error:
            seconds, message = 0.0, str(error)
        else:
            message = ""
    assert (0 < seconds < float("inf")) == (not message)
    assert value.strip() or seconds == 120
    assert not message or message.startswith("VLLM_FL_RANKS_TIMEOUT: must be a positive number of seconds")


@pytest.mark.parametrize("below", ["file", "file/folder", "x" * 300, "loop"])
def test_a_folder_for_the_trace_that_cannot_be_made(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    with (
        environment(VLLM_FL_TRACE_DIR=str(tmp_path / below)),
        pytest.raises(PolicyError, match=r"^VLLM_FL_TRACE_DIR: .*cannot be made: "),
    ):
        trace.recorder()

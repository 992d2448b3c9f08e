"""Nothing is guessed and nothing is ignored: every wrong configuration, and what it must say."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING
from typing import Any

import pytest

from vllm_fl.dispatch import PolicyError
from vllm_fl.dispatch import call_op
from vllm_fl.dispatch import get_default_manager
from vllm_fl.dispatch import get_policy
from vllm_fl.dispatch import policy_from_config
from vllm_fl.dispatch import reset_default_manager
from vllm_fl.dispatch import reset_global_policy
from vllm_fl.dispatch.policy import keys

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

KINDS = "flagos, vendor, reference, native"
TOKENS = f"{KINDS}, vendor:<name>, impl:<impl_id>"
BOOLEANS = "1/0, true/false, yes/no, on/off"
KEYS = ", ".join(keys.KEYS)
MIXED = (
    "must have a + before every name (they are added to the packaged ones) or before none "
    "(they replace them);"
)
FORM = "is not of the form 'op=a|b;op2=x'."

#: A variable, its value, and the whole message.
VARIABLES = [
    ("PREFER", "vendr", f"prefer must be one of {KINDS}, not 'vendr'. Did you mean 'vendor'?"),
    ("PREFER", "gpu!", f"prefer must be one of {KINDS}, not 'gpu!'."),
    ("PREFER", "vendor:cuda", f"prefer must be one of {KINDS}, not 'vendor:cuda'. Did you mean 'vendor'?"),
    (
        "PREFER",
        "vendor|flagos",
        f"prefer must be one of {KINDS}, not 'vendor|flagos'. Did you mean 'vendor'?",
    ),
    ("STRICT", "maybe", f"strict must be one of {BOOLEANS}, not 'maybe'."),
    ("STRICT", "2", f"strict must be one of {BOOLEANS}, not '2'."),
    ("STRICT", "y", f"strict must be one of {BOOLEANS}, not 'y'."),
    ("PREFER_ENABLED", "enabled", f"must be one of {BOOLEANS}, not 'enabled'."),
    ("OOT_ENABLED", "-1", f"must be one of {BOOLEANS}, not '-1'."),
    ("PER_OP", "rms_norm", f"'rms_norm' {FORM}"),
    ("PER_OP", "rms_norm=", f"'rms_norm=' {FORM}"),
    ("PER_OP", "=vendor", f"'=vendor' {FORM}"),
    ("PER_OP", ";;", f"';;' {FORM}"),
    ("PER_OP", "rms_norm:vendor", f"'rms_norm:vendor' {FORM}"),
    ("PER_OP", "rms_norm=vendor;rms_norm=flagos", "gives 'rms_norm' two orders."),
    (
        "PER_OP",
        "rms_norm=vendor||flagos",
        f"'' in the order of 'rms_norm' is no token; tokens are {TOKENS}.",
    ),
    (
        "PER_OP",
        "rms_norm=flagos|refrence",
        f"'refrence' in the order of 'rms_norm' is no token; tokens are {TOKENS}. Did you mean 'reference'?",
    ),
    (
        "PER_OP",
        "rms_norm=vendor,flagos",
        f"'vendor,flagos' in the order of 'rms_norm' is no token; tokens are {TOKENS}. "
        "Did you mean 'vendor'?",
    ),
    ("PER_OP", "rms_norm=vendor:", "token 'vendor:' of 'rms_norm' names nothing after the colon."),
    ("PER_OP", "rms_norm=impl:", "token 'impl:' of 'rms_norm' names nothing after the colon."),
    ("PER_OP", "rms_norm=vendor|vendor", "the order of 'rms_norm' names a token twice: vendor|vendor."),
    ("PER_OP", "rmsnorm=vendor", "unknown operator 'rmsnorm'. Did you mean 'rms_norm'?"),
    ("PER_OP", "RMS_Norm=vendor", "unknown operator 'RMS_Norm'. Did you mean 'rms_norm'?"),
    ("PER_OP", "rms_norm=vendor:asscend", "unknown vendor 'asscend'. Did you mean 'ascend'?"),
    ("PER_OP", "rms_norm=vendor:zzz", "unknown vendor 'zzz'. Known: ascend, cuda, template."),
    (
        "PER_OP",
        "rms_norm=flagos|impl:vendor.cud",
        "unknown implementation 'vendor.cud'. Did you mean 'vendor.cuda'?",
    ),
    ("PER_OP", "rms_norm=impl:native", "unknown implementation 'native'."),
    ("ALLOW_VENDORS", ",", "allow_vendors must hold names, not ''."),
    ("ALLOW_VENDORS", "cuda,,ascend", "allow_vendors must hold names, not ''."),
    ("ALLOW_VENDORS", "cuda,ascend,cuda", "allow_vendors names 'cuda' twice."),
    ("ALLOW_VENDORS", "cuda;ascend", "unknown vendor 'cuda;ascend'."),
    ("ALLOW_VENDORS", "CUDA", "unknown vendor 'CUDA'. Did you mean 'cuda'?"),
    ("DENY_VENDORS", "cuda, cuda", "deny_vendors names 'cuda' twice."),
    ("DENY_VENDORS", "vendor:cuda", "unknown vendor 'vendor:cuda'."),
    ("DENY_VENDORS", "cuda;ascend", "unknown vendor 'cuda;ascend'."),
    ("DENY_VENDORS", "+CUDA", "unknown vendor 'CUDA'. Did you mean 'cuda'?"),
    ("DENY_VENDORS", "cuda.fast", "unknown vendor 'cuda.fast'. Did you mean 'cuda'?"),
    ("DENY_VENDORS", "+cuda,ascend", f"deny_vendors {MIXED} 'ascend' has none."),
    ("ALLOW_VENDORS", "cuda,+ascend", f"allow_vendors {MIXED} 'cuda' has none."),
    ("ALLOW_VENDORS", "+cudda", "unknown vendor 'cudda'. Did you mean 'cuda'?"),
    ("DENY_VENDORS", "+", "deny_vendors must hold vendor names, not '+'."),
    ("DENY_VENDORS", "+cuda,+cuda", "deny_vendors names '+cuda' twice."),
    ("DEFAULTS", "nome", "defaults must be one of packaged, none, not 'nome'. Did you mean 'none'?"),
    ("DEFAULTS", "0", "defaults must be one of packaged, none, not '0'."),
    ("PLUGINS", "referense", "no plugin 'referense' is installed; installed are none."),
    ("PLUGINS", "a,a", "names 'a' twice."),
    ("PLUGINS", "a,", "must hold names, not ''."),
    ("PLUGIN_MODULES", "no_such_module", "there is no module 'no_such_module'."),
    ("PLUGIN_MODULES", "no_such_module.inner", "there is no module 'no_such_module.inner'."),
    ("PLUGIN_MODULES", "vllm_fl.no_such", "there is no module 'vllm_fl.no_such'."),
    ("PLUGIN_MODULES", "json,json", "names 'json' twice."),
    ("LOG_LEVEL", "LOUD", "must be one of DEBUG, INFO, WARNING, ERROR, not 'LOUD'."),
    ("LOG_LEVEL", "10", "must be one of DEBUG, INFO, WARNING, ERROR, not '10'."),
]

#: What a file holds, and the whole message; "{file}" is its path.
FILES = [
    # Not YAML.
    ("prefer: [flagos\n", "{file}:2: is no YAML: while parsing a flow sequence, expected ',' or ']'"),
    ("prefer: flagos\n\tstrict: true\n", "{file}:2: is no YAML: while scanning for the next token, found"),
    ("\tprefer: flagos\n", "{file}:1: is no YAML: while scanning for the next token, found character"),
    ("strict: true\nprefer: a: b\n", "{file}:2: is no YAML: mapping values are not allowed here."),
    ('prefer: "flagos\n', "{file}:2: is no YAML: while scanning a quoted scalar, found unexpected end"),
    ("prefer: flagos\nstrict: \x07\n", "{file}:2: is no YAML: it holds '\\x07'."),
    ("prefer: flagos\n---\nstrict: on\n", "{file}:2: is no YAML: expected a single document in the stream"),
    ("prefer: *flagos\n", "{file}:1: is no YAML: found undefined alias 'flagos'."),
    ("strict: on\nprefer: !!python/name:os.system\n", "{file}:2: is no YAML: could not determine a constr"),
    ("\nstrict: !!int maybe\n", "{file}:2: is no YAML: 'maybe' is no int: ValueError: invalid literal for"),
    ("strict: 2026-99-99\n", "{file}:1: is no YAML: '2026-99-99' is no timestamp: ValueError: month must"),
    ("strict: !!bool maybe\n", "{file}:1: is no YAML: 'maybe' is no bool: KeyError: 'maybe'."),
    # Not a mapping, or not of ours.
    ("- prefer\n- flagos\n", "{file}:1: must be a mapping of keys to values."),
    ("# a comment\n\nflagos\n", "{file}:3: must be a mapping of keys to values."),
    ("!!omap {prefer: flagos}\n", "{file}:1: must be a mapping of keys to values."),
    ("per_op_order: !mine\n  rms_norm: native\n", "{file}:1: must be a mapping of keys to values."),
    ("1: flagos\n", "{file}:1: a key must be a name, not 1."),
    ("? [a, b]\n: c\n", "{file}:1: a key must be a name, not ['a', 'b']."),
    ("on: 1\n", "{file}:1: a key must be a name, not True."),
    ("prefer: flagos\nstrict: on\nprefer: vendor\n", "{file}:3: 'prefer' stands twice, first at {file}:1."),
    ("prefers: flagos\n", "{file}:1: unknown key 'prefers'; keys are " + KEYS + ". Did you mean 'prefer'?"),
    (
        "strict: on\nper_op: {}\n",
        "{file}:2: unknown key 'per_op'; keys are " + KEYS + ". Did you mean 'per_op_order'?",
    ),
    (
        "op_backends: {rms_norm: native}\nper_op_order: {}\n",
        "{file}:2: per_op_order and op_backends are one key, which is set at {file}:1.",
    ),
    ("op_backends: [rms_norm]\n", "{file}:1: per_op_order must map operators to orders, not ['rms_norm']."),
    ("Prefer: flagos\n", "{file}:1: unknown key 'Prefer'; keys are " + KEYS + ". Did you mean 'prefer'?"),
    # prefer and strict.
    ("strict: on\n\nprefer: vendorr\n", "{file}:3: prefer must be one of " + KINDS + ", not 'vendorr'. Did"),
    ("prefer:\n", "{file}:1: prefer must be one of " + KINDS + ", not None."),
    ("prefer: [vendor]\n", "{file}:1: prefer must be one of " + KINDS + ", not ['vendor']."),
    ("prefer: {a: b}\n", "{file}:1: prefer must be one of " + KINDS + ", not {{'a': 'b'}}."),
    ("strict: maybe\n", "{file}:1: strict must be one of " + BOOLEANS + ", not 'maybe'."),
    ("strict: 2\n", "{file}:1: strict must be one of " + BOOLEANS + ", not 2."),
    ("strict: 1.0\n", "{file}:1: strict must be one of " + BOOLEANS + ", not 1.0."),
    ("strict:\n", "{file}:1: strict must be one of " + BOOLEANS + ", not None."),
    ("strict: [on]\n", "{file}:1: strict must be one of " + BOOLEANS + ", not [True]."),
    # Vendors.
    ("allow_vendors: []\n", "{file}:1: allow_vendors names nothing; leave it out."),
    ("deny_vendors: []\n", "{file}:1: deny_vendors names nothing; leave it out."),
    ("deny_vendors: {cuda: yes}\n", "{file}:1: deny_vendors must be a list of names, not {{'cuda': True}}."),
    ("deny_vendors:\n", "{file}:1: deny_vendors must be a list of names, not None."),
    ("deny_vendors: [cuda, 1]\n", "{file}:1: deny_vendors must hold names, not 1."),
    ("deny_vendors: [cuda, cuda]\n", "{file}:1: deny_vendors names 'cuda' twice."),
    (
        "strict: on\ndeny_vendors: [+cuda, ascend]\n",
        "{file}:2: deny_vendors " + MIXED + " 'ascend' has none.",
    ),
    ("deny_vendors: ['+']\n", "{file}:1: deny_vendors must hold vendor names, not '+'."),
    ("allow_vendors: +cudda\n", "{file}:1: unknown vendor 'cudda'. Did you mean 'cuda'?"),
    ("strict: on\ndefaults:\n", "{file}:2: defaults must be one of packaged, none, not None."),
    ("defaults: off\n", "{file}:1: defaults must be one of packaged, none, not False."),
    ("defaults: nothing\n", "{file}:1: defaults must be one of packaged, none, not 'nothing'."),
    ("strict: on\nallow_vendors: cudda\n", "{file}:2: unknown vendor 'cudda'. Did you mean 'cuda'?"),
    (
        "allow_vendors: [cuda, ascend]\ndeny_vendors: [cuda]\n",
        "{file}:2: 'cuda' is denied here and allowed by {file}:1.",
    ),
    # Orders.
    ("per_op_order: [rms_norm]\n", "{file}:1: per_op_order must map operators to orders, not ['rms_norm']."),
    ("per_op_order:\n", "{file}:1: per_op_order must map operators to orders, not None."),
    ("per_op_order:\n  1: [vendor]\n", "{file}:2: a key must be a name, not 1."),
    ("per_op_order:\n  rms_norm: []\n", "{file}:2: the order of 'rms_norm' is empty."),
    ("per_op_order:\n  rms_norm:\n", "{file}:2: the order of 'rms_norm' must be a list of tokens, not None."),
    (
        "per_op_order:\n  rms_norm: {vendor: cuda}\n",
        "{file}:2: the order of 'rms_norm' must be a list of tokens, not {{'vendor': 'cuda'}}.",
    ),
    (
        "per_op_order:\n  rms_norm:\n  - vendor: cuda\n",
        "{file}:2: {{'vendor': 'cuda'}} in the order of 'rms_norm' is no token; tokens are " + TOKENS + ".",
    ),
    (
        "per_op_order:\n  moe_sum: [vendor]\n  rms_norm: [vendor, vendor]\n",
        "{file}:3: the order of 'rms_norm' names a token twice: vendor|vendor.",
    ),
    (
        "per_op_order:\n  rms_norm: [vendor]\n  moe_sum: vendor\n  rms_norm: flagos\n",
        "{file}:4: 'rms_norm' stands twice, first at {file}:2.",
    ),
    (
        "per_op_order:\n  moe_sum: vendor\n  silu_and_mull: vendor|flagos\n",
        "{file}:3: unknown operator 'silu_and_mull'. Did you mean 'silu_and_mul'?",
    ),
    (
        "per_op_order:\n  rms_norm: [flagos,\n    'vendor:huawei']\n",
        "{file}:2: unknown vendor 'huawei'. Known: ascend, cuda, template.",
    ),
    (
        "per_op_order:\n  moe_sum: vendor\n  rms_norm: ['impl:reference.troch']\n",
        "{file}:3: unknown implementation 'reference.troch'. Did you mean 'reference.torch'?",
    ),
]

WAYS = {
    "get_policy": get_policy,
    "ensure_initialized": lambda: get_default_manager().ensure_initialized(),
    "call_op": lambda: call_op("silu_and_mul", None),
    "explain": lambda: get_default_manager().explain("silu_and_mul"),
    "freeze": lambda: get_default_manager().freeze(),
}


def check(expected: str, *, whole: bool) -> None:
    for way in WAYS.values():
        reset_default_manager()
        reset_global_policy()
        with pytest.raises(PolicyError) as caught:
            way()
        assert isinstance(caught.value, ValueError)
        message = str(caught.value)
        assert message == expected if whole else message.startswith(expected), message
        with pytest.raises(PolicyError):  # not only the first time
            way()


@pytest.mark.usefixtures("no_plugins")
@pytest.mark.parametrize(("name", "value", "message"), VARIABLES)
def test_a_variable(monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str) -> None:
    monkeypatch.setenv(f"VLLM_FL_{name}", value)
    ends = not message.startswith("unknown") or "?" in message or "Known" in message
    check(f"VLLM_FL_{name}: {message}", whole=ends)


@pytest.mark.usefixtures("no_plugins")
def test_a_vendor_that_is_both_allowed_and_denied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_FL_ALLOW_VENDORS", "cuda,ascend")
    monkeypatch.setenv("VLLM_FL_DENY_VENDORS", "ascend,cuda")
    check(
        "VLLM_FL_DENY_VENDORS: 'ascend', 'cuda' is denied here and allowed by VLLM_FL_ALLOW_VENDORS.",
        whole=True,
    )


@pytest.mark.usefixtures("no_plugins")
@pytest.mark.parametrize(("text", "message"), FILES)
def test_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(text)
    monkeypatch.setenv("VLLM_FL_CONFIG", str(file))
    expected = message.format(file=file)
    check(expected, whole=expected[-1] in ".?")
    if "unknown" not in expected or "key" in expected:
        with pytest.raises(PolicyError, match=re.escape(str(file))):
            policy_from_config(str(file))


def not_there(folder: Path) -> Path:
    return folder / "not-there.yaml"


def a_folder(folder: Path) -> Path:
    return folder


def not_utf8(folder: Path) -> Path:
    (folder / "latin.yaml").write_bytes("prefer: flagós\n".encode("latin-1"))
    return folder / "latin.yaml"


def below_a_file(folder: Path) -> Path:
    (folder / "file").write_text("")
    return folder / "file" / "policy.yaml"


def a_loop(folder: Path) -> Path:
    (folder / "loop").symlink_to("loop")
    return folder / "loop"


@pytest.mark.usefixtures("no_plugins")
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (not_there, "[Errno 2] No such file or directory"),
        (a_folder, "[Errno 21] Is a directory"),
        (not_utf8, "'utf-8' codec can't decode byte 0xf3"),
        (below_a_file, "[Errno 20] Not a directory"),
        (a_loop, "[Errno 40] Too many levels of symbolic links"),
    ],
)
def test_a_file_that_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, make: Callable[[Path], Path], reason: str
) -> None:
    path = make(tmp_path)
    monkeypatch.setenv("VLLM_FL_CONFIG", str(path))
    check(f"VLLM_FL_CONFIG={path}: cannot be read: {reason}", whole=False)
    with pytest.raises(PolicyError) as caught:
        policy_from_config(str(path))
    assert str(caught.value).startswith(f"{path}: cannot be read: {reason}")


@pytest.mark.usefixtures("no_plugins")
def test_a_file_is_judged_also_where_a_variable_is_right(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("prefr: vendor\n")
    monkeypatch.setenv("VLLM_FL_CONFIG", str(file))
    monkeypatch.setenv("VLLM_FL_PREFER", "vendor")
    check(f"{file}:1: unknown key 'prefr'", whole=False)


@pytest.mark.usefixtures("no_plugins")
def test_a_switch_is_judged_also_where_a_file_has_the_policy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("prefer: vendor\n")
    monkeypatch.setenv("VLLM_FL_CONFIG", str(file))
    monkeypatch.setenv("VLLM_FL_PREFER_ENABLED", "nope")
    check(f"VLLM_FL_PREFER_ENABLED: must be one of {BOOLEANS}, not 'nope'.", whole=True)


IMPORT_WITH = """
import os, sys
cases = {cases!r}
for values in [*({{name: value}} for name, value in cases), dict(cases)]:
    os.environ.update(values)
    import vllm_fl.dispatch
    for name in [*values, *(name for name in sys.modules if name.startswith("vllm_fl"))]:
        os.environ.pop(name, None) or sys.modules.pop(name)
print("imported", end="")
"""


def test_importing_raises_nothing(python: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("\t{")
    cases = list({f"VLLM_FL_{name}": value for name, value, _ in VARIABLES}.items())
    cases += [
        ("VLLM_FL_CONFIG", str(path)) for path in (not_there(tmp_path), tmp_path, tmp_path / "bad.yaml")
    ]
    done = python(IMPORT_WITH.format(cases=cases))
    assert (done.returncode, done.stdout) == (0, "imported"), done.stderr


@pytest.mark.usefixtures("no_plugins")
def test_a_mended_configuration_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_FL_PREFER", "vendr")
    with pytest.raises(PolicyError):
        get_policy()
    os.environ["VLLM_FL_PREFER"] = "vendor"
    assert get_policy().prefer == "vendor"

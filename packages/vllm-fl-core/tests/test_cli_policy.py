"""``vllm-fl policy``: each value with the place that it came from, and a file's faults."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING
from typing import Any
from typing import ClassVar

import pytest

from vllm_fl.cli import main
from vllm_fl.cli.policy import values_of
from vllm_fl.dispatch import Backend
from vllm_fl.dispatch import OpImpl
from vllm_fl.dispatch import OpManager
from vllm_fl.dispatch import OpRegistry
from vllm_fl.dispatch import SelectionPolicy
from vllm_fl.dispatch import reset_default_manager
from vllm_fl.dispatch import reset_global_policy
from vllm_fl.dispatch import with_preference
from vllm_fl.dispatch.policy.keys import KEYS
from vllm_fl.dispatch.policy.packaged import effective
from vllm_fl.dispatch.types import Origin

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FILE = """\
prefer: vendor
deny_vendors: [ascend]
per_op_order:
  rms_norm: [vendor:cuda, reference]
  silu_and_mul: native
"""


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    reset_default_manager()
    reset_global_policy()
    yield
    reset_default_manager()
    reset_global_policy()


def show(capfd: pytest.CaptureFixture[str]) -> dict[str, tuple[Any, str]]:
    assert main(["policy", "show", "--json"]) == 0
    values = json.loads(capfd.readouterr().out)["values"]
    return {row["key"]: (row["value"], row["source"]) for row in values}


def test_nothing_is_set(capfd: pytest.CaptureFixture[str]) -> None:
    assert show(capfd) == {
        f"{name}{inner}": (value, "default")
        for name, key in KEYS.items()
        for inner, (value, _) in key.type.rows(key.type.default).items()
    }
    assert main(["policy", "show"]) == 0
    shown = [line.split() for line in capfd.readouterr().out.splitlines()]
    for row in ("prefer flagos", "strict false", "allow_vendors all", "deny_vendors none", "tuned none"):
        assert [*row.split(), "default"] in shown


def test_variables(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_FL_PREFER", "reference")
    monkeypatch.setenv("VLLM_FL_PER_OP", "rms_norm=vendor|native")
    found = show(capfd)
    assert found["prefer"] == ("reference", "VLLM_FL_PREFER")
    assert found["per_op_order.rms_norm"] == (["vendor", "native"], "VLLM_FL_PER_OP")
    assert found["strict"] == (False, "default")
    assert main(["policy", "show"]) == 0
    assert "per_op_order.rms_norm  vendor | native  VLLM_FL_PER_OP" in capfd.readouterr().out


def test_a_file(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(FILE)
    monkeypatch.setenv("VLLM_FL_CONFIG", str(file))
    found = show(capfd)
    assert found["prefer"] == ("vendor", f"{file}:1")
    assert found["deny_vendors"] == (["ascend"], f"{file}:2")
    assert found["per_op_order.rms_norm"] == (["vendor:cuda", "reference"], f"{file}:4")
    assert found["per_op_order.silu_and_mul"] == (["native"], f"{file}:5")


def test_a_wrong_configuration(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_FL_STRICT", "maybe")
    assert main(["policy", "show"]) == 1
    assert "VLLM_FL_STRICT: strict must be one of" in capfd.readouterr().err


def test_a_misspelt_variable_is_not_ignored(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_FL_PER_OPS", "rms_norm=native")
    for command in (["policy", "show"], ["explain", "--all"]):
        assert main(command) == 0
        said = capfd.readouterr().err
        assert "VLLM_FL_PER_OPS is read by nobody. Did you mean 'VLLM_FL_PER_OP'?" in said


class Acme(Backend):
    name = "acme"
    default_policy: ClassVar = {"prefer": "vendor", "per_op_order": {"rms_norm": ["reference"]}}

    def is_available(self) -> bool:
        return True

    def silu_and_mul(self, x: Any) -> Any:
        return x


def test_code_contexts_and_packaged_defaults() -> None:
    def sources(policy: SelectionPolicy) -> dict[str, str]:
        return {row["key"]: row["source"] for row in values_of(policy)}

    policy = SelectionPolicy.from_dict(strict=True)
    assert sources(policy) == {**sources(SelectionPolicy()), "strict": "code"}
    assert set(sources(SelectionPolicy()).values()) == {"default"}
    with with_preference("native") as inner:
        assert sources(inner)["prefer"] == "a context manager"

    registry = OpRegistry()
    backend = Acme()
    origin = Origin("vllm-plugin-acme", "1.2", "acme")
    impls = [
        OpImpl(i.op_name, i.impl_id, i.kind, i.fn, i.vendor, origin=origin) for i in backend.implementations()
    ]
    registry.commit(impls=tuple(impls), backends=(backend,), origin=origin)
    snapshot = OpManager(registry).snapshot()
    packaged = "the packaged defaults of acme (vllm-plugin-acme 1.2)"
    found = sources(effective(SelectionPolicy(), snapshot))
    assert found["prefer"] == packaged
    assert found["per_op_order.rms_norm"] == packaged
    assert found["strict"] == "default"


def test_check_of_a_right_file(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(FILE)
    assert main(["policy", "check", str(file)]) == 0
    said = capfd.readouterr()
    assert f"{file} is right" in said.out
    assert f"note: {file}:4: nothing that is installed here is 'vendor:cuda' of rms_norm" in said.out


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("prefer: vendor\nprefers: vendor\n", ":2: unknown key 'prefers'"),
        ("per_op_order:\n  rms_nrm: [vendor]\n", ":2: unknown operator 'rms_nrm'. Did you mean 'rms_norm'?"),
        ("prefer: [\n", ": is no YAML"),
        (None, "cannot be read"),
    ],
)
def test_check_of_a_wrong_file(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, text: str | None, problem: str
) -> None:
    file = tmp_path / "policy.yaml"
    if text is not None:
        file.write_text(text)
    assert main(["policy", "check", str(file)]) == 1
    said = capfd.readouterr()
    assert said.out == ""
    assert problem in said.err
    assert main(["policy", "check", str(file), "--json"]) == 1
    said = capfd.readouterr()
    assert problem in json.loads(said.out)["problem"]
    assert problem in said.err

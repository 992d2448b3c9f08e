"""Control characters in what plug-ins say: no output and no log has them, and no row is forged."""

from __future__ import annotations

import importlib
import json
import logging
import os
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import vllm_fl
from vllm_fl.cli import main
from vllm_fl.cli.output import Output
from vllm_fl.dispatch import NoImplementationError
from vllm_fl.dispatch import call_op
from vllm_fl.dispatch import get_default_manager
from vllm_fl.dispatch.common.log import get_logger
from vllm_fl.dispatch.common.text import printable
from vllm_fl.dispatch.common.text import printable_lines

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Iterator

#: A screen that is cleared, colours, a bell, a row of a table, another direction, nothing to see.
EVIL = "a\x1b[2J\x1b[31m\x07\x9b1m\r\nforged  row\u2028x\u2029\x85\u202e\u2066\u200b\x7f\x00\ud800z"

ESCAPED = [
    ("plain", "plain"),
    ("", ""),
    ("中文\u3000与\u00a0空格 é 😀", "中文\u3000与\u00a0空格 é 😀"),
    ("\x1b[31m", "\\x1b[31m"),
    ("a\nb\r\tc", "a\\nb\\r\\tc"),
    ("\x07\x00\x7f\x85\x9b", "\\x07\\x00\\x7f\\x85\\x9b"),
    ("\u202e\u2066\u200b\u2028\ufeff", "\\u202e\\u2066\\u200b\\u2028\\ufeff"),
    ("\ud800", "\\ud800"),
    ("\U000e0001", "\\U000e0001"),
]


@pytest.mark.parametrize(("text", "expected"), ESCAPED)
def test_what_is_escaped(text: str, expected: str) -> None:
    assert printable(text) == expected
    assert printable(printable(text)) == expected
    assert printable_lines(f"{text}\nx").endswith("\nx")


def is_clean(text: str) -> bool:
    """Whether a terminal shows all of it and obeys none of it."""
    seen = (one == "\n" or one.isprintable() or unicodedata.category(one) == "Zs" for one in text)
    return all(seen) and "\nforged" not in text


def test_the_judge_sees_what_is_not_clean() -> None:
    assert is_clean("a row\nanother 中文\u3000one\n")
    assert not any(map(is_clean, ["\x1b[0m", "\x07", "\u202e", "a\rb", "\ud800", "a\nforged  row"]))


HOSTILE = """
from vllm_fl.dispatch import Backend, operator

EVIL = {evil!r}

@operator()
def evil_operator(self, x):
    "CONTRACT"

evil_operator.__doc__ = EVIL

class Evil(Backend):
    name = "evil"
    default_policy = {{EVIL: EVIL, "per_op_order": {{EVIL: EVIL, "rms_norm": [EVIL]}}}}

    def is_available(self):
        raise RuntimeError(EVIL)

    def silu_and_mul(self, x):
        return x

class Failing(Backend):
    name = "failing"
    default_policy = {{EVIL: EVIL, "per_op_order": {{EVIL: EVIL, "rms_norm": [EVIL]}}}}

    def is_available(self):
        return True

    def missing(self, op_name):
        return None if op_name == "silu_and_mul" else EVIL

    def silu_and_mul(self, x):
        raise ValueError(EVIL)

    def gelu_and_mul(self, x, approximate="none"):
        raise ValueError(EVIL)

def register(registry):
    for declare in (lambda: registry.declare(evil_operator), lambda: registry.register_impl(EVIL)):
        try:
            declare()
        except Exception:
            pass
    registry.register_backend(Evil())
    registry.register_backend(Failing())
"""

BROKEN = "raise ImportError({evil!r})"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a plug-in that says what it should not, and one that says so and fails."""
    folder = tmp_path / "site"
    for name, source in (("evil", HOSTILE), ("broken", BROKEN)):
        info = folder / f"{name}-1.dist-info"
        info.mkdir(parents=True)
        (folder / f"{name}_ops.py").write_text(source.format(evil=EVIL))
        head = f"Metadata-Version: 2.1\nName: {name}\x1b[31m\n Version: 9\x07\nVersion: 1\x1b]0;x\x07\u202e\n"
        (info / "METADATA").write_text(head)
        (info / "entry_points.txt").write_text(f"[vllm_fl.plugin]\n{name}\x1b[2J\u202e = {name}_ops\n")
    monkeypatch.syspath_prepend(folder)
    importlib.invalidate_caches()
    yield folder
    for name in ("evil_ops", "broken_ops"):
        sys.modules.pop(name, None)


def trace_folder(tmp_path: Path) -> str:
    entry = {"op": EVIL, "impl_id": EVIL, "calls": 1, "graphs": 0, "signatures": {EVIL: 1}}
    record = {"schema_version": 1, "run": EVIL, "pid": 1, "operators": [entry], "layers": []}
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace" / "one.json").write_text(json.dumps(record))
    (tmp_path / "trace" / "two.json").write_text(json.dumps({**record, "run": "x"}))
    (tmp_path / "trace" / "\x1b[2J\u202eforged.json").write_text("{")
    return str(tmp_path / "trace")


def wrong_file(tmp_path: Path) -> str:
    (tmp_path / "wrong.yaml").write_text(f"prefer: {json.dumps(EVIL)}\n")
    return str(tmp_path / "wrong.yaml")


COMMANDS: list[tuple[list[str | Callable[[Path], str]], int]] = [
    (["list"], 0),
    (["list", "--probe"], 0),
    (["explain", "silu_and_mul"], 0),
    (["explain", "gelu_and_mul"], 0),
    (["explain", "--all", "--native"], 0),
    (["explain", EVIL], 1),
    (["policy", "show"], 0),
    (["policy", "check", wrong_file], 1),
    (["policy", "check", "no\x1b[2Jsuch\nforged  row"], 1),
    (["env"], 0),
    (["trace", trace_folder], 0),
    (["trace", trace_folder, "--run", "all"], 0),
    (["trace", trace_folder, "--run", EVIL], 0),
    (["new-vendor", "evil\x1b[2J\nforged  row", "x"], 1),
]


@pytest.mark.usefixtures("site")
@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
@pytest.mark.parametrize(("command", "code"), COMMANDS, ids=[str(c[:2])[:40] for c, _ in COMMANDS])
def test_every_command(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    command: list[str | Callable[[Path], str]],
    code: int,
    *,
    as_json: bool,
) -> None:
    if as_json and command[0] == "new-vendor":
        pytest.skip("it has no --json")
    arguments = [one if isinstance(one, str) else one(tmp_path) for one in command]
    assert main([*arguments, *(["--json"] if as_json else [])]) == code
    said = capfd.readouterr()
    assert is_clean(said.out), ascii(said.out)
    assert is_clean(said.err), ascii(said.err)
    if command[0] in ("list", "env") and not as_json:
        assert "\\x1b[2J" in said.out
    if as_json and said.out:
        json.loads(said.out)


def test_the_doctor(site: Path) -> None:
    path = os.pathsep.join([str(site), str(Path(vllm_fl.__file__).parents[1])])
    command = [sys.executable, "-m", "vllm_fl", "doctor", "--check=plugins", "--check=backends"]
    more = ["--check=variables", "--check=operators"]
    variables = {**os.environ, "PYTHONPATH": path, "VLLM_FL_AC\x1b[2JME": "1", "VLLM_FL_PREFER": "vendor"}
    said = subprocess.run([*command, *more], env=variables, capture_output=True, timeout=300, check=False)
    out, err = said.stdout.decode(), said.stderr.decode()
    assert said.returncode == 1, out + err
    assert "\\x1b[2J" in out
    assert is_clean(out), ascii(out)
    assert is_clean(err), ascii(err)


@pytest.mark.usefixtures("site")
def test_what_nothing_runs_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_FL_PER_OP", "silu_and_mul=vendor:evil")
    with pytest.raises(NoImplementationError) as caught:
        call_op("silu_and_mul", 1)
    assert "\\x1b[2J" in str(caught.value)
    assert is_clean(str(caught.value))
    assert is_clean(str(get_default_manager().explain("silu_and_mul")))


LOGS = """
from vllm_fl.dispatch import call_op, get_default_manager

try:
    call_op("silu_and_mul", 1)
except Exception:
    pass
get_default_manager().failures.set_aside("silu_and_mul", "vendor.failing", ValueError({evil!r}))
"""


def test_the_log(site: Path, python: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = python(LOGS.format(evil=EVIL), site, VLLM_FL_LOG_LEVEL="DEBUG", PYTHONIOENCODING="utf-8")
    assert done.returncode == 0, done.stderr
    assert "plugin 'broken\\x1b[2J" in done.stderr.replace("\\\\", "\\")
    assert "is set aside" in done.stderr
    assert is_clean(done.stderr), ascii(done.stderr)


def test_a_traceback_keeps_its_lines(caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger("vllm_fl.dispatch.test")
    try:
        raise ValueError(EVIL)
    except ValueError as error:
        logger.warning("%s and %d, %r", EVIL, 3, [EVIL], exc_info=error)
    (record,) = caplog.records
    said = logging.Formatter("%(levelname)s %(message)s").format(record)
    assert said.startswith("WARNING a\\x1b[2J")
    assert len(said.splitlines()) >= 4
    assert "ValueError: a\\x1b[2J" in said
    assert is_clean(said), ascii(said)


def test_widths_are_those_of_what_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    with Output(as_json=False) as output:
        output.table("T", ("a", "b"), [["\x1b[0m", "x"], ["y", "z"]])
    assert capfd.readouterr().out.splitlines()[1:] == [
        "a        b",
        "-------  -",
        "\\x1b[0m  x",
        "y        z",
        "",
    ]

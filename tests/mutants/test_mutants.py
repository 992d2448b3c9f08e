"""What `hatch run mutants` makes of a module, and that its verdicts are those of the tests."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from types import ModuleType

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def run() -> ModuleType:
    pytest.importorskip("cosmic_ray")
    spec = importlib.util.spec_from_file_location("mutants_run", HERE / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_what_is_changed(run: ModuleType) -> None:
    found = {
        (one.was, one.now.replace("  ", " ")) for one in run.mutants("m", "def f(x):\n    return x + 1\n")
    }
    assert found == {
        ("return x + 1", "return x - 1"),
        ("return x + 1", "return x + 2"),
        ("return x + 1", "return x + 0"),
    }


@pytest.mark.parametrize(
    "code",
    [
        "def f(x: int | None) -> str | None:\n    return x\n",
        "x: int | None = f()\n",
        "def f(*, x): ...\n",
        "def f(x, *args): ...\n",
        "if TYPE_CHECKING:\n    x = 1\n",
    ],
)
def test_what_only_a_type_checker_reads_is_left_alone(run: ModuleType, code: str) -> None:
    assert list(run.mutants("m", code)) == []


def test_what_tests_toml_names_is_there(run: ModuleType) -> None:
    listed = tomllib.loads((HERE / "tests.toml").read_text())["tests"]
    assert set(listed) - set(run.plans()) == {"*"}
    paths = {path for paths in listed.values() for path in paths}
    assert [path for path in paths if not (run.CORE / "tests" / path).exists()] == []


def test_a_survivor_is_named_with_its_lines(run: ModuleType) -> None:
    mutant = run.Mutant("dispatch/m", "AddNot", 3, "if x:", "if not x:", "")
    assert run.is_named(mutant, {("dispatch/m", "if x:", "if not x:")})
    assert run.is_named(mutant, {("*", "if x:", "if not x:")})
    assert not run.is_named(mutant, {("dispatch/n", "if x:", "if not x:")})


def test_what_is_named_can_still_be_made(run: ModuleType) -> None:
    """A name outlives the line that it names unless something looks."""
    source = run.CORE / "src" / "vllm_fl"
    lines = {
        name: {line.strip() for line in (source / f"{name}.py").read_text().splitlines()}
        for name in run.plans()
    }
    everywhere = set().union(*lines.values())
    for module, was, _ in run.named():
        assert was.split(" / ")[0] in (everywhere if module == "*" else lines[module]), f"{module}: {was}"


@pytest.mark.parametrize(
    ("body", "limit", "passes"),
    [("assert 1 + 1 == 2", 60, True), ("assert 1 + 1 == 3", 60, False), ("while True: pass", 3, False)],
    ids=["passes", "fails", "runs past its time"],
)
def test_a_verdict(tmp_path: Path, body: str, limit: int, passes: bool) -> None:
    """In a process of its own: the one that forks has no threads."""
    pytest.importorskip("cosmic_ray")
    test = tmp_path / "test_it.py"
    test.write_text(f"def test_it():\n    {body}\n")
    code = (
        f"import sys; from pathlib import Path; sys.path.insert(0, {str(HERE)!r}); import run\n"
        f"tests = run.Tests(Path({str(tmp_path)!r}), Path({str(tmp_path)!r}))\n"
        f"print(tests.passes([{str(test)!r}], {limit}))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == str(passes), (tmp_path / "log").read_text()

"""``hatch run mutants [MODULE ...]``: change the code a little, and see whether a test fails.

Cosmic-ray's operators make the mutants: it changes the text of a module, so that what reads
signatures and sources, as the dispatch does, sees what users' Python would see. Each mutant is
tested in a process of its own that starts warm, with pytest and torch imported; what runs past
its time counts as killed. The working tree is not touched: a copy is.

A mutant that no test kills is either named in ``named.toml``, with the reason why no test can
or should, or a fault of the tests: the exit status is 1. ``--share 0.1`` takes a sample, the
same for the same ``--seed``.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from contextlib import suppress
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any
from typing import Final

from cosmic_ray.ast import ast_nodes
from cosmic_ray.ast import get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CORE = ROOT / "packages" / "vllm-fl-core"
PACKAGE = "vllm_fl"

#: One replacement for each thing that can be replaced: cosmic-ray's other ones for it, eleven
#: for an addition, are killed by the same tests.
OPERATORS: Final = (
    "AddNot",
    "NumberReplacer",
    "ReplaceAndWithOr",
    "ReplaceBinaryOperator_Add_Sub",
    "ReplaceBinaryOperator_BitAnd_BitOr",
    "ReplaceBinaryOperator_BitOr_BitAnd",
    "ReplaceBinaryOperator_Div_Mul",
    "ReplaceBinaryOperator_FloorDiv_Div",
    "ReplaceBinaryOperator_Mod_Mul",
    "ReplaceBinaryOperator_Mul_Div",
    "ReplaceBinaryOperator_Pow_Mul",
    "ReplaceBinaryOperator_Sub_Add",
    "ReplaceBreakWithContinue",
    "ReplaceComparisonOperator_Eq_NotEq",
    "ReplaceComparisonOperator_GtE_Gt",
    "ReplaceComparisonOperator_Gt_GtE",
    "ReplaceComparisonOperator_IsNot_Is",
    "ReplaceComparisonOperator_Is_IsNot",
    "ReplaceComparisonOperator_LtE_Lt",
    "ReplaceComparisonOperator_Lt_LtE",
    "ReplaceComparisonOperator_NotEq_Eq",
    "ReplaceContinueWithBreak",
    "ReplaceFalseWithTrue",
    "ReplaceOrWithAnd",
    "ReplaceTrueWithFalse",
    "ReplaceUnaryOperator_Delete_Not",
    "ReplaceUnaryOperator_USub_UAdd",
    "RemoveDecorator",
    "ExceptionReplacer",
    "ZeroIterationForLoop",
)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one module."""

    module: str
    operator: str
    line: int
    #: The changed lines, before and after.
    was: str
    now: str
    code: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line}\n    - {self.was}\n    + {self.now}"


def plans() -> dict[str, list[str]]:
    """Return the tests of each module: those that tests.toml names, or the usual ones (``*``)."""
    tests: dict[str, list[str]] = tomllib.loads((HERE / "tests.toml").read_text())["tests"]
    source = CORE / "src" / PACKAGE
    paths = sorted((source / "dispatch").rglob("*.py"))
    dispatch = [path.relative_to(source).with_suffix("").as_posix() for path in paths]
    return {name: tests.get(name, tests["*"]) for name in [*dispatch, "conformance/judge"]}


def mutants(module: str, code: str) -> Iterator[Mutant]:
    """Make every mutant that is other code: a changed annotation or docstring is not."""
    same = _meaning(code)
    for name in OPERATORS:
        operator = get_operator(f"core/{name}")()
        positions = [
            start for node in ast_nodes(get_ast(code)) for start, _ in operator.mutation_positions(node)
        ]
        for occurrence, (line, _) in enumerate(positions):
            try:
                changed = mutate_code(code, operator, occurrence)
            except AttributeError:  # cosmic-ray replaces no exception that is an attribute or in a tuple
                continue
            if changed is None or _meaning(changed) == same or _is_a_star(name, code, changed):
                continue
            was, now = _difference(code, changed)
            yield Mutant(module, name, line, was, now, changed)


class _Meaning(ast.NodeTransformer):
    """Leaves out annotations, which nothing evaluates, and what only a type checker runs."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        return ast.arg(node.arg)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(0)
        return self.generic_visit(node)

    def visit_If(self, node: ast.If) -> ast.AST:
        if "TYPE_CHECKING" in ast.unparse(node.test):
            return ast.Pass()
        return self.generic_visit(node)


def _meaning(code: str) -> str:
    try:
        return ast.dump(_Meaning().visit(ast.parse(code)))
    except SyntaxError:
        return code


def _is_a_star(name: str, before: str, after: str) -> bool:
    """Say whether it took the star before keyword-only parameters for a product."""
    if name != "ReplaceBinaryOperator_Mul_Div":
        return False
    try:
        quotients = [
            sum(isinstance(node, ast.Div) for node in ast.walk(ast.parse(code))) for code in (before, after)
        ]
    except SyntaxError:  # ``def f(/, x)``
        return True
    return quotients[0] == quotients[1]


def _difference(before: str, after: str) -> tuple[str, str]:
    old, new = before.splitlines(), after.splitlines()
    changes = [c for c in SequenceMatcher(None, old, new, autojunk=False).get_opcodes() if c[0] != "equal"]
    pairs = [(old[a:b], new[c:d]) for _, a, b, c, d in changes]
    was, now = (
        " / ".join(line.strip() for lines in side for line in lines) for side in zip(*pairs, strict=True)
    )
    return was, now


class Tests:
    """Runs a module's tests on a copy of the package, in forks of this process."""

    def __init__(self, copy: Path, work: Path) -> None:
        self.copy = copy
        self.work = work
        # What the tests start gets the copy too.
        os.environ.update(
            PYTHONPATH=os.pathsep.join([str(copy), str(ROOT / "packages" / "vllm-fl-reference" / "src")]),
            PYTHONDONTWRITEBYTECODE="1",
            TMPDIR=str(work),
            HYPOTHESIS_STORAGE_DIRECTORY=str(work / "hypothesis"),
        )
        sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)
        sys.dont_write_bytecode = True

    def passes(self, paths: list[str], limit: float) -> bool:
        """Say whether every test passes within ``limit`` seconds."""
        child = os.fork()
        if child == 0:
            self._run(paths)
        ends = time.monotonic() + limit
        try:
            while time.monotonic() < ends:
                done, status = os.waitpid(child, os.WNOHANG)
                if done:
                    return os.waitstatus_to_exitcode(status) == 0
                time.sleep(0.02)
            return False
        finally:
            # What it started ends with it, and a child that has not begun its session yet.
            for ending in (os.killpg, os.kill):
                with suppress(ProcessLookupError, PermissionError):
                    ending(child, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(child, 0)

    def _run(self, paths: list[str]) -> None:
        status = 1
        try:
            os.setsid()
            # A mutant may grow without end.
            resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
            log = os.open(self.work / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for stream in (1, 2):
                os.dup2(log, stream)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            import pytest

            options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", str(ROOT)]
            options += ["-c", str(ROOT / "pytest.ini"), "--basetemp", str(self.work / "pytest")]
            status = pytest.main([*options, *[str(CORE / "tests" / path) for path in paths]])
        finally:
            os._exit(status)

    def try_out(self, mutant: Mutant, paths: list[str], limit: float) -> bool:
        """Say whether the tests kill the mutant."""
        file = self.copy / PACKAGE / f"{mutant.module}.py"
        original = file.read_text()
        file.write_text(mutant.code)
        try:
            return not self.passes(paths, limit)
        finally:
            file.write_text(original)


def named() -> set[tuple[str, str, str]]:
    """Return the survivors that have a reason: module, line before and after."""
    entries = tomllib.loads((HERE / "named.toml").read_text()).get("survivor", [])
    return {(one["module"], one["was"], one["now"]) for one in entries if one["reason"]}


def is_named(mutant: Mutant, reasons: set[tuple[str, str, str]]) -> bool:
    """Say whether the survivor has a reason, of its module or of any (``*``)."""
    return any((module, mutant.was, mutant.now) in reasons for module in (mutant.module, "*"))


def examine(tests: Tests, module: str, paths: list[str], share: float, seed: int) -> dict[str, Any]:
    """Try a module's mutants and return what came of them."""
    code = (tests.copy / PACKAGE / f"{module}.py").read_text()
    everything = list(mutants(module, code))
    if not everything:
        return {"mutants": 0, "tried": 0, "killed": 0, "named": 0, "survivors": []}
    chosen = everything
    if share < 1:
        count = max(1, round(share * len(everything)))
        chosen = random.Random(f"{seed} {module}").sample(everything, count)
    started = time.monotonic()
    if not tests.passes(paths, 600):
        log = (tests.work / "log").read_text()[-3000:]
        raise SystemExit(f"{module}: its tests fail without a mutant:\n{log}")
    needed = time.monotonic() - started
    reasons = named()
    alive: list[Mutant] = []
    for number, mutant in enumerate(chosen, 1):
        if not tests.try_out(mutant, paths, 3 * needed + 20):
            alive.append(mutant)
            if not is_named(mutant, reasons):
                print(f"\nsurvives ({mutant.operator}): {mutant}", flush=True)
        print(f"\r{module}: {number} of {len(chosen)}", end="", file=sys.stderr, flush=True)
    excused = [one for one in alive if is_named(one, reasons)]
    print(
        f"\r{module}: {len(chosen)} of {len(everything)} mutants, {len(chosen) - len(alive)} killed, "
        f"{len(excused)} named, {len(alive) - len(excused)} survive ({time.monotonic() - started:.0f} s)",
        flush=True,
    )
    return {
        "mutants": len(everything),
        "tried": len(chosen),
        "killed": len(chosen) - len(alive),
        "named": len(excused),
        "survivors": [str(one) for one in alive if one not in excused],
    }


def main() -> int:
    """Examine each module and return the exit status."""
    tests_of = plans()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    every = ", ".join(tests_of)
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=f"of {every}; default: all")
    parser.add_argument("--share", type=float, default=1.0, help="try this share of the mutants; default: 1")
    parser.add_argument("--seed", type=int, default=0, help="of the sample; default: 0")
    parser.add_argument("--json", type=Path, default=Path("out/mutants.json"), help="default: %(default)s")
    arguments = parser.parse_args()
    unknown = set(arguments.modules) - set(tests_of)
    if unknown:
        parser.error(f"no module {', '.join(sorted(unknown))}")
    if not 0 < arguments.share <= 1:
        parser.error("--share is above 0 and at most 1")
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="vllm-fl-mutants-", ignore_cleanup_errors=True) as name:
        work = Path(name)
        copy = work / "src"
        shutil.copytree(CORE / "src", copy, ignore=shutil.ignore_patterns("__pycache__"))
        tests = Tests(copy, work)
        # Before the first fork: these take longer than most modules' tests.
        import hypothesis  # noqa: F401
        import pytest  # noqa: F401
        import torch  # noqa: F401

        for module in arguments.modules or tests_of:
            found[module] = examine(tests, module, tests_of[module], arguments.share, arguments.seed)
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    tried, killed, excused = (sum(one[key] for one in found.values()) for key in ("tried", "killed", "named"))
    alive = tried - killed - excused
    print(f"\n{killed} of {tried} killed ({killed / max(1, tried):.1%}), {excused} named, {alive} survive")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())

"""``hatch run pythons [3.12 ...]``: the core's and the reference's tests with each Python.

It looks for ``python3.12`` and the like on the path, and in pyenv's folder. For each it makes
an environment, installs what the tests need with the pins of ``hatch.toml``, PyTorch's CPU build
where an index carries one for that Python, and the two packages as built wheels. Without
PyTorch the core's tests run that need none, and the reference's are not run; the table says so.
The exit status is 1 if a test fails, or if no Python was found.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from run import CACHE
from run import ROOT
from run import build_wheels

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
TESTS = {name: ROOT / "packages" / name / "tests" for name in ("vllm-fl-core", "vllm-fl-reference")}
#: What the tests need beside the packages and PyTorch.
TOOLS = ("pytest", "pytest-xdist", "hypothesis", "rich", "jsonschema", "packaging", "pyyaml")


def pins() -> dict[str, str]:
    """Return the requirements of the developers' environment, by name."""
    listed = tomllib.loads((ROOT / "hatch.toml").read_text())["envs"]["default"]["dependencies"]
    return {re.split(r"[=<>\[]", one)[0]: one for one in listed}


def interpreter(version: str) -> str | None:
    """Return a Python of this version that starts; pyenv's ``python3.12`` may only say how to get one."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    found = [shutil.which(f"python{version}"), *sorted(map(str, pyenv.glob(f"{version}.*/bin/python")))]
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    for one in filter(None, found):
        ended = subprocess.run([one, "-c", code], check=False, capture_output=True, text=True)
        if ended.returncode == 0 and ended.stdout.strip() == version:
            return one
    return None


def prepare(python: str, environment: Path, wheels: list[Path]) -> str:
    """Make the environment; return which PyTorch it has, empty if none is to be had."""
    subprocess.run([python, "-m", "venv", "--clear", environment], check=True)
    pip = [str(environment / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    pinned = pins()
    subprocess.run([*pip, *(pinned.get(name, name) for name in TOOLS)], check=True)
    subprocess.run([*pip, "--no-deps", *map(str, wheels)], check=True)
    # Not a CUDA build, which is several GB.
    torch = f"{pinned['torch']}+cpu"
    ended = subprocess.run([*pip, torch, "numpy"], check=False, capture_output=True)
    return torch if ended.returncode == 0 else ""


def run(version: str, wheels: list[Path], more: list[str]) -> tuple[bool, str]:
    """Run the tests; return whether none failed, and what there is to say."""
    python = interpreter(version)
    if python is None:
        return True, "not run: this machine has no such Python"
    environment = CACHE.with_name("pythons") / version
    torch = prepare(python, environment, wheels)
    tests = [str(path) for name, path in TESTS.items() if torch or name == "vllm-fl-core"]
    # The packages are the wheels; `tests` is what the sources give.
    command = [environment / "bin" / "python", "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal"]
    command += [*tests, *more]
    ended = subprocess.run(command, check=False, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    print(ended.stdout, flush=True)
    last = ended.stdout.rstrip().rpartition("\n")[2].strip("= ")
    beside = torch or "no CPU build of PyTorch for it here: the reference and what needs PyTorch not run"
    return ended.returncode == 0, f"{last}; {beside}"


def main() -> int:
    """Run every Python's tests and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("pythons", nargs="*", metavar="PYTHON", help=f"default: {', '.join(PYTHONS)}")
    parser.add_argument("--pytest", action="append", default=[], metavar="OPTION", help="as --pytest=-x")
    arguments = parser.parse_args()
    outcomes = {}
    with tempfile.TemporaryDirectory(prefix="vllm-fl-wheels-") as folder:
        wheels = build_wheels(Path(folder))
        for version in arguments.pythons or PYTHONS:
            outcomes[version] = run(version, wheels, arguments.pytest)
    for version, (right, text) in outcomes.items():
        print(f"{version}  {'' if right else 'FAILED: '}{text}")
    ran = any(not text.startswith("not run") for _, text in outcomes.values())
    return 0 if ran and all(right for right, _ in outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

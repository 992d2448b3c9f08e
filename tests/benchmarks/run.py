"""``hatch run bench``: every benchmark, one after the other, each in its own process.

Tables go to the terminal, the figures to ``out/bench.json``. The exit status says
whether every budget is kept. Every figure is a ratio or a difference inside one
run; leave the machine alone meanwhile, it takes about twenty minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
#: The arguments of each; engines of two modes are too many for one process.
BENCHMARKS = {
    "dispatch": ["dispatch.py"],
    "layers": ["layers.py"],
    "serving-eager": ["serving.py", "eager"],
    "serving-compile": ["serving.py", "compile"],
}


def main() -> int:
    """Run them and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("only", nargs="*", help=f"of {', '.join(BENCHMARKS)}; default: all")
    parser.add_argument("--json", type=Path, default=Path("out/bench.json"), help="default: out/bench.json")
    arguments = parser.parse_args()
    unknown = set(arguments.only) - set(BENCHMARKS)
    if unknown:
        parser.error(f"no benchmark {', '.join(sorted(unknown))}")
    figures, failed = {}, []
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    for name in arguments.only or BENCHMARKS:
        print(f"\n== {name}", flush=True)
        part = arguments.json.with_suffix(f".{name}.json")
        script, *mode = BENCHMARKS[name]
        command = [sys.executable, str(FOLDER / script), *mode, "--json", str(part)]
        ended = subprocess.run(command, check=False)
        if ended.returncode:
            failed.append(name)
        if part.exists():
            figures[name] = json.loads(part.read_text())
            part.unlink()
    arguments.json.write_text(json.dumps(figures, indent=1))
    print(f"\nfigures: {arguments.json}" + (f"; NOT within budget: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""The command ``vllm-fl``.

Exit codes: 0 it is well, 1 a problem was found, 2 the command line is wrong, 3 a
fault of vllm-fl itself. With ``--json`` stdout holds one object and nothing else,
whatever a plugin prints.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from typing import TYPE_CHECKING

from vllm_fl.cli import demo
from vllm_fl.cli import inspect
from vllm_fl.cli import trace
from vllm_fl.cli.output import Output
from vllm_fl.cli.output import Problem

if TYPE_CHECKING:
    from collections.abc import Sequence

_DESCRIPTION = "Which implementation of each operator vLLM runs, and why."
_EPILOG = """\
examples:
  vllm-fl list                     what is installed
  vllm-fl explain rms_norm         what runs, and why
  vllm-fl demo --compare-native    run vLLM with the dispatch and without it
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-fl",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="print the core's version")
    commands = parser.add_subparsers(metavar="COMMAND", dest="command")
    for module in (inspect, demo, trace):
        module.add_commands(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        argv: the arguments, without the program's name; those of the process if None.
    """
    parser = _parser()
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as end:  # argparse has printed why
        return int(end.code or 0)
    if arguments.version:
        from vllm_fl.cli.output import generated_by

        print(generated_by())
        return 0
    if arguments.command is None:
        parser.print_help()
        return 2
    with Output(as_json=getattr(arguments, "json", False)) as output:
        try:
            code: int = arguments.run(arguments, output)
        except Problem as problem:
            output.error(str(problem))
            return 1
        except BrokenPipeError:
            # The reader (`| head`) has what it wanted; Python's own flush at the
            # end must not complain.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            return 0
        except KeyboardInterrupt:
            return 130
        except Exception:  # noqa: BLE001 - a fault of ours is exit code 3, not a stray 1
            output.error(traceback.format_exc())
            output.error("This is a fault of vllm-fl. Please report it with the lines above.")
            return 3
        sys.stdout.flush()
        return code

"""The command ``vllm-fl``.

Exit codes: :class:`~vllm_fl.cli.output.ExitCode`. With ``--json`` stdout holds one object
and nothing else, whatever a plugin prints; schema.json says what is in it.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING
from typing import NoReturn

from vllm_fl.about import generated_by
from vllm_fl.cli import bench
from vllm_fl.cli import completion
from vllm_fl.cli import conformance
from vllm_fl.cli import demo
from vllm_fl.cli import doctor
from vllm_fl.cli import env
from vllm_fl.cli import list_and_explain
from vllm_fl.cli import new_vendor
from vllm_fl.cli import policy
from vllm_fl.cli import trace
from vllm_fl.cli import tune
from vllm_fl.cli.output import ExitCode
from vllm_fl.cli.output import Output
from vllm_fl.cli.output import Problem
from vllm_fl.cli.parser import Parser

if TYPE_CHECKING:
    from collections.abc import Sequence

_DESCRIPTION = "Which implementation of each operator vLLM runs, and why."
_EPILOG = """\
examples:
  vllm-fl list                     what is installed
  vllm-fl explain rms_norm         what runs, and why
  vllm-fl doctor                   what is wrong, and what mends it
  vllm-fl demo --compare-native    run vLLM with the dispatch and without it
"""


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="vllm-fl",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="print the core's version")
    commands = parser.add_subparsers(metavar="COMMAND", dest="command")
    for module in (list_and_explain, doctor, policy, env, demo, trace, new_vendor, conformance, bench, tune):
        module.add_commands(commands)
    completion.add_commands(commands, parser)
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
        print(generated_by())
        return ExitCode.OK
    if arguments.command is None:
        parser.print_help()
        return ExitCode.USAGE
    with Output(as_json=getattr(arguments, "json", False)) as output:
        try:
            code: int = arguments.run(arguments, output)
        except Problem as problem:
            output.error(str(problem))
            return ExitCode.PROBLEM
        except BrokenPipeError:
            # The reader (`| head`) has what it wanted; Python's own flush at the
            # end must not complain.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            return ExitCode.OK
        except KeyboardInterrupt:
            return ExitCode.INTERRUPTED
        except Exception:  # noqa: BLE001 - a fault of ours is exit code 3, not a stray 1
            output.error(traceback.format_exc())
            output.error("This is a fault of vllm-fl. Please report it with the lines above.")
            return ExitCode.FAULT
        sys.stdout.flush()
        return code


def run_and_leave() -> NoReturn:
    """Run the command as a program, and leave without Python's clean-up.

    A vendor's library whose import failed halfway, such as one without its driver, can
    crash the interpreter when it ends, after everything has been said.
    """
    code = main()
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)

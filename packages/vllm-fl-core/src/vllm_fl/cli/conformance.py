"""``vllm-fl conformance``: whether a backend's operators are right."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.cli.output import ExitCode
from vllm_fl.cli.output import Problem
from vllm_fl.dispatch import DispatchError
from vllm_fl.dispatch.calling.fatal import is_fatal
from vllm_fl.dispatch.common.foreign import describe
from vllm_fl.dispatch.common.text import printable

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable
    from collections.abc import Iterator

    from vllm_fl.cli.output import Colour
    from vllm_fl.cli.output import Output
    from vllm_fl.conformance.report import Report

#: Seconds between two lines of progress where stderr is no terminal.
_QUIET_SECONDS = 10.0

_TIERS = ("smoke", "full", "stress")
_COLOURS: dict[str, Colour] = {"FAILED": "red", "passed with waivers": "yellow", "passed": "green"}
_COLUMNS = (
    "operator",
    "implementation",
    "passed",
    "of them loosened",
    "failed",
    "refused",
    "not run",
    "worst error",
)


def add_commands(commands: Any) -> None:
    """Add ``conformance``."""
    parser = commands.add_parser(
        "conformance",
        help="whether a backend's operators are right",
        description="Run every operator that a backend registers through the dispatch and compare it with "
        "float64. Exit code 1 where anything fails; what has run is reported where it is interrupted.",
        epilog="example: vllm-fl conformance --backend vendor.acme --tier full --html report.html",
    )
    parser.add_argument(
        "--backend",
        required=True,
        metavar="NAME",
        help="an implementation id (vendor.acme), a vendor (acme), flagos or reference",
    )
    parser.add_argument("--op", action="append", default=[], metavar="OP", help="only this; may be repeated")
    parser.add_argument("--tier", choices=_TIERS, default="smoke", help="how much; default: smoke")
    parser.add_argument("--device", default="auto", help="default: the accelerator, or else cpu")
    parser.add_argument(
        "--max-elements", type=int, metavar="N", help="leave out, and report, cases with larger tensors"
    )
    parser.add_argument(
        "--waivers", type=Path, metavar="FILE", help="a TOML file beside the one that the wheel ships"
    )
    parser.add_argument("--json", dest="json_file", type=Path, metavar="F", help="write every result to F")
    parser.add_argument(
        "--junit", dest="junit_file", type=Path, metavar="F", help="write a JUnit XML report to F"
    )
    parser.add_argument(
        "--html", dest="html_file", type=Path, metavar="F", help="write a report for people to F"
    )
    parser.set_defaults(run=_conformance)


def _conformance(arguments: argparse.Namespace, output: Output) -> int:
    if find_spec("torch") is None:
        raise Problem("conformance needs torch, which is not installed: install the one for your device")
    from vllm_fl.conformance import html
    from vllm_fl.conformance import report
    from vllm_fl.conformance import run
    from vllm_fl.conformance.case import Tier
    from vllm_fl.conformance.select import UnknownNameError
    from vllm_fl.conformance.waivers import WaiverError

    options = run.Options(
        operators=arguments.op,
        tier=Tier[arguments.tier.upper()],
        device=arguments.device,
        max_elements=arguments.max_elements,
        waivers=arguments.waivers,
    )
    try:
        prepared = run.prepare(arguments.backend, options)
    except DispatchError as error:
        raise Problem(str(error)) from None
    except (UnknownNameError, WaiverError, ValueError) as error:
        output.error(str(error))
        return ExitCode.USAGE
    whole = report.Report.begin(arguments.backend, options, prepared)
    was_interrupted = False
    # What has run is reported, whatever ends the run: hours may have gone into it.
    try:
        with (
            interrupted_by_sigterm(),
            progress(len(prepared.steps), f"conformance of {arguments.backend}") as advance,
        ):
            for result in prepared.run():
                whole.add(result)
                advance(result.op)
    except KeyboardInterrupt:
        was_interrupted = True
        whole.add(prepared.unfinished(len(whole.results), "interrupted"))
    except Exception as error:
        if not is_fatal(error):
            raise
        whole.add(prepared.unfinished(len(whole.results), f"the device failed: {describe(error)}"))
    for path, write in (
        (arguments.json_file, report.write_json),
        (arguments.junit_file, report.write_junit),
        (arguments.html_file, html.write_html),
    ):
        if path is not None:
            write(whole, path)
            output.note(f"wrote {path}")
    print_summary(whole, output)
    if was_interrupted:
        return ExitCode.INTERRUPTED
    return ExitCode.PROBLEM if whole.failures else ExitCode.OK


def print_summary(report: Report, output: Output) -> None:
    """Print a table, then what failed, then what else a reader must know."""
    from vllm_fl.conformance.report import remarks
    from vllm_fl.conformance.report import worst
    from vllm_fl.conformance.result import Status

    rows = []
    for (op, impl_id), results in report.by_operator().items():
        counts = Counter(result.status for result in results)
        error = worst(results)
        rows.append(
            [
                op,
                impl_id,
                counts[Status.PASSED] or "",
                sum(result.is_loosened for result in results) or "",
                *(counts[status] or "" for status in (Status.FAILED, Status.REFUSED)),
                counts[Status.CAPPED] + counts[Status.SKIPPED] + counts[Status.NOT_RUN] or "",
                "" if error is None else f"{error:.2g}",
            ]
        )
    title = (
        f"Conformance of {report.backend}, tier {report.settings['tier']}, on {report.environment['device']}"
    )
    output.table(title, _COLUMNS, rows)
    for result in report.failures:
        output.text(printable(f"FAILED {result.op}: {result.name}: {result.note}"))
    for line in remarks(report):
        output.text(printable(line))
    output.text(f"{report.verdict}: {report.counts()}", colour=_COLOURS[report.verdict])


@contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """Take SIGTERM, which a time limit sends, for Ctrl-C; in the main thread only, as Python allows."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def progress(total: int, title: str) -> Iterator[Callable[[str], None]]:
    """Show on stderr how far a run is, with rich where it is installed; yields what to call for a step.

    Where stderr is no terminal, a line now and then.
    """
    if find_spec("rich") is not None and sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn
        from rich.progress import MofNCompleteColumn
        from rich.progress import Progress
        from rich.progress import TextColumn
        from rich.progress import TimeElapsedColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[op]}"),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(title, total=total, op="")
            yield lambda op: bar.update(task, advance=1, op=op)
        return
    done, shown = 0, time.monotonic()

    def advance(op: str) -> None:
        nonlocal done, shown
        done += 1
        is_terminal = sys.stderr.isatty()
        if not is_terminal and time.monotonic() - shown < _QUIET_SECONDS:
            return
        shown = time.monotonic()
        text = f"{title}: {done} of {total}, {op}"
        print(f"\r{text:<79}" if is_terminal else text, end="" if is_terminal else "\n", file=sys.stderr)

    yield advance
    if sys.stderr.isatty():
        print(f"\r{'':<79}\r", end="", file=sys.stderr)

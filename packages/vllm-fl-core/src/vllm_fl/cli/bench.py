"""``vllm-fl bench``: how long every implementation takes, at the shapes that matter."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.cli.conformance import interrupted_by_sigterm
from vllm_fl.cli.conformance import progress
from vllm_fl.cli.env import environment
from vllm_fl.cli.output import ExitCode
from vllm_fl.cli.output import Problem
from vllm_fl.dispatch import DispatchError
from vllm_fl.dispatch import get_default_manager
from vllm_fl.dispatch.calling.fatal import is_fatal
from vllm_fl.dispatch.common.foreign import describe

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    import torch

    from vllm_fl.cli.output import Output
    from vllm_fl.tuning.bench import Bench
    from vllm_fl.tuning.bench import Row
    from vllm_fl.tuning.shapes import Selection
    from vllm_fl.tuning.table import Report


def add_commands(commands: Any) -> None:
    """Add ``bench``."""
    parser = commands.add_parser(
        "bench",
        help="how long every implementation takes, and which one wins",
        description="Time every available implementation, the compiled reference and vLLM's own path. What "
        "the conformance kit finds wrong at a shape is named and not timed.",
        epilog="example: vllm-fl bench --model path/to/model --html report.html",
    )
    add_selection(parser)
    parser.add_argument("--json", dest="json_file", type=Path, metavar="F", help="write every row to F")
    parser.add_argument("--html", dest="html_file", type=Path, metavar="F", help="write a page for people")
    parser.set_defaults(run=_bench)


def add_selection(parser: argparse.ArgumentParser) -> None:
    """Add what ``bench`` and ``tune`` have in common: what is measured, and how."""
    parser.add_argument("operators", nargs="*", metavar="OP", help="only these operators")
    parser.add_argument(
        "--backend", action="append", default=[], metavar="NAME", help="only this one; may be repeated"
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model", type=Path, metavar="DIR", help="the shapes of a model's config.json")
    source.add_argument("--trace", type=Path, metavar="DIR", help="those that a trace recorded")
    source.add_argument("--shapes", type=Path, metavar="FILE", help="those of a YAML file")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="of the activations")
    parser.add_argument(
        "--mode", default="eager,graph", metavar="M", help="of eager, graph, compile; default: eager,graph"
    )
    parser.add_argument("--rows", metavar="N,N", help="numbers of tokens; default: powers of 4")
    parser.add_argument("--device", default="auto", help="default: the accelerator, or else cpu")
    parser.add_argument(
        "--seconds", type=float, default=0.05, help="for each of them and each shape; default: 0.05"
    )


class Run:
    """What the arguments ask for, checked.

    Raises:
        Problem: torch is missing, or the configuration is wrong.
        UsageError: the arguments are wrong.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        if find_spec("torch") is None:
            raise Problem("this needs torch, which is not installed: install the one for your device")
        from vllm_fl.conformance.run import device_of
        from vllm_fl.tuning.bench import Bench
        from vllm_fl.tuning.bench import Options
        from vllm_fl.tuning.contenders import check_names
        from vllm_fl.tuning.machine import machine
        from vllm_fl.tuning.shapes import ShapesError
        from vllm_fl.tuning.table import Report

        try:
            self.device: torch.device = device_of(arguments.device)
            selection = _selected(arguments, self.device).of(arguments.operators)
            manager = get_default_manager()
            check_names(manager, arguments.backend)
            manager.ensure_initialized()
            options = Options(
                modes=_modes(arguments.mode),
                rows=_rows(arguments.rows) or selection.rows,
                backends=tuple(arguments.backend),
                seconds=_seconds(arguments.seconds),
            )
            self.bench: Bench = Bench(manager, self.device, options, selection.families)
        except DispatchError as error:
            raise Problem(str(error)) from None
        except (ShapesError, ValueError) as error:
            raise UsageError(str(error)) from None
        if not self.bench.modes:
            raise UsageError(f"{self.device} has no graphs: choose eager or compile")
        self.report: Report = Report(
            machine(self.device, environment()),
            str(self.device),
            selection.source,
            self.bench.modes,
            notes=[*selection.notes],
        )
        if "graph" in options.modes and "graph" not in self.bench.modes:
            self.report.notes.append(f"{self.device} has no graphs: that mode was not measured")
        self.was_interrupted = False

    def measured(self, passes: int, title: str) -> Iterator[tuple[int, list[Row]]]:
        """Yield what :meth:`Bench.run` does, with a bar on stderr; what ends early is noted."""
        total = passes * self.bench.steps
        try:
            with interrupted_by_sigterm(), progress(total, title) as advance:
                for number, rows in self.bench.run(passes):
                    yield number, rows
                    advance(f"{rows[0].op} {rows[0].shape}" if rows else "")
        except KeyboardInterrupt:
            self.was_interrupted = True
            self.report.notes.append("interrupted: what follows was not measured")
        except Exception as error:
            if not is_fatal(error):
                raise
            self.report.notes.append(f"the device failed: {describe(error)}")
        self.report.copy_bandwidth = self.bench.bandwidth
        for (op, impl_id), why in self.bench.absent.items():
            self.report.notes.append(f"not here: {op}: {impl_id}: {why}")


class UsageError(ValueError):
    """The command line is wrong."""


def _selected(arguments: argparse.Namespace, device: torch.device) -> Selection:
    from vllm_fl.tuning import models
    from vllm_fl.tuning import shapes

    if arguments.model is not None:
        return models.from_model(arguments.model, arguments.dtype)
    if arguments.trace is not None:
        return models.from_trace(arguments.trace)
    if arguments.shapes is not None:
        return shapes.from_file(arguments.shapes, arguments.dtype or "bfloat16")
    return models.usual(arguments.dtype or "bfloat16", is_small=device.type == "cpu")


def _modes(text: str) -> tuple[str, ...]:
    from vllm_fl.tuning.contenders import MODES

    found = tuple(one.strip() for one in text.split(","))
    for one in found:
        if one not in MODES:
            raise UsageError(f"--mode must name {', '.join(MODES)}, not {one!r}")
    return tuple(mode for mode in MODES if mode in found)


def _rows(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    try:
        found = tuple(sorted({int(one) for one in text.split(",")}))
    except ValueError:
        found = (0,)
    if found[0] < 1:
        raise UsageError(f"--rows must be positive numbers with commas between, not {text!r}")
    return found


def _seconds(value: float) -> float:
    if not 0 < value < 3600:
        raise UsageError(f"--seconds must be a positive number of seconds, not {value:g}")
    return value


def _bench(arguments: argparse.Namespace, output: Output) -> int:
    try:
        run = Run(arguments)
    except UsageError as error:
        output.error(str(error))
        return ExitCode.USAGE
    from vllm_fl.tuning import page
    from vllm_fl.tuning import table

    for _, rows in run.measured(1, "bench"):
        run.report.rows += rows
    for path, write in ((arguments.json_file, table.write_json), (arguments.html_file, page.write_html)):
        if path is not None:
            write(run.report, path)
            output.note(f"wrote {path}")
    table.print_report(run.report, output)
    return exit_code(run)


def exit_code(run: Run) -> int:
    """Return 130 where it was interrupted, 1 where something is wrong or nothing was measured."""
    if run.was_interrupted:
        return ExitCode.INTERRUPTED
    is_measured = any(row.median_us is not None for row in run.report.rows)
    return ExitCode.PROBLEM if run.report.wrong or not is_measured else ExitCode.OK

"""``vllm-fl tune``: write a tuned table of what was the fastest here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.cli.bench import Run
from vllm_fl.cli.bench import UsageError
from vllm_fl.cli.bench import add_selection
from vllm_fl.cli.bench import exit_code
from vllm_fl.cli.output import ExitCode

if TYPE_CHECKING:
    import argparse

    from vllm_fl.cli.output import Output
    from vllm_fl.tuning.bench import Row


def add_commands(commands: Any) -> None:
    """Add ``tune``."""
    parser = commands.add_parser(
        "tune",
        help="measure, and write a tuned table for a policy",
        description="Measure twice: the first pass nominates, the second one, which the first knows nothing "
        "of, decides. Writes the table that a policy file names with its key tuned.",
        epilog="example: vllm-fl tune --model path/to/model --output tuned.yaml",
    )
    add_selection(parser)
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("tuned.yaml"),
        metavar="FILE",
        help="where the table goes; default: tuned.yaml",
    )
    parser.set_defaults(run=_tune)


def _tune(arguments: argparse.Namespace, output: Output) -> int:
    try:
        run = Run(arguments)
    except UsageError as error:
        output.error(str(error))
        return ExitCode.USAGE
    from vllm_fl.tuning import table
    from vllm_fl.tuning import tune

    passes: tuple[list[Row], list[Row]] = ([], [])
    for number, rows in run.measured(2, "tune"):
        passes[number].extend(rows)
    run.report.rows = passes[1]
    tables = {}
    for op in dict.fromkeys(row.op for row in passes[1]):
        first, second = ([row for row in one if row.op == op] for one in passes)
        found = tune.entries(tune.choose(op, first, second))
        if found:
            tables[op] = found
    table.print_report(run.report, output)
    if not tables:
        output.error("nothing was right in both passes, and no table was written")
        return ExitCode.INTERRUPTED if run.was_interrupted else ExitCode.PROBLEM
    arguments.output.write_text(tune.table_text(run.report, tables), encoding="utf-8")
    count = sum(map(len, tables.values()))
    output.text(f"wrote {arguments.output}: {count} entries of {len(tables)} operators")
    output.text(f"a policy file uses it with the line: tuned: {arguments.output.name}")
    return exit_code(run)

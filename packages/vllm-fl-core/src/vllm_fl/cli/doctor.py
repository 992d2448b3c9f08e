"""``vllm-fl doctor``: named checks of this installation."""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.cli.output import ExitCode
from vllm_fl.dispatch.common.text import printable
from vllm_fl.doctor import checks
from vllm_fl.doctor import inside_vllm
from vllm_fl.doctor import installation
from vllm_fl.doctor import platform
from vllm_fl.doctor.finding import FAIL
from vllm_fl.doctor.finding import STATUSES
from vllm_fl.doctor.finding import WARN
from vllm_fl.doctor.finding import worst

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from vllm_fl.cli.output import Output
    from vllm_fl.doctor.finding import Finding

#: Every check, in the order in which they help.
CHECKS: dict[str, Callable[[checks.Examination], list[Finding]]] = {
    function.__name__: function
    for function in (
        installation.installation,
        installation.requirements,
        checks.plugins,
        checks.backends,
        checks.vendors,
        checks.variables,
        checks.policy,
        checks.operators,
        inside_vllm.vllm,
        inside_vllm.settings,
        platform.platform,
        checks.workers,
    )
}


def add_commands(commands: Any) -> None:
    """Add ``doctor``."""
    parser = commands.add_parser(
        "doctor",
        help="what is wrong with this installation, and what mends it",
        description="Check this installation. What may crash or hang is tried in a process of its own.",
        epilog="exit codes: 0 well (warnings allowed), 1 a check fails (--strict: or warns), 2 usage, "
        "3 a fault of vllm-fl. example: vllm-fl doctor --check plugins --check workers",
    )
    parser.add_argument(
        "--check", action="append", choices=CHECKS, metavar="NAME", help="only this check; may be repeated"
    )
    parser.add_argument(
        "--list-checks", action="store_true", help="print the checks and what each one checks"
    )
    parser.add_argument("--strict", action="store_true", help="exit with 1 for a warning too")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="time limit of everything that is tried (default 60)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_doctor)


def _about(name: str) -> str:
    return (CHECKS[name].__doc__ or "").partition("\n")[0]


def _doctor(arguments: argparse.Namespace, output: Output) -> int:
    if arguments.seconds <= 0:
        output.error("--seconds must be positive")
        return ExitCode.USAGE
    if arguments.list_checks:
        listed = [{"name": name, "checks": _about(name)} for name in CHECKS]
        if arguments.json:
            output.json_object({"checks": listed})
        else:
            output.table("Checks", ("check", "it is well where"), [list(one.values()) for one in listed])
        return ExitCode.OK
    examination = checks.Examination(arguments.seconds)
    results: dict[str, list[Finding]] = {}
    for name in arguments.check or CHECKS:
        results[name] = CHECKS[name](examination)
        if not arguments.json:
            _print(name, results[name], output)
    statuses = {name: worst(findings) for name, findings in results.items()}
    code = _code(list(statuses.values()), strict=arguments.strict)
    if arguments.json:
        output.json_object(
            {
                "status": max(statuses.values(), key=STATUSES.index),
                "checks": [
                    {"name": name, "status": statuses[name], "findings": [one.to_dict() for one in findings]}
                    for name, findings in results.items()
                ],
            }
        )
    else:
        counts = {status: list(statuses.values()).count(status) for status in reversed(STATUSES)}
        output.text(", ".join(f"{count} {status}" for status, count in counts.items() if count))
    return code


def _code(statuses: list[str], *, strict: bool) -> int:
    is_well = FAIL not in statuses and not (strict and WARN in statuses)
    return ExitCode.OK if is_well else ExitCode.PROBLEM


def _print(name: str, findings: list[Finding], output: Output) -> None:
    for finding in findings:
        output.text(printable(f"{finding.status}  {name:<12}  {finding.what}"))
        if finding.status in (FAIL, WARN):
            output.text(printable(f"{'':20}why:  {finding.why}"))
            for line in finding.mend.split("\n"):
                output.text(f"{'':20}mend: {line}")

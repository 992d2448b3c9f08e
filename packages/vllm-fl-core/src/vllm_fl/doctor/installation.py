"""The checks of what is installed: read from metadata, nothing is imported."""

from __future__ import annotations

import json
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote
from urllib.parse import urlparse

import vllm_fl
from vllm_fl.dispatch.common.distributions import CORE
from vllm_fl.dispatch.common.distributions import PACKAGE
from vllm_fl.dispatch.common.distributions import PLUGIN_GROUP
from vllm_fl.dispatch.common.distributions import VLLM_GROUPS
from vllm_fl.dispatch.common.distributions import copies
from vllm_fl.dispatch.common.distributions import entry_points
from vllm_fl.dispatch.common.distributions import installed_twice
from vllm_fl.dispatch.common.distributions import name_of
from vllm_fl.dispatch.common.distributions import requirements_of
from vllm_fl.dispatch.common.distributions import rivals
from vllm_fl.dispatch.common.distributions import sentence
from vllm_fl.dispatch.common.distributions import text_of
from vllm_fl.dispatch.common.distributions import version_of
from vllm_fl.dispatch.common.foreign import describe
from vllm_fl.doctor.checks import unanswered
from vllm_fl.doctor.finding import FAIL
from vllm_fl.doctor.finding import PASS
from vllm_fl.doctor.finding import SKIP
from vllm_fl.doctor.finding import WARN
from vllm_fl.doctor.finding import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator
    from importlib.metadata import Distribution

    from vllm_fl.dispatch.common.distributions import Copy
    from vllm_fl.doctor.checks import Examination


def _plugin_distributions() -> set[str]:
    return {name_of(entry.dist) for entry in entry_points(PLUGIN_GROUP)[0] if entry.dist is not None}


def _provides(distribution: Distribution, package: str) -> bool:
    """Whether a distribution has files of an import package."""
    if package in text_of(distribution, "top_level.txt").split():
        return True
    return f"\n{package}/" in "\n" + text_of(distribution, "RECORD")


def installation(examination: Examination) -> list[Finding]:
    """Every wheel is installed once, whole, and is the one that Python imports."""
    names = sorted(_plugin_distributions() | {CORE})
    findings = [_unreadable(problem) for problem in entry_points()[1]]
    findings += [_double(name, every) for name, every in installed_twice().items()]
    findings += [finding for name in names for finding in _incomplete(name)]
    findings += [*_rivals(), *_entry_points_twice(), *_imported_from_elsewhere()]
    return findings or [Finding(PASS, f"installed once and whole: {', '.join(names)}")]


def _double(name: str, every: list[Copy]) -> Finding:
    all_of_it = " ".join(str(one.metadata) for one in every)
    return Finding(
        FAIL,
        sentence(name, every),
        "the version that is told is not the code that runs, or a leftover hides the plugin",
        f"pip uninstall -y {name}  # until it says that there is none; what is then still there is to be\n"
        f"rm -r {all_of_it}\n"
        f"pip install {name}",
    )


def _unreadable(problem: str) -> Finding:
    return Finding(
        FAIL,
        problem,
        "Python gives a program the entry points of all distributions or of none, and vLLM asks for them",
        "install that distribution anew, or remove the folder that is named",
    )


def _incomplete(name: str) -> Iterator[Finding]:
    for one in metadata.distributions(name=name):
        try:
            listed = [file for file in one.files or () if file.suffix == ".py"]
        except Exception as error:  # noqa: BLE001 - each Python raises something else
            yield Finding(
                WARN,
                f"the list of the files of {name} cannot be read: {describe(error)}",
                "it cannot be said whether they are all there",
                f"pip install --force-reinstall --no-deps {name}",
            )
            continue
        gone = [str(file) for file in listed if not Path(str(one.locate_file(file))).exists()]
        if gone:
            yield Finding(
                FAIL,
                f"{len(gone)} of the {len(listed)} modules of {name} are not there, such as {gone[0]}",
                "its metadata is left over from another installation, or its files were deleted",
                f"pip install --force-reinstall --no-deps {name}  # or pip uninstall {name}",
            )


def _rivals() -> Iterator[Finding]:
    found = set(rivals(entry_points(*VLLM_GROUPS)[0]))
    found |= {name_of(one) for one in metadata.distributions() if _provides(one, PACKAGE)} - {CORE}
    for name in sorted(found):
        yield Finding(
            FAIL,
            f"{name} has an import package {PACKAGE} too",
            f"it and {CORE} overwrite each other's files, or one hides the other",
            f"pip uninstall -y {name} {CORE} && pip install {CORE}",
        )


def _entry_points_twice() -> Iterator[Finding]:
    for group in (PLUGIN_GROUP, *VLLM_GROUPS):
        owners: dict[str, list[str]] = {}
        for entry in entry_points(group)[0]:
            owners.setdefault(entry.name, []).append(name_of(entry.dist) if entry.dist else "?")
        for name, wheels in sorted(owners.items()):
            # Two distributions with one plugin are the check "plugins".
            is_ours = group == PLUGIN_GROUP or CORE in wheels
            if len(wheels) > 1 and is_ours and (group != PLUGIN_GROUP or len(set(wheels)) == 1):
                yield Finding(
                    FAIL,
                    f"the entry point {name!r} of {group} stands {len(wheels)} times: {', '.join(wheels)}",
                    "one of them is loaded, and which one is chance",
                    f"pip install --force-reinstall --no-deps {wheels[0]}",
                )


def _imported_from_elsewhere() -> Iterator[Finding]:
    imported = Path(vllm_fl.__file__).parent.resolve()
    every = copies(CORE)
    if not every:
        yield Finding(
            WARN,
            f"{PACKAGE} is imported from {imported}, and {CORE} is not installed",
            "vLLM finds plug-ins by their metadata, and does not load this one",
            f"pip install {CORE}",
        )
        return
    source = _editable(metadata.distribution(CORE))
    is_there = (
        imported.is_relative_to(source) if source else imported == (every[0].folder / PACKAGE).resolve()
    )
    if not is_there:
        yield Finding(
            FAIL,
            f"{PACKAGE} is imported from {imported}, and {CORE} {every[0]} is another one",
            "the version that is told is not the code that runs",
            "take the folder out of PYTHONPATH, or install from it: pip install -e PATH",
        )


def _editable(distribution: Distribution) -> Path | None:
    """Return the folder that an editable installation points to."""
    try:
        origin = json.loads(text_of(distribution, "direct_url.json") or "{}")
    except ValueError:
        return None
    if not origin.get("dir_info", {}).get("editable"):
        return None
    return Path(unquote(urlparse(origin["url"]).path)).resolve()


def requirements(examination: Examination) -> list[Finding]:
    """What the wheels require is installed, torch above all, in a version that fits."""
    if find_spec("packaging") is None:
        return [Finding(SKIP, "needs the package packaging: pip install packaging")]
    findings = [
        finding
        for name in sorted(_plugin_distributions() | {CORE})
        for finding in _unmet(name, only=None, status=FAIL)
    ]
    vllms = [name_of(one) for one in metadata.distributions() if _provides(one, "vllm")]
    # The rest of what vLLM requires is its own affair.
    findings += [finding for name in vllms for finding in _unmet(name, only="torch", status=WARN)]
    if find_spec("torch") is not None:
        findings += _torch(examination)
    return findings or [Finding(PASS, "every wheel has what it requires")]


def _unmet(name: str, only: str | None, status: str) -> Iterator[Finding]:
    from packaging.requirements import InvalidRequirement
    from packaging.requirements import Requirement
    from packaging.version import InvalidVersion

    one = next(iter(metadata.distributions(name=name)), None)
    for line in requirements_of(one) if one is not None else ():
        try:
            needed = Requirement(line)
        except InvalidRequirement as error:
            why = "it cannot be checked"
            yield Finding(WARN, f"{name} requires {line!r}: {error}", why, f"pip install --upgrade {name}")
            continue
        if only not in (None, needed.name) or (needed.marker and not needed.marker.evaluate({"extra": ""})):
            continue
        has = version_of(needed.name) or ""
        try:
            fits = bool(has) and needed.specifier.contains(has, prereleases=True)
        except InvalidVersion:  # of damaged metadata
            fits = False
        if not fits:
            yield Finding(
                status,
                f"{name} requires {needed.name}{needed.specifier}, and {has or 'none'} is installed",
                "what was compiled for another version fails when it is loaded, or computes something else",
                f"pip install '{needed.name}{needed.specifier}'",
            )


def _torch(examination: Examination) -> Iterator[Finding]:
    answer = examination.ask("torch")
    mend = "pip install --force-reinstall torch  # the version that vLLM requires"
    if answer.problem:
        what = f"`import torch` {answer.problem}: {answer.last_line}".removesuffix(": ")
        yield unanswered(answer, what, "no implementation runs without it", "" if answer.is_late else mend)
        return
    told = version_of("torch") or "none"
    if told.partition("+")[0] != answer.value.partition("+")[0]:
        what = f"torch {answer.value} is imported, and {told} is installed"
        yield Finding(FAIL, what, "wheels were resolved against another torch than the one that runs", mend)

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
from vllm_fl.dispatch._installed import CORE
from vllm_fl.dispatch._installed import PACKAGE
from vllm_fl.dispatch._installed import PLUGIN_GROUP
from vllm_fl.dispatch._installed import VLLM_GROUPS
from vllm_fl.dispatch._installed import copies
from vllm_fl.dispatch._installed import installed_twice
from vllm_fl.dispatch._installed import rivals
from vllm_fl.dispatch._installed import sentence
from vllm_fl.doctor.finding import FAIL
from vllm_fl.doctor.finding import PASS
from vllm_fl.doctor.finding import SKIP
from vllm_fl.doctor.finding import WARN
from vllm_fl.doctor.finding import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator
    from importlib.metadata import Distribution

    from vllm_fl.dispatch._installed import Copy
    from vllm_fl.doctor.checks import Examination


def _plugin_distributions() -> set[str]:
    return {e.dist.name for e in metadata.entry_points(group=PLUGIN_GROUP) if e.dist is not None}


def _text(distribution: Distribution, name: str) -> str:
    try:
        return distribution.read_text(name) or ""
    except (OSError, UnicodeError):
        return ""


def _provides(distribution: Distribution, package: str) -> bool:
    """Whether a distribution has files of an import package."""
    if package in _text(distribution, "top_level.txt").split():
        return True
    return f"\n{package}/" in "\n" + _text(distribution, "RECORD")


def installation(examination: Examination) -> list[Finding]:
    """Every wheel is installed once, whole, and is the one that Python imports."""
    names = sorted(_plugin_distributions() | {CORE})
    findings = [_double(name, every) for name, every in installed_twice().items()]
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


def _incomplete(name: str) -> Iterator[Finding]:
    for one in metadata.distributions(name=name):
        listed = [file for file in one.files or () if file.suffix == ".py"]
        gone = [str(file) for file in listed if not Path(str(one.locate_file(file))).exists()]
        if gone:
            yield Finding(
                FAIL,
                f"{len(gone)} of the {len(listed)} modules of {name} are not there, such as {gone[0]}",
                "its metadata is left over from another installation, or its files were deleted",
                f"pip install --force-reinstall --no-deps {name}  # or pip uninstall {name}",
            )


def _rivals() -> Iterator[Finding]:
    of_vllm = [entry for group in VLLM_GROUPS for entry in metadata.entry_points(group=group)]
    found = set(rivals(of_vllm))
    found |= {one.name for one in metadata.distributions() if one.name != CORE and _provides(one, PACKAGE)}
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
        for entry in metadata.entry_points(group=group):
            owners.setdefault(entry.name, []).append(entry.dist.name if entry.dist else "?")
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
        origin = json.loads(_text(distribution, "direct_url.json") or "{}")
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
    vllms = [one.name for one in metadata.distributions() if _provides(one, "vllm")]
    # The rest of what vLLM requires is its own affair.
    findings += [finding for name in vllms for finding in _unmet(name, only="torch", status=WARN)]
    if find_spec("torch") is not None:
        findings += _torch(examination)
    return findings or [Finding(PASS, "every wheel has what it requires")]


def _unmet(name: str, only: str | None, status: str) -> Iterator[Finding]:
    from packaging.requirements import InvalidRequirement
    from packaging.requirements import Requirement

    try:
        lines = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return
    for line in lines:
        try:
            needed = Requirement(line)
        except InvalidRequirement as error:
            why = "it cannot be checked"
            yield Finding(WARN, f"{name} requires {line!r}: {error}", why, f"pip install --upgrade {name}")
            continue
        if only not in (None, needed.name) or (needed.marker and not needed.marker.evaluate({"extra": ""})):
            continue
        try:
            has = metadata.version(needed.name)
        except metadata.PackageNotFoundError:
            has = ""
        if not has or not needed.specifier.contains(has, prereleases=True):
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
        what = f"`import torch` {answer.problem}: {answer.last_line}"
        yield Finding(FAIL, what, "no implementation runs without it", mend)
        return
    try:
        told = metadata.version("torch")
    except metadata.PackageNotFoundError:
        told = "none"
    if told.partition("+")[0] != answer.value.partition("+")[0]:
        what = f"torch {answer.value} is imported, and {told} is installed"
        yield Finding(FAIL, what, "wheels were resolved against another torch than the one that runs", mend)

"""What is installed twice, or by somebody else: cheap questions to package metadata.

Discovery warns of what it finds here; ``vllm-fl doctor`` looks further.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING
from typing import NamedTuple

from vllm_fl.dispatch.common.foreign import describe
from vllm_fl.dispatch.common.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterable
    from importlib.metadata import Distribution
    from importlib.metadata import EntryPoint
    from pathlib import Path

CORE = "vllm-fl-core"

#: The import package of this distribution, which is no namespace for others.
PACKAGE = "vllm_fl"

#: The group of entry points of plugins.
PLUGIN_GROUP = "vllm_fl.plugin"

#: vLLM's groups of entry points; a package that plugs into vLLM is in one of them.
VLLM_GROUPS = ("vllm.general_plugins", "vllm.platform_plugins")


class Copy(NamedTuple):
    """One installation of a distribution.

    Attributes:
        version: its version.
        folder: where its modules are, or are said to be.
        metadata: the file or folder that says so: ``.dist-info`` or ``.egg-info``.
    """

    version: str
    folder: Path
    metadata: Path

    def __str__(self) -> str:
        return f"{self.version or '(no version)'} in {self.metadata}"


def entry_points(*groups: str) -> tuple[list[EntryPoint], list[str]]:
    """Return the entry points of some groups, and a sentence for each distribution whose cannot be read.

    ``importlib.metadata`` reads those of all distributions at once, or of none where one is damaged.
    """
    from importlib import metadata

    with suppress(Exception):  # each Python raises something else
        every = metadata.entry_points()
        return [entry for group in groups for entry in every.select(group=group)], []
    found: list[EntryPoint] = []
    damaged = []
    seen = set()
    for one in metadata.distributions():
        place = _place(one)
        name = place.stem.partition("-")[0]
        if name in seen:
            continue  # the first one on the path counts
        try:
            found += [entry for entry in one.entry_points if entry.group in groups]
        except Exception as error:  # noqa: BLE001 - as above
            damaged.append(f"the entry points of {place} cannot be read: {describe(error)}")
        seen.add(name)
    return found, damaged


def version_of(distribution: str) -> str | None:
    """Return the version of a distribution, None where it is not installed, and ``?`` if it is damaged."""
    from importlib import metadata

    try:
        return metadata.version(distribution) or "?"
    except metadata.PackageNotFoundError:
        return None
    except Exception:  # noqa: BLE001 - as above
        return "?"


def copies(distribution: str) -> list[Copy]:
    """Return every installation of a distribution on ``sys.path``, the one that counts first."""
    from importlib import metadata

    return _apart(metadata.distributions(name=distribution))


def installed_twice() -> dict[str, list[Copy]]:
    """Return the copies of what is installed more than once: of the core, and of every plugin.

    The copy that counts may be a leftover that hides the plugin, so that all are asked.
    """
    from importlib import metadata

    by_name: dict[str, list[Distribution]] = {}
    for one in metadata.distributions():
        # Read from the file's name: "acme_kernels-1.0.dist-info", "acme.kernels.egg-info".
        name = _place(one).stem.partition("-")[0]
        by_name.setdefault(name.replace("_", "-").replace(".", "-").lower(), []).append(one)
    return {
        name: found
        for name, every in by_name.items()
        if len(every) > 1 and _is_ours(name, every) and len(found := _apart(every)) > 1
    }


def _is_ours(name: str, every: list[Distribution]) -> bool:
    return name == CORE or any(f"[{PLUGIN_GROUP}]" in text_of(one, "entry_points.txt") for one in every)


def _apart(distributions: Iterable[Distribution]) -> list[Copy]:
    found: dict[Path, Copy] = {}
    for one in distributions:
        place = _place(one)
        # One folder may be on the path twice, also by a link.
        found.setdefault(place.resolve(), Copy(_version(one), place.parent, place))
    return list(found.values())


def text_of(distribution: Distribution, name: str) -> str:
    """Return a file of a distribution's metadata, nothing where it is missing or damaged."""
    try:
        return distribution.read_text(name) or ""
    except Exception:  # noqa: BLE001 - each Python raises something else
        return ""


def _place(distribution: Distribution) -> Path:
    from pathlib import Path  # a tenth of importing this package

    path = getattr(distribution, "_path", None)  # no public name says which of the files it is
    return Path(str(path)) if path is not None else Path(str(distribution.locate_file("")))


def name_of(distribution: Distribution) -> str:
    """Return the name of a distribution; that of its folder where its metadata is damaged."""
    try:
        found = distribution.name
    except Exception:  # noqa: BLE001 - as above
        found = None
    return printable(found or _place(distribution).stem.partition("-")[0])


def requirements_of(distribution: Distribution) -> list[str]:
    """Return what a distribution requires, nothing where its metadata is damaged."""
    try:
        return list(distribution.requires or ())
    except Exception:  # noqa: BLE001 - as above
        return []


def _version(distribution: Distribution) -> str:
    try:
        return distribution.version or ""
    except Exception:  # noqa: BLE001 - damaged; each Python raises something else
        return ""


def sentence(name: str, every: list[Copy]) -> str:
    """Say which copy counts, and which are left over."""
    first, *others = map(str, every)
    return f"{name} is installed {len(every)} times: {first} counts, and not {', '.join(others)}"


def rivals(entry_points: Iterable[EntryPoint]) -> list[str]:
    """Return the distributions, not this one, that have entry points into the package ``vllm_fl``.

    Python imports one of the two packages, and their files may lie in one folder.
    """
    found = {
        name_of(entry.dist)
        for entry in entry_points
        if entry.value.partition(":")[0].partition(".")[0] == PACKAGE and entry.dist is not None
    }
    return sorted(found - {CORE})

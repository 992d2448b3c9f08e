"""``vllm-fl new-vendor``: a package for a vendor, made of the sample wheel's sources.

The sample is a wheel like any other (``known_wheels.json`` says which) and carries its
whole project. Its name is replaced everywhere, in texts and in file names, and what
concerns the sample alone, from a line with ``<sample>`` to one with ``</sample>``, is
left out. A copy of its folder has ``rename.py``, which calls :func:`rename`.
"""

from __future__ import annotations

import keyword
import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.cli.output import Problem
from vllm_fl.dispatch import PLUGIN_GROUP
from vllm_fl.dispatch import BackendImplKind
from vllm_fl.dispatch.common.distributions import entry_points
from vllm_fl.dispatch.common.distributions import name_of
from vllm_fl.dispatch.common.distributions import version_of
from vllm_fl.dispatch.types import NATIVE
from vllm_fl.dispatch.wheels import known_wheels

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from vllm_fl.cli.output import Output
    from vllm_fl.dispatch.wheels import Wheel

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_SAMPLE_ONLY = re.compile(r"^[^\n]*<sample>.*?</sample>[^\n]*\n", re.MULTILINE | re.DOTALL)
#: Made by tools; not copied.
_DERIVED = re.compile(r"__pycache__|\..*_cache|.*\.egg-info|build|dist|\.git|\.venv")
#: Not touched by a renaming in place.
_KEPT = (".git", ".venv")
#: Of the sample alone.
_NOT_COPIED = ("rename.py", "changelog.d", "PKG-INFO")
#: Words of policies and of implementation ids, and modules that every plugin has.
_WORDS = {
    *(kind.value for kind in BackendImplKind),
    *(kind.prefix for kind in BackendImplKind),
    NATIVE,
    "impl",
    "register_ops",
    "core",
    "test",
    "tests",
}


def add_commands(commands: Any) -> None:
    """Add ``new-vendor``."""
    parser = commands.add_parser(
        "new-vendor",
        help="make a package for a new vendor's operators",
        description="Make a package for a new vendor's operators: it builds, installs, registers and is "
        "tested as it is, on the CPU. Then its functions are replaced by the vendor's kernels.",
        epilog="example: vllm-fl new-vendor acme ./vllm-plugin-acme",
    )
    parser.add_argument("name", metavar="NAME", help="the vendor's name in policies, such as acme")
    parser.add_argument("folder", type=Path, metavar="DIR", help="a folder that is empty or not there yet")
    parser.set_defaults(run=_new_vendor)


def _new_vendor(arguments: argparse.Namespace, output: Output) -> int:
    name, target = arguments.name, arguments.folder
    check_name(name)
    if target.exists() and not target.is_dir():
        raise Problem(f"{target} is there and is no folder")
    if target.is_dir() and any(target.iterdir()):
        raise Problem(f"{target} is not empty")
    _write(_renamed(_sample_project(), name), target)
    output.text(
        f"{target} holds {_distribution(name)}. Next, in it:\n"
        "  python -m pip install -e '.[test]'\n"
        "  python -m pytest\n"
        f"  vllm-fl conformance --backend {name} --tier smoke\n"
        f"  VLLM_FL_PREFER=vendor vllm-fl explain --all"
    )
    return 0


def rename(folder: Path, name: str) -> None:
    """Make a vendor's package of a copy of the sample's folder, in place.

    Everything is read and checked before anything is written.

    Args:
        folder: the copy.
        name: the vendor's name.

    Raises:
        Problem: a bad name, the sample's own folder, or a folder that is none of its copies.
    """
    check_name(name)
    sample = _sample()
    if folder.name == sample.distribution:
        raise Problem(f"{folder} is the sample itself: copy it first, to {_distribution(name)} for one")
    files = _renamed(folder, name)
    for path in folder.iterdir():
        if path.is_dir() and path.name not in _KEPT:
            shutil.rmtree(path)
        elif path.is_file():
            path.unlink()
    _write(files, folder)


def check_name(name: str) -> None:
    """Refuse what cannot be a new vendor's name.

    Raises:
        Problem: saying why.
    """
    if not _NAME.fullmatch(name):
        raise Problem(
            f"{name!r} cannot be a vendor's name: a module is called so, and a word of a policy; "
            "use lower-case letters, digits and _, beginning with a letter"
        )
    if keyword.iskeyword(name):
        raise Problem(f"{name!r} cannot be a vendor's name: it is a keyword of Python")
    for wheel in known_wheels():
        if name in (wheel.plugin, wheel.vendor):
            raise Problem(f"{name!r} cannot be a vendor's name: it is reserved to {wheel.distribution}")
    if name in _WORDS:
        raise Problem(f"{name!r} cannot be a vendor's name: the word has a meaning of its own here")
    if _sample().plugin in name:
        raise Problem(
            f"{name!r} cannot be a vendor's name: {_sample().plugin!r} is the word that is replaced"
        )
    for entry in entry_points(PLUGIN_GROUP)[0]:
        if entry.name == name:
            owner = name_of(entry.dist) if entry.dist else "another distribution"
            raise Problem(f"a plugin {name!r} is already installed, by {owner}")
    if find_spec(f"vllm_fl_{name}"):
        raise Problem(f"a module vllm_fl_{name} is already installed")
    version = version_of(_distribution(name))
    if version is not None:
        raise Problem(f"{_distribution(name)} {version} is already installed")


def _sample() -> Wheel:
    return next(wheel for wheel in known_wheels() if wheel.sample)


def _distribution(name: str) -> str:
    return _sample().distribution.replace(_sample().plugin, name.replace("_", "-"))


def _sample_project() -> Path:
    """Return the folder with the sample's sources: in its wheel, or around its source."""
    sample = _sample()
    spec = find_spec(f"vllm_fl_{sample.plugin}")
    for package in (spec.submodule_search_locations or ()) if spec else ():
        for folder in (Path(package) / "_project", Path(package).parents[1]):
            if (folder / "pyproject.toml").is_file():
                return folder
    raise Problem(f"the sample is not installed; pip install {sample.distribution}")


def _is_derived(name: str) -> bool:
    return _DERIVED.fullmatch(name) is not None


def _renamed(project: Path, name: str) -> dict[Path, str]:
    """Return the files of a new vendor's package, by their paths in it."""
    sample = _sample()
    if not (project / "src" / f"vllm_fl_{sample.plugin}").is_dir():
        raise Problem(f"{project} is no copy of {sample.distribution}")
    words = {
        sample.distribution: _distribution(name),
        sample.plugin: name,
        sample.plugin.capitalize(): "".join(map(str.capitalize, name.split("_"))),
        sample.plugin.upper(): name.upper(),
    }
    # The longest first: a distribution's name has hyphens where a module's has none.
    pattern = re.compile("|".join(map(re.escape, sorted(words, key=len, reverse=True))))

    def replace(text: str) -> str:
        return pattern.sub(lambda found: words[found.group()], text)

    return {
        Path(replace(str(path))): replace(_SAMPLE_ONLY.sub("", (project / path).read_text("utf-8")))
        for path in _sources(project)
    }


def _sources(project: Path) -> Iterator[Path]:
    for path in sorted(project.rglob("*")):
        inside = path.relative_to(project)
        if path.is_file() and inside.parts[0] not in _NOT_COPIED and not any(map(_is_derived, inside.parts)):
            yield inside


def _write(files: dict[Path, str], folder: Path) -> None:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, "utf-8")

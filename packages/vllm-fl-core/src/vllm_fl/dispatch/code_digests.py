"""The code that a compiled graph may have in it, as digests.

A version says what a wheel's code is until somebody edits it: an editable installation,
a module that a variable names, a script that registers a function. So the code itself is
read: of the top-level packages that implement something, and of what they import from
outside of ``site-packages``. Only its content and its place in the package count, so that
two hosts agree.
"""

from __future__ import annotations

import os
import re
import sys
from importlib.machinery import all_suffixes
from importlib.util import find_spec
from typing import TYPE_CHECKING

from vllm_fl.dispatch.availability import layers_of

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Iterator

    from vllm_fl.dispatch.types import OpImpl

#: What stands in the place of the digest of code that cannot be read.
UNREADABLE = "unreadable"

# vLLM's own key has the versions of these two.
_KNOWN = sys.stdlib_module_names | {"torch", "vllm"}

_INSTALLED = ("site-packages", "dist-packages")

# What Python can import: text, compiled text, and libraries.
_SUFFIXES = tuple(all_suffixes())
_IMPORT = re.compile(rb"\n[ \t]*(?:from[ \t]+(\w+)|import[ \t]+([\w., \t]+))")


def modules_of(impl: OpImpl) -> set[str]:
    """Return the names of the modules that an implementation and its predicate are from."""
    given = (impl.fn, impl.supports, impl.supports_layer)
    found = {one.partition(":")[0] for one in given if isinstance(one, str)}
    if impl.backend is not None:
        found.add(type(impl.backend).__module__)
    for function in (impl.load(), *impl.predicates()):
        try:
            for layer in layers_of(function):
                owner = getattr(layer, "__self__", None)
                owners = (layer, owner if isinstance(owner, type) else type(owner))
                found |= {name for one in owners if isinstance(name := getattr(one, "__module__", None), str)}
        except Exception:  # noqa: BLE001, S112 - an object of a plugin's that answers no question
            continue
    return found


def digests(modules: Iterable[str]) -> dict[str, str]:
    """Return a digest of the code of every top-level package that ``modules`` are in.

    So too of the packages outside of ``site-packages`` that their code imports.
    """
    from hashlib import sha256

    found: dict[str, str] = {}
    waiting = [(name.partition(".")[0], True) for name in sorted(modules)]
    while waiting:
        name, is_asked = waiting.pop()
        # A process that another one spawned has its script under the second name.
        name = "__main__" if name == "__mp_main__" else name
        if name in found or name in _KNOWN:
            continue
        digest, imported, is_read = sha256(), set[str](), False
        for place, path in _files(name, is_asked=is_asked):
            is_read = True
            of_file, its_imports = _look_at(path)
            digest.update(f"{place}\0{of_file}\0".encode())
            imported |= its_imports
        if is_read or is_asked:
            found[name] = digest.hexdigest()[:16] if is_read else UNREADABLE
        waiting += [(one, False) for one in sorted(imported)]
    return found


# What was read, by path: a file that is as old and as long as before is the same one.
_known_files: dict[str, tuple[tuple[int, int], tuple[str, frozenset[str]]]] = {}


def _look_at(path: str) -> tuple[str, frozenset[str]]:
    """Return the digest of a file and what its code imports."""
    from hashlib import sha256

    try:
        status = os.stat(path)
        state = status.st_mtime_ns, status.st_size
        known = _known_files.get(path)
        if known is not None and known[0] == state:
            return known[1]
        with open(path, "rb") as file:
            content = file.read()
    except OSError:
        return UNREADABLE, frozenset()
    found = sha256(content).hexdigest(), frozenset(_imported(content) if path.endswith(".py") else ())
    _known_files[path] = state, found
    return found


def _imported(content: bytes) -> set[str]:
    names: set[str] = set()
    for from_one, several in set(_IMPORT.findall(b"\n" + content)):
        parts = [from_one] if from_one else several.split(b",")
        names |= {part.split()[0].partition(b".")[0].decode() for part in parts if part.split()}
    return names


def _files(name: str, *, is_asked: bool) -> Iterator[tuple[str, str]]:
    """Yield the files of a top-level module or package: where in it, and where on the disk."""
    try:
        module = sys.modules.get(name)
        spec = getattr(module, "__spec__", None) if module is not None else find_spec(name)
        file = getattr(module, "__file__", None) or getattr(spec, "origin", None)
        archive = getattr(getattr(spec, "loader", None), "archive", None)
        folders = getattr(module, "__path__", None) or getattr(spec, "submodule_search_locations", None) or ()
        file, folders = str(file or ""), sorted(map(str, folders))
    except Exception:  # noqa: BLE001 - a finder or a module of somebody's
        return
    if not is_asked and (not file or any(part in _INSTALLED for part in file.split(os.sep))):
        return  # its version is somebody's requirement, or it is no code but a folder that is called so
    if archive is not None:
        yield name, str(archive)
    elif folders:
        for folder in folders:
            yield from _files_in(folder)
    elif os.path.isfile(file):
        yield os.path.basename(file), file


def _files_in(top: str) -> Iterator[tuple[str, str]]:
    for folder, inner, names in os.walk(top):
        inner[:] = sorted(one for one in inner if one != "__pycache__" and not one.startswith("."))
        for name in sorted(names):
            if name.endswith(_SUFFIXES):
                path = os.path.join(folder, name)
                yield os.path.relpath(path, top).replace(os.sep, "/"), path

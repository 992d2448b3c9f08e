"""The files of a trace: written where others may write too, and read without trusting them.

A folder may be shared, and a name in it guessed. A file is therefore created under a random
name, never through a link, and gets its own name in one step; the folder of somebody else is
refused. What is read is a regular file, of this user or of the folder's owner, and checked.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.dispatch.common.suggest import shown

if TYPE_CHECKING:
    from pathlib import Path

SCHEMA_VERSION = 1

#: A longer file is no record: it holds at most some kilobytes for each operator.
_LONGEST = 64 * 2**20

_SHAPES: dict[str, dict[str, type]] = {
    "operators": {"op": str, "impl_id": str, "calls": int, "graphs": int, "signatures": dict},
    "layers": {"layer": str, "op": str, "impl_id": str, "form": str, "instances": int},
}
_FACTS: dict[str, type] = {"run": str, "pid": int, "process": str, "fingerprint": str, "policy": str}


def make_folder(folder: Path) -> None:
    """Make a folder for this user alone; one that is there stays as it is."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def why_not_into(folder: Path) -> str | None:
    """Say why no record is written into a folder that is there, or None."""
    here, me = folder.stat(), os.geteuid()
    # The link too: who owns it may let it lead elsewhere at any time. Root may do anything anyway.
    others = {folder.lstat().st_uid, here.st_uid} - {me, 0}
    if others:
        return f"it belongs to user {others.pop()}, and this process runs as user {me}"
    if here.st_mode & stat.S_IWOTH and not here.st_mode & stat.S_ISVTX:
        return "everybody may write into it (chmod o-w)"
    return None


def write(folder: Path, name: str, text: str) -> None:
    """Write a file in one step, following no link and overwriting nothing on the way.

    Raises:
        OSError: it cannot be written.
    """
    import secrets

    part = folder / f".{name}.{secrets.token_hex(8)}.part"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(part, flags, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        part.replace(folder / name)  # a link of that name is replaced, and not followed
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def read(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return every record of a folder, and a line for each file that is none."""
    records: list[dict[str, Any]] = []
    problems: list[str] = []
    trusted = {os.geteuid(), folder.stat().st_uid, 0}
    for path in sorted(folder.glob("*.json")):
        try:
            records.append(_record(_text(path, trusted)))
        except (OSError, ValueError, RecursionError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            problems.append(f"{shown(path.name)} is left out: {why}")
    return records, problems


def _text(path: Path, trusted: set[int]) -> str:
    # Not blocking: who opens a FIFO waits for somebody who writes into it.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a regular file")
        if status.st_uid not in trusted:
            raise ValueError(f"it belongs to user {status.st_uid}")
        if status.st_size > _LONGEST:
            raise ValueError(f"it is longer than {_LONGEST} bytes")
        return file.read()


def _record(text: str) -> dict[str, Any]:
    import json

    values = json.loads(text)
    if not isinstance(values, dict) or "schema_version" not in values:
        raise ValueError("it is not a record of vllm-fl")
    if values["schema_version"] != SCHEMA_VERSION:
        version = shown(values["schema_version"])
        raise ValueError(f"it is of schema version {version}, and this vllm-fl reads {SCHEMA_VERSION}")
    _check(values, {name: kind for name, kind in _FACTS.items() if name in values})
    _check(values, dict.fromkeys(_SHAPES, list))
    for part, shape in _SHAPES.items():
        for entry in values[part]:
            _check(entry, shape)
    for entry in values["operators"]:
        _check(entry["signatures"], dict.fromkeys(entry["signatures"], int))
    return values


def _check(values: object, shape: dict[str, type]) -> None:
    for name, kind in shape.items():
        # `type`, since True is an int.
        if not isinstance(values, dict) or type(values.get(name)) is not kind:
            raise ValueError(f"it is damaged: {name} must be a {kind.__name__}")

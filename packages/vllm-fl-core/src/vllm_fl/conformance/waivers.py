"""Waivers: where a vendor loosens or skips a case, and says why.

TOML, shipped in the wheel as ``conformance.toml`` in the package that registers the
implementations, or named on the command line::

    [[waiver]]
    op = "rms_norm"                   # or a list of operators
    case = "float16 alone large*"     # a case's name, or a list; * and ? as in a shell
    device = "cpu"                    # only there; every device if left out
    loosen = 4.0                      # multiplies the tolerances; or: skip = true
    reason = "the library accumulates in float16; https://..."

Files written earlier say ``[[exception]]``, which is read as the same. A waiver that
changes nothing is a failure: everything that it names has run and passes without it.
One that names no case is an error.
"""

from __future__ import annotations

import fnmatch
import tomllib
from dataclasses import dataclass
from dataclasses import field
from importlib import resources
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.dispatch.common.files import read_text
from vllm_fl.dispatch.common.suggest import suggest

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from vllm_fl.conformance.result import Result
    from vllm_fl.dispatch import PluginRecord

FILE_NAME = "conformance.toml"
#: The name of an entry, and the one that it had before.
_ENTRIES = ("waiver", "exception")
_KEYS: dict[str, tuple[type, ...]] = {
    "op": (str, list),
    "case": (str, list),
    "device": (str,),
    "loosen": (float, int),
    "skip": (bool,),
    "reason": (str,),
}


class WaiverError(ValueError):
    """The file is wrong; the message names it, and which entry."""


@dataclass
class Waiver:
    """One entry of the file.

    Attributes:
        op: the operator.
        case: a pattern of case names.
        reason: why.
        source: the file.
        device: the only type of device where it holds, or ``""``.
        loosen: what the tolerances are multiplied by.
        skip: the case is not run.
        matched: cases that it was asked about.
        used: cases that it skipped, or that passed only because of it.
    """

    op: str
    case: str
    reason: str
    source: str
    device: str = ""
    loosen: float = 1.0
    skip: bool = False
    matched: int = field(default=0, compare=False)
    used: int = field(default=0, compare=False)

    def __str__(self) -> str:
        return f"{self.op}: {self.case!r} ({self.source})"

    def applies(self, result: Result, device: torch.device) -> bool:
        """Whether it means what a result is of, on this device."""
        return self.device in ("", device.type) and self.names(result.op, result.name)

    def names(self, op: str, case: str) -> bool:
        """Whether it means a case."""
        return op == self.op and fnmatch.fnmatchcase(case, self.case)


def read(path: Path, source: str | None = None) -> list[Waiver]:
    """Read a file.

    Raises:
        WaiverError: it is missing or wrong.
    """
    where = source or str(path)
    try:
        values = tomllib.loads(read_text(path))
    except OSError as error:
        raise WaiverError(f"{where}: {error.strerror or error}") from None
    except RecursionError:
        raise WaiverError(f"{where}: it is nested too deeply") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise WaiverError(f"{where}: {error}") from None
    unknown = sorted(set(values).difference(_ENTRIES))
    if unknown:
        raise WaiverError(f"{where}: unknown key {unknown[0]!r}; entries are [[waiver]].")
    entries = [
        (f"{where}: [[{name}]] number {number}", entry)
        for name in _ENTRIES
        for number, entry in enumerate(values.get(name, []), 1)
    ]
    return [one for place, entry in entries for one in _waivers(entry, where, place)]


def _waivers(values: dict[str, Any], source: str, where: str) -> list[Waiver]:
    """Return what an entry means: a waiver for each of its operators and cases."""
    for key, value in values.items():
        if key not in _KEYS:
            raise WaiverError(f"{where}: unknown key {key!r}.{suggest(key, _KEYS)}")
        if not isinstance(value, _KEYS[key]) or isinstance(value, bool) is not (key == "skip"):
            wanted = " or ".join(kind.__name__ for kind in _KEYS[key])
            raise WaiverError(f"{where}: {key} must be a {wanted}, not {value!r}.")
    for key in ("op", "case", "reason"):
        if not str(values.get(key, "")).strip():
            raise WaiverError(f"{where}: {key} is missing.")
    if bool(values.get("skip")) == ("loosen" in values):
        raise WaiverError(f"{where}: say either skip = true or loosen = <factor>.")
    if values.get("loosen", 2.0) <= 1.0:
        raise WaiverError(f"{where}: loosen must be more than 1.")
    ops, cases = (value if isinstance(value, list) else [value] for value in (values["op"], values["case"]))
    rest = {key: value for key, value in values.items() if key not in ("op", "case")}
    return [Waiver(op, case, source=source, **rest) for op in ops for case in cases]


def shipped(record: PluginRecord | None) -> list[Waiver]:
    """Read the file of the wheel that a plugin is from; nothing where it ships none.

    Raises:
        WaiverError: it is wrong.
    """
    package = package_of(record)
    if package is None:
        return []
    try:
        file = resources.files(package) / FILE_NAME
        with resources.as_file(file) as path:
            return read(path, f"{package}/{FILE_NAME}") if path.is_file() else []
    except (ModuleNotFoundError, TypeError, FileNotFoundError):
        return []  # a single module, which ships no file


def package_of(record: PluginRecord | None) -> str | None:
    """Return the package whose module registers the plugin's implementations."""
    if record is None or not record.success:
        return None
    return record.source.partition(":")[0].partition(".")[0]

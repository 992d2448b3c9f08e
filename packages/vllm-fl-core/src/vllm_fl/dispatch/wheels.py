"""The wheels that are known to implement operators: what known_wheels.json says."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING
from typing import NamedTuple

from vllm_fl.dispatch.types import BackendImplKind

if TYPE_CHECKING:
    from collections.abc import Iterable


class Wheel(NamedTuple):
    """A distribution that is known to implement operators; see known_wheels.json."""

    distribution: str
    plugin: str
    impl_id: str
    purpose: str
    operators: tuple[str, ...]
    #: `vllm-fl new-vendor` makes a vendor's package of its sources.
    sample: bool

    @property
    def vendor(self) -> str | None:
        """The vendor whose name it has reserved."""
        kind, _, name = self.impl_id.partition(".")
        return name if kind == "vendor" else None


@functools.cache
def known_wheels() -> tuple[Wheel, ...]:
    """Return what known_wheels.json says."""
    import json  # with Path, a tenth of importing this package
    from pathlib import Path

    text = Path(__file__).with_name("known_wheels.json").read_text("utf-8")
    return tuple(
        Wheel(
            w["distribution"],
            w["plugin"],
            w["impl_id"],
            w["for"],
            tuple(w["operators"]),
            w.get("sample", False),
        )
        for w in json.loads(text)["wheels"]
    )


def owner_of(*, plugin: str | None = None, impl_id: str | None = None) -> Wheel | None:
    """Return the wheel to which a plugin's name or an implementation's id is reserved."""
    for wheel in known_wheels():
        if plugin == wheel.plugin:
            return wheel
        if impl_id is not None and f"{impl_id}.".startswith(f"{wheel.impl_id}."):
            return wheel
    return None


def install_hint(op_name: str) -> str:
    """Say which wheels implement an operator, a line each with its pip command."""
    wheels = [wheel for wheel in known_wheels() if op_name in wheel.operators]
    if not wheels:
        return "No known wheel implements it."
    lines = [f"  pip install {wheel.distribution}  # {wheel.purpose}" for wheel in wheels]
    return "\n".join(["Install one of:", *lines])


def faster_wheels(op_names: Iterable[str], installed_plugins: Iterable[str] = ()) -> list[Wheel]:
    """Return the wheels with a chip's own kernels for any of the operators, the installed ones left out."""
    wanted, installed = set(op_names), set(installed_plugins)
    return [
        wheel
        for wheel in known_wheels()
        if not wheel.impl_id.startswith(BackendImplKind.REFERENCE.prefix)
        and wanted.intersection(wheel.operators)
        and wheel.plugin not in installed
    ]

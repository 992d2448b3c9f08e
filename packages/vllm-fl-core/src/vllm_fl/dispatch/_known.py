"""The wheels that are known, and the names that a policy may use."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_fl.dispatch._suggest import shown
from vllm_fl.dispatch._suggest import suggest
from vllm_fl.dispatch.errors import PolicyError
from vllm_fl.dispatch.types import NATIVE
from vllm_fl.dispatch.types import BackendImplKind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm_fl.dispatch.policy import SelectionPolicy
    from vllm_fl.dispatch.registry import OpRegistrySnapshot


@dataclass(frozen=True)
class Wheel:
    """A distribution that is known to implement operators; see known_wheels.json."""

    distribution: str
    plugin: str
    impl_id: str
    purpose: str
    operators: tuple[str, ...]
    #: `vllm-fl new-vendor` makes a vendor's package of its sources.
    sample: bool = False

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


def check_names(
    policy: SelectionPolicy, snapshot: OpRegistrySnapshot, broken_plugins: Iterable[str] = ()
) -> None:
    """Check every operator, vendor and implementation that a policy names.

    A name of a known wheel is right also where the wheel is not installed, and a
    name that only a plugin which failed to load could have is let pass.

    Raises:
        PolicyError: naming the place, the name and the nearest right one.
    """
    operators = {*snapshot.operators, *snapshot.impls_by_op}
    vendors = snapshot.vendors() | {wheel.vendor for wheel in known_wheels() if wheel.vendor}
    impl_ids = snapshot.impl_ids() | {wheel.impl_id for wheel in known_wheels()}
    broken = list(broken_plugins)

    def place(key: str) -> str:
        return (
            policy.sources.get(key) or policy.sources.get(key.partition(".")[0]) or "the policy set in code"
        )

    def check(kind: str, name: str, known: set[str], key: str) -> None:
        # "vendor.acme.fast" may be of a plugin "acme" or of "vllm-plugin-acme".
        owner = name.split(".")[1] if "." in name else name
        if name not in known and not any(owner in plugin for plugin in broken):
            raise PolicyError(f"{place(key)}: unknown {kind} {shown(name)}.{suggest(name, known)}")

    for op_name, order in policy.per_op_order:
        key = f"op_backends.{op_name}"
        check("operator", op_name, operators, key)
        for token in order:
            head, _, rest = token.partition(":")
            if head == "vendor" and rest:
                check("vendor", rest, vendors, key)
            elif head == "impl":
                check("implementation", rest, impl_ids, key)
    for op_name, entries in policy.tuned:
        check("operator", op_name, operators, "tuned")
        for impl_id in {one for entry in entries for one in entry.order} - {NATIVE}:
            check("implementation", impl_id, impl_ids, "tuned")
    for key, names in (("deny_vendors", policy.deny_vendors), ("allow_vendors", policy.allow_vendors or ())):
        for name in sorted(names):
            check("vendor", name, vendors, key)

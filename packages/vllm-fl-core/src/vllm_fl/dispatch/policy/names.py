"""The names in a policy: whether there are such operators, vendors and implementations."""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import TypeVar

from vllm_fl.dispatch.common.suggest import did_you_mean
from vllm_fl.dispatch.common.suggest import shown
from vllm_fl.dispatch.common.suggest import suggest
from vllm_fl.dispatch.errors import PolicyError
from vllm_fl.dispatch.types import NATIVE
from vllm_fl.dispatch.types import may_be_vendor
from vllm_fl.dispatch.wheels import known_wheels

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Iterable

    from vllm_fl.dispatch.policy.value import SelectionPolicy
    from vllm_fl.dispatch.registry import OpRegistrySnapshot

_Answer = TypeVar("_Answer")


class Names:
    """The names that a policy may use: those of what is installed, and of the known wheels.

    A name that only a plugin which failed to load could have is let pass.
    """

    def __init__(self, snapshot: OpRegistrySnapshot, broken_plugins: Iterable[str] = ()) -> None:
        self._operators = {*snapshot.operators, *snapshot.impls_by_op}
        self._vendors = snapshot.vendors() | {wheel.vendor for wheel in known_wheels() if wheel.vendor}
        self._impl_ids = snapshot.impl_ids() | {wheel.impl_id for wheel in known_wheels()}
        self._broken = tuple(broken_plugins)

    def _is_known(self, name: str, known: set[str]) -> bool:
        # "vendor.acme.fast" may be of a plugin "acme" or of "vllm-plugin-acme".
        owner = name.split(".")[1] if "." in name else name
        return name in known or any(owner in plugin for plugin in self._broken)

    def _check(self, kind: str, name: object, known: set[str]) -> None:
        if not isinstance(name, str) or not self._is_known(name, known):
            raise PolicyError(f"unknown {kind} {shown(name)}.{suggest(name, known)}")

    def operator(self, name: object) -> None:
        """Check an operator's name; as the others, it raises PolicyError with the nearest right one."""
        self._check("operator", name, self._operators)

    def vendor(self, name: object) -> None:
        """Check a vendor's name."""
        self._check("vendor", name, self._vendors)

    def implementation(self, name: object) -> None:
        """Check an implementation's id."""
        self._check("implementation", name, self._impl_ids)

    def token(self, token: str) -> None:
        """Check the vendor or the implementation that a token of an order names."""
        head, _, rest = token.partition(":")
        if head == "vendor" and rest:
            self.vendor(rest)
        elif head == "impl":
            self.implementation(rest)

    def denies_nobody(self, vendor: str) -> tuple[str, str] | None:
        """Return the name and a hint where nobody here has it: one list may be for a whole fleet.

        Raises:
            PolicyError: no vendor could have this name.
        """
        if self._is_known(vendor, self._vendors):
            return None
        if not may_be_vendor(vendor):
            self.vendor(vendor)
        return shown(vendor), did_you_mean(vendor, self._vendors)


def check_names(
    policy: SelectionPolicy, snapshot: OpRegistrySnapshot, broken_plugins: Iterable[str] = ()
) -> list[tuple[str, str, str]]:
    """Check every operator, vendor and implementation that a policy names.

    Returns:
        Place, name and hint of each vendor that is denied and not here, which is no error.

    Raises:
        PolicyError: naming the place, the name and the nearest right one.
    """
    names = Names(snapshot, broken_plugins)

    def place(key: str) -> str:
        return policy.source(key) or "the policy set in code"

    def check(key: str, question: Callable[[str], _Answer], name: str) -> _Answer:
        try:
            return question(name)
        except PolicyError as error:
            raise PolicyError(f"{place(key)}: {error}") from None

    for op_name, order in policy.per_op_order:
        key = f"per_op_order.{op_name}"
        check(key, names.operator, op_name)
        for token in order:
            check(key, names.token, token)
    for op_name, entries in policy.tuned:
        check("tuned", names.operator, op_name)
        for impl_id in {one for entry in entries for one in entry.order} - {NATIVE}:
            check("tuned", names.implementation, impl_id)
    for vendor in sorted(policy.allow_vendors or ()):
        check("allow_vendors", names.vendor, vendor)
    denied = [check("deny_vendors", names.denies_nobody, vendor) for vendor in sorted(policy.deny_vendors)]
    return [(place("deny_vendors"), *one) for one in denied if one]

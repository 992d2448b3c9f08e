"""A vendor's packaged defaults: read entry by entry, and laid below a policy.

They are of the wheel's day: it may know an operator, a vendor or a key that this core or this
machine does not. Such an entry is left out with one line, and the rest holds. They are
explicit in nothing: installing a wheel is no wish of the user's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING
from typing import Any
from typing import NamedTuple

from vllm_fl.dispatch._config import policy_of
from vllm_fl.dispatch._config import read
from vllm_fl.dispatch._foreign import describe
from vllm_fl.dispatch._foreign import raise_if_from_a_signal
from vllm_fl.dispatch._known import Names
from vllm_fl.dispatch._log import warn_once
from vllm_fl.dispatch._suggest import shown
from vllm_fl.dispatch.backend import Backend
from vllm_fl.dispatch.errors import PolicyError
from vllm_fl.dispatch.policy import PACKAGED
from vllm_fl.dispatch.policy import SelectionPolicy
from vllm_fl.dispatch.policy import check_order

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_fl.dispatch.registry import OpRegistrySnapshot

#: Keys of the policy file that mean nothing in a wheel.
_NOT_PACKAGED = ("tuned", "defaults")


class Below(NamedTuple):
    """What lies below a policy.

    Attributes:
        policy: the packaged defaults; nothing is set in it where none apply.
        faults: a line for each entry that cannot be used; they have been logged.
        note: why none apply though there are some; empty where they do.
    """

    policy: SelectionPolicy
    faults: tuple[str, ...] = ()
    note: str = ""


def effective(policy: SelectionPolicy, snapshot: OpRegistrySnapshot) -> SelectionPolicy:
    """Lay a policy over the packaged defaults, key by key and operator by operator."""
    return _over(policy, lies_below(policy, snapshot).policy)


def lies_below(policy: SelectionPolicy, snapshot: OpRegistrySnapshot) -> Below:
    """Return the packaged defaults of the only available vendor; they are read anew each time."""
    nothing = Below(SelectionPolicy())
    backends = [b for b in snapshot.backends if type(b).default_policy is not Backend.default_policy]
    if policy.defaults != PACKAGED or not backends:
        return nothing
    impls = [impl for impls in snapshot.impls_by_op.values() for impl in impls if impl.vendor]
    available = {impl.vendor for impl in impls if impl.is_available()}
    found = [backend for backend in backends if _vendor(backend) in available]
    if not found:
        return nothing
    if len(available) > 1:
        names = ", ".join(sorted(map(str, available)))
        return nothing._replace(note=f"{names} are available: the packaged defaults of none apply")
    backend = found[0]
    if not policy.is_vendor_allowed(str(backend.vendor)):
        return nothing._replace(
            note=f"{backend.vendor} may not be chosen, so that its packaged defaults do not apply"
        )
    origin = next((i.origin for i in impls if i.vendor == backend.vendor and i.origin), None)
    wheel = f" ({origin.wheel})" if origin else ""
    return _read(backend, f"the packaged defaults of {backend.vendor}{wheel}", Names(snapshot))


def _vendor(backend: Backend) -> str | None:
    try:
        return backend.vendor
    except BaseException as error:  # noqa: BLE001 - it was registered with one, and has none now
        raise_if_from_a_signal(error)
        return None


def _read(backend: Backend, place: str, names: Names) -> Below:
    reader = _Reader(names)
    try:
        given = backend.default_policy
        if not isinstance(given, Mapping):
            raise PolicyError(f"must be a mapping of keys to values, not {shown(given)}.")
        for key, value in given.items():
            reader.entry(key, value)
        policy = reader.policy(place)
    except BaseException as error:  # noqa: BLE001 - a plugin's fault costs that plugin's defaults
        raise_if_from_a_signal(error)
        problem = str(error) if isinstance(error, PolicyError) else f"{describe(error)}."
        return Below(SelectionPolicy(), (warn_once("%s: %s They are not used.", place, problem),))
    lines = [warn_once("%s: %s It is left out, and the rest holds.", place, one) for one in reader.faults]
    lines += [
        warn_once("%s: denies vendor %s, which nothing here has.%s", place, *one) for one in reader.absent
    ]
    return Below(_over(policy, SelectionPolicy()), tuple(lines))


class _Reader:
    """Reads packaged defaults entry by entry; one that is wrong is a fault, and costs nothing else."""

    def __init__(self, names: Names) -> None:
        self.names = names
        self.values: dict[str, Any] = {}
        self.faults: list[str] = []
        self.absent: list[tuple[str, str]] = []

    def entry(self, key: object, value: object) -> None:
        if key == "op_backends":
            if not isinstance(value, Mapping):
                self.faults.append(f"op_backends must map operators to orders, not {shown(value)}.")
                return
            orders = {op_name: self._order(op_name, order) for op_name, order in value.items()}
            self.values[key] = {op_name: order for op_name, order in orders.items() if order}
        elif key in ("allow_vendors", "deny_vendors"):
            given = value.split(",") if isinstance(value, str) else value
            self._keep(str(key), lambda: read(key, self._vendors(str(key), given)))
        elif key in _NOT_PACKAGED:
            self.faults.append(f"{key} has no meaning in packaged defaults.")
        else:
            self._keep(str(key), lambda: read(key, value))

    def policy(self, place: str) -> SelectionPolicy:
        sources = dict.fromkeys(self.values, place)
        try:
            return policy_of(self.values, sources)
        except PolicyError:  # a vendor is allowed and denied, and what is denied is never chosen
            self.faults.append("allow_vendors names a vendor that deny_vendors names too.")
            return policy_of({k: v for k, v in self.values.items() if k != "allow_vendors"}, sources)

    def _keep(self, key: str, make: Callable[[], Any]) -> None:
        try:
            self.values[key] = make()
        except PolicyError as error:
            self.faults.append(str(error))

    def _order(self, op_name: object, order: object) -> tuple[str, ...]:
        tokens = [token.strip() for token in order.split("|")] if isinstance(order, str) else order
        try:
            if not (isinstance(tokens, (list, tuple)) and tokens):
                check_order(op_name, tokens)
            self.names.operator(op_name)
        except PolicyError as error:
            self.faults.append(f"op_backends: {error}")
            return ()
        kept: list[str] = []
        for token in tokens:  # type: ignore[attr-defined]
            try:
                check_order(op_name, [*kept, token])
                self.names.token(token)
            except PolicyError as error:
                self.faults.append(f"op_backends.{op_name}: {error}")
            else:
                kept.append(token)
        if not kept:
            self.faults.append(f"op_backends.{op_name}: nothing is left of this order.")
        return tuple(kept)

    def _vendors(self, key: str, given: object) -> object:
        if not isinstance(given, (list, tuple, set, frozenset)):
            return given  # what reads the whole says what is wrong
        kept: list[str] = []
        for name in given:
            try:
                (one,) = read(key, [name])
                vendor = one.removeprefix("+").strip()
                if one in kept:
                    raise PolicyError(f"names {shown(one)} twice.")
                if key == "deny_vendors":
                    self.absent += filter(None, [self.names.denies_nobody(vendor)])
                else:
                    self.names.vendor(vendor)
            except PolicyError as error:
                self.faults.append(f"{key}: {error}")
            else:
                kept.append(one)
        return kept


def _over(upper: SelectionPolicy, lower: SelectionPolicy) -> SelectionPolicy:
    """Lay one policy over another, in which nothing is extended."""
    if not lower.explicit and not upper.extends:
        return upper
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for key in ("prefer", "strict", "deny_vendors", "allow_vendors"):
        mine, theirs = getattr(upper, key), getattr(lower, key)
        if key in upper.extends:
            # To add to a list that allows everybody forbids nobody.
            values[key] = None if theirs is None else theirs | mine
            if key in lower.explicit:
                sources[key] = f"{upper.sources.get(key, 'code')}, added to {lower.sources[key]}"
        elif key in lower.explicit - upper.explicit:
            values[key], sources[key] = theirs, lower.sources[key]
    own, added = dict(upper.per_op_order), dict(lower.per_op_order)
    sources.update({f"op_backends.{op}": lower.sources["op_backends"] for op in added if op not in own})
    return replace(
        upper,
        **values,
        per_op_order=tuple({**added, **own}.items()),
        extends=frozenset(),
        sources={**upper.sources, **sources},
    )

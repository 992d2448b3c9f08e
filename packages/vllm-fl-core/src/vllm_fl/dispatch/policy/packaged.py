"""A vendor's packaged defaults: read entry by entry, and laid below a policy.

They are of the wheel's day: it may know an operator, a vendor or a key that this core or this
machine does not. Such an entry is left out with one line, and the rest holds. They are
explicit in nothing: installing a wheel is no wish of the user's.

They are read, and a policy is laid over them, once for a policy and a snapshot.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING
from typing import Any
from typing import NamedTuple

from vllm_fl.dispatch.availability import answers
from vllm_fl.dispatch.availability import provisional_answers
from vllm_fl.dispatch.backend import Backend
from vllm_fl.dispatch.common.foreign import describe
from vllm_fl.dispatch.common.foreign import raise_if_from_a_signal
from vllm_fl.dispatch.common.log import warn_once
from vllm_fl.dispatch.common.suggest import shown
from vllm_fl.dispatch.errors import PolicyError
from vllm_fl.dispatch.policy.keys import KEYS
from vllm_fl.dispatch.policy.keys import PACKAGED
from vllm_fl.dispatch.policy.keys import key_of
from vllm_fl.dispatch.policy.names import Names
from vllm_fl.dispatch.policy.reading import policy_of
from vllm_fl.dispatch.policy.value import SelectionPolicy
from vllm_fl.dispatch.policy.value_types import Orders
from vllm_fl.dispatch.policy.value_types import Vendors
from vllm_fl.dispatch.policy.value_types import check_order
from vllm_fl.dispatch.policy.value_types import tokens_of

if TYPE_CHECKING:
    from vllm_fl.dispatch.policy.keys import Key
    from vllm_fl.dispatch.registry import OpRegistrySnapshot

#: Policies of contexts come and go: of so many it is known what they lie over.
_KEPT = 64


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


class _Laid(NamedTuple):
    """A policy, what it was laid over, and what came of it."""

    upper: SelectionPolicy
    snapshot: weakref.ref[OpRegistrySnapshot]
    answers: object
    below: Below
    effective: SelectionPolicy


#: By identity of policy and snapshot. Replaced, not edited, so that nobody waits.
_laid: dict[tuple[int, int], _Laid] = {}


def effective(policy: SelectionPolicy, snapshot: OpRegistrySnapshot) -> SelectionPolicy:
    """Lay a policy over the packaged defaults, key by key and operator by operator."""
    return _lay(policy, snapshot).effective


def lies_below(policy: SelectionPolicy, snapshot: OpRegistrySnapshot) -> Below:
    """Return the packaged defaults of the only available vendor."""
    return _lay(policy, snapshot).below


def _lay(policy: SelectionPolicy, snapshot: OpRegistrySnapshot) -> _Laid:
    global _laid
    key = (id(policy), id(snapshot))
    found, heard = _laid.get(key), answers()
    # The entry keeps its policy alive, so that no other one has this id; of a snapshot it asks.
    if found is not None and found.snapshot() is snapshot and found.answers is heard:
        return found
    provisional = provisional_answers()
    below = _find_below(policy, snapshot)
    made = _Laid(policy, weakref.ref(snapshot), heard, below, _over(policy, below.policy))
    if provisional == provisional_answers():
        kept = [item for item in _laid.items() if item[1].snapshot() is not None]
        _laid = {**dict(kept[1 - _KEPT :]), key: made}
    return made


def _find_below(policy: SelectionPolicy, snapshot: OpRegistrySnapshot) -> Below:
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

    def entry(self, name: object, value: object) -> None:
        try:
            key = key_of(name)
            if not key.packaged:
                raise PolicyError(f"{key.name} has no meaning in packaged defaults.")
            if isinstance(key.type, Orders):
                value = self._orders(key, value)
            elif isinstance(key.type, Vendors):
                value = self._vendors(key, value)
            self.values[key.name] = key.type.read(key.name, value)
        except PolicyError as error:
            self.faults.append(str(error))

    def policy(self, place: str) -> SelectionPolicy:
        sources = dict.fromkeys(self.values, place)
        try:
            return policy_of(self.values, sources)
        except PolicyError:  # a vendor is allowed and denied, and what is denied is never chosen
            self.faults.append("allow_vendors names a vendor that deny_vendors names too.")
            return policy_of({k: v for k, v in self.values.items() if k != "allow_vendors"}, sources)

    def _orders(self, key: Key, given: object) -> object:
        """Return the orders that can be used."""
        if not isinstance(given, Mapping):
            return given  # what reads the whole says what is wrong
        orders = {op_name: self._order(key, op_name, order) for op_name, order in given.items()}
        return {op_name: order for op_name, order in orders.items() if order}

    def _order(self, key: Key, op_name: object, order: object) -> tuple[str, ...]:
        tokens = tokens_of(order)
        try:
            if not (isinstance(tokens, (list, tuple)) and tokens):
                check_order(op_name, tokens)
            self.names.operator(op_name)
        except PolicyError as error:
            self.faults.append(f"{key.name}: {error}")
            return ()
        kept: list[str] = []
        for token in tokens:  # type: ignore[attr-defined]
            try:
                check_order(op_name, [*kept, token])
                self.names.token(token)
            except PolicyError as error:
                self.faults.append(f"{key.name}.{op_name}: {error}")
            else:
                kept.append(token)
        if not kept:
            self.faults.append(f"{key.name}.{op_name}: nothing is left of this order.")
        return tuple(kept)

    def _vendors(self, key: Key, given: object) -> object:
        """Return the vendors that can be used."""
        given = given.split(",") if isinstance(given, str) else given
        if not isinstance(given, (list, tuple, set, frozenset)):
            return given  # as above
        kept: list[str] = []
        for name in given:
            try:
                (one,) = key.type.read(key.name, [name])
                vendor = one.removeprefix("+").strip()
                if one in kept:
                    raise PolicyError(f"names {shown(one)} twice.")
                if key.name == "deny_vendors":
                    self.absent += filter(None, [self.names.denies_nobody(vendor)])
                else:
                    self.names.vendor(vendor)
            except PolicyError as error:
                self.faults.append(f"{key.name}: {error}")
            else:
                kept.append(one)
        return kept


def _over(upper: SelectionPolicy, lower: SelectionPolicy) -> SelectionPolicy:
    """Lay one policy over another, in which nothing is extended."""
    if not lower.explicit and not upper.extends:
        return upper
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name, key in KEYS.items():
        mine, theirs = getattr(upper, name), getattr(lower, name)
        if key.type.by_operator:
            own, added = dict(mine), dict(theirs)
            values[name] = {**added, **own}
            sources.update({f"{name}.{op}": lower.sources[name] for op in added if op not in own})
        elif name in upper.extends:
            # To add to a list that allows everybody forbids nobody.
            values[name] = None if theirs is None else theirs | mine
            if name in lower.explicit:
                sources[name] = f"{upper.sources.get(name, 'code')}, added to {lower.sources[name]}"
        elif name in lower.explicit - upper.explicit:
            values[name], sources[name] = theirs, lower.sources[name]
    return replace(upper, **values, extends=frozenset(), sources={**upper.sources, **sources})

"""What a policy is, whatever it was read from."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import field
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.dispatch.common.suggest import shown
from vllm_fl.dispatch.errors import PolicyError
from vllm_fl.dispatch.policy.keys import KEYS
from vllm_fl.dispatch.policy.keys import key_of
from vllm_fl.dispatch.policy.value_types import KINDS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm_fl.dispatch.tuned import Measured

#: What an attribute is before its default is put there.
_UNSET: Any = None


@dataclass(frozen=True)
class SelectionPolicy:
    """What a user wants. Values that are None are not set and take their default.

    What is not set takes the packaged defaults of the only available vendor, key by key and
    operator by operator, and else the built-in ones (:mod:`vllm_fl.dispatch.policy.packaged`).

    Attributes:
        prefer: the kind that is tried first: ``flagos``, ``vendor``,
            ``reference`` or ``native``.
        strict: raise the first failure of an implementation instead of running
            the next one.
        per_op_order: ``((op, (token, ...)), ...)``; an operator's own order, and
            what it does not list is not tried.
        deny_vendors: vendors that are never chosen. Where every name is given with a
            ``+`` before it, they are added to the packaged ones instead of replacing them.
        allow_vendors: the only vendors that may be chosen; None allows all. A ``+`` adds.
        tuned: what was measured, by operator and shape; see
            :mod:`vllm_fl.dispatch.tuned`.
        explicit: which of these were set on purpose. Computed where it is None.
        defaults: ``packaged``, or ``none``: no vendor's packaged defaults lie below.
        extends: which of the lists of vendors were given with a ``+``.
        sources: where each value came from, for people; not compared.

    Raises:
        PolicyError: a value has the wrong type, or is no known token.
    """

    prefer: str = _UNSET
    strict: bool = _UNSET
    per_op_order: tuple[tuple[str, tuple[str, ...]], ...] = _UNSET
    deny_vendors: frozenset[str] = _UNSET
    allow_vendors: frozenset[str] | None = _UNSET
    tuned: tuple[tuple[str, tuple[Measured, ...]], ...] = _UNSET
    explicit: frozenset[str] = _UNSET
    defaults: str = _UNSET
    extends: frozenset[str] = frozenset()
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        put = object.__setattr__
        given, extends = set(), set(self.extends)
        for name, key in KEYS.items():
            value = getattr(self, name)
            if key.type.is_given(value):
                given.add(name)
            if value is None:
                put(self, name, key.type.default)
                continue
            put(self, name, key.type.check(name, value))
            if key.type.adds(value):
                extends.add(name)
        if self.explicit is None:
            put(self, "explicit", frozenset(given))
        # To add nothing is to say nothing.
        put(self, "extends", frozenset(name for name in extends if getattr(self, name)))
        put(self, "_orders", dict(self.per_op_order))

    @classmethod
    def from_dict(cls, /, **values: Any) -> SelectionPolicy:
        """Make a policy from plain values by key; see the class for the keys.

        ``SelectionPolicy.from_dict(**policy.to_dict())`` is ``policy`` again.

        Args:
            **values: a value by key, an empty list or mapping being none. With ``explicit``,
                the keys that were set on purpose, it is a whole policy: every key is there.

        Raises:
            PolicyError: an unknown key, one that is missing beside ``explicit``, or a
                value of the wrong type or without a meaning.
        """
        is_whole = "explicit" in values
        explicit = values.pop("explicit", ())
        if not isinstance(explicit, (list, tuple, set, frozenset)):
            raise PolicyError(f"explicit must be a list of keys, not {shown(explicit)}.")
        given: dict[str, Any] = {}
        for name, value in values.items():
            key = key_of(name)
            if key.name in given:
                spellings = " and ".join((key.name, *key.older))
                raise PolicyError(f"{spellings} are one key; give one of them.")
            given[key.name] = value
        if not is_whole:
            said = {
                name: value for name, value in given.items() if not (KEYS[name].type.holds_many and not value)
            }
            return cls(**said)
        missing = [name for name in KEYS if name not in given]
        if missing:
            raise PolicyError(f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing.")
        for name, value in given.items():
            if value is None and KEYS[name].type.default is not None:
                KEYS[name].type.check(name, value)
        return cls(**given, explicit=frozenset(key_of(name).name for name in explicit))

    def to_dict(self) -> dict[str, Any]:
        """Return the policy as values of JSON's types; :meth:`from_dict` takes them back."""
        plain = {
            name: key.type.plain(getattr(self, name), adds=name in self.extends) for name, key in KEYS.items()
        }
        return {**plain, "explicit": sorted(self.explicit)}

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits that differ where the policy does."""
        import hashlib
        import json

        text = json.dumps(self.to_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def per_op_order_dict(self) -> dict[str, list[str]]:
        """The operators' own orders as a new dict."""
        return {op: list(order) for op, order in self.per_op_order}

    def get_per_op_order(self, op_name: str) -> list[str] | None:
        """Return the operator's own order, or None where it has none."""
        order = self._orders.get(op_name)  # type: ignore[attr-defined]
        return None if order is None else list(order)

    def get_default_order(self) -> list[str]:
        """Return the kinds, the preferred one first."""
        return [self.prefer, *(kind for kind in KINDS if kind != self.prefer)]

    def order(self, op_name: str) -> list[str]:
        """Return the tokens that are tried for an operator, in order."""
        return self.get_per_op_order(op_name) or self.get_default_order()

    def is_explicit_for(self, op_name: str) -> bool:
        """Whether the user asked explicitly how this operator is chosen."""
        is_ordered = op_name in self._orders  # type: ignore[attr-defined]
        return "prefer" in self.explicit or is_ordered or bool(self.measured(op_name))

    def measured(self, op_name: str) -> tuple[Measured, ...]:
        """Return the tuned table's entries of an operator, by shape and rows."""
        return next((entries for name, entries in self.tuned if name == op_name), ())

    def is_vendor_allowed(self, vendor: str) -> bool:
        """Whether the policy lets a vendor be chosen; a denied one never is."""
        if vendor in self.deny_vendors:
            return False
        # What is added to a list of which nothing is known here forbids nobody.
        anybody = self.allow_vendors is None or "allow_vendors" in self.extends
        return anybody or vendor in (self.allow_vendors or ())

    def source(self, name: str) -> str | None:
        """Return where a value came from, None where that was not said.

        Args:
            name: a key, or ``<key>.<operator>``.
        """
        return self.sources.get(name) or self.sources.get(name.partition(".")[0])

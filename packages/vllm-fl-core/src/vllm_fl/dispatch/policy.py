"""Selection policies: what a user wants, and where each wish came from.

The policy in force is the innermost :func:`policy_context` of this thread or
task, else the one of :func:`set_global_policy`, else what the environment says
(:mod:`vllm_fl.dispatch._config`). A policy never changes once it is made.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
from typing import TYPE_CHECKING
from typing import Any
from typing import Protocol

from vllm_fl.dispatch._fork import ForkSafeLock
from vllm_fl.dispatch._suggest import did_you_mean
from vllm_fl.dispatch._suggest import shown
from vllm_fl.dispatch.errors import PolicyError
from vllm_fl.dispatch.tuned import check_table
from vllm_fl.dispatch.tuned import to_plain
from vllm_fl.dispatch.types import NATIVE
from vllm_fl.dispatch.types import BackendImplKind

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Iterable
    from collections.abc import Iterator
    from collections.abc import Mapping

    from vllm_fl.dispatch.tuned import Measured

PREFER_DEFAULT = BackendImplKind.DEFAULT.value
PREFER_VENDOR = BackendImplKind.VENDOR.value
PREFER_REFERENCE = BackendImplKind.REFERENCE.value

#: The order of kinds without a preference; ``native`` exists inside vLLM only.
KINDS = (PREFER_DEFAULT, PREFER_VENDOR, PREFER_REFERENCE, NATIVE)

#: What ``defaults`` says: those of the available vendor's wheel lie below, or they do not.
PACKAGED, NO_DEFAULTS = "packaged", "none"


@dataclass(frozen=True)
class SelectionPolicy:
    """What a user wants. Values that are None are not set and take their default.

    What is not set takes the packaged defaults of the only available vendor, key by key and
    operator by operator, and else the built-in ones (:mod:`vllm_fl.dispatch._packaged`).

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

    prefer: str = None  # type: ignore[assignment]  # never None once made
    strict: bool = None  # type: ignore[assignment]
    per_op_order: tuple[tuple[str, tuple[str, ...]], ...] = ()
    deny_vendors: frozenset[str] = frozenset()
    allow_vendors: frozenset[str] | None = None
    tuned: tuple[tuple[str, tuple[Measured, ...]], ...] = ()
    explicit: frozenset[str] = None  # type: ignore[assignment]
    defaults: str = None  # type: ignore[assignment]
    extends: frozenset[str] = frozenset()
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        put = object.__setattr__
        if self.explicit is None:
            given = {
                "prefer": self.prefer is not None,
                "strict": self.strict is not None,
                "op_backends": bool(self.per_op_order),
                "deny_vendors": bool(self.deny_vendors),
                "allow_vendors": self.allow_vendors is not None,
                "tuned": bool(self.tuned),
                "defaults": self.defaults is not None,
            }
            put(self, "explicit", frozenset(name for name, is_set in given.items() if is_set))
        put(self, "prefer", PREFER_DEFAULT if self.prefer is None else check_prefer(self.prefer))
        put(self, "strict", False if self.strict is None else self.strict)
        if not isinstance(self.strict, bool):
            raise PolicyError(f"strict must be True or False, not {shown(self.strict)}.")
        order = self.per_op_order
        items = order.items() if isinstance(order, dict) else order
        put(self, "per_op_order", tuple(sorted((op, check_order(op, tokens)) for op, tokens in items)))
        put(self, "defaults", PACKAGED if self.defaults is None else check_defaults(self.defaults))
        extends = set(self.extends)
        for key in ("deny_vendors", "allow_vendors"):
            if getattr(self, key) is not None:
                names, adds = check_vendors(key, getattr(self, key))
                put(self, key, names)
                extends.update({key} if adds else ())
        put(self, "extends", frozenset(key for key in extends if getattr(self, key)))
        put(self, "tuned", check_table(self.tuned))
        put(self, "_orders", dict(self.per_op_order))

    @classmethod
    def from_dict(
        cls,
        prefer: str | None = None,
        strict: bool | None = None,
        per_op_order: Mapping[str, Iterable[str]] | None = None,
        deny_vendors: Iterable[str] | None = None,
        allow_vendors: Iterable[str] | None = None,
        tuned: Mapping[str, Iterable[Mapping[str, Any]]] | None = None,
        defaults: str | None = None,
    ) -> SelectionPolicy:
        """Make a policy from plain containers; see the class for the values."""
        return cls(
            prefer=prefer.lower() if isinstance(prefer, str) else prefer,  # type: ignore[arg-type]
            strict=strict,  # type: ignore[arg-type]
            per_op_order=tuple((op, order) for op, order in (per_op_order or {}).items()),  # type: ignore[misc]
            deny_vendors=deny_vendors or frozenset(),  # type: ignore[arg-type]
            allow_vendors=allow_vendors or None,  # type: ignore[arg-type]
            tuned=tuned or (),  # type: ignore[arg-type]
            defaults=defaults.lower() if isinstance(defaults, str) else defaults,  # type: ignore[arg-type]
        )

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
        """Whether the user asked in so many words how this operator is chosen."""
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

    def _plain_names(self, key: str) -> list[str]:
        plus = "+" if key in self.extends else ""
        return [f"{plus}{name}" for name in sorted(getattr(self, key))]

    def to_dict(self) -> dict[str, Any]:
        """Return the policy as plain values; :meth:`from_plain` takes them back."""
        table = {"tuned": to_plain(self.tuned)} if self.tuned else {}
        return {
            "prefer": self.prefer,
            "strict": self.strict,
            "op_backends": self.per_op_order_dict,
            "deny_vendors": self._plain_names("deny_vendors"),
            "allow_vendors": None if self.allow_vendors is None else self._plain_names("allow_vendors"),
            "defaults": self.defaults,
            "explicit": sorted(self.explicit),
            **table,
        }

    @classmethod
    def from_plain(cls, values: Mapping[str, Any], source: str) -> SelectionPolicy:
        """Make a policy from what :meth:`to_dict` returned in another process."""
        allow = values["allow_vendors"]
        return cls(
            prefer=values["prefer"],
            strict=values["strict"],
            per_op_order=tuple((op, tuple(order)) for op, order in values["op_backends"].items()),
            deny_vendors=frozenset(values["deny_vendors"]),
            allow_vendors=None if allow is None else frozenset(allow),
            tuned=values.get("tuned", ()),
            explicit=frozenset(values["explicit"]),
            defaults=values["defaults"],
            sources=dict.fromkeys(values["explicit"], source),
        )

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits that differ where the policy does."""
        import hashlib
        import json

        text = json.dumps(self.to_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_prefer(value: object) -> str:
    """Return ``value`` if it is a kind.

    Raises:
        PolicyError: it is not.
    """
    if value not in KINDS:
        raise PolicyError(
            f"prefer must be one of {', '.join(KINDS)}, not {shown(value)}.{did_you_mean(value, KINDS)}"
        )
    return str(value)


def check_defaults(value: object) -> str:
    """Return ``value`` if it is ``packaged`` or ``none``.

    Raises:
        PolicyError: it is not.
    """
    known = (PACKAGED, NO_DEFAULTS)
    if value not in known:
        raise PolicyError(
            f"defaults must be one of {', '.join(known)}, not {shown(value)}.{did_you_mean(value, known)}"
        )
    return str(value)


def check_order(op_name: object, tokens: object) -> tuple[str, ...]:
    """Return an operator's order as a tuple of tokens.

    Raises:
        PolicyError: it is empty, or holds something that is no token, or one twice.
    """
    if not isinstance(op_name, str):
        raise PolicyError(f"an operator's name must be a string, not {shown(op_name)}.")
    if isinstance(tokens, str) or not isinstance(tokens, (list, tuple)):
        raise PolicyError(f"the order of {shown(op_name)} must be a list of tokens, not {shown(tokens)}.")
    if not tokens:
        raise PolicyError(f"the order of {shown(op_name)} is empty.")
    for token in tokens:
        head, colon, rest = token.partition(":") if isinstance(token, str) else ("", "", "")
        if head in ("vendor", "impl") and colon:
            if rest.strip() != rest or not rest:
                raise PolicyError(f"token {shown(token)} of {shown(op_name)} names nothing after the colon.")
        elif token not in KINDS:
            known = (*KINDS, "vendor:<name>", "impl:<impl_id>")
            raise PolicyError(
                f"{shown(token)} in the order of {shown(op_name)} is no token; tokens are {', '.join(known)}."
                f"{did_you_mean(token, KINDS)}"
            )
    if len(set(tokens)) != len(tokens):
        raise PolicyError(f"the order of {shown(op_name)} names a token twice: {'|'.join(tokens)}.")
    return tuple(tokens)


def check_vendors(key: str, values: object) -> tuple[frozenset[str], bool]:
    """Return the vendors of a list, and whether they add to it: each name has a ``+`` then.

    Raises:
        PolicyError: it is no list of names, or only some of them have a ``+``.
    """
    if isinstance(values, str) or not isinstance(values, (set, frozenset, list, tuple)):
        raise PolicyError(f"{key} must be a list of vendor names, not {shown(values)}.")
    for value in values:
        if not isinstance(value, str) or not value.removeprefix("+").strip():
            raise PolicyError(f"{key} must hold vendor names, not {shown(value)}.")
    added = {value.removeprefix("+").strip() for value in values if value.startswith("+")}
    if added and len(added) != len(values):
        plain = ", ".join(sorted(value for value in values if not value.startswith("+")))
        raise PolicyError(
            f"{key} must have a + before every name (they are added to the packaged ones) or before "
            f"none (they replace them); {shown(plain)} has none."
        )
    return frozenset(added or values), bool(added)


class PolicyListener(Protocol):
    """What is told of a changed global policy; an ``OpManager``."""

    def policy_changed(self) -> None:
        """Take the new policy into account."""

    @property
    def frozen(self) -> bool:
        """Whether a policy change is an error now."""


_context: ContextVar[SelectionPolicy | None] = ContextVar("vllm_fl_policy", default=None)


class _Global:
    """The policy of the process."""

    def __init__(self) -> None:
        self.lock = ForkSafeLock()
        self.chosen: SelectionPolicy | None = None
        self.from_environment: SelectionPolicy | None = None
        self.changes = 0
        # Replaced, not edited, so that whoever enters a context waits for nobody.
        self.listeners: tuple[weakref.ref[PolicyListener], ...] = ()

    def current(self) -> SelectionPolicy | None:
        """Return the policy in force, None where the environment must be read first."""
        return self.chosen or self.from_environment

    def each_listener(self) -> list[PolicyListener]:
        return [listener for ref in self.listeners if (listener := ref()) is not None]

    def add(self, listener: PolicyListener) -> None:
        with self.lock:
            self.listeners = (*map(weakref.ref, self.each_listener()), weakref.ref(listener))

    def refuse_while_frozen(self, what: str) -> None:
        if any(listener.frozen for listener in self.each_listener()):
            raise RuntimeError(
                f"{what} while the dispatch is frozen: every choice of this process is fixed. "
                "Call get_default_manager().thaw() first."
            )

    def change(self, what: str, policy: SelectionPolicy | None) -> None:
        with self.lock:
            self.refuse_while_frozen(what)
            self.chosen = policy
            self.changes += 1
            if policy is None:
                self.from_environment = None
        for listener in self.each_listener():
            listener.policy_changed()


_global = _Global()


def add_policy_listener(listener: PolicyListener) -> None:
    """Tell ``listener`` of every change of the global policy, for as long as it lives."""
    _global.add(listener)


def global_policy() -> SelectionPolicy:
    """Return the policy of the process, contexts left out.

    The environment is read once.

    Raises:
        PolicyError: the environment, or the file that it names, is wrong.
    """
    while True:
        changes, found = _global.changes, _global.current()
        if found is not None:
            return found
        # Imported and read without the lock, and perhaps by two threads.
        from vllm_fl.dispatch._config import policy_from_environment

        read = policy_from_environment()
        with _global.lock:
            if changes == _global.changes and _global.from_environment is None:
                _global.from_environment = read


def publish_if_current(policy: SelectionPolicy, publish: Callable[[], None]) -> bool:
    """Call ``publish`` if ``policy`` is in force, before it can be changed; say whether it was."""
    with _global.lock:
        if policy is not (_context.get() or _global.current()):
            return False
        publish()
        return True


def get_policy() -> SelectionPolicy:
    """Return the policy in force.

    Raises:
        PolicyError: the configuration is wrong; the message names the variable
            or the file and line. Every name in it is checked against what is
            installed.
    """
    policy = _context.get()
    if policy is None:
        policy = global_policy()
    from vllm_fl.dispatch.manager import get_default_manager

    get_default_manager().check_policy(policy)
    return policy


def set_global_policy(policy: SelectionPolicy) -> SelectionPolicy:
    """Make ``policy`` the policy of the process; return the one before.

    ::

        from vllm_fl.dispatch import SelectionPolicy, reset_global_policy, set_global_policy

        set_global_policy(SelectionPolicy.from_dict(per_op_order={"rms_norm": ["reference"]}))
        reset_global_policy()  # what the environment says

    It replaces all that the environment says, and lies over the available vendor's packaged
    defaults (``defaults="none"`` leaves them out). What was set aside after failures is
    tried again. Set before ``LLM()`` is made, it is the policy of the workers too.

    Raises:
        RuntimeError: the dispatch is frozen.
        TypeError: ``policy`` is no SelectionPolicy.
    """
    if not isinstance(policy, SelectionPolicy):
        raise TypeError(f"set_global_policy takes a SelectionPolicy, not {type(policy).__name__}")
    try:
        before = global_policy()
    except PolicyError:
        # A wrong environment must not stand in the way of the policy that replaces it.
        before = SelectionPolicy()
    _global.change("set_global_policy() was called", policy)
    return before


def reset_global_policy() -> None:
    """Forget :func:`set_global_policy` and read the environment again when asked.

    Raises:
        RuntimeError: the dispatch is frozen.
    """
    _global.change("reset_global_policy() was called", None)


@contextmanager
def policy_context(policy: SelectionPolicy) -> Iterator[SelectionPolicy]:
    """Put ``policy`` in force for this thread or task.

    ::

        from vllm_fl.dispatch import SelectionPolicy, call_op, policy_context

        with policy_context(SelectionPolicy.from_dict(prefer="reference", strict=True)):
            ...  # call_op chooses with it here, and nowhere else

    The innermost context holds; none of what lies outside it is mixed in, but the available
    vendor's packaged defaults. :func:`with_preference` and the others like it start from the
    policy in force instead. Entering or leaving one forgets no failure.

    Raises:
        RuntimeError: the dispatch is frozen.
    """
    if not isinstance(policy, SelectionPolicy):
        raise TypeError(f"policy_context takes a SelectionPolicy, not {type(policy).__name__}")
    _global.refuse_while_frozen("policy_context() was entered")
    token = _context.set(policy)
    try:
        yield policy
    finally:
        _context.reset(token)


def _changed(**values: Any) -> SelectionPolicy:
    policy = _context.get() or global_policy()
    explicit = policy.explicit | frozenset(values)
    sources = {**policy.sources, **dict.fromkeys(values, "a context manager")}
    extends = policy.extends - frozenset(values)
    return replace(policy, explicit=explicit, sources=sources, extends=extends, **values)


def with_preference(prefer: str) -> Any:
    """Context manager: the policy in force with another ``prefer``.

    Args:
        prefer: ``flagos``, ``vendor``, ``reference`` or ``native``.

    Raises:
        PolicyError: another value.
        RuntimeError: the dispatch is frozen.
    """
    return policy_context(_changed(prefer=prefer.lower() if isinstance(prefer, str) else prefer))


def with_strict_mode() -> Any:
    """Context manager: the policy in force, strict: the first failure is raised.

    Raises:
        RuntimeError: the dispatch is frozen.
    """
    return policy_context(_changed(strict=True))


def with_allowed_vendors(*vendors: str) -> Any:
    """Context manager: the policy in force, with no vendor but these.

    Implementations of the other kinds stay.

    Raises:
        RuntimeError: the dispatch is frozen.
    """
    return policy_context(_changed(allow_vendors=frozenset(vendors)))


def with_denied_vendors(*vendors: str) -> Any:
    """Context manager: the policy in force, without these vendors.

    Those that it denies already stay denied, those of the packaged defaults too.

    Raises:
        RuntimeError: the dispatch is frozen.
    """
    policy = _context.get() or global_policy()
    names = policy.deny_vendors | frozenset(vendors)
    adds = "deny_vendors" in policy.extends or "deny_vendors" not in policy.explicit
    return policy_context(_changed(deny_vendors=frozenset(f"+{name}" for name in names) if adds else names))


def policy_from_config(config_path: str) -> SelectionPolicy:
    """Read a policy from a YAML file; see the configuration reference for its keys.

    Raises:
        PolicyError: the file is missing or wrong; the message names file and line.
    """
    from vllm_fl.dispatch._config import policy_from_file

    return policy_from_file(str(config_path))

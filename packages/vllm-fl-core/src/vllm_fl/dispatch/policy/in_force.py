"""The policy in force, and how it is changed.

It is the innermost :func:`policy_context` of this thread or task, else the one of
:func:`set_global_policy`, else what the environment says
(:mod:`vllm_fl.dispatch.policy.reading`). A policy never changes once it is made. Who
chooses lays it over the packaged defaults (:mod:`vllm_fl.dispatch.policy.packaged`).
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING
from typing import Any
from typing import Protocol

from vllm_fl.dispatch.common.fork import ForkSafeLock
from vllm_fl.dispatch.errors import PolicyError
from vllm_fl.dispatch.policy.reading import policy_from_environment
from vllm_fl.dispatch.policy.value import SelectionPolicy

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Iterator


class PolicyListener(Protocol):
    """What is told of a changed global policy; an ``OpManager``."""

    def policy_changed(self) -> None:
        """Take the new policy into account."""

    @property
    def frozen(self) -> bool:
        """Whether a policy change is an error now."""


#: The policy of this thread or task, None outside of every context.
context: ContextVar[SelectionPolicy | None] = ContextVar("vllm_fl_policy", default=None)


class _Global:
    """The policy of the process."""

    def __init__(self) -> None:
        self.lock = ForkSafeLock()
        self.chosen: SelectionPolicy | None = None
        self.from_environment: SelectionPolicy | None = None
        self.changes = 0
        self.check: Callable[[SelectionPolicy], object] = lambda policy: None
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


def check_names_with(check: Callable[[SelectionPolicy], object]) -> None:
    """Let :func:`get_policy` call ``check``, of somebody who knows what is installed."""
    _global.check = check


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
        # Read without the lock, and perhaps by two threads.
        read = policy_from_environment()
        with _global.lock:
            if changes == _global.changes and _global.from_environment is None:
                _global.from_environment = read


def publish_if_current(policy: SelectionPolicy, publish: Callable[[], None]) -> bool:
    """Call ``publish`` if ``policy`` is in force, before it can be changed; say whether it was."""
    with _global.lock:
        if policy is not (context.get() or _global.current()):
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
    policy = context.get()
    if policy is None:
        policy = global_policy()
    _global.check(policy)
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
    token = context.set(policy)
    try:
        yield policy
    finally:
        context.reset(token)


def _changed(**values: Any) -> SelectionPolicy:
    policy = context.get() or global_policy()
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
    return policy_context(_changed(prefer=prefer))


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
    policy = context.get() or global_policy()
    names = policy.deny_vendors | frozenset(vendors)
    adds = "deny_vendors" in policy.extends or "deny_vendors" not in policy.explicit
    return policy_context(_changed(deny_vendors=frozenset(f"+{name}" for name in names) if adds else names))

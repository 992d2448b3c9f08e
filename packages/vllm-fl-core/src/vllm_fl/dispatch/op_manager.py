"""The manager of one registry: resolves, calls, explains and freezes.

What it follows is stated in :mod:`vllm_fl.dispatch.manager`.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.dispatch import selection
from vllm_fl.dispatch.availability import provisional_answers
from vllm_fl.dispatch.callables import callable_of
from vllm_fl.dispatch.callables import nothing_runs
from vllm_fl.dispatch.callables import warn_of_degradation
from vllm_fl.dispatch.calling.guard import Candidate
from vllm_fl.dispatch.common.fork import after_fork_in_child
from vllm_fl.dispatch.common.log import get_logger
from vllm_fl.dispatch.common.log import warn_once
from vllm_fl.dispatch.discovery import Discovery
from vllm_fl.dispatch.errors import DispatchError
from vllm_fl.dispatch.errors import NoImplementationError
from vllm_fl.dispatch.failures import Failures
from vllm_fl.dispatch.plan import Plan
from vllm_fl.dispatch.policy import add_policy_listener
from vllm_fl.dispatch.policy import global_policy
from vllm_fl.dispatch.policy import publish_if_current
from vllm_fl.dispatch.policy.in_force import context
from vllm_fl.dispatch.policy.names import check_names
from vllm_fl.dispatch.policy.packaged import effective
from vllm_fl.dispatch.registry import OpRegistry
from vllm_fl.dispatch.selection import Asked
from vllm_fl.dispatch.tables import Table
from vllm_fl.dispatch.tables import Tables
from vllm_fl.dispatch.types import NATIVE

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Mapping
    from collections.abc import Sequence

    from vllm_fl.dispatch.callables import Resolved
    from vllm_fl.dispatch.decision import Decision
    from vllm_fl.dispatch.policy import SelectionPolicy
    from vllm_fl.dispatch.registry import OpRegistrySnapshot
    from vllm_fl.dispatch.types import OpImpl
    from vllm_fl.dispatch.types import Origin

logger = get_logger(__name__)

_LATE = "late registration"

#: A plan that is out of date before it is published is made again this often.
_FREEZES_TRIED = 100


class _Frozen:
    """What holds from a freeze to the thaw."""

    def __init__(self, plan: Plan, snapshot: OpRegistrySnapshot) -> None:
        self.plan = plan
        self.snapshot = snapshot


class OpManager(Tables):
    """Resolves operators for one registry.

    Args:
        registry: what to choose from; it is used as it is. Where it is None, a
            new one is filled by the discovery of plugins.

    Attributes:
        registry: what is registered.
        failures: what was learned of implementations in this process.
    """

    def __init__(self, registry: OpRegistry | None = None) -> None:
        super().__init__()
        self.registry = registry if registry is not None else OpRegistry()
        self.failures = Failures(self._choices_change, self._origin_of)
        self._plugins = Discovery(self.registry, is_wanted=registry is None)
        self._frozen: _Frozen | None = None
        self._warned: set[str] = set()
        self._checked: tuple[SelectionPolicy, list[str]] | None = None
        self._ready_in = 0
        self.registry.add_listener(self)
        add_policy_listener(self)
        after_fork_in_child(self._forget_the_parent)

    # -- choosing -------------------------------------------------------------

    def snapshot(self) -> OpRegistrySnapshot:
        """Return what is chosen from: the registry's snapshot, that of the freeze while frozen."""
        frozen = self._frozen
        return frozen.snapshot if frozen else self.registry.snapshot()

    def explain(self, op_name: str, *, native: bool = False) -> Decision:
        """Return the decision that the policy in force makes for an operator.

        It loads what it must know to answer, and changes nothing.

        Args:
            op_name: the operator.
            native: include vLLM's own path, as a replaced layer does.

        Raises:
            UnknownOperatorError: no such operator.
        """
        self.ensure_initialized()
        return self._decide(op_name, self._policy_in_force(), self.snapshot(), Asked(with_native=native))

    def _decide(
        self, op_name: str, policy: SelectionPolicy, snapshot: OpRegistrySnapshot, asked: Asked
    ) -> Decision:
        failed = self.failures.by_operator.get(op_name, {})
        decision = selection.decide(op_name, policy, snapshot, failed, asked)
        return decision.noted(self.failures.trials.get(op_name, {}))

    def resolve_candidates(self, op_name: str) -> list[OpImpl]:
        """Return what can run an operator, in the order in which it is tried.

        Raises:
            UnknownOperatorError: no such operator.
            NoImplementationError: nothing can run it.
        """
        decision = self.explain(op_name)
        if decision.impl_id is None:
            raise NoImplementationError(self._why_nothing_runs(decision))
        impls = {i.impl_id: i for i in self.snapshot().impls_by_op.get(op_name, ())}
        return [impls[report.impl_id] for report in decision.usable]

    def get_selected_impl_id(self, op_name: str) -> str:
        """Return the id of what runs an operator.

        Raises:
            UnknownOperatorError: no such operator.
            NoImplementationError: nothing can run it.
        """
        return self.resolve_candidates(op_name)[0].impl_id

    def _why_nothing_runs(self, decision: Decision) -> str:
        text = nothing_runs(decision, list(self.registry.plugins.values()))
        loading = self._plugins.loading
        return f"{text}\n  {loading} has not ended, and waits for this call." if loading else text

    # -- resolving ------------------------------------------------------------

    def _fill(self, table: Table, op_name: str) -> Callable[..., Any]:
        """Resolve an operator into a table, unless the world has moved on meanwhile."""
        self.ensure_initialized()
        policy = table.policy if table.policy is not None else global_policy()
        self.check_policy(policy)
        snapshot, world = self.snapshot(), self._world()
        resolved = self._resolve(op_name, policy, snapshot, Asked())
        with self._lock:
            is_current = table is self._table or self._context_tables.get(id(table.policy)) is table
            if is_current and snapshot is self.snapshot() and world == self._world():
                table[op_name] = resolved.fn
        return resolved.fn

    def _world(self) -> tuple[Any, int]:
        """Return what a choice depends on beside its policy and snapshot."""
        return self.failures.by_operator, provisional_answers()

    def resolve_with_native(
        self,
        op_name: str,
        native: Callable[..., Any] | None,
        *,
        only_traceable: bool = False,
        wrap: Callable[[Candidate], Candidate] | None = None,
        layer: Sequence[tuple[Any, ...]] = (),
    ) -> Resolved:
        """Resolve an operator for a layer of vLLM, which has a path of its own.

        Args:
            op_name: the operator.
            native: the layer's own path, taking the operator's arguments; None
                leaves it out, for what several layers share.
            only_traceable: leave out of ``fn`` what Dynamo cannot trace, unless
                it is the first choice.
            wrap: applied to every candidate but the native one.
            layer: calls of this layer, all arguments of each in the contract's order. Where
                a ``supports_layer`` answers them alike, it is asked at no call.
        """
        self.ensure_initialized()
        policy = self._policy_in_force()
        snapshot = self.snapshot()
        candidate = None
        if native is not None:
            operator = snapshot.operators.get(op_name)
            writes = operator.mutates if operator else ()
            candidate = Candidate(NATIVE, native, writes=writes, traceable=True)
        asked = Asked(native is not None, only_traceable, tuple(layer))
        return self._resolve(op_name, policy, snapshot, asked, candidate, wrap)

    def _resolve(
        self,
        op_name: str,
        policy: SelectionPolicy,
        snapshot: OpRegistrySnapshot,
        asked: Asked,
        native: Candidate | None = None,
        wrap: Callable[[Candidate], Candidate] | None = None,
    ) -> Resolved:
        decision = self._decide(op_name, policy, snapshot, asked)
        if decision.impl_id is None:
            raise NoImplementationError(self._why_nothing_runs(decision))
        warn_of_degradation(decision, self._warned)
        strict = effective(policy, snapshot).strict
        measured = policy.measured(op_name)
        return callable_of(
            decision, snapshot, self.failures, asked, native, measured, strict=strict, wrap=wrap
        )

    # -- plugins and the policy ----------------------------------------------

    def ensure_initialized(self) -> None:
        """Discover the plugins, once per process, and check the configuration.

        Raises:
            PolicyError: the configuration is wrong.
        """
        if self._ready_in == os.getpid():
            return
        self.discover()
        self._policy_in_force()
        if self._plugins.loading is None:
            self._ready_in = os.getpid()

    def discover(self) -> None:
        """Load the plugins, once, and ask neither a policy nor a backend anything.

        A call that a plugin itself waits for while it is loaded (it comes from the plugin,
        from a module that it imports, or from a thread that it joins) returns at once, and
        finds what has been registered so far.

        Raises:
            PolicyError: a variable that says which plugins to load is wrong.
            DispatchError: another thread loads them, and takes too long.
        """
        self._plugins.load()

    def _policy_in_force(self) -> SelectionPolicy:
        # The table of a frozen process has the policy of the freeze.
        policy = self._table.policy or context.get() or global_policy()
        self.check_policy(policy)
        return policy

    def check_policy(self, policy: SelectionPolicy) -> list[str]:
        """Check every name in a policy against what is installed.

        Returns:
            What is no error and has no effect here, a line each; it is logged, once.

        Raises:
            PolicyError: an unknown operator, vendor or implementation.
        """
        checked = self._checked
        if checked is not None and policy is checked[0]:
            return checked[1]
        self.discover()
        if self._plugins.loading is not None:
            return []  # a plugin asks, and not every name is known yet
        plugins = list(self.registry.plugins.values())
        broken = [f"{r.name} {r.distribution}" for r in plugins if r.state != "loaded"]
        absent = check_names(policy, self.registry.snapshot(), broken)
        lines = [warn_once("%s: denies vendor %s, which nothing here has.%s", *one) for one in absent]
        self._checked = policy, lines
        return lines

    # -- failures -------------------------------------------------------------

    def get_failed_impls(self, op_name: str | None = None) -> dict[str, set[str]]:
        """Return what was set aside, by operator."""
        failed = self.failures.by_operator
        return {op: set(ids) for op, ids in failed.items() if ids and op_name in (None, op)}

    def clear_failed_impls(self, op_name: str | None = None) -> None:
        """Try again what was set aside, of one operator or of all."""
        self.failures.clear(op_name)

    def _origin_of(self, op_name: str, impl_id: str) -> Origin | None:
        impls = self.snapshot().impls_by_op.get(op_name, ())
        return next((impl.origin for impl in impls if impl.impl_id == impl_id and impl.origin), None)

    # -- freezing -------------------------------------------------------------

    @property
    def frozen(self) -> bool:
        """Whether every choice is fixed."""
        return self._frozen is not None

    @property
    def plan(self) -> Plan | None:
        """The plan of a frozen manager."""
        frozen = self._frozen
        return frozen.plan if frozen else None

    def freeze(self, extra: Mapping[str, Any] | None = None) -> Plan:
        """Fix every choice of the process and return the plan.

        Until :meth:`thaw`, a policy change raises RuntimeError, and a
        registration is recorded, not used, and warned about once.

        Args:
            extra: plain values that the fingerprint covers too.

        Raises:
            PolicyError: the configuration is wrong.
            DispatchError: what is chosen from changes all the time.
        """
        for _ in range(_FREEZES_TRIED):
            frozen = self._frozen
            if frozen is not None:
                return frozen.plan
            self.ensure_initialized()
            world, policy, snapshot = self._world(), self._policy_in_force(), self.registry.snapshot()
            plan, table = self._make_plan(policy, snapshot, dict(extra or {}))
            publish = functools.partial(self._publish, _Frozen(plan, snapshot), table)
            with self._lock:
                is_same = snapshot is self.registry.snapshot() and world == self._world()
                if self._frozen is None and is_same:
                    publish_if_current(policy, publish)
        raise DispatchError(
            f"freeze() gave up: something was registered, set aside or set as the policy during each of "
            f"{_FREEZES_TRIED} attempts to choose."
        )

    def _publish(self, frozen: _Frozen, table: Table) -> None:
        self._frozen = frozen
        self._publish_table(table)

    def _make_plan(
        self, policy: SelectionPolicy, snapshot: OpRegistrySnapshot, extra: dict[str, Any]
    ) -> tuple[Plan, Table]:
        table = Table(self, policy)
        candidates: dict[str, tuple[str, ...]] = {}
        for op_name in sorted({*snapshot.operators, *snapshot.impls_by_op}):
            try:
                resolved = self._resolve(op_name, policy, snapshot, Asked())
            except NoImplementationError:
                candidates[op_name] = ()
                continue
            candidates[op_name] = tuple(report.impl_id for report in resolved.decision.usable)
            table[op_name] = resolved.fn
        choices = {op_name: impl_ids[0] if impl_ids else None for op_name, impl_ids in candidates.items()}
        plugins = list(self.registry.plugins.values())
        plan = Plan.of(choices, policy, snapshot, extra, candidates=candidates, plugins=plugins)
        return plan, table

    def thaw(self) -> None:
        """Let policies and registrations change the choices again."""
        with self._lock:
            self._frozen = None
            self._warned.discard(_LATE)
            self._new_tables()

    # -- what changes the tables ----------------------------------------------

    def policy_changed(self) -> None:
        """Forget every choice and every failure; a new global policy was set."""
        with self._lock:
            if self._frozen is not None:
                return  # frozen between the change and this call, with the new policy
            self.failures.forget()
            self._warned = set()
            self._new_tables()

    def registry_changed(self) -> None:
        """Forget every choice; something was registered."""
        with self._lock:
            self._checked = None
            frozen = self._frozen
            if frozen is None:
                self._new_tables()
                return
            if frozen.snapshot is self.registry.snapshot():
                return  # frozen between the registration and this call
            is_first = _LATE not in self._warned
            self._warned.add(_LATE)
        if is_first:
            logger.warning("something was registered after the dispatch was frozen; it is used after thaw()")

    def _forget_the_parent(self) -> None:
        self._frozen = None
        self._warned = set()
        self._ready_in = 0
        self._new_tables()

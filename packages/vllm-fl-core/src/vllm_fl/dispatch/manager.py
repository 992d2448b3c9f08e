"""The manager: resolves, calls, explains and freezes.

Which one runs
==============

1. The policy in force: the innermost ``policy_context``, else
   ``set_global_policy``, else ``VLLM_FL_CONFIG`` (a YAML file; it replaces the
   environment's variables), else environment variables; each over the active
   vendor's packaged defaults over the built-in ones, key by key and operator by
   operator, unless it says ``defaults: none``. With two available vendors
   neither's packaged defaults apply, nor do those of a vendor that the policy
   denies.
2. The implementations of the operator, minus those that the policy denies,
   minus those that are not available.
3. Their order: the operator's own order where the policy gives one (what it
   does not list is not tried), else the kinds in the order of ``prefer``; inside
   one token by priority, then by ``impl_id``. Tokens: ``flagos``, ``vendor``,
   ``vendor:<name>``, ``reference``, ``impl:<impl_id>``, and ``native``: inside
   vLLM every replaced layer has vLLM's own path as a candidate, the last one
   unless the policy says otherwise.
4. A tuned table, where the policy names one, reorders step 3 for the shapes that
   it has measured (:mod:`vllm_fl.dispatch.tuned`).
5. The first whose ``supports`` agrees runs.

A layer that vLLM leaves to its compiler stays ``native`` unless the policy says
otherwise in so many words (an explicit ``prefer``, order or context) or a tuned
table names its operator.

When one fails
==============

1. "Not for these inputs" moves to the next candidate, for this call only. It is said
   by ``supports``; by ``NotImplementedError`` of an implementation that writes none of
   its arguments; or by ``RefusedBeforeWriting``, whose name promises that nothing was
   written. The promise is the implementation's own: where it calls another operator,
   that one's refusal is an exception like any other.
2. A fault of the caller (arguments that do not bind, an unknown operator) is
   raised as it is.
3. Out of memory, a dead device, a signal: raised as they are, also inside a group, a
   cause or a context. What the devices' libraries say then is a table with its
   sources, ``fatal_errors.json``.
4. Any other exception of an implementation that writes none of its arguments: with
   ``strict`` it is raised; otherwise the next candidate runs, and only if it
   succeeds on the same arguments is the first set aside for that operator (until
   a policy is set or it is cleared), with one warning. If all raise, nothing is
   set aside.
5. After an implementation that writes its arguments the next candidate runs only when
   they can be put back: until its first success, from copies; with and without an
   optional tensor it succeeds apart. Afterwards the exception is raised, with a note.
   ``NotImplementedError`` is such an exception, since torch raises it from the middle
   of a kernel too; until the first success it sets nothing aside.
6. When nothing is left, the first exception is raised, of its own type, with the
   others as notes. A refusal gives way to a later exception that promises less.
7. During tracing or graph capture, and with more than one rank, the exceptions of
   rules 4 and 5 are raised; with ranks, until a first success, ``NotImplementedError``
   is not. With ``strict``, no copies are made, and an implementation that has no
   predicate is called without a guard, so that its refusal is raised too.

The code of the second list is in :mod:`vllm_fl.dispatch._guard`.

Threads
=======

A call takes no lock. It relies on what Python documents, and not on a lock around
the interpreter: reading and binding an attribute, and getting and setting one key of
a dict, are each done as a whole, and a ``ContextVar`` belongs to its thread or task.
Policies, snapshots, decisions and plans are never edited, only replaced. A table is
filled only while the policy, snapshot and failures that it was resolved from are
current, which is checked under the lock; a call that has got a callable keeps it.

No lock is held while somebody else's code runs: an import, ``register()``,
``is_available()``, a predicate, a log handler, the text of an exception. It is run
first, and what it gave is published if nothing has changed meanwhile. The first thread
that needs the plugins, or a backend's answer, gets them; others wait for it without a
lock (:mod:`vllm_fl.dispatch._work`), and where it waits for them in its turn:

* A call for which a plugin waits while it is loaded, from the plugin itself, a module
  that it imports or a thread that it joins, uses what has been registered so far.
* A call from a module that ``is_available()`` imports asks the backend itself, and what
  it hears is not kept. Any other call that the answer waits for raises `DispatchError`.
* A wait that has another cause ends with a `DispatchError` after 120 seconds.
"""

from __future__ import annotations

import functools
import os
from collections import OrderedDict
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.dispatch import selection
from vllm_fl.dispatch._foreign import describe
from vllm_fl.dispatch._foreign import is_loggable
from vllm_fl.dispatch._fork import ForkSafeLock
from vllm_fl.dispatch._fork import after_fork_in_child
from vllm_fl.dispatch._guard import Candidate
from vllm_fl.dispatch._log import get_logger
from vllm_fl.dispatch._log import level_from_environment
from vllm_fl.dispatch._log import warn_once
from vllm_fl.dispatch._refusal import note_entrance
from vllm_fl.dispatch._refusal import note_handed_out
from vllm_fl.dispatch._work import Work
from vllm_fl.dispatch.backend import provisional_answers
from vllm_fl.dispatch.errors import DispatchError
from vllm_fl.dispatch.errors import NoImplementationError
from vllm_fl.dispatch.errors import PolicyError
from vllm_fl.dispatch.plan import Plan
from vllm_fl.dispatch.policy import add_policy_listener
from vllm_fl.dispatch.policy import global_policy
from vllm_fl.dispatch.policy import publish_if_current
from vllm_fl.dispatch.policy.in_force import check_names_with
from vllm_fl.dispatch.policy.in_force import context
from vllm_fl.dispatch.policy.names import check_names
from vllm_fl.dispatch.policy.packaged import effective
from vllm_fl.dispatch.registry import OpRegistry
from vllm_fl.dispatch.resolved import build
from vllm_fl.dispatch.resolved import nothing_runs
from vllm_fl.dispatch.resolved import warn_of_degradation
from vllm_fl.dispatch.resolved import with_table
from vllm_fl.dispatch.tuned import reordered
from vllm_fl.dispatch.types import NATIVE

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Mapping

    from vllm_fl.dispatch.decision import Decision
    from vllm_fl.dispatch.policy import SelectionPolicy
    from vllm_fl.dispatch.registry import OpRegistrySnapshot
    from vllm_fl.dispatch.resolved import Resolved
    from vllm_fl.dispatch.types import OpImpl

logger = get_logger(__name__)

# Bound once: Python takes an imported name for a module, and `context.get()` would
# make a bound method for every call.
_context_policy = context.get

#: Tables of context policies that are kept; older ones are made anew.
_TABLES_KEPT = 64

#: A plan that is out of date before it is published is made again this often.
_FREEZES_TRIED = 100


class _Table(dict[str, Any]):
    """The callables of one policy and one snapshot; filled when asked."""

    __slots__ = ("manager", "policy")

    def __init__(self, manager: OpManager, policy: SelectionPolicy | None) -> None:
        super().__init__()
        self.manager = manager
        self.policy = policy

    def __missing__(self, op_name: str) -> Any:
        return self.manager._fill(self, op_name)


class OpManager:
    """Resolves operators for one registry.

    Args:
        registry: what to choose from; it is used as it is. Where it is None, a
            new one is filled by the discovery of plugins.
    """

    def __init__(self, registry: OpRegistry | None = None) -> None:
        self.registry = registry if registry is not None else OpRegistry()
        self._discovers = registry is None
        self._discovery: Work | None = None
        self._lock = ForkSafeLock()
        self._plan: Plan | None = None
        self._frozen_snapshot: OpRegistrySnapshot | None = None
        self._failed: dict[str, dict[str, str]] = {}
        self._proven: set[tuple[str, str, tuple[bool, ...]]] = set()
        self._trials: dict[str, dict[str, str]] = {}
        self._warned: set[str] = set()
        self._bad_answers: set[tuple[str, str]] = set()
        self._checked: tuple[SelectionPolicy, list[str]] | None = None
        self._ready_in = 0
        self._table = _Table(self, None)
        self._context_tables: OrderedDict[int, _Table] = OrderedDict()
        self.registry.add_listener(self)
        add_policy_listener(self)
        after_fork_in_child(self._forget_the_parent)

    # -- the hot path ---------------------------------------------------------

    def call(self, op_name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Run an operator with the policy in force.

        Raises:
            UnknownOperatorError: no such operator.
            NoImplementationError: nothing can run it.
            Exception: what the implementation raises; see "When one fails".
        """
        policy = _context_policy()
        if policy is None:
            table = self._table
        else:
            # The table keeps its policy alive, so that no other one has this id.
            table = self._context_tables.get(id(policy)) or self._context_table(policy)
        return table[op_name](*args, **kwargs)

    def resolve(self, op_name: str) -> Callable[..., Any]:
        """Return the operator as a callable that keeps the choice of this moment.

        Raises:
            UnknownOperatorError: no such operator.
            NoImplementationError: nothing can run it.
        """
        policy = _context_policy()
        table = self._table if policy is None else self._context_table(policy)
        function: Callable[..., Any] = table[op_name]
        note_handed_out(function)
        return function

    def _context_table(self, policy: SelectionPolicy) -> _Table:
        table = self._context_tables.get(id(policy))
        if table is not None and table.policy is policy:
            return table
        table = self._table
        if table.policy is not None:
            return table  # frozen: what was chosen then holds here too
        with self._lock:
            if self._plan is not None:
                return self._table
            table = _Table(self, policy)
            self._context_tables[id(policy)] = table
            while len(self._context_tables) > _TABLES_KEPT:
                self._context_tables.popitem(last=False)
            return table

    # -- resolving ------------------------------------------------------------

    def _fill(self, table: _Table, op_name: str) -> Callable[..., Any]:
        """Resolve an operator into a table, unless the world has moved on meanwhile."""
        self.ensure_initialized()
        policy = table.policy if table.policy is not None else global_policy()
        self.check_policy(policy)
        snapshot, failed, provisional = self.snapshot(), self._failed, provisional_answers()
        resolved = self._resolve(op_name, policy, snapshot)
        with self._lock:
            is_current = table is self._table or self._context_tables.get(id(table.policy)) is table
            is_same = snapshot is self.snapshot() and failed is self._failed
            if is_current and is_same and provisional == provisional_answers():
                table[op_name] = resolved.fn
        return resolved.fn

    def snapshot(self) -> OpRegistrySnapshot:
        """Return what is chosen from: the registry's snapshot, that of the freeze while frozen."""
        return self._frozen_snapshot or self.registry.snapshot()

    def _policy_in_force(self) -> SelectionPolicy:
        # The table of a frozen process has the policy of the freeze.
        policy = self._table.policy or _context_policy() or global_policy()
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
        if self._discovery is not None:
            return []  # a plugin asks, and not every name is known yet
        plugins = list(self.registry.plugins.values())
        broken = [f"{r.name} {r.distribution}" for r in plugins if r.state != "loaded"]
        absent = check_names(policy, self.registry.snapshot(), broken)
        lines = [warn_once("%s: denies vendor %s, which nothing here has.%s", *one) for one in absent]
        self._checked = policy, lines
        return lines

    def resolve_with_native(
        self,
        op_name: str,
        native: Callable[..., Any] | None,
        *,
        only_traceable: bool = False,
        wrap: Callable[[Candidate], Candidate] | None = None,
    ) -> Resolved:
        """Resolve an operator for a layer of vLLM, which has a path of its own.

        Args:
            op_name: the operator.
            native: the layer's own path, taking the operator's arguments; None
                leaves it out, for what several layers share.
            only_traceable: leave out of ``fn`` what Dynamo cannot trace, unless
                it is the first choice.
            wrap: applied to every candidate but the native one.
        """
        self.ensure_initialized()
        policy = self._policy_in_force()
        snapshot = self.snapshot()
        candidate = None
        if native is not None:
            operator = snapshot.operators.get(op_name)
            writes = operator.mutates if operator else ()
            candidate = Candidate(NATIVE, native, writes=writes, traceable=True)
        return self._resolve(op_name, policy, snapshot, candidate, only_traceable, wrap)

    def _resolve(
        self,
        op_name: str,
        policy: SelectionPolicy,
        snapshot: OpRegistrySnapshot,
        native: Candidate | None = None,
        only_traceable: bool = False,
        wrap: Callable[[Candidate], Candidate] | None = None,
    ) -> Resolved:
        decision = self._decide(op_name, policy, snapshot, with_native=native is not None)
        if decision.impl_id is None:
            raise NoImplementationError(self._why_nothing_runs(decision))
        warn_of_degradation(decision, self._warned)
        strict = effective(policy, snapshot).strict

        def made(its: Decision) -> Resolved:
            return build(its, snapshot, self, native, strict=strict, only_traceable=only_traceable, wrap=wrap)

        resolved, measured = made(decision), policy.measured(op_name)
        operator = snapshot.operators.get(op_name)
        if not measured or operator is None or only_traceable:
            return resolved
        return with_table(operator, resolved, {entry: made(reordered(decision, entry)) for entry in measured})

    def _decide(
        self, op_name: str, policy: SelectionPolicy, snapshot: OpRegistrySnapshot, *, with_native: bool
    ) -> Decision:
        failed = self._failed.get(op_name, {})
        decision = selection.decide(op_name, policy, snapshot, failed, with_native=with_native)
        return decision.noted(self._trials.get(op_name, {}))

    def _why_nothing_runs(self, decision: Decision) -> str:
        text = nothing_runs(decision, list(self.registry.plugins.values()))
        work = self._discovery
        return f"{text}\n  {work.what} has not ended, and waits for this call." if work else text

    # -- asking ---------------------------------------------------------------

    def ensure_initialized(self) -> None:
        """Discover the plugins, once per process, and check the configuration.

        Raises:
            PolicyError: the configuration is wrong.
        """
        if self._ready_in == os.getpid():
            return
        self.discover()
        self._policy_in_force()
        if self._discovery is None:
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
        if not self._discovers:
            return
        problem = level_from_environment()
        if problem:
            raise PolicyError(problem)
        from vllm_fl.dispatch.discovery import discover_plugins

        mine = Work("the discovery of plugins")
        while True:
            with self._lock:
                if not self._discovers:
                    return
                work = self._discovery
                if work is None:
                    self._discovery = mine
                    break
            if work.wait() != "done":
                return
        has_ended = False
        try:
            discover_plugins(self.registry, mine.goes_on)
            has_ended = True
        finally:
            with self._lock:
                # In a child that was forked meanwhile, another one may be under way.
                if self._discovery is mine:
                    self._discovery = None
                self._discovers = self._discovers and not has_ended
                mine.is_done = True

    def explain(self, op_name: str, *, native: bool = False) -> Decision:
        """Return the decision that the policy in force makes for an operator.

        Args:
            op_name: the operator.
            native: include vLLM's own path, as a replaced layer does.

        Raises:
            UnknownOperatorError: no such operator.
        """
        self.ensure_initialized()
        policy = self._policy_in_force()
        snapshot = self.snapshot()
        if not native:
            try:
                return self._resolve(op_name, policy, snapshot).decision
            except NoImplementationError:
                pass
        return self._decide(op_name, policy, snapshot, with_native=native)

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

    # -- failures -------------------------------------------------------------

    def get_failed_impls(self, op_name: str | None = None) -> dict[str, set[str]]:
        """Return what was set aside, by operator."""
        failed = self._failed
        return {op: set(ids) for op, ids in failed.items() if ids and op_name in (None, op)}

    def is_set_aside(self, op_name: str, impl_id: str) -> bool:
        """Whether an implementation was set aside for an operator; for each call."""
        return impl_id in self._failed.get(op_name, ())

    def clear_failed_impls(self, op_name: str | None = None) -> None:
        """Try again what was set aside, of one operator or of all."""
        with self._lock:
            kept = {} if op_name is None else {op: ids for op, ids in self._failed.items() if op != op_name}
            self._failed = kept
            for table in self._tables():
                for name in [op_name] if op_name else list(table):
                    table.pop(name, None)

    def set_aside(self, op_name: str, impl_id: str, error: BaseException) -> None:
        """Do not choose an implementation for an operator again; warn once."""
        reason = describe(error)
        with self._lock:
            known = self._failed.get(op_name, {})
            if impl_id in known:
                return
            self._failed = {**self._failed, op_name: {**known, impl_id: reason}}
            for table in self._tables():
                table.pop(op_name, None)
        logger.warning(
            "%s raised for %s and is set aside; the next candidate ran on the same arguments. "
            "`clear_failed_impls(%r)` tries it again. It was: %s",
            impl_id,
            op_name,
            op_name,
            reason,
            exc_info=error if is_loggable(error) else None,
        )

    def bad_answer(self, op_name: str, impl_id: str, answer: str) -> None:
        """Say once that a predicate returns what is neither a bool nor a sentence."""
        with self._lock:
            if (op_name, impl_id) in self._bad_answers:
                return
            self._bad_answers.add((op_name, impl_id))
        impls = self.snapshot().impls_by_op.get(op_name, ())
        origin = next((impl.origin for impl in impls if impl.impl_id == impl_id and impl.origin), None)
        logger.warning(
            "the predicate of %s%s for %s returned %s. It must return True, or a sentence that says why not; "
            "this counts as a refusal. Report it to its authors.",
            impl_id,
            f" ({origin})" if origin else "",
            op_name,
            answer,
        )

    def is_proven(self, op_name: str, impl_id: str, kind: tuple[bool, ...] = ()) -> bool:
        """Whether an implementation has succeeded once in this process.

        Args:
            op_name: the operator.
            impl_id: the implementation.
            kind: which of the optional tensors that make two operators of one are given.
        """
        return (op_name, impl_id, kind) in self._proven

    def prove(self, op_name: str, impl_id: str, kind: tuple[bool, ...] = ()) -> None:
        """Note an implementation's first success; see :meth:`is_proven`."""
        self._proven.add((op_name, impl_id, kind))

    def note_trial(self, op_name: str, impl_id: str, what: str) -> None:
        """Let every later decision say what came of an implementation's first calls."""
        with self._lock:
            self._trials = {**self._trials, op_name: {**self._trials.get(op_name, {}), impl_id: what}}

    # -- freezing -------------------------------------------------------------

    @property
    def frozen(self) -> bool:
        """Whether every choice is fixed."""
        return self._plan is not None

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
            plan = self._plan
            if plan is not None:
                return plan
            self.ensure_initialized()
            failed, provisional = self._failed, provisional_answers()
            policy, snapshot = self._policy_in_force(), self.registry.snapshot()
            plan, table = self._make_plan(policy, snapshot, dict(extra or {}))
            publish = functools.partial(self._publish, plan, table, snapshot)
            with self._lock:
                is_same = snapshot is self.registry.snapshot() and failed is self._failed
                if self._plan is None and is_same and provisional == provisional_answers():
                    publish_if_current(policy, publish)
        raise DispatchError(
            f"freeze() gave up: something was registered, set aside or set as the policy during each of "
            f"{_FREEZES_TRIED} attempts to choose."
        )

    def _publish(self, plan: Plan, table: _Table, snapshot: OpRegistrySnapshot) -> None:
        self._plan, self._table, self._frozen_snapshot = plan, table, snapshot
        self._context_tables = OrderedDict()

    def _make_plan(
        self, policy: SelectionPolicy, snapshot: OpRegistrySnapshot, extra: dict[str, Any]
    ) -> tuple[Plan, _Table]:
        table = _Table(self, policy)
        candidates: dict[str, tuple[str, ...]] = {}
        for op_name in sorted({*snapshot.operators, *snapshot.impls_by_op}):
            try:
                resolved = self._resolve(op_name, policy, snapshot)
            except NoImplementationError:
                candidates[op_name] = ()
                continue
            candidates[op_name] = tuple(report.impl_id for report in resolved.decision.usable)
            table[op_name] = resolved.fn
        choices = {op_name: impl_ids[0] if impl_ids else None for op_name, impl_ids in candidates.items()}
        plugins = list(self.registry.plugins.values())
        plan = Plan.of(choices, policy, snapshot, extra, candidates=candidates, plugins=plugins)
        return plan, table

    @property
    def plan(self) -> Plan | None:
        """The plan of a frozen manager."""
        return self._plan

    def thaw(self) -> None:
        """Let policies and registrations change the choices again."""
        with self._lock:
            self._plan = self._frozen_snapshot = None
            self._warned.discard("late registration")
            self._new_tables()

    # -- what changes the tables ----------------------------------------------

    def _tables(self) -> list[_Table]:
        return [self._table, *self._context_tables.values()]

    def _new_tables(self) -> None:
        self._table = _Table(self, None)
        self._context_tables = OrderedDict()

    def policy_changed(self) -> None:
        """Forget every choice and every failure; a new global policy was set."""
        with self._lock:
            if self._plan is not None:
                return  # frozen between the change and this call, with the new policy
            self._failed = {}
            self._trials = {}
            self._warned = set()
            self._new_tables()

    def registry_changed(self) -> None:
        """Forget every choice; something was registered."""
        with self._lock:
            self._checked = None
            if self._plan is None:
                self._new_tables()
                return
            if self._frozen_snapshot is self.registry.snapshot():
                return  # frozen between the registration and this call
            is_first = "late registration" not in self._warned
            self._warned.add("late registration")
        if is_first:
            logger.warning("something was registered after the dispatch was frozen; it is used after thaw()")

    def _forget_the_parent(self) -> None:
        self._plan = self._frozen_snapshot = None
        self._failed = {}
        self._trials = {}
        self._proven = set()
        self._warned = set()
        self._bad_answers = set()
        self._ready_in = 0
        self._discovery = None
        self._new_tables()


_default: OpManager | None = None
_default_lock = ForkSafeLock()


def get_default_manager() -> OpManager:
    """Return the manager of the process, made when first asked for.

    It is what :func:`call_op` and :func:`resolve_op` ask. ``explain(op)`` says what runs
    and why, ``freeze()`` fixes every choice, ``registry`` holds what is registered.
    """
    global _default
    found = _default
    if found is None:
        made = OpManager()
        with _default_lock:
            found = _default = _default or made
    return found


def reset_default_manager() -> None:
    """Forget the manager of the process, its registry, choices and failures.

    The next one discovers the plugins anew. Policies stay as they are.
    """
    global _default
    with _default_lock:
        before, _default = _default, None
    # Whoever still holds it must not keep policies from being changed.
    if before is not None:
        before.thaw()


def call_op(op_name: str, /, *args: Any, **kwargs: Any) -> Any:
    """Run an operator with the implementation that the policy in force chooses.

    ::

        import torch
        from vllm_fl.dispatch import call_op, get_default_manager, with_preference

        x = torch.randn(4, 256)
        y = call_op("silu_and_mul", x)  # T[4, 128]
        print(get_default_manager().explain("silu_and_mul"))  # what runs, and why
        with with_preference("reference"):  # another choice, for this thread or task
            assert torch.allclose(call_op("silu_and_mul", x), y, atol=1e-5)

    ``help(Operators.silu_and_mul)`` says what an operator takes, writes and returns;
    ``help(vllm_fl.dispatch.manager)`` which implementation runs, and what happens when
    one fails. The short of it: of the implementations that are allowed, available and
    ready to take these arguments, the first in the policy's order runs; where it says
    "not for these inputs" or fails before it has written anything, the next one does.

    It follows contexts, policy changes and late registrations at once. What is called
    again and again with one choice is cheaper by :func:`resolve_op`.

    Args:
        op_name: the operator, such as ``"rms_norm"``; ``vllm-fl list ops`` lists them.
        *args: its arguments, in the contract's order.
        **kwargs: its arguments by name.

    Returns:
        What the operator's contract says.

    Raises:
        UnknownOperatorError: no such operator; the message has the nearest name.
        NoImplementationError: nothing can run it; the message says what to install.
        PolicyError: the configuration is wrong; the message names the variable, or the
            file and line.
        TypeError: the arguments do not fit the operator's signature.
        Exception: what the implementation raises; see "When one fails".
    """
    manager = _default or get_default_manager()
    policy = _context_policy()
    if policy is None:
        table = manager._table
    else:
        table = manager._context_tables.get(id(policy)) or manager._context_table(policy)
    return table[op_name](*args, **kwargs)  # as in OpManager.call, without its frame


def resolve_op(op_name: str) -> Callable[..., Any]:
    """Return an operator as a callable that keeps the choice of this moment.

    ::

        import torch
        from vllm_fl.dispatch import resolve_op

        rms_norm = resolve_op("rms_norm")
        x, weight = torch.randn(4, 128), torch.ones(128)
        for _ in range(3):
            y = rms_norm(x, None, weight, 1e-6)

    With ``strict`` and no predicate it is the implementation itself; else it keeps the
    rules of "When one fails". The policy is read here and never in the callable, which
    can be traced. Resolve anew after a change of the policy.

    Args:
        op_name: the operator.

    Returns:
        A callable with the operator's signature.

    Raises:
        UnknownOperatorError: no such operator.
        NoImplementationError: nothing can run it; the message says what to install.
        PolicyError: the configuration is wrong.
    """
    return get_default_manager().resolve(op_name)


check_names_with(lambda policy: get_default_manager().check_policy(policy))

# An implementation may call another operator: its exceptions pass through these.
note_entrance(OpManager.call)
note_entrance(call_op)

"""The tables of a manager: what was resolved, by operator; a call is a look-up in one.

A table belongs to one policy and one snapshot. It is filled when it is asked, and dropped
whole where the policy or the snapshot changes, so that readers take no lock.
"""

from __future__ import annotations

import abc
from collections import OrderedDict
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.dispatch.calling.refusal import note_entrance
from vllm_fl.dispatch.calling.refusal import note_handed_out
from vllm_fl.dispatch.common.fork import ForkSafeLock
from vllm_fl.dispatch.policy.in_force import context

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_fl.dispatch.policy import SelectionPolicy

# Bound once: Python takes an imported name for a module, and `context.get()` would
# make a bound method for every call.
_context_policy = context.get

#: Tables of context policies that are kept; older ones are made anew.
_TABLES_KEPT = 64


class Table(dict[str, Any]):
    """The callables of one policy and one snapshot; filled when asked.

    The policy is None in the table of calls outside of every context, until a freeze.
    """

    __slots__ = ("manager", "policy")

    def __init__(self, manager: Tables, policy: SelectionPolicy | None) -> None:
        super().__init__()
        self.manager = manager
        self.policy = policy

    def __missing__(self, op_name: str) -> Any:
        return self.manager._fill(self, op_name)


class Tables(abc.ABC):
    """Calls and resolves operators by its tables."""

    def __init__(self) -> None:
        self._lock = ForkSafeLock()
        self._table = Table(self, None)
        self._context_tables: OrderedDict[int, Table] = OrderedDict()

    @abc.abstractmethod
    def _fill(self, table: Table, op_name: str) -> Callable[..., Any]:
        """Resolve an operator into a table, unless the world has moved on meanwhile."""

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

    def _context_table(self, policy: SelectionPolicy) -> Table:
        table = self._context_tables.get(id(policy))
        if table is not None and table.policy is policy:
            return table
        table = self._table
        if table.policy is not None:
            return table  # frozen: what was chosen then holds here too
        with self._lock:
            if self._table.policy is not None:
                return self._table
            table = Table(self, policy)
            self._context_tables[id(policy)] = table
            while len(self._context_tables) > _TABLES_KEPT:
                self._context_tables.popitem(last=False)
            return table

    def _new_tables(self) -> None:
        self._table = Table(self, None)
        self._context_tables = OrderedDict()

    def _choices_change(self, op_name: str | None) -> None:
        """Forget the choice for an operator, or for each; something was set aside, or is tried again."""
        with self._lock:
            for table in (self._table, *self._context_tables.values()):
                for name in [op_name] if op_name else list(table):
                    table.pop(name, None)

    def _publish_table(self, table: Table) -> None:
        self._table = table
        self._context_tables = OrderedDict()


# An implementation may call another operator: its exceptions pass through this.
note_entrance(Tables.call)

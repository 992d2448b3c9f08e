"""The registry: which implementations exist.

Readers take :meth:`OpRegistry.snapshot` and never wait: a snapshot is replaced,
not edited. A registration is checked here, and the message names the culprit.
"""

from __future__ import annotations

import inspect
import weakref
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING
from typing import Any
from typing import Protocol

from vllm_fl.dispatch.backend import Backend
from vllm_fl.dispatch.calling.binding import signature_problem
from vllm_fl.dispatch.common.fork import ForkSafeLock
from vllm_fl.dispatch.common.suggest import shown
from vllm_fl.dispatch.common.suggest import suggest
from vllm_fl.dispatch.declaration import Operator
from vllm_fl.dispatch.declaration import declaration_of
from vllm_fl.dispatch.errors import RegistrationError
from vllm_fl.dispatch.ops import OPERATORS
from vllm_fl.dispatch.types import OpImpl

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Mapping

    from vllm_fl.dispatch.types import Origin


@dataclass(frozen=True)
class OpRegistrySnapshot:
    """What is registered at one moment; immutable.

    Attributes:
        impls_by_op: every operator's implementations, in order of registration.
        operators: the declarations, those of plugins included.
        backends: the backends that were registered as a whole.
        version: grows with every registration.
    """

    impls_by_op: Mapping[str, tuple[OpImpl, ...]] = field(default_factory=lambda: MappingProxyType({}))
    operators: Mapping[str, Operator] = field(default_factory=lambda: MappingProxyType(dict(OPERATORS)))
    backends: tuple[Backend, ...] = ()
    version: int = 0

    def vendors(self) -> set[str]:
        """Return the vendors that have an implementation."""
        return {i.vendor for impls in self.impls_by_op.values() for i in impls if i.vendor}

    def without(self, origin: Origin) -> OpRegistrySnapshot:
        """Return this snapshot without what ``origin`` registered."""
        kept = {
            op_name: tuple(impl for impl in impls if impl.origin != origin)
            for op_name, impls in self.impls_by_op.items()
        }
        return replace(self, impls_by_op=MappingProxyType({op: impls for op, impls in kept.items() if impls}))

    def impl_ids(self) -> set[str]:
        """Return every implementation id."""
        return {i.impl_id for impls in self.impls_by_op.values() for i in impls}


@dataclass(frozen=True)
class PluginRecord:
    """What the discovery did with one plugin.

    Attributes:
        name: the entry point's name, or the module's.
        distribution: the wheel, or the variable that named the module.
        version: the wheel's version.
        source: what was loaded, ``module`` or ``module:function``.
        api_version: the plugin API that it declares.
        state: ``loaded``, ``failed``, ``incompatible``, ``refused`` or ``not-allowed``.
        reason: the state in a sentence; what was left out of a loaded plugin.
        operators: the operators for which it registered an implementation.
        variables: environment variables that it reads.
    """

    name: str
    distribution: str
    version: str
    source: str
    api_version: int | None
    state: str
    reason: str = ""
    operators: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()

    @property
    def success(self) -> bool:
        """Whether it was loaded."""
        return self.state == "loaded"


class RegistryListener(Protocol):
    """What is told of a registration; an ``OpManager``."""

    def registry_changed(self) -> None:
        """Take the new snapshot into account."""


class OpRegistry:
    """A thread-safe collection of implementations.

    Registrations survive a fork.
    """

    def __init__(self) -> None:
        self._lock = ForkSafeLock()
        self._snapshot = OpRegistrySnapshot()
        self._listeners: tuple[weakref.ref[RegistryListener], ...] = ()
        #: What the discovery did, by plugin name; kept here so that a child that was
        #: forked in the middle of it goes on where its parent was.
        self.plugins: dict[str, PluginRecord] = {}

    def snapshot(self) -> OpRegistrySnapshot:
        """Return what is registered now, as an immutable object."""
        return self._snapshot

    def register_impl(self, impl: OpImpl) -> None:
        """Register one implementation.

        Raises:
            RegistrationError: its signature does not fit the operator's contract,
                it writes what the contract does not allow, or its id is taken.
        """
        self.register_many([impl])

    def register_many(self, impls: Iterable[OpImpl]) -> None:
        """Register all of ``impls``, or none where one is refused.

        Raises:
            RegistrationError: see :meth:`register_impl`; every bad one is named.
        """
        self.commit(impls=tuple(impls))

    def register_backend(self, backend: Backend) -> None:
        """Register every operator that the backend's class implements, and declare its own.

        Raises:
            RegistrationError: see :meth:`register_impl`; or a method is decorated with
                ``@implementation``, and no operator is called so.
        """
        check_backend(backend)
        own, problems = own_operators(backend, self._snapshot)
        if problems:
            raise RegistrationError("\n".join(problems))
        self.commit(impls=tuple(backend.implementations()), operators=own, backends=(backend,))

    def declare(self, method: Any) -> None:
        """Declare an operator that the core does not know.

        Args:
            method: a function decorated with ``@operator``, or an
                :class:`~vllm_fl.dispatch.ops.Operator`.

        Raises:
            RegistrationError: it is neither, or the operator is declared in
                another way.
        """
        found = method if isinstance(method, Operator) else declaration_of(method)
        if found is None:
            raise RegistrationError(f"{shown(method)} is no declaration: decorate it with @operator.")
        self.commit(operators=(found,))

    def commit(
        self,
        *,
        impls: tuple[OpImpl, ...] = (),
        operators: tuple[Operator, ...] = (),
        backends: tuple[Backend, ...] = (),
        origin: Origin | None = None,
    ) -> None:
        """Register everything at once, or nothing.

        Args:
            origin: what it registered before is replaced.

        Raises:
            RegistrationError: naming everything that is wrong.
        """
        while True:
            before = self._snapshot
            # Without the lock: a look at a function may run code of its module's.
            now = before.without(origin) if origin else before
            declared = dict(now.operators)
            problems = [problem for op in operators if (problem := _add_operator(declared, op))]
            by_op = dict(now.impls_by_op)
            problems += [problem for impl in impls if (problem := _add_impl(by_op, declared, impl))]
            if problems:
                raise RegistrationError("\n".join(problems))
            after = OpRegistrySnapshot(
                MappingProxyType(by_op),
                MappingProxyType(declared),
                now.backends + backends,
                now.version + 1,
            )
            with self._lock:
                if self._snapshot is before:
                    self._snapshot = after
                    break
        for ref in self._listeners:
            listener = ref()
            if listener is not None:
                listener.registry_changed()

    def add_listener(self, listener: RegistryListener) -> None:
        """Tell ``listener`` of every registration, for as long as it lives."""
        with self._lock:
            living = [ref for ref in self._listeners if ref() is not None]
            self._listeners = (*living, weakref.ref(listener))


def check_backend(backend: object) -> None:
    """Check that something is a backend, and no object that only says so.

    Raises:
        RegistrationError: it is none.
    """
    if isinstance(backend, type):
        raise RegistrationError(f"{shown(backend)} is a class; register an instance of it")
    if not issubclass(type(backend), Backend):
        raise RegistrationError(f"{shown(backend)} is no Backend")


def own_operators(backend: Backend, snapshot: OpRegistrySnapshot) -> tuple[tuple[Operator, ...], list[str]]:
    """Return the operators that a backend's class declares, and what is wrong with its names."""
    marked = backend.marked()
    problems = [
        f"{type(backend).__qualname__}.{name} is marked with @implementation, and there is no operator "
        f"{name!r}.{suggest(name, snapshot.operators)} A new operator is declared there, with @operator."
        for name, declared in marked.items()
        if declared is None and name not in snapshot.operators
    ]
    return tuple(declared for declared in marked.values() if declared), problems


#: A generated function passes them on, and has names of its own that begin with an underscore.
_PLAIN = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _add_operator(declared: dict[str, Operator], operator: Operator) -> str | None:
    for name, parameter in operator.signature.parameters.items():
        if parameter.kind not in _PLAIN:
            return (
                f"operator {operator.name!r}: {name!r} is {parameter.kind.description}; a contract names each"
            )
        if name.startswith("_"):
            return f"operator {operator.name!r}: the name of a parameter begins with a letter, not {name!r}"
    known = declared.get(operator.name)
    if known is not None and (known.signature, known.mutates) != (operator.signature, operator.mutates):
        return f"operator {operator.name!r} is declared already, as {operator.name}{known.signature}"
    declared.setdefault(operator.name, operator)
    return None


def _add_impl(
    by_op: dict[str, tuple[OpImpl, ...]], declared: Mapping[str, Operator], impl: OpImpl
) -> str | None:
    if not issubclass(type(impl), OpImpl):
        return f"{shown(impl)} is no OpImpl"
    what = f"{impl.impl_id} of {impl.op_name}"
    siblings = by_op.get(impl.op_name, ())
    known = next((sibling for sibling in siblings if sibling.impl_id == impl.impl_id), None)
    if known is not None and known != impl:
        by = f" by {known.origin}" if known.origin else ""
        return f"{what}: this id is registered already{by}"
    operator = declared.get(impl.op_name)
    if operator is not None:
        foreign = sorted(set(impl.writes or ()) - set(operator.mutates))
        if foreign:
            return f"{what}: writes {', '.join(foreign)}, which the contract does not allow"
        if not isinstance(impl.fn, str):
            problem = signature_problem(operator, impl.fn)
            if problem:
                return f"{what}: {problem}"
        for ask in (impl.supports_layer, impl.supports):
            if ask is None or isinstance(ask, str):
                continue
            problem = signature_problem(operator, ask, is_predicate=True)
            if problem:
                return f"{what}: its predicate cannot be called: {problem}"
    if known is None:
        by_op[impl.op_name] = (*siblings, impl)
    return None

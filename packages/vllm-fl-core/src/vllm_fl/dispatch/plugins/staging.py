"""What one plugin registers, until it is known to be whole."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.dispatch.common.suggest import shown
from vllm_fl.dispatch.errors import RegistrationError
from vllm_fl.dispatch.ops import OPERATORS
from vllm_fl.dispatch.registry import OpRegistry
from vllm_fl.dispatch.registry import check_backend
from vllm_fl.dispatch.registry import own_operators
from vllm_fl.dispatch.types import OpImpl
from vllm_fl.dispatch.wheels import owner_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm_fl.dispatch.backend import Backend
    from vllm_fl.dispatch.declaration import Operator
    from vllm_fl.dispatch.types import Origin

#: What one plugin may register. More is a loop that has no end, or will be one.
MOST_IMPLEMENTATIONS = 1000
TOO_MANY = f"it registers more than {MOST_IMPLEMENTATIONS} implementations"


class Stage(OpRegistry):
    """A registry of one plugin; its ``problems`` are what was not right."""

    def __init__(self, registry: OpRegistry, origin: Origin) -> None:
        super().__init__()
        self._snapshot = registry.snapshot().without(origin)
        self._origin = origin
        self.impls: list[OpImpl] = []
        self.operators: list[Operator] = []
        self.backends: list[Backend] = []
        self.problems: list[str] = []
        self.too_many = False
        #: What is registered now is too late.
        self.is_closed = False

    def register_many(self, impls: Iterable[OpImpl]) -> None:
        """Register what is right of ``impls``, of which there may be no end."""
        self.commit(impls=tuple(itertools.islice(impls, MOST_IMPLEMENTATIONS + 1)))

    def commit(
        self,
        *,
        impls: tuple[OpImpl, ...] = (),
        operators: tuple[Operator, ...] = (),
        backends: tuple[Backend, ...] = (),
        origin: Origin | None = None,
    ) -> None:
        """Keep what is right; note what is not, so that its siblings stay."""
        if self.is_closed:
            raise RegistrationError("register() has returned, or failed; register what is left there")
        kept = len(self.impls) + len(self.operators) + len(self.backends) + len(self.problems)
        self.too_many |= kept + len(impls) + len(operators) > MOST_IMPLEMENTATIONS
        if self.too_many:
            raise RegistrationError(TOO_MANY)
        for operator in operators:
            if self._try(operators=(operator,)):
                self.operators.append(operator)
        for impl in impls:
            if not issubclass(type(impl), OpImpl):
                self.problems.append(f"{shown(impl)} is no OpImpl")
                continue
            owned = replace(impl, origin=self._origin)
            owner = owner_of(impl_id=impl.impl_id)
            if owner is not None and owner.distribution != self._origin.distribution:
                self.problems.append(
                    f"{impl.impl_id} of {impl.op_name}: this id is reserved to {owner.distribution}"
                )
            elif self._try(impls=(owned,)):
                self.impls.append(owned)
        self.backends.extend(backends)

    def register_backend(self, backend: Backend) -> None:
        """Register what is right of it; see :meth:`commit`."""
        check_backend(backend)
        own, problems = own_operators(backend, self._snapshot)
        self.problems += problems
        # Before what implements them.
        self.commit(operators=own)
        impls = []
        for op_name in (name for name in (*OPERATORS, *backend.marked()) if name in self._snapshot.operators):
            try:
                impls.append(backend.implementation_of(op_name))
            except RegistrationError as error:
                self.problems.append(str(error))
        self.commit(impls=tuple(impl for impl in impls if impl), backends=(backend,))

    def _try(self, **one: Any) -> bool:
        try:
            super().commit(**one)
        except RegistrationError as error:
            self.problems.append(str(error))
            return False
        return True

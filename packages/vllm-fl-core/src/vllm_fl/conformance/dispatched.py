"""An implementation behind the real dispatch, with a count of what ran.

A registry of its own holds every implementation of the operator, each counted, and
a manager of its own chooses among them by a strict policy whose order is the one
implementation that is judged. So the choice, the predicate, the adaptation of an
older signature and the failure rules are the dispatcher's own, and another
implementation that ran would be seen.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING
from typing import Any

import torch

from vllm_fl.conformance.process import left_alone
from vllm_fl.conformance.tensors import tensors_of
from vllm_fl.conformance.tensors import threads
from vllm_fl.dispatch import OpManager
from vllm_fl.dispatch import OpRegistry
from vllm_fl.dispatch import SelectionPolicy
from vllm_fl.dispatch import policy_context
from vllm_fl.dispatch.calling.predicate import as_bool

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Iterable

    from vllm_fl.dispatch import Operator
    from vllm_fl.dispatch import OpImpl
    from vllm_fl.dispatch.callables import Resolved
    from vllm_fl.dispatch.calling.guard import Candidate


class AnotherRanError(RuntimeError):
    """The dispatch did not run the implementation that its policy names."""


class Dispatched:
    """One implementation, called through the dispatch.

    Args:
        impl: what is judged; it is available.
        operator: its declaration.
        others: the operator's other implementations.
        row_arguments: the arguments whose first dimension is the rows.

    Attributes:
        resolved: the operator as a layer holds it, not counted.
        predicates: what it is asked at a call, taking every argument of the contract.
        supports_layer: the one of them that a layer asks once, or None.
        writes: the arguments that it may write.
    """

    def __init__(
        self,
        impl: OpImpl,
        operator: Operator,
        others: Iterable[OpImpl] = (),
        row_arguments: tuple[str, ...] = (),
    ) -> None:
        self.impl = impl
        self.operator = operator
        self.row_arguments = row_arguments
        self.ran: list[str] = []
        # Those of the process, however many judge.
        self._threads = torch.get_num_threads()
        function = impl.load()
        self.writes = operator.mutates if impl.writes is None else impl.writes
        others = [other for other in others if other.impl_id != impl.impl_id]
        counted = [replace(impl, fn=self._counted(impl.impl_id, function))]
        counted += [replace(other, fn=self._counted_later(other)) for other in others]
        self._counting = self._manager(counted)
        self._bare = self._manager([impl, *others])
        self.policy = SelectionPolicy.from_dict(
            strict=True, per_op_order={operator.name: [f"impl:{impl.impl_id}"]}
        )
        self.resolved = self.resolve()
        self.predicates = self.resolved.candidates[0].predicates
        self.supports_layer = self.resolved.candidates[0].supports_layer

    def resolve(self, wrap: Callable[[Candidate], Candidate] | None = None) -> Resolved:
        """Resolve the operator without a count, as one of vLLM's layers does."""
        with policy_context(self.policy):
            return self._bare.resolve_with_native(self.operator.name, None, wrap=wrap)

    def _manager(self, impls: list[OpImpl]) -> OpManager:
        registry = OpRegistry()
        registry.commit(impls=tuple(impls), operators=(self.operator,))
        return OpManager(registry)

    def _counted(self, impl_id: str, function: Callable[..., Any]) -> Callable[..., Any]:
        # `wraps` leads the dispatch to the signature and to the backend whose method it is.
        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.ran.append(impl_id)
            return function(*args, **kwargs)

        return counted

    def _counted_later(self, impl: OpImpl) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.ran.append(impl.impl_id)
            return impl.load()(*args, **kwargs)

        return counted

    def bound(self, arguments: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments as the contract passes them: by position where it can be."""
        return self.operator.call_of(arguments)

    def __call__(self, arguments: dict[str, Any]) -> Any:
        """Call the operator through the dispatch.

        Raises:
            AnotherRanError: something else ran, or nothing, or it ran twice.
            SideEffectError: it changed the process's settings.
            NotImplementedError: "not for these inputs".
            Exception: what the implementation raises.
        """
        args, kwargs = self.bound(arguments)
        self.ran.clear()
        device = next((x.device for x in tensors_of(arguments.values())), None)
        # Without a tensor it computes nothing: it answers which class does, whose library
        # may change the process where it is imported.
        watched = nullcontext() if device is None else left_alone(device)
        with policy_context(self.policy), threads(self._threads), watched:
            result = self._counting.call(self.operator.name, *args, **kwargs)
        if self.ran != [self.impl.impl_id]:
            raise AnotherRanError(
                f"the policy names {self.impl.impl_id}, and what ran is {', '.join(self.ran) or 'nothing'}"
            )
        return result

    def call_directly(self, arguments: dict[str, Any]) -> Any:
        """Call the implementation itself, adapted to the contract's signature."""
        args, kwargs = self.bound(arguments)
        with threads(self._threads):
            return self.resolved.candidates[0].fn(*args, **kwargs)

    def refusal(self, arguments: dict[str, Any]) -> object:
        """Return what its predicates say; True where there is none, and where another bool agrees."""
        args, kwargs = self.bound(arguments)
        for predicate in self.predicates:
            answer: object = predicate(*args, **kwargs)
            if not as_bool(answer):
                return answer
        return True

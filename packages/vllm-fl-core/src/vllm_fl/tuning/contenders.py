"""What competes: every implementation, the compiled reference and vLLM's own path."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING
from typing import Any

import torch

from vllm_fl.conformance.dispatched import Dispatched
from vllm_fl.dispatch import BackendImplKind
from vllm_fl.dispatch import match_token
from vllm_fl.dispatch.calling.binding import adapt
from vllm_fl.dispatch.calling.predicate import refusal
from vllm_fl.dispatch.common.foreign import describe
from vllm_fl.dispatch.common.suggest import did_you_mean
from vllm_fl.dispatch.common.suggest import shown
from vllm_fl.dispatch.types import NATIVE
from vllm_fl.integration.alone import UnreachableError
from vllm_fl.integration.alone import native_path
from vllm_fl.integration.opaque import opaque
from vllm_fl.integration.opaque import shielded
from vllm_fl.tuning.shapes import ShapesError

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Iterable
    from collections.abc import Mapping

    from torch import Tensor

    from vllm_fl.dispatch import Operator
    from vllm_fl.dispatch import OpImpl
    from vllm_fl.dispatch import OpManager

#: The id of the reference as torch's compiler makes it. No policy can name it.
COMPILED = "reference.compiled"
EAGER, GRAPH, COMPILE = MODES = ("eager", "graph", "compile")


class NotMeasuredError(RuntimeError):
    """A contender has no such mode here; the message says why."""


@dataclass(frozen=True)
class Contender:
    """One way to compute an operator.

    Attributes:
        impl_id: an implementation's id, ``native`` or ``reference.compiled``.
        make: takes the arguments of a family and whether a compiler calls it, and returns the
            function; raises NotMeasuredError.
        supports: takes the operator's arguments and returns why not, or None.
        writes: the arguments that it may write.
        is_graph_safe: it may be captured in a device's graph.
        wheel: the distribution with its version.
    """

    impl_id: str
    make: Callable[[Mapping[str, Any], bool], Callable[..., Any]]
    supports: Callable[..., str | None]
    writes: tuple[str, ...]
    is_graph_safe: bool = True
    wheel: str = ""

    @property
    def is_native(self) -> bool:
        """Whether it is vLLM's own path, which has promised the contract nothing."""
        return self.impl_id == NATIVE


@dataclass(frozen=True)
class Field:
    """The contenders of one operator.

    Attributes:
        operator: its declaration.
        contenders: in the order of the policy in force; what it does not name comes last.
        absent: why others do not compete, by id.
    """

    operator: Operator
    contenders: tuple[Contender, ...]
    absent: Mapping[str, str]


def contenders(manager: OpManager, op_name: str, wanted: Iterable[str]) -> Field:
    """Return what competes for an operator.

    Args:
        manager: what is registered.
        op_name: the operator.
        wanted: ids, vendors or tokens; everything where it is empty.
    """
    snapshot = manager.snapshot()
    operator = snapshot.operators[op_name]
    names = list(wanted)
    found: list[Contender] = []
    absent: dict[str, str] = {}
    for impl in snapshot.impls_by_op.get(op_name, ()):
        is_reference = impl.kind is BackendImplKind.REFERENCE
        is_wanted = _is_wanted(impl, names)
        if not is_wanted and not (is_reference and COMPILED in names):
            continue
        reason = impl.unavailable_reason()
        if reason is not None:
            absent[impl.impl_id] = reason
            continue
        try:
            one = _registered(impl, operator)
        except Exception as error:  # noqa: BLE001 - a plug-in's module raises what it likes
            absent[impl.impl_id] = f"cannot be loaded: {describe(error)}"
            continue
        found += [one] if is_wanted else []
        if is_reference and impl.traceable and (not names or COMPILED in names):
            found.append(_compiled_reference(impl, operator))
    if not names or NATIVE in names:
        found.append(_native(operator))
    order = [candidate.impl_id for candidate in manager.explain(op_name, native=True).usable]
    place = {impl_id: at for at, impl_id in enumerate(order)}
    found.sort(key=lambda one: (place.get(one.impl_id, len(place)), one.impl_id))
    return Field(operator, tuple(found), absent)


def check_names(manager: OpManager, wanted: Iterable[str]) -> None:
    """Check the names of ``--backend``.

    Raises:
        ShapesError: nothing is registered under one of them.
    """
    manager.discover()
    every = [impl for impls in manager.snapshot().impls_by_op.values() for impl in impls]
    known = {one for impl in every for one in (impl.impl_id, impl.vendor) if one} | {NATIVE, COMPILED}
    for name in wanted:
        if name not in known and not any(_is_wanted(impl, [name]) for impl in every):
            raise ShapesError(f"nothing is registered as {shown(name)}.{did_you_mean(name, known)}")


def _is_wanted(impl: OpImpl, names: list[str]) -> bool:
    is_named = any(name in (impl.impl_id, impl.vendor) or match_token(impl, name) for name in names)
    return not names or is_named


def _agrees(*_: Any, **__: Any) -> str | None:
    return None


def _registered(impl: OpImpl, operator: Operator) -> Contender:
    fn = adapt(operator, impl.load())
    predicates = [adapt(operator, ask, is_predicate=True) for ask in impl.predicates()]

    def supports(*args: Any, **kwargs: Any) -> str | None:
        return next(filter(None, (refusal(ask, args, kwargs) for ask in predicates)), None)

    def make(arguments: Mapping[str, Any], compiled: bool) -> Callable[..., Any]:
        if not compiled:
            return fn
        if impl.traceable:
            return traced(_writing_nothing(operator, fn))
        # The form in which vLLM's layers call it there.
        whole = Dispatched(impl, operator)
        resolved = whole.resolve(functools.partial(shielded, operator, is_strict=True))
        return traced(opaque(operator, resolved))

    writes = operator.mutates if impl.writes is None else impl.writes
    wheel = impl.origin.wheel if impl.origin else ""
    return Contender(impl.impl_id, make, supports, writes, impl.graph_safe, wheel)


def _compiled_reference(impl: OpImpl, operator: Operator) -> Contender:
    fn = adapt(operator, impl.load())

    def make(arguments: Mapping[str, Any], compiled: bool) -> Callable[..., Any]:
        return traced(_writing_nothing(operator, fn))

    writes = operator.mutates if impl.writes is None else impl.writes
    return Contender(COMPILED, make, _agrees, writes, True, impl.origin.wheel if impl.origin else "")


def _native(operator: Operator) -> Contender:
    def make(arguments: Mapping[str, Any], compiled: bool) -> Callable[..., Any]:
        try:
            path = native_path(operator.name, arguments, compiled=compiled)
        except UnreachableError as error:
            raise NotMeasuredError(str(error)) from error
        return traced(_writing_nothing(operator, path)) if compiled else path

    return Contender(NATIVE, make, _agrees, operator.mutates, True, "vllm")


def _writing_nothing(operator: Operator, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``fn`` with new results where it may do either way: so vLLM's layers call compiled code."""
    names = list(operator.signature.parameters)
    switches = {
        names.index(name): not value
        for form in operator.forms
        if form.in_place
        for name, value in (form.fixed or {}).items()
    }
    if not switches:
        return fn

    def writes_nothing(*args: Any, **kwargs: Any) -> Any:
        values = list(args)
        for place, value in switches.items():
            values[place] = value
        return fn(*values, **kwargs)

    return writes_nothing


def traced(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function as torch's compiler makes it, whole, for any number of rows."""
    compiled: Callable[..., Any] = torch.compile(fn, fullgraph=True, dynamic=False)
    return compiled


def mark_rows(arguments: Mapping[str, Any], names: Iterable[str]) -> None:
    """Let a compiler make one graph for every number of rows, as it does for a model.

    Of one row it makes a graph of its own.
    """
    for name in names:
        value: Tensor | None = arguments.get(name)
        if isinstance(value, torch.Tensor) and value.shape[0] > 1:
            torch._dynamo.mark_dynamic(value, 0)

"""From a name on the command line to the implementations that it means."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_fl.dispatch import match_token
from vllm_fl.dispatch.common.suggest import suggest
from vllm_fl.dispatch.types import BackendImplKind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm_fl.dispatch import OpImpl
    from vllm_fl.dispatch import OpManager


class UnknownNameError(LookupError):
    """No such backend or operator; the message names the nearest right one."""


def select(manager: OpManager, name: str, operators: Iterable[str] = ()) -> list[OpImpl]:
    """Return the implementations of a backend, in the order of operators.

    Args:
        manager: what is registered.
        name: an implementation id (``vendor.acme``), a token of an order
            (``flagos``, ``reference``, ``vendor:acme``, ``impl:vendor.acme``) or a
            vendor's name (``acme``).
        operators: only these; all where it is empty.

    Raises:
        UnknownNameError: nothing is registered under this name, or it has no such
            operator.
        PolicyError: the configuration is wrong.
    """
    manager.discover()
    snapshot = manager.registry.snapshot()
    every = [impl for _, impls in sorted(snapshot.impls_by_op.items()) for impl in impls]
    found = [impl for impl in every if _is_named(impl, name)]
    if not found:
        known = {impl.impl_id for impl in every} | {impl.vendor for impl in every if impl.vendor}
        broken = "".join(
            f"\n  plugin {record.name!r} of {record.distribution}: {record.reason}"
            for record in manager.registry.plugins.values()
            if not record.success
        )
        hint = suggest(name, known) or " No implementation is registered."
        raise UnknownNameError(f"nothing is registered as {name!r}.{hint}{broken}")
    wanted = list(operators)
    for operator in wanted:
        offered = {impl.op_name for impl in found}
        if operator not in offered:
            raise UnknownNameError(f"{name!r} has no operator {operator!r}.{suggest(operator, offered)}")
    return [impl for impl in found if not wanted or impl.op_name in wanted]


def _is_named(impl: OpImpl, name: str) -> bool:
    if name in (impl.impl_id, impl.vendor):
        return True
    is_token = ":" in name or name in set(BackendImplKind)
    return is_token and match_token(impl, name)

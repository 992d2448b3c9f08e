"""The plan of a frozen process: every choice, and a fingerprint of all of them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.dispatch.code_digests import digests
from vllm_fl.dispatch.code_digests import modules_of

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Mapping

    from vllm_fl.dispatch.policy import SelectionPolicy
    from vllm_fl.dispatch.registry import OpRegistrySnapshot
    from vllm_fl.dispatch.registry import PluginRecord


@dataclass(frozen=True)
class Plan:
    """Every choice of a frozen process.

    Attributes:
        choices: the implementation of each operator; None where nothing can run.
        policy: the fingerprint of the policy.
        wheels: the version of every wheel that is chosen.
        candidates: what can run each operator, the choice first: a graph has another
            one in it where the choice refuses.
        code: a digest of the code of the core and of all those candidates, by top-level
            package; :mod:`vllm_fl.dispatch.code_digests` says what it covers.
        variables: the environment variables that plugins say they read, where set.
        fingerprint: 16 hexadecimal digits that differ where any of it does.
    """

    choices: Mapping[str, str | None]
    policy: str
    wheels: Mapping[str, str]
    candidates: Mapping[str, tuple[str, ...]]
    code: Mapping[str, str]
    variables: Mapping[str, str]
    fingerprint: str

    @classmethod
    def of(
        cls,
        choices: Mapping[str, str | None],
        policy: SelectionPolicy,
        snapshot: OpRegistrySnapshot,
        extra: Mapping[str, Any],
        *,
        candidates: Mapping[str, tuple[str, ...]] | None = None,
        plugins: Iterable[PluginRecord] = (),
    ) -> Plan:
        """Return the plan of some choices.

        Args:
            choices: the implementation of each operator.
            policy: the policy that they were made with.
            snapshot: what they were made from.
            extra: plain values that the fingerprint covers too.
            candidates: what can run each operator; the choices alone if None.
            plugins: what became of every plugin.
        """
        import hashlib
        import json

        if candidates is None:
            candidates = {op_name: (chosen,) if chosen else () for op_name, chosen in choices.items()}
        usable = [
            impl
            for op_name, impls in snapshot.impls_by_op.items()
            for impl in impls
            if impl.impl_id in candidates.get(op_name, ())
        ]
        wheels = {
            impl.origin.distribution: impl.origin.version
            for impl in usable
            if impl.origin is not None and impl.impl_id == choices.get(impl.op_name)
        }
        origins = {(impl.origin.distribution, impl.origin.entry_point) for impl in usable if impl.origin}
        modules = {module for impl in usable for module in modules_of(impl)}
        variables: dict[str, str] = {}
        for plugin in plugins:
            if (plugin.distribution, plugin.name) in origins:
                modules.add(plugin.source.partition(":")[0])
            variables |= {name: os.environ[name] for name in plugin.variables if name in os.environ}
        code = digests({*modules, __name__})
        facts = {
            "policy": policy.fingerprint(),
            "candidates": dict(candidates),
            "wheels": wheels,
            "code": code,
            "variables": variables,
            "extra": dict(extra),
        }
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
        return cls(choices, policy.fingerprint(), wheels, candidates, code, variables, digest)

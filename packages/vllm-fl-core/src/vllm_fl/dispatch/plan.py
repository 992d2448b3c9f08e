"""The plan of a frozen process: every choice, and a fingerprint of all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from typing import Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm_fl.dispatch.policy import SelectionPolicy
    from vllm_fl.dispatch.registry import OpRegistrySnapshot


@dataclass(frozen=True)
class Plan:
    """Every choice of a frozen process.

    Attributes:
        choices: the implementation of each operator; None where nothing can run.
        policy: the fingerprint of the policy.
        wheels: the version of every wheel that is chosen.
        fingerprint: 16 hexadecimal digits that differ where any of it does.
    """

    choices: Mapping[str, str | None]
    policy: str
    wheels: Mapping[str, str]
    fingerprint: str

    @classmethod
    def of(
        cls,
        choices: Mapping[str, str | None],
        policy: SelectionPolicy,
        snapshot: OpRegistrySnapshot,
        extra: Mapping[str, Any],
    ) -> Plan:
        """Return the plan of some choices.

        Args:
            choices: the implementation of each operator.
            policy: the policy that they were made with.
            snapshot: what they were made from.
            extra: plain values that the fingerprint covers too.
        """
        import hashlib
        import json

        wheels = {
            impl.origin.distribution: impl.origin.version
            for op_name, impls in snapshot.impls_by_op.items()
            for impl in impls
            if impl.origin is not None and impl.impl_id == choices.get(op_name)
        }
        facts = {
            "policy": policy.fingerprint(),
            "choices": dict(choices),
            "wheels": wheels,
            "extra": dict(extra),
        }
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
        return cls(choices, policy.fingerprint(), wheels, digest)

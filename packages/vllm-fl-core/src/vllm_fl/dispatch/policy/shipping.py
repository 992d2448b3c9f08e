"""A policy on its way from a server's front end to its workers, which may have another core."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.dispatch.common.distributions import CORE
from vllm_fl.dispatch.common.distributions import version_of
from vllm_fl.dispatch.common.suggest import shown
from vllm_fl.dispatch.errors import PolicyError
from vllm_fl.dispatch.policy.value import SelectionPolicy

if TYPE_CHECKING:
    from collections.abc import Mapping

_SOURCE = "the front end"


def shipped(policy: SelectionPolicy) -> dict[str, Any]:
    """Return what carries a policy to another process, as values of JSON's types."""
    return {"policy": policy.to_dict(), "fingerprint": policy.fingerprint(), "core": version_of(CORE)}


def received(parcel: Mapping[str, Any]) -> SelectionPolicy:
    """Return the policy of what :func:`shipped` returned in another process.

    Raises:
        PolicyError: this core cannot read it, or reads another policy in it; the message
            says which key, and the versions of both cores.
    """
    theirs, ours = parcel.get("core") or "of an unknown version", version_of(CORE)
    cores = (
        f"The front end has {CORE} {theirs}, this process {ours}: install the same version where both run."
    )
    values, sent = parcel.get("policy"), parcel.get("fingerprint")
    try:
        if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
            raise PolicyError(f"must be a mapping of keys to values, not {shown(values)}.")
        # Without it a key that is missing would be one that is not set.
        policy = SelectionPolicy.from_dict(**{"explicit": None, **values})
    except PolicyError as error:
        raise PolicyError(f"the policy that {_SOURCE} sent: {error} {cores}") from None
    read = policy.fingerprint()
    if read != sent:
        raise PolicyError(f"this process reads the policy {read} where {_SOURCE} sent {sent}. {cores}")
    return replace(policy, sources=dict.fromkeys(policy.explicit, _SOURCE))

"""Selection policies: what a user wants, and where each wish came from.

- :mod:`.keys`: the table of the keys; :mod:`.value_types`: what their values may be.
- :mod:`.value`: :class:`SelectionPolicy`, what a policy is, whatever it was read from.
- :mod:`.reading`: the policy file and the variables; :mod:`.shipping`: another process.
- :mod:`.in_force`: the context's policy, else the global one, else the environment's;
  :mod:`.packaged`: the available vendor's packaged defaults, which lie below it.
- :mod:`.names`: whether there are the operators, vendors and implementations it names.

A new key is a row of the table and an attribute of the value. None of these knows the
manager: it hands in what :func:`get_policy` checks names with.
"""

from __future__ import annotations

from vllm_fl.dispatch.policy.in_force import PolicyListener
from vllm_fl.dispatch.policy.in_force import add_policy_listener
from vllm_fl.dispatch.policy.in_force import get_policy
from vllm_fl.dispatch.policy.in_force import global_policy
from vllm_fl.dispatch.policy.in_force import policy_context
from vllm_fl.dispatch.policy.in_force import publish_if_current
from vllm_fl.dispatch.policy.in_force import reset_global_policy
from vllm_fl.dispatch.policy.in_force import set_global_policy
from vllm_fl.dispatch.policy.in_force import with_allowed_vendors
from vllm_fl.dispatch.policy.in_force import with_denied_vendors
from vllm_fl.dispatch.policy.in_force import with_preference
from vllm_fl.dispatch.policy.in_force import with_strict_mode
from vllm_fl.dispatch.policy.keys import NO_DEFAULTS
from vllm_fl.dispatch.policy.keys import PACKAGED
from vllm_fl.dispatch.policy.reading import policy_from_config
from vllm_fl.dispatch.policy.value import SelectionPolicy
from vllm_fl.dispatch.policy.value_types import KINDS
from vllm_fl.dispatch.policy.value_types import PREFER_DEFAULT
from vllm_fl.dispatch.policy.value_types import PREFER_REFERENCE
from vllm_fl.dispatch.policy.value_types import PREFER_VENDOR

__all__ = [
    "KINDS",
    "NO_DEFAULTS",
    "PACKAGED",
    "PREFER_DEFAULT",
    "PREFER_REFERENCE",
    "PREFER_VENDOR",
    "PolicyListener",
    "SelectionPolicy",
    "add_policy_listener",
    "get_policy",
    "global_policy",
    "policy_context",
    "policy_from_config",
    "publish_if_current",
    "reset_global_policy",
    "set_global_policy",
    "with_allowed_vendors",
    "with_denied_vendors",
    "with_preference",
    "with_strict_mode",
]

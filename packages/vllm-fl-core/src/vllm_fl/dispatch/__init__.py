"""Which implementation of an operator runs, and why.

::

    from vllm_fl.dispatch import call_op, get_default_manager

    y = call_op("silu_and_mul", x)
    print(get_default_manager().explain("silu_and_mul"))

Importing this package imports neither torch nor vLLM nor a plugin, and raises
nothing for a wrong configuration: ``get_policy`` and the first call do.
"""

from __future__ import annotations

from vllm_fl.dispatch.backend import Backend
from vllm_fl.dispatch.backend import implementation
from vllm_fl.dispatch.common.distributions import PLUGIN_GROUP
from vllm_fl.dispatch.common.log import get_logger
from vllm_fl.dispatch.common.log import level_from_environment as _level_from_environment
from vllm_fl.dispatch.common.log import set_log_level
from vllm_fl.dispatch.decision import Decision
from vllm_fl.dispatch.declaration import Operator
from vllm_fl.dispatch.declaration import TorchForm
from vllm_fl.dispatch.declaration import operator
from vllm_fl.dispatch.discovery import discover_plugins
from vllm_fl.dispatch.errors import DispatchError
from vllm_fl.dispatch.errors import NoImplementationError
from vllm_fl.dispatch.errors import PolicyError
from vllm_fl.dispatch.errors import RefusedBeforeWriting
from vllm_fl.dispatch.errors import RegistrationError
from vllm_fl.dispatch.errors import UnknownOperatorError
from vllm_fl.dispatch.manager import call_op
from vllm_fl.dispatch.manager import clear_discovered_plugins
from vllm_fl.dispatch.manager import get_default_manager
from vllm_fl.dispatch.manager import get_discovered_plugins
from vllm_fl.dispatch.manager import reset_default_manager
from vllm_fl.dispatch.manager import resolve_op
from vllm_fl.dispatch.op_manager import OpManager
from vllm_fl.dispatch.ops import OPERATORS
from vllm_fl.dispatch.ops import Operators
from vllm_fl.dispatch.plan import Plan
from vllm_fl.dispatch.plugins.loading import PLUGIN_API_VERSION
from vllm_fl.dispatch.plugins.loading import PLUGIN_MODULES_ENV
from vllm_fl.dispatch.policy import PREFER_DEFAULT
from vllm_fl.dispatch.policy import PREFER_REFERENCE
from vllm_fl.dispatch.policy import PREFER_VENDOR
from vllm_fl.dispatch.policy import SelectionPolicy
from vllm_fl.dispatch.policy import get_policy
from vllm_fl.dispatch.policy import policy_context
from vllm_fl.dispatch.policy import policy_from_config
from vllm_fl.dispatch.policy import reset_global_policy
from vllm_fl.dispatch.policy import set_global_policy
from vllm_fl.dispatch.policy import with_allowed_vendors
from vllm_fl.dispatch.policy import with_denied_vendors
from vllm_fl.dispatch.policy import with_preference
from vllm_fl.dispatch.policy import with_strict_mode
from vllm_fl.dispatch.registry import OpRegistry
from vllm_fl.dispatch.registry import OpRegistrySnapshot
from vllm_fl.dispatch.registry import PluginRecord
from vllm_fl.dispatch.types import BackendImplKind
from vllm_fl.dispatch.types import BackendPriority
from vllm_fl.dispatch.types import OpImpl
from vllm_fl.dispatch.types import match_token

__all__ = [
    "OPERATORS",
    "PLUGIN_API_VERSION",
    "PLUGIN_GROUP",
    "PLUGIN_MODULES_ENV",
    "PREFER_DEFAULT",
    "PREFER_REFERENCE",
    "PREFER_VENDOR",
    "Backend",
    "BackendImplKind",
    "BackendPriority",
    "Decision",
    "DispatchError",
    "NoImplementationError",
    "OpImpl",
    "OpManager",
    "OpRegistry",
    "OpRegistrySnapshot",
    "Operator",
    "Operators",
    "Plan",
    "PluginRecord",
    "PolicyError",
    "RefusedBeforeWriting",
    "RegistrationError",
    "SelectionPolicy",
    "TorchForm",
    "UnknownOperatorError",
    "call_op",
    "clear_discovered_plugins",
    "discover_plugins",
    "get_default_manager",
    "get_discovered_plugins",
    "get_logger",
    "get_policy",
    "implementation",
    "match_token",
    "operator",
    "policy_context",
    "policy_from_config",
    "reset_default_manager",
    "reset_global_policy",
    "resolve_op",
    "set_global_policy",
    "set_log_level",
    "with_allowed_vendors",
    "with_denied_vendors",
    "with_preference",
    "with_strict_mode",
]

_level_from_environment()

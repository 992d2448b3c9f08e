"""One engine's policy: shipped by the front end, frozen by the worker.

The front end asks no backend whether it is available: that can initialise a
device, and a process with an initialised device cannot fork. It checks the
policy and sends it along in ``additional_config``; the worker takes it, freezes
its choices when it builds its first layer, and their fingerprint becomes a part
of vLLM's compile-cache key.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.dispatch import PolicyError
from vllm_fl.dispatch import get_default_manager
from vllm_fl.dispatch import get_policy
from vllm_fl.dispatch import set_global_policy
from vllm_fl.dispatch import trace
from vllm_fl.dispatch.code_digests import UNREADABLE
from vllm_fl.dispatch.common.foreign import describe
from vllm_fl.dispatch.policy import shipping
from vllm_fl.dispatch.policy.reading import policy_from_environment
from vllm_fl.integration import ranks
from vllm_fl.integration.layer import serving
from vllm_fl.integration.log import logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_fl.dispatch import Plan
    from vllm_fl.dispatch import SelectionPolicy

#: The entry of vLLM's ``additional_config``.
KEY = "vllm_fl"

FINGERPRINT_VARIABLE = "VLLM_FL_DISPATCH_FINGERPRINT"

#: What the plan's fingerprint covers beside the choices: the replaced layers.
_facts: dict[str, Any] = {}

#: Layers that run natively after a fault of ours.
_faulty: set[str] = set()


def fingerprint() -> str:
    """Return what the compile-cache key says of this process.

    That is the plan's, and what has departed from the plan: compiled code of a
    day when a kernel failed must not be used on a day when it works.
    """
    manager = get_default_manager()
    plan = manager.plan
    if plan is None:
        return f"unfrozen-{get_policy().fingerprint()}"
    failed = {f"{op}={one}" for op, ids in manager.get_failed_impls().items() for one in ids}
    return "-".join([plan.fingerprint, *sorted(failed | _faulty)])


def ship_policy(engine_args: Any) -> None:
    """Write the policy in force into an engine's ``additional_config``.

    Raises:
        PolicyError: the policy is wrong, or cannot be sent.
    """
    policy = get_policy()
    given = engine_args.additional_config
    if given is None:
        given = {}
    if not isinstance(given, dict):
        # A caller's own class. The environment reaches a worker without us.
        if _is_from_environment(policy):
            return
        raise PolicyError(
            "a policy that is set in code cannot reach vLLM's workers, because additional_config is a "
            f"{type(given).__name__} and not a dict: set VLLM_FL_CONFIG instead."
        )
    theirs = given.get(KEY)
    if theirs is not None and not (isinstance(theirs, dict) and "fingerprint" in theirs):
        raise PolicyError(
            f"additional_config[{KEY!r}] is written by vllm-fl; set VLLM_FL_CONFIG or a VLLM_FL_* "
            "variable, or call set_global_policy()."
        )
    engine_args.additional_config = {**given, KEY: shipping.shipped(policy)}


#: What vLLM keeps for the process, by the module that keeps it, and how it is emptied:
#: layers of ours, and the attention that we chose. An engine holds its own by attribute,
#: so that emptying these takes nothing away from one that is alive.
_SHARED: dict[str, Callable[[Any], None]] = {
    "vllm.model_executor.layers.activation": lambda it: it._ACTIVATION_AND_MUL_REGISTRY._dict.clear(),
    "vllm.model_executor.layers.quantization.utils.marlin_utils": lambda it: _leave_to_vllm(
        it._quant_fp8_method
    ),
    "vllm.model_executor.layers.rotary_embedding": lambda it: it._ROPE_DICT.clear(),
    "vllm.model_executor.models.gemma": lambda it: it._get_gemma_act_fn.cache_clear(),
    "vllm.v1.attention.selector": lambda it: it._cached_get_attn_backend.cache_clear(),
}


def forget_shared_layers() -> None:
    """Let the engine that begins get no layer of an earlier one, which had another policy."""
    for name, forget in _SHARED.items():
        module = sys.modules.get(name)
        if module is not None:
            forget(module)


def _leave_to_vllm(layer: Any) -> None:
    """Let a layer that every engine of the process calls run vLLM's own path."""
    its = serving(layer)
    if its is not None:
        its.leave()
        logger.info("vllm-fl: the activations of Marlin's layers stay vLLM's own, which two engines share")


def _is_from_environment(policy: SelectionPolicy) -> bool:
    return policy == policy_from_environment()


def begin(vllm_config: Any) -> Plan | None:
    """Freeze the choices for the engine that builds a layer; return the plan.

    A second engine in the process starts from a thaw where its policy is another
    one. Without a model (a layer that is built by hand) nothing is frozen.

    Raises:
        PolicyError: the shipped policy cannot be read here, or is not the one that its
            fingerprint names.
        RanksDifferError: another rank of the engine chose otherwise, or did not choose.
    """
    if getattr(vllm_config, "model_config", None) is None:
        return None
    manager = get_default_manager()
    shipped = vllm_config.additional_config
    shipped = shipped.get(KEY) if isinstance(shipped, dict) else None
    plan = manager.plan
    if plan is not None:
        if shipped is None or shipped["fingerprint"] == plan.policy:
            return plan
        manager.thaw()
    try:
        return _freeze(shipped)
    except Exception as error:
        # Nothing is fixed that the ranks have not agreed on, and nobody waits for this one.
        manager.thaw()
        if not isinstance(error, ranks.RanksDifferError):
            ranks.withdraw(describe(error))
        raise


def _freeze(shipped: Any) -> Plan:
    if shipped is not None and get_policy().fingerprint() != shipped["fingerprint"]:
        set_global_policy(shipping.received(shipped))
    plan = get_default_manager().freeze(_facts)
    ranks.agree(plan, _facts)
    record = trace.recorder()
    if record is not None:
        record.fact("fingerprint", plan.fingerprint)
        record.fact("policy", plan.policy)
    wheels = ", ".join(f"{name} {version}".rstrip() for name, version in plan.wheels.items())
    logger.info(
        "vllm-fl: implementations of %s; policy %s, fingerprint %s; `vllm-fl explain --all` shows more",
        wheels or "no wheel (install one; every layer stays vLLM's own)",
        plan.policy,
        plan.fingerprint,
    )
    unread = sorted(name for name, digest in plan.code.items() if digest == UNREADABLE)
    if unread:
        logger.warning(
            "vllm-fl: the code of %s cannot be read, so that compiled graphs outlive a change of it: delete "
            "vLLM's compile cache (VLLM_CACHE_ROOT) then",
            ", ".join(unread),
        )
    return plan


def remember(name: str, value: Any) -> None:
    """Let the fingerprint cover ``value``."""
    _facts[name] = value


def note_fault(name: str) -> bool:
    """Note that a layer runs natively after a fault of ours; say whether that is new."""
    is_new = name not in _faulty
    _faulty.add(name)
    return is_new

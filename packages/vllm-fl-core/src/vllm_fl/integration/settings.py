"""What the plug-in's own variables leave to vLLM: the same answer for the engine, the log and the command.

It imports neither torch nor vLLM, so that ``vllm-fl explain`` can ask it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import NamedTuple

from vllm_fl.dispatch import PolicyError
from vllm_fl.dispatch.environment import boolean_variable
from vllm_fl.dispatch.environment import names_variable
from vllm_fl.dispatch.types import NATIVE

if TYPE_CHECKING:
    from vllm_fl.dispatch.decision import Decision

SWITCHES = ("VLLM_FL_PREFER_ENABLED", "VLLM_FL_OOT_ENABLED")
WHITELIST = "VLLM_FL_OOT_WHITELIST"
BLACKLIST = "VLLM_FL_OOT_BLACKLIST"

POLICY_CHOOSES_NATIVE = "the policy chooses it"


class Names(NamedTuple):
    """What one of vLLM's layers is called.

    Attributes:
        class_name: its class.
        vllm_name: its other name in the lists.
        op_names: the operators that may serve it.
        form: the only form in which it is served; empty where that is the decision's.
    """

    class_name: str
    vllm_name: str
    op_names: tuple[str, ...]
    form: str = ""


#: Every layer that may be served, and the seams, without importing what serves them.
LAYERS = (
    Names("SiluAndMul", "silu_and_mul", ("silu_and_mul",)),
    Names("GeluAndMul", "gelu_and_mul", ("gelu_and_mul",)),
    Names("RMSNorm", "rms_norm", ("rms_norm",)),
    Names("GemmaRMSNorm", "gemma_rms_norm", ("rms_norm",)),
    Names("RotaryEmbedding", "rotary_embedding", ("rotary_embedding",)),
    Names("UnquantizedFusedMoEMethod", "unquantized_fused_moe", ("fused_experts",)),
    Names("MoERunner", "MoERunner", ("topk_softmax", "grouped_topk")),
    Names("QuantFP8", "quant_fp8", ("dynamic_per_token_quant_fp8",)),
    Names("Int8ScaledMMLinearKernel", "int8_linear", ("dynamic_per_token_quant_int8",)),
    Names("Attention", "attention", ("attention_backend",), "plain"),
)


# -- the variables -----------------------------------------------------------------


def off_by() -> str | None:
    """Return the variable that leaves every layer to vLLM, or None.

    Raises:
        PolicyError: one of them is no boolean.
    """
    off = [name for name in SWITCHES if not boolean_variable(name, True)]
    return off[0] if off else None


def lists() -> tuple[list[str] | None, list[str]]:
    """Return the names of the only layers that are served, None for all, and of those that are not.

    Raises:
        PolicyError: both variables are set, or a name is empty or stands twice.
    """
    allowed, denied = names_variable(WHITELIST), names_variable(BLACKLIST)
    if allowed is not None and denied is not None:
        raise PolicyError(f"{BLACKLIST}: {WHITELIST} is set too; keep one of them.")
    return allowed, denied or []


def why_not_listed(*names: str) -> str | None:
    """Say which list leaves to vLLM what has these names; None where neither does."""
    allowed, denied = lists()
    if allowed is not None and not set(names).intersection(allowed):
        return f"{WHITELIST} does not name it"
    return f"{BLACKLIST} names it" if set(names).intersection(denied) else None


# -- what follows for a layer ---------------------------------------------------------


class Expected(NamedTuple):
    """What the settings and the policy make of a layer that vLLM does not leave to its compiler.

    Attributes:
        name: its class in vLLM.
        impl_id: what it runs; ``native`` is vLLM's own, None where nothing can run.
        form: the form of what it calls, ``plain`` for vLLM's own.
        reason: why it is vLLM's own, in the words of the log; None where it is served.
    """

    name: str
    impl_id: str | None
    form: str
    reason: str | None


def left_to_vllm() -> dict[str, str]:
    """Return the layers that the variables leave to vLLM, by class, each with the reason.

    Raises:
        PolicyError: a variable is wrong.
    """
    off = off_by()
    reasons = {one.class_name: why_not_listed(one.class_name, one.vllm_name) for one in LAYERS}
    return {name: f"{off} is off" if off else why for name, why in reasons.items() if off or why}  # type: ignore[misc]


def expected(decision: Decision) -> list[Expected]:
    """Return what each layer of an operator will run in vLLM's eager mode.

    Args:
        decision: the operator's, with vLLM's own path among the candidates.

    Raises:
        PolicyError: a variable is wrong.
    """
    left = left_to_vllm()
    if decision.impl_id == NATIVE:
        left = {one.class_name: POLICY_CHOOSES_NATIVE for one in LAYERS} | left
    return [
        Expected(name, NATIVE, "plain", left[name])
        if name in left
        else Expected(name, decision.impl_id, form or decision.form, None)
        for name, _, op_names, form in LAYERS
        if decision.op_name in op_names
    ]

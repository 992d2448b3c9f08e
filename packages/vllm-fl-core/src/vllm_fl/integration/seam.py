"""What the three seams into vLLM have in common: its layers, its attention, its quantisation to int8.

Each asks here whether it is left to vLLM, says here what runs, in the log and in the record,
and has its faults contained here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_fl.dispatch import NoImplementationError
from vllm_fl.dispatch import PolicyError
from vllm_fl.dispatch import trace
from vllm_fl.dispatch.calling.torch_state import is_one_of_several_ranks
from vllm_fl.dispatch.types import NATIVE
from vllm_fl.integration import engine
from vllm_fl.integration import ranks
from vllm_fl.integration.log import logger

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Seam:
    """A place in vLLM that is wrapped, where no class of its registry can be replaced.

    Attributes:
        class_name: the class of vLLM's that it stands for; the log and the lists name it so.
        vllm_name: its other name in the lists.
        install: wraps it; where it has been wrapped it does nothing.
    """

    class_name: str
    vllm_name: str
    install: Callable[[], None]


# -- what is left to vLLM --------------------------------------------------------


def why_left_to_vllm() -> str | None:
    """Say which setting of vLLM's leaves everything to it, or None."""
    from vllm import envs

    return "VLLM_BATCH_INVARIANT is set" if getattr(envs, "VLLM_BATCH_INVARIANT", False) else None


# -- faults ------------------------------------------------------------------------


class ExplicitFailureError(Exception):
    """What the user asked for explicitly fails, or nothing else may run: that stops the start."""


def contain(name: str, error: Exception, *, is_start: bool = False) -> None:
    """Let vLLM's own path run where something of ours has failed, and say so once.

    Args:
        name: whose own path that is.
        error: what failed; it is being handled.
        is_start: nothing is served yet, and the other ranks are told. Later a rank of several
            raises: alone on another path than the others, its answers would be wrong.

    Raises:
        PolicyError: the configuration is wrong.
        NoImplementationError: the policy leaves nothing that can run.
        ExplicitFailureError: what it leaves fails.
        Exception: any other ``error``, in a rank of several.
    """
    if isinstance(error, (PolicyError, NoImplementationError, ExplicitFailureError)):
        raise error
    if is_start:
        ranks.withdraw(f"vllm-fl serves {name} not there: {type(error).__name__}: {error}")
    elif is_one_of_several_ranks():
        raise error
    if engine.note_fault(name):
        logger.error("vllm-fl: %s runs vLLM's own path: %s: %s", name, type(error).__name__, error)
        logger.debug("vllm-fl failed to serve %s", name, exc_info=True)


# -- what is said -------------------------------------------------------------------

#: The lines that this process has logged.
said: set[str] = set()

#: What is vLLM's own in this process, and why.
_native: dict[str, str] = {}


def say_once(text: str) -> None:
    """Log a line, once a process."""
    if text not in said:
        said.add(text)
        logger.info(text)


def note_served(name: str, op_name: str, impl_id: str, form: str, note: str = "") -> None:
    """Say, and record, that an implementation serves one more layer of a name."""
    say_once(f"vllm-fl: {name} is served by {impl_id} ({op_name}, {form}){note}")
    record = trace.recorder()
    if record is not None:
        record.layer(name, op_name, impl_id, form)


def note_native(name: str, op_name: str, reason: str, *, is_counted: bool = True) -> None:
    """Say, and record, why one more layer of a name is vLLM's own.

    Args:
        name: the layer's.
        op_name: the operator that would serve it.
        reason: why not.
        is_counted: its calls will be recorded, so that the record has it among the layers.
    """
    _native[name] = reason
    say_once(f"vllm-fl: {name} stays vLLM's own: {reason}")
    record = trace.recorder()
    if record is not None:
        record.fact("native_layers", dict(_native))
        if is_counted:
            record.layer(name, op_name, NATIVE, "plain")

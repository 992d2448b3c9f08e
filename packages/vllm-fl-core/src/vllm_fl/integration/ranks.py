"""With several ranks every one makes the same choices, or vLLM does not start.

A rank that runs another kernel than the others gives wrong answers, or hangs in a
collective that they do not enter. Every rank therefore publishes what it froze in
the store of its process group. That is no collective: where a rank runs vLLM
natively and publishes nothing, the others read that within a time limit and stop.

Rank 0 compares every rank with itself, and each other rank compares itself with
rank 0, so that a thousand ranks read two thousand records and not a million. A
difference stops both ranks that have it, and vLLM ends the others.
"""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.dispatch import get_default_manager
from vllm_fl.dispatch.calling.torch_state import is_one_of_several_ranks
from vllm_fl.dispatch.common.text import printable
from vllm_fl.dispatch.decision import CHOSEN
from vllm_fl.dispatch.decision import NEXT
from vllm_fl.dispatch.environment import seconds_variable
from vllm_fl.dispatch.errors import DispatchError
from vllm_fl.integration.log import logger

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Mapping
    from collections.abc import Sequence

    from vllm_fl.dispatch import Plan

TIMEOUT_VARIABLE = "VLLM_FL_RANKS_TIMEOUT"

#: A rank may still read the model's code from a slow disk.
_DEFAULT_SECONDS = 120.0

_MEND = (
    "Every rank needs the same wheels and the same VLLM_FL_* variables; `vllm-fl explain --all`, run as a "
    "rank runs, says why it chooses what. VLLM_FL_OOT_ENABLED=0 for every rank runs vLLM natively."
)

# Every engine of a process agrees anew; the ranks of one engine count alike.
_rounds = itertools.count(1)


class RanksDifferError(DispatchError, RuntimeError):
    """The ranks do not run the same: the message names rank, operator and both choices."""


@dataclass(frozen=True)
class Group:
    """The ranks that compute together.

    Attributes:
        rank: this one.
        size: how many there are.
        store: their ``torch.distributed`` store.
    """

    rank: int
    size: int
    store: Any


def group() -> Group | None:
    """Return the default process group, None where this process computes alone."""
    if not is_one_of_several_ranks():
        return None
    from torch import distributed

    world: Any = distributed.group.WORLD
    return Group(distributed.get_rank(), distributed.get_world_size(), world.get_group_store())


def time_limit() -> float:
    """Return how many seconds a rank waits for the others.

    Raises:
        PolicyError: the variable is no positive number.
    """
    return seconds_variable(TIMEOUT_VARIABLE, _DEFAULT_SECONDS)


def agree(plan: Plan, facts: Mapping[str, Any], ranks: Group | None = None) -> None:
    """Publish what this rank froze, and compare it with the others'.

    Args:
        plan: this rank's.
        facts: what its fingerprint covers beside the choices.
        ranks: the ranks; those of the default process group if None.

    Raises:
        RanksDifferError: a rank froze something else, runs natively, failed, or has
            published nothing within the time limit.
    """
    ranks = ranks or group()
    if ranks is None:
        return
    mine = {"fingerprint": plan.fingerprint, **_parts(plan, facts)}
    try:
        prefix = _publish(ranks, mine)
        others = range(1, ranks.size) if ranks.rank == 0 else (0,)
        missing = _wait(ranks, prefix, others)
        there = [other for other in others if other not in missing]
        problems = [line for other in there for line in _compare(ranks, prefix, other, mine)]
    except RuntimeError as error:
        # The store lives in rank 0, which has ended: its own log says why.
        raise RanksDifferError(
            f"rank {ranks.rank} of {ranks.size} cannot read what the others chose: {error}"
        ) from error
    problems += [
        f"rank {other} has published nothing within {time_limit():g} s ({TIMEOUT_VARIABLE}): it runs vLLM "
        "without vllm-fl (not installed there, or VLLM_PLUGINS leaves out 'fl'), or it has failed"
        for other in missing
    ]
    if problems:
        # Another rank's words: they may be anything.
        lines = "\n".join(f"  {printable(problem)}" for problem in problems)
        raise RanksDifferError(
            f"vLLM does not start, because its {ranks.size} ranks do not run the same. "
            f"Rank {ranks.rank} sees:\n{lines}\n{_MEND}"
        )
    logger.info("vllm-fl: rank %s of %s agrees, fingerprint %s", ranks.rank, ranks.size, plan.fingerprint)


def withdraw(reason: str, ranks: Group | None = None) -> None:
    """Tell the other ranks that this one runs natively, or not at all, so that none waits for it."""
    try:
        ranks = ranks or group()
        if ranks is not None:
            _publish(ranks, {"withdrawn": reason})
    except RuntimeError:
        # Then they wait, and stop as for a rank that has no vllm-fl.
        logger.debug("vllm-fl: the other ranks cannot be told", exc_info=True)


def _parts(plan: Plan, facts: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "policy": {"the process": plan.policy},
        "choice": {op: impl_id or "nothing" for op, impl_id in plan.choices.items()},
        "candidates": {op: " > ".join(impl_ids) for op, impl_ids in plan.candidates.items()},
        "wheel": dict(plan.wheels),
        "code": dict(plan.code),
        "variable": dict(plan.variables),
        "fact": {name: json.dumps(value, sort_keys=True) for name, value in facts.items()},
    }


def _publish(ranks: Group, record: Mapping[str, Any]) -> str:
    prefix = f"vllm_fl/{next(_rounds)}"
    ranks.store.set(f"{prefix}/{ranks.rank}", json.dumps(record))
    return prefix


def _wait(ranks: Group, prefix: str, others: Sequence[int]) -> list[int]:
    """Wait until all ``others`` have published, and return those that have not in time."""
    # Asking again and again, as a store that waits lets no other thread of this
    # process ask (those of the process group do).
    keys = [f"{prefix}/{other}" for other in others]
    deadline = time.monotonic() + time_limit()
    pause = 0.01
    while not ranks.store.check(keys):
        if time.monotonic() > deadline:
            return [other for other, key in zip(others, keys, strict=True) if not ranks.store.check([key])]
        time.sleep(pause)
        pause = min(2 * pause, 0.25)
    return []


def _compare(ranks: Group, prefix: str, other: int, mine: Mapping[str, Any]) -> Iterator[str]:
    theirs = json.loads(ranks.store.get(f"{prefix}/{other}"))
    if "withdrawn" in theirs:
        yield f"rank {other} does not take part: {theirs['withdrawn']}"
        return
    if theirs["fingerprint"] == mine["fingerprint"]:
        return
    for part in ("policy", "choice", "candidates", "wheel", "code", "variable", "fact"):
        for name in sorted(mine[part].keys() | theirs[part].keys()):
            # A module of VLLM_FL_PLUGIN_MODULES has no version.
            here, there = (facts[part].get(name, "none") or "no version" for facts in (mine, theirs))
            if here != there:
                why = _why_not(name, there) if part == "choice" else ""
                yield f"{part} of {name}: rank {ranks.rank} has {here}, rank {other} has {there}{why}"


def _why_not(op_name: str, impl_id: str) -> str:
    """Say why this rank does not run what another one does, where it knows."""
    for candidate in get_default_manager().explain(op_name).candidates:
        if candidate.impl_id == impl_id and candidate.status not in (CHOSEN, NEXT):
            return f"; here {impl_id} is {candidate.reason}"
    return ""

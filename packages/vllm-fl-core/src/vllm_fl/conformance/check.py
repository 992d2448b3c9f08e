"""One case: call the operator and judge everything that its contract promises."""

from __future__ import annotations

import time
from dataclasses import dataclass
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllm_fl.conformance.case import Tier
from vllm_fl.conformance.judge import RIGHT
from vllm_fl.conformance.judge import Verdict
from vllm_fl.conformance.judge import vacuity
from vllm_fl.conformance.judge import wrong
from vllm_fl.conformance.layer_question import layer_problem
from vllm_fl.conformance.process import SideEffectError
from vllm_fl.conformance.result import Result
from vllm_fl.conformance.result import Status
from vllm_fl.conformance.tensors import moved
from vllm_fl.conformance.tensors import named
from vllm_fl.conformance.tensors import other_values
from vllm_fl.conformance.tensors import overwrite
from vllm_fl.conformance.tensors import packed
from vllm_fl.conformance.tensors import same_bytes
from vllm_fl.conformance.tensors import shares_memory
from vllm_fl.conformance.tensors import tensors_of
from vllm_fl.conformance.tensors import threads
from vllm_fl.conformance.tensors import threads_for
from vllm_fl.conformance.tensors import written
from vllm_fl.dispatch import RefusedBeforeWriting
from vllm_fl.dispatch.calling.fatal import is_fatal
from vllm_fl.dispatch.common.foreign import describe

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from vllm_fl.conformance.case import Arguments
    from vllm_fl.conformance.case import Case
    from vllm_fl.conformance.dispatched import Dispatched
    from vllm_fl.conformance.judge import Expected


@dataclass(frozen=True)
class _Outcome:
    status: Status
    verdict: Verdict
    is_deterministic: bool | None = None


@dataclass(frozen=True)
class Call:
    """What one call left behind.

    Attributes:
        arguments: as they are after it.
        returned: what it returned.
        results: what is judged, on the device.
    """

    arguments: Arguments
    returned: Any
    results: tuple[Tensor | None, ...]

    def on_cpu(self) -> tuple[Tensor | None, ...]:
        """Return the results on the CPU."""
        return tuple(part.cpu() if isinstance(part, Tensor) else part for part in self.results)

    def kept(self) -> Call:
        """Return a copy whose results nothing writes any more."""
        copies = (part.detach().clone() if isinstance(part, Tensor) else part for part in self.results)
        return replace(self, results=tuple(copies))

    def new(self) -> list[tuple[int, Tensor]]:
        """Return the results that are memory of their own, by their places."""
        given = tensors_of(self.arguments.values())
        return [
            (place, part)
            for place, part in enumerate(self.results)
            if isinstance(part, Tensor) and not any(shares_memory(part, one) for one in given)
        ]


def check(case: Case, dispatched: Dispatched, device: torch.device, *, loosen: float = 1.0) -> Result:
    """Run a case and judge it.

    Args:
        case: what is called.
        dispatched: the implementation behind the dispatch.
        device: where its arguments are.
        loosen: what the tolerances are multiplied by.

    Raises:
        Exception: the device has failed; nothing that runs after it means anything.
    """
    started = time.perf_counter()
    with threads(threads_for(case.elements)):
        made = case.make()
        expected = case.expect(made)
        blind = vacuity(expected)
        try:
            if blind:
                outcome = _failed(f"a fault of this case, not of the implementation: {blind}")
            else:
                outcome = _examined(case, made, expected, dispatched, device, loosen)
        except SideEffectError as error:
            outcome = _failed(str(error))
        except Exception as error:
            if is_fatal(error):
                raise
            outcome = _failed(f"raised {describe(error)}")
    is_compared = outcome.status is not Status.REFUSED
    return Result(
        dispatched.impl.impl_id,
        case.op,
        case.name,
        outcome.status,
        named(case.dtype),
        outcome.verdict.ratio if is_compared else None,
        outcome.verdict.largest if is_compared else None,
        outcome.verdict.note,
        outcome.is_deterministic,
        seconds=time.perf_counter() - started,
    )


def _failed(note: str) -> _Outcome:
    return _Outcome(Status.FAILED, wrong(note))


def call(case: Case, made: Arguments, function: Callable[[Arguments], Any], device: torch.device) -> Call:
    """Call ``function`` with copies of a case's arguments, as vLLM does: without autograd."""
    arguments = moved(made, device)
    with torch.inference_mode():
        returned = function(arguments)
    return Call(arguments, returned, case.results(returned, arguments))


def _examined(
    case: Case,
    made: Arguments,
    expected: Expected,
    dispatched: Dispatched,
    device: torch.device,
    loosen: float,
) -> _Outcome:
    arguments = moved(made, device)
    answer = dispatched.refusal(arguments)
    touched = written(made, arguments, ())
    if touched:
        return _failed(f"supports wrote {', '.join(touched)}")
    if answer is not True and not (isinstance(answer, str) and answer):
        return _failed(f"supports returned {answer!r}; it must say in a sentence why not")
    problem = layer_problem(dispatched, arguments)
    if problem:
        return _failed(problem)
    try:
        with torch.inference_mode():
            returned = dispatched(arguments)
    except NotImplementedError as error:
        touched = written(made, arguments, ())
        if touched:
            return _failed(f"refused, and had written {', '.join(touched)}")
        if dispatched.writes and not isinstance(error, RefusedBeforeWriting):
            return _failed(
                f"raised {describe(error)}, and may write {', '.join(dispatched.writes)}: to refuse, such "
                "a one answers so by supports, or raises RefusedBeforeWriting"
            )
        return _Outcome(Status.REFUSED, Verdict(note=answer if isinstance(answer, str) else str(error)))
    if answer is not True:
        return _failed("supports refused, and the dispatch ran it all the same")
    first = Call(arguments, returned, case.results(returned, arguments))
    problem = contract_problem(case, made, first, dispatched.writes)
    if problem:
        return _failed(problem)
    verdict = expected.judge(first.on_cpu())
    if verdict.ratio > loosen:
        return _Outcome(Status.FAILED, verdict)
    kept = first.kept()
    if case.tier < Tier.STRESS:
        found = _with_other_values(case, expected, dispatched, first, kept)
        if found.ratio > loosen:
            return _Outcome(Status.FAILED, found)
        verdict += found
    second = call(case, made, dispatched.call_directly, device)
    problem = _reused(first, kept, second)
    if problem:
        return _failed(problem)
    first = kept
    is_deterministic = _agree(first, second)
    if not is_deterministic:
        # Either it differs from run to run, or the dispatch changes what it computes.
        # A kernel that adds in any order may give the same bytes a few times in a row.
        for way in (dispatched, dispatched.call_directly) * _PATIENCE:
            again = call(case, made, way, device)
            verdict += expected.judge(again.on_cpu())
            if not _agree(again, first if way is dispatched else second):
                break
        else:
            return _failed("called directly it always gives other bytes than through the dispatch")
        verdict += expected.judge(second.on_cpu())
    if case.same_bytes:
        dense = call(case, packed(made), dispatched, device)
        if is_deterministic and not _agree(first, dense):
            return _failed("contiguous arguments give other bytes than these, whose last stride is 1 too")
    status = Status.PASSED if verdict.ratio <= loosen else Status.FAILED
    return _Outcome(status, verdict, is_deterministic)


def _with_other_values(
    case: Case, expected: Expected, dispatched: Dispatched, first: Call, kept: Call
) -> Verdict:
    """Judge a call of the very tensors of the first one, which hold other values by now.

    What an implementation keeps by a shape, an address, an object or its version counter is
    stale then, be it a weight, a table or a result.
    """
    with other_values():
        values = case.make()
    overwrite(first.arguments, values)
    with torch.inference_mode():
        returned = dispatched.call_directly(first.arguments)
    again = Call(first.arguments, returned, case.results(returned, first.arguments))
    problem = contract_problem(case, values, again, dispatched.writes) or _reused(first, kept, again)
    if problem:
        return wrong(f"called again with other values: {problem}")
    if case.elements > _WORTH_JUDGING:
        return RIGHT
    verdict = case.expect(values).judge(again.on_cpu())
    if verdict.is_right:
        return verdict
    stale = ""
    if _agree(kept, again) or expected.judge(again.on_cpu()).is_right:
        stale = "it returns the first call's results: "
    note = (
        f"right for one set of values, and wrong for a second one in the same tensors: {stale}{verdict.note}"
    )
    return replace(verdict, note=note)


def _reused(first: Call, kept: Call, later: Call) -> str:
    """Say what a later call did to what an earlier one returned; ``""`` where nothing."""
    for place, part in first.new():
        if any(shares_memory(part, other) for _, other in later.new()):
            return f"result {place} is memory that an earlier call returned: it must be new each time"
        if not same_bytes(part, kept.results[place]):
            return f"result {place} of an earlier call was changed by a later one"
    return ""


#: A larger case's second set of values is not compared with float64; there are smaller ones.
_WORTH_JUDGING = 2**20

#: Calls of each kind before two results that differ are held to differ always.
_PATIENCE = 8


def _agree(one: Call, other: Call) -> bool:
    return len(one.results) == len(other.results) and all(map(same_bytes, one.results, other.results))


def contract_problem(case: Case, made: Arguments, call: Call, writes: tuple[str, ...]) -> str:
    """Say what a call did against the contract, values apart; ``""`` where nothing.

    Args:
        case: what was called.
        made: its arguments as they were.
        call: what it left.
        writes: what the implementation declares that it may write.
    """
    returned = call.returned if isinstance(call.returned, tuple) else (call.returned,)
    arguments = call.arguments
    allowed = set(case.writes).intersection(writes)
    if case.returns_arguments:
        if len(returned) != len(case.returns_arguments):
            return f"returned {len(returned)} results, not {len(case.returns_arguments)}"
        for part, name in zip(returned, case.returns_arguments, strict=True):
            if part is not arguments[name]:
                return f"returned something else than the argument {name} itself"
    else:
        problem = _new_problem(returned, arguments, donated=allowed)
        if problem:
            return problem
    touched = written(made, arguments, allowed)
    if touched:
        declared = f"declares that it writes {', '.join(writes) or 'nothing'}"
        return (
            f"wrote {', '.join(dict.fromkeys(touched))}; it {declared}, and the contract lets it write "
            f"{', '.join(case.writes) or 'nothing'} here"
        )
    return ""


def _new_problem(returned: tuple[Any, ...], arguments: Arguments, donated: set[str]) -> str:
    """Say why results are not new and contiguous tensors on the arguments' device.

    What is donated may be reused for them.
    """
    given = tensors_of(arguments.values())
    names = [name for name, value in arguments.items() if isinstance(value, Tensor)]
    for place, part in enumerate(returned):
        if part is None:
            continue
        if not isinstance(part, Tensor):
            return f"result {place} is a {type(part).__name__}, not a tensor"
        if part.requires_grad:
            return f"result {place} requires a gradient: autograd recorded how it was computed"
        if given and part.device != given[0].device:
            return f"result {place} is on {part.device}, not on {given[0].device}"
        if not part.is_contiguous():
            return f"result {place} is not contiguous: shape {tuple(part.shape)}, stride {part.stride()}"
        for name, value in zip(names, given, strict=True):
            if name not in donated and shares_memory(part, value):
                return f"result {place} is the argument {name} or a view of it, and must be new"
        for other in tensors_of(returned[:place]):
            if shares_memory(part, other):
                return f"result {place} shares memory with another result"
    return ""

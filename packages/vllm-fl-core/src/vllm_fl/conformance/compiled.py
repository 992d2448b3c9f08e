"""What a compiler and a device's graph do with an implementation.

vLLM traces a layer once, with the number of tokens unknown, and drops the guards:
one graph serves every number. So what is said to be traceable is traced whole with
many rows and run with other numbers, guards evaluated; a second graph is a choice
by rows, of which vLLM would take one branch for all, and so is a predicate that takes
some numbers and refuses others. What is not traceable is traced in the form in which
vLLM calls it then, a torch operator around it.
"""

from __future__ import annotations

import functools
import time
from dataclasses import replace
from typing import TYPE_CHECKING
from typing import Any

import torch
from torch import Tensor

from vllm_fl.conformance.case import MANY
from vllm_fl.conformance.check import Call
from vllm_fl.conformance.check import contract_problem
from vllm_fl.conformance.judge import RIGHT
from vllm_fl.conformance.judge import wrong
from vllm_fl.conformance.result import Result
from vllm_fl.conformance.result import Status
from vllm_fl.conformance.tensors import moved
from vllm_fl.dispatch.calling.fatal import is_fatal
from vllm_fl.dispatch.common.foreign import describe
from vllm_fl.integration.opaque import opaque
from vllm_fl.integration.opaque import shielded

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence

    from vllm_fl.conformance.case import Arguments
    from vllm_fl.conformance.case import Case
    from vllm_fl.conformance.case import Suite
    from vllm_fl.conformance.dispatched import Dispatched
    from vllm_fl.conformance.judge import Verdict

#: First the number that is traced, then fewer, fewer than there are experts, and more.
#: A predicate is asked about the others too; what refuses some is run with what it takes.
_ROWS = (83, 7, 2, 201, 1, 16, 64, 256, 1024, 8192, MANY)
_TRACED = 4
_CAPTURED_ROWS = 33
#: What vLLM's AOT compilation does with a graph but for generating code.
_BACKEND = "aot_eager"

TRACED = "one graph for every number of rows"
OPAQUE = "one graph around it, opaque to a compiler"
CAPTURED = "captured in a CUDA graph"


def trace(suite: Suite, dispatched: Dispatched, device: torch.device, loosen: float = 1.0) -> Result:
    """Trace every form of an operator with one number of rows and run it with others."""
    name = TRACED if dispatched.impl.traceable else OPAQUE
    judge = functools.partial(_traced, suite)
    return _each(name, suite, _ROWS, _TRACED, judge, dispatched, device, loosen)


def capture(suite: Suite, dispatched: Dispatched, device: torch.device, loosen: float = 1.0) -> Result:
    """Capture every form of an operator in a CUDA graph and replay it on other values."""
    return _each(CAPTURED, suite, (_CAPTURED_ROWS, *_ROWS), 1, _captured, dispatched, device, loosen)


def _each(
    name: str,
    suite: Suite,
    rows: Sequence[int],
    needed: int,
    judge: Callable[[Sequence[Case], Dispatched, torch.device], Verdict],
    dispatched: Dispatched,
    device: torch.device,
    loosen: float,
) -> Result:
    """Judge every form that the implementation takes, of the first dtype of which it takes any."""
    started = time.perf_counter()
    whole, ran, why = RIGHT, None, ""
    for cases in zip(*(suite.rows(number) for number in rows), strict=True):
        if ran not in (None, cases[0].dtype):
            continue
        try:
            taken, refusal = _taken(dict(zip(rows, cases, strict=True)), needed, dispatched, device)
            why = why or refusal
            if not taken:
                continue
            ran = cases[0].dtype
            if refusal and dispatched.impl.traceable:
                whole += wrong(
                    f"supports takes {taken[0].name} and not every number of rows ({refusal}): what is "
                    "traced once serves them all, so that it must not look at their number"
                )
            else:
                whole += judge(taken, dispatched, device)
        except Exception as error:
            if is_fatal(error):
                raise
            ran = cases[0].dtype
            whole += wrong(f"{cases[0].name}: {_brief(error)}")
    status = Status.NOT_RUN if ran is None else Status.PASSED if whole.ratio <= loosen else Status.FAILED
    return Result(
        dispatched.impl.impl_id,
        dispatched.operator.name,
        name,
        status,
        ratio=None if ran is None else whole.ratio,
        note=f"it refuses all of these arguments: {why}" if ran is None else whole.note,
        seconds=time.perf_counter() - started,
        is_case=False,
    )


def _taken(
    cases: dict[int, Case], needed: int, dispatched: Dispatched, device: torch.device
) -> tuple[list[Case], str]:
    """Return the first cases that ``supports`` takes, and why it refuses one; ``""`` where it refuses none.

    Every number of rows is asked about where code is traced once for all of them. One row is
    not run: torch's compiler makes a graph of its own for it.
    """
    taken: list[Case] = []
    refusal = ""
    for rows, case in cases.items():
        if len(taken) == needed and not (dispatched.predicates and dispatched.impl.traceable):
            break
        answer = dispatched.refusal(moved(case.make(), device))
        if answer is True:
            taken += [case] if rows > 1 and len(taken) < needed else []
        else:
            refusal = refusal or f"{case.name}: {answer}"
    return taken, refusal


def _brief(error: BaseException) -> str:
    lines = [line.strip() for line in describe(error).splitlines() if line.strip()]
    return " ".join(lines[:3])[:400]


def _traced(suite: Suite, cases: Sequence[Case], dispatched: Dispatched, device: torch.device) -> Verdict:
    """Judge one form of an operator in a graph."""
    torch._dynamo.reset()
    graphs = 0
    inner = torch._dynamo.lookup_backend(_BACKEND)

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return inner(graph, inputs)

    function = _caller(_function(dispatched), dispatched, list(cases[0].make()))
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    verdict = RIGHT
    try:
        for case in cases:
            made = case.make()
            arguments = moved(made, device)
            for name in suite.row_arguments:
                if isinstance(arguments.get(name), Tensor):
                    torch._dynamo.mark_dynamic(arguments[name], 0)
            with torch.inference_mode():
                returned = compiled(*arguments.values())
            returned = _identities(returned, arguments, case)
            call = Call(arguments, returned, case.results(returned, arguments))
            verdict += _judged(case, made, call, dispatched)
            if graphs > 1:
                return verdict + wrong(
                    f"traced anew for {case.name}: it chooses by the number of rows, and vLLM would keep the "
                    "branch that it traced first"
                )
    finally:
        torch._dynamo.reset()
    return verdict


def _judged(case: Case, made: Arguments, call: Call, dispatched: Dispatched) -> Verdict:
    problem = contract_problem(case, made, call, dispatched.writes)
    verdict = wrong(problem) if problem else case.expect(made).judge(call.on_cpu())
    if verdict.is_right:
        return verdict
    return replace(verdict, note=f"{case.name}: {verdict.note or f'{verdict.ratio:.2g} tolerances off'}")


def _identities(returned: Any, arguments: Arguments, case: Case) -> Any:
    """Take an argument that a graph returned as a new object of the same memory for itself."""
    if not case.returns_arguments:
        return returned
    parts = returned if isinstance(returned, tuple) else (returned,)
    found = []
    for part, name in zip(parts, case.returns_arguments, strict=False):
        value = arguments[name]
        same = (
            isinstance(part, Tensor)
            and isinstance(value, Tensor)
            and part.data_ptr() == value.data_ptr()
            and part.stride() == value.stride()
        )
        found.append(value if same else part)
    return tuple(found) if isinstance(returned, tuple) else found[0]


def _function(dispatched: Dispatched) -> Callable[..., Any]:
    """Return what vLLM's layers call in compiled code."""
    if dispatched.impl.traceable:
        return dispatched.resolved.fn
    resolved = dispatched.resolve(functools.partial(shielded, dispatched.operator, is_strict=True))
    return opaque(dispatched.operator, resolved)


def _caller(function: Callable[..., Any], dispatched: Dispatched, names: list[str]) -> Callable[..., Any]:
    keyword_only = {
        p.name for p in dispatched.operator.signature.parameters.values() if p.kind is p.KEYWORD_ONLY
    }
    positional = [place for place, name in enumerate(names) if name not in keyword_only]
    keywords = [(name, place) for place, name in enumerate(names) if name in keyword_only]

    def call(*values: Any) -> Any:
        return function(*[values[i] for i in positional], **{name: values[i] for name, i in keywords})

    return call


def _captured(cases: Sequence[Case], dispatched: Dispatched, device: torch.device) -> Verdict:
    """Judge one form in a graph that was captured with other values."""
    (case,) = cases
    made = case.make()
    arguments = moved(made, device)
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.inference_mode(), torch.cuda.stream(stream):
        for _ in range(3):
            dispatched.call_directly(arguments)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.inference_mode():
        # What is captured must not be what is replayed, or a constant would pass.
        for value in tensors.values():
            if value.is_floating_point():
                value.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            returned = dispatched.call_directly(arguments)
        for name, value in tensors.items():
            value.copy_(made[name])
        graph.replay()
        torch.cuda.synchronize()
    return _judged(case, made, Call(arguments, returned, case.results(returned, arguments)), dispatched)

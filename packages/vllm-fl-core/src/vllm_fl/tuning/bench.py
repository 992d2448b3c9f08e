"""The run: every contender of every operator, at every shape, in every mode."""

from __future__ import annotations

import math
from dataclasses import asdict
from dataclasses import dataclass
from typing import TYPE_CHECKING
from typing import Any

import torch

from vllm_fl.conformance.cases import SUITES
from vllm_fl.dispatch.calling.fatal import is_fatal
from vllm_fl.tuning import recipes
from vllm_fl.tuning.contenders import COMPILE
from vllm_fl.tuning.contenders import COMPILED
from vllm_fl.tuning.contenders import EAGER
from vllm_fl.tuning.contenders import GRAPH
from vllm_fl.tuning.contenders import NotMeasuredError
from vllm_fl.tuning.contenders import contenders
from vllm_fl.tuning.contenders import mark_rows
from vllm_fl.tuning.judging import Judge
from vllm_fl.tuning.judging import brief
from vllm_fl.tuning.timing import Copies
from vllm_fl.tuning.timing import clock_of
from vllm_fl.tuning.timing import copy_bandwidth
from vllm_fl.tuning.timing import has_graphs
from vllm_fl.tuning.timing import measure

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Iterator
    from collections.abc import Sequence

    from vllm_fl.dispatch import OpManager
    from vllm_fl.tuning.contenders import Contender
    from vllm_fl.tuning.contenders import Field
    from vllm_fl.tuning.judging import Answer
    from vllm_fl.tuning.shapes import Family
    from vllm_fl.tuning.timing import Clock
    from vllm_fl.tuning.timing import Subject
    from vllm_fl.tuning.timing import Times

#: Tokens where nobody gives any; a CPU would take hours for the rest.
ROWS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
ROWS_ON_CPU = (1, 4, 16, 64, 256, 1024)
#: That a compiler may make of one function: two for each contender, and some more.
_MOST_GRAPHS = 64


@dataclass(frozen=True)
class Row:
    """What one contender did at one shape, in one mode.

    Attributes:
        op: the operator.
        impl_id: the contender.
        shape: the selector's shape, ``16x4096``.
        sizes: what else the operator was called with.
        tokens: of the model.
        rows: of the selector, which a tuned table counts.
        last: its last dimension.
        layout: ``contiguous`` or ``strided``, with ``+residual`` where one is added.
        dtype: of the activations.
        mode: ``eager``, ``graph`` or ``compile``.
        correct: None where it was not asked, or refuses these arguments.
        median_us: microseconds of a call; None where it was not timed.
        p20_us: a fifth of the batches took less.
        p80_us: four fifths of the batches took less.
        host_us: until the call returns.
        share_of_bandwidth: what it moved, of what a copy moves in that time.
        note: why it is not correct or was not timed.
    """

    op: str
    impl_id: str
    shape: str
    sizes: str
    tokens: int
    rows: int
    last: int
    layout: str
    dtype: str
    mode: str
    correct: bool | None = None
    median_us: float | None = None
    p20_us: float | None = None
    p80_us: float | None = None
    host_us: float | None = None
    share_of_bandwidth: float | None = None
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values, with three decimals."""
        return {key: round(v, 3) if isinstance(v, float) else v for key, v in asdict(self).items()}

    @property
    def key(self) -> tuple[Any, ...]:
        """What rows of one comparison have in common."""
        return (self.op, self.dtype, self.last, self.sizes, self.layout, self.mode, self.tokens)

    @property
    def family(self) -> tuple[Any, ...]:
        """What rows of one curve have in common: everything but the contender and the tokens."""
        return self.key[:-1]


@dataclass(frozen=True)
class Options:
    """How it is measured.

    Attributes:
        modes: of ``eager``, ``graph`` and ``compile``.
        rows: the tokens; those of the selection, or the usual ones, where it is empty.
        backends: the contenders; all where it is empty.
        seconds: for each contender, shape and mode, about.
    """

    modes: tuple[str, ...] = (EAGER, GRAPH)
    rows: tuple[int, ...] = ()
    backends: tuple[str, ...] = ()
    seconds: float = 0.05


class Bench:
    """A run over some families.

    Args:
        manager: what is registered.
        device: where it is measured.
        options: how.
        families: what is measured, in order.
        clock: the device's own where it is None.
    """

    def __init__(
        self,
        manager: OpManager,
        device: torch.device,
        options: Options,
        families: Sequence[Family],
        clock: Clock | None = None,
    ) -> None:
        self._manager = manager
        self.device = device
        self.options = options
        self.modes = tuple(mode for mode in options.modes if mode != GRAPH or has_graphs(device))
        self._clock = clock or clock_of(device)
        usual = ROWS_ON_CPU if device.type == "cpu" else ROWS
        self.cases = [(one, tuple(one.tokens or options.rows or usual)) for one in families]
        self.bandwidth = 0.0
        #: Why contenders did not compete, by operator and id.
        self.absent: dict[tuple[str, str], str] = {}

    @property
    def steps(self) -> int:
        """How many shapes a pass measures."""
        return sum(len(tokens) for _, tokens in self.cases)

    def run(self, passes: int = 1) -> Iterator[tuple[int, list[Row]]]:
        """Yield the number of a pass and its rows, for each family and number of tokens.

        The passes of a family follow one another; a contender is judged in the first.
        """
        self.bandwidth = copy_bandwidth(self.device, clock_of(self.device))
        # Every contender that is compiled shares the code that calls it, and has graphs of its own.
        with torch._dynamo.config.patch(recompile_limit=_MOST_GRAPHS):
            yield from self._run(passes)

    def _run(self, passes: int) -> Iterator[tuple[int, list[Row]]]:
        for family, every in self.cases:
            torch._dynamo.reset()
            field = contenders(self._manager, family.op, self.options.backends)
            self.absent.update({(family.op, impl_id): why for impl_id, why in field.absent.items()})
            functions: dict[tuple[str, bool], Callable[..., Any] | str] = {}
            answers: dict[tuple[int, str, bool], Answer] = {}
            for number in range(passes):
                for tokens in every:
                    one = _Shape(self, field, family, tokens, functions, answers)
                    yield number, one.rows()


class _Shape:
    """One family with one number of tokens."""

    def __init__(
        self,
        bench: Bench,
        field: Field,
        family: Family,
        tokens: int,
        functions: dict[tuple[str, bool], Callable[..., Any] | str],
        answers: dict[tuple[int, str, bool], Answer],
    ) -> None:
        self._bench, self._field, self._family, self._tokens = bench, field, family, tokens
        self._functions, self._answers = functions, answers
        self._its_judge: Judge | None = None
        self._arguments = recipes.make(family, tokens, bench.device)
        mark_rows(self._arguments, SUITES[family.op].row_arguments)
        self._bytes = recipes.moved_bytes(family, tokens, self._arguments)

    def rows(self) -> list[Row]:
        operator = self._field.operator
        selector = self._arguments[operator.selector or next(iter(self._arguments))]
        blank = Row(
            self._family.op,
            "",
            "x".join(map(str, selector.shape)),
            str(self._family),
            self._tokens,
            math.prod(selector.shape[:-1]),
            selector.shape[-1],
            self._family.layout,
            str(selector.dtype).removeprefix("torch."),
            "",
        )
        copies = Copies(operator, self._arguments, self._bytes)
        return [row for mode in self._bench.modes for row in self._in_mode(mode, blank, copies)]

    def _in_mode(self, mode: str, blank: Row, copies: Copies) -> Iterator[Row]:
        found: dict[str, dict[str, Any]] = {}
        subjects: list[Subject] = []
        for contender in self._field.contenders:
            if mode == COMPILE and contender.impl_id == COMPILED:
                continue  # it is the reference, which is compiled itself then
            facts = found[contender.impl_id] = {"impl_id": contender.impl_id, "mode": mode}
            try:
                function = self._function(contender, mode == COMPILE)
            except NotMeasuredError as error:
                facts["note"] = str(error)
                continue
            answer = self._answer(contender, mode == COMPILE, function)
            facts |= {"correct": answer.is_right, "note": answer.note}
            # vLLM's own path is what everything is compared with, be it right or not.
            if answer.is_right or (answer.is_right is False and contender.is_native):
                self._add(subjects, facts, contender, mode, function, copies)
        times = measure(subjects, self._bench._clock, self._bench.options.seconds) if subjects else {}
        for impl_id, facts in found.items():
            timed = self._timed(times[impl_id]) if impl_id in times else {}
            yield Row(**{**asdict(blank), **facts, **timed})

    def _add(
        self,
        subjects: list[Subject],
        facts: dict[str, Any],
        contender: Contender,
        mode: str,
        function: Callable[..., Any],
        copies: Copies,
    ) -> None:
        if mode != GRAPH:
            subjects.append(copies.eager(contender.impl_id, function))
            return
        if not contender.is_graph_safe:
            facts["note"] = "it does not say that it may be captured in a graph"
            return
        try:
            subjects.append(copies.captured(contender.impl_id, function, self._bench._clock))
        except Exception as error:
            if is_fatal(error):
                raise
            facts["note"] = f"cannot be captured in a graph: {brief(error)}"

    def _function(self, contender: Contender, compiled: bool) -> Callable[..., Any]:
        key = (contender.impl_id, compiled)
        if key not in self._functions:
            try:
                self._functions[key] = contender.make(self._arguments, compiled)
            except NotMeasuredError as error:
                self._functions[key] = str(error)
        found = self._functions[key]
        if isinstance(found, str):
            raise NotMeasuredError(found)
        return found

    def _answer(self, contender: Contender, compiled: bool, function: Callable[..., Any]) -> Answer:
        key = (self._tokens, contender.impl_id, compiled)
        if key not in self._answers:
            values_only = compiled or contender.is_native or contender.impl_id == COMPILED
            self._answers[key] = self._judge().ask(contender, function, values_only=values_only)
        return self._answers[key]

    def _judge(self) -> Judge:
        if self._its_judge is None:
            self._its_judge = Judge(self._field.operator, self._arguments)
        return self._its_judge

    def _timed(self, times: Times) -> dict[str, Any]:
        share = self._bytes / (times.median_us / 1e6) / self._bench.bandwidth
        return {**asdict(times), "share_of_bandwidth": share}

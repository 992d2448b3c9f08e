"""What a case is: one call of an operator, and what is right for it."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import replace
from enum import IntEnum
from typing import TYPE_CHECKING
from typing import Any
from typing import TypeAlias

import torch

from vllm_fl.conformance.tensors import named

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Iterable

    from torch import Tensor

    from vllm_fl.conformance.judge import Expected
    from vllm_fl.conformance.judge import Verdict

#: An operator's arguments by name, in the contract's order; what is left out has its default.
Arguments: TypeAlias = dict[str, Any]

#: In which order they are tried where one is enough; see ``Suite.rows``.
ROWS_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

#: One more than 16 bits count, and than a grid's second axis holds on CUDA.
MANY = 2**16 + 1


class Tier(IntEnum):
    """How much is run: a tier holds those before it."""

    #: Under a minute on two cores.
    SMOKE = 0
    #: Every shape, dtype and layout.
    FULL = 1
    #: More elements than 32 bits count; needs a device with tens of gigabytes.
    STRESS = 2


@dataclass(frozen=True)
class Case:
    """One call of an operator, and what is right for it.

    Attributes:
        op: the operator.
        name: what is special about the call; with ``op`` it is unique.
        dtype: what the report groups it by.
        make: returns the arguments on the CPU, the same each time.
        expect: takes such arguments and says what is right.
        elements: of the largest argument; ``--max-elements`` compares it.
        tier: where it runs first.
        writes: the arguments that the contract lets this very call write.
        returns_arguments: the results are these arguments themselves; new where empty.
        also: arguments that are results too, although they are not returned.
        same_bytes: contiguous arguments must give the same bytes.
    """

    op: str
    name: str
    dtype: torch.dtype
    make: Callable[[], Arguments]
    expect: Callable[[Arguments], Expected]
    elements: int
    tier: Tier = Tier.FULL
    writes: tuple[str, ...] = ()
    returns_arguments: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    same_bytes: bool = False

    def __str__(self) -> str:
        return f"{self.op}: {self.name}"

    def results(self, returned: Any, arguments: Arguments) -> tuple[Tensor | None, ...]:
        """Return everything that is judged: what was returned, and what else was written."""
        parts = returned if isinstance(returned, tuple) else (returned,)
        return (*parts, *(arguments[name] for name in self.also))


@dataclass(frozen=True)
class Suite:
    """The cases of one operator.

    Attributes:
        op: the operator.
        cases: returns every case, of all tiers.
        rows: returns a few cases of so many rows, one for each form of the operator:
            what is traced with one number of rows is run with others. ``rows`` cases
            of different numbers differ in that alone. Of several dtypes the first is run
            of which the implementation takes any.
        row_arguments: the arguments whose first dimension is the rows.
    """

    op: str
    cases: Callable[[], Iterable[Case]]
    rows: Callable[[int], Iterable[Case]]
    row_arguments: tuple[str, ...]


def stretched(case: Case, name: str, copies: int) -> Case:
    """Return a stress case: one tensor's rows many times over, of which a few are judged.

    Args:
        case: its only tensor is ``x``, whose rows are independent of each other.
        name: the new case's.
        copies: how often the rows of ``x`` follow each other.
    """

    def make() -> Arguments:
        made = case.make()
        return {**made, "x": made["x"].repeat(copies, *[1] * (made["x"].dim() - 1))}

    def expect(given: Arguments) -> Expected:
        rows = given["x"].shape[0]
        few = rows // copies
        # The first, those at the middle, and the last, whose offsets are the largest.
        chosen = torch.cat([torch.arange(start, start + few) for start in (0, rows // 2, rows - few)])
        expected = case.expect({**given, "x": given["x"][chosen]})

        def judge(outs: tuple[Tensor | None, ...]) -> Verdict:
            whole = (out is not None and out.shape[0] == rows for out in outs)
            if all(whole):
                outs = tuple(None if out is None else out[chosen] for out in outs)
            return expected.judge(outs)

        return replace(expected, judge=judge)

    return replace(
        case, name=name, make=make, expect=expect, elements=case.elements * copies, tier=Tier.STRESS
    )


def label(dtype: torch.dtype, *parts: object) -> str:
    """Return a case's name: its dtype, then what is special."""
    return " ".join([named(dtype), *(str(part) for part in parts if part)])


def shape_of(*sizes: int) -> str:
    """Return ``7x1024``."""
    return "x".join(map(str, sizes))

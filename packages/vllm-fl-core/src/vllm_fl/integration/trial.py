"""First calls of a layer's operator, on tiny inputs, when the layer is built.

Kernels that fail to compile fail here. It spends the copies that a first success needs,
before vLLM measures its memory, and lets everything run before a graph is captured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import Any

import torch

from vllm_fl.dispatch import trace
from vllm_fl.dispatch.calling import predicate
from vllm_fl.integration.results import Trial
from vllm_fl.integration.results import on_trial

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_fl.dispatch.callables import Resolved
    from vllm_fl.integration.layer import Layer

#: Of a second trial, where one row is refused: kernels that take whole blocks take them.
MORE_ROWS = 64

#: What has run once, and what came of it: operator, candidates, form and the kind of arguments.
tried: dict[tuple[Any, ...], Trial] = {}


def kinds(layer: Layer, examples: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Return what of the examples, and of ``fixed``, a choice may depend on: shapes, dtypes, device."""
    found: list[Any] = [*layer.fixed.values()]
    for example in examples:
        for value in example:
            is_tensor = isinstance(value, torch.Tensor)
            found.append((value.shape, value.dtype, value.device) if is_tensor else value)
    return tuple(found)


def first_calls(
    layer: Layer, watched: Resolved, form: str, function: Callable[..., Any], rows: int = 1
) -> Trial:
    """Run the operator on the layer's examples, or find what came of it when they last ran.

    Args:
        layer: it has the examples.
        watched: what ``function`` is made of, with every result checked.
        form: the form of ``function``.
        function: takes the operator's arguments.
        rows: how many rows the examples get.

    Returns:
        Who ran, and who refused.
    """
    record = trace.recorder()
    keywords = layer.fixed
    first, whole = watched.candidates[0], Trial()
    for example in layer.examples():
        arguments = tuple(_repeated(value, rows) for value in example)
        if arguments[0].device.type == "meta":
            continue
        names = [one.impl_id for one in watched.candidates]
        key = (layer.op_name, *names, form, *kinds(layer, [arguments]))
        if key not in tried:
            try:
                if record is not None:
                    record.is_paused = True
                with torch.no_grad(), on_trial() as trial:
                    function(*arguments, **keywords)
            except NotImplementedError:
                trial.ran = None
            finally:
                if record is not None:
                    record.is_paused = False
            if trial.ran != first.impl_id:
                answers = (predicate.refusal(ask, arguments, keywords) for ask in first.predicates)
                if reason := next(filter(None, answers), None):
                    trial.refused.setdefault(first.impl_id, reason)
            tried[key] = trial
        whole.ran = tried[key].ran
        whole.refused |= tried[key].refused
    return whole


def _repeated(value: Any, rows: int) -> Any:
    if rows == 1 or not isinstance(value, torch.Tensor) or not value.dim() or value.shape[0] != 1:
        return value
    return value.repeat(rows, *[1] * (value.dim() - 1))

"""Whether a contender is right at a shape: the conformance kit's judge, on some of its rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from typing import Any

import torch
from torch import Tensor

from vllm_fl.conformance.cases import SUITES
from vllm_fl.conformance.check import Call
from vllm_fl.conformance.check import contract_problem
from vllm_fl.conformance.tensors import moved
from vllm_fl.dispatch.calling.fatal import is_fatal
from vllm_fl.dispatch.common.foreign import describe
from vllm_fl.tuning.contenders import mark_rows

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Mapping

    from vllm_fl.conformance.case import Case
    from vllm_fl.conformance.judge import Expected
    from vllm_fl.dispatch import Operator
    from vllm_fl.tuning.contenders import Contender

#: Rows that are judged at the beginning, in the middle and at the end of more.
_AT_EACH = 16
#: Of more bytes it is not looked whether anything beside the results was written.
_WORTH_COMPARING = 2**25
#: Their results say by which row they are: all of them are judged.
_WHOLE = ("topk_softmax", "moe_align_block_size")


@dataclass(frozen=True)
class Answer:
    """What became of a contender's first call.

    Attributes:
        is_right: None where it refused.
        note: why not, in a sentence.
    """

    is_right: bool | None
    note: str = ""


class Judge:
    """Knows what is right for one set of arguments.

    Args:
        operator: the operator.
        arguments: on the device; they are not written.

    Raises:
        LookupError: the kit has no case of this form.
    """

    def __init__(self, operator: Operator, arguments: Mapping[str, Any]) -> None:
        self._operator = operator
        self._arguments = arguments
        self._case = _case_for(operator.name, arguments)
        suite = SUITES[operator.name]
        self._rows = rows = arguments[suite.row_arguments[0]].shape[0]
        self._some: Tensor | None = None
        if operator.name not in _WHOLE and rows > 3 * _AT_EACH:
            starts = (0, (rows - _AT_EACH) // 2, rows - _AT_EACH)
            self._some = torch.cat([torch.arange(start, start + _AT_EACH) for start in starts])
        given = {
            name: self._chosen(value) if name in suite.row_arguments else _on_cpu(value)
            for name, value in arguments.items()
        }
        self._expected: Expected = self._case.expect(given)
        self._bytes = sum(v.untyped_storage().nbytes() for v in arguments.values() if isinstance(v, Tensor))

    def _chosen(self, value: Any) -> Any:
        # What has another number of rows is judged as it is, and found wrong for that.
        if self._some is None or not isinstance(value, Tensor) or value.shape[:1] != (self._rows,):
            return _on_cpu(value)
        return value[self._some.to(value.device)].cpu()

    def ask(self, contender: Contender, function: Callable[..., Any], *, values_only: bool) -> Answer:
        """Call a contender once and judge what it gives.

        Args:
            contender: whose it is.
            function: takes the operator's arguments.
            values_only: it has promised right values, and not the whole contract.

        Raises:
            Exception: the device has failed.
        """
        arguments = moved(self._arguments, _device_of(self._arguments))
        args, kwargs = bound(self._operator, arguments)
        mark_rows(arguments, SUITES[self._operator.name].row_arguments)
        try:
            reason = contender.supports(*args, **kwargs)
            if reason is not None:
                return Answer(None, reason)
            with torch.inference_mode():
                returned = function(*args, **kwargs)
                results = self._case.results(returned, arguments)
        except NotImplementedError as error:
            return Answer(None, str(error) or "it refuses these arguments")
        except Exception as error:
            if is_fatal(error):
                raise
            return Answer(False, f"raised {brief(error)}")
        try:
            verdict = self._expected.judge(tuple(map(self._chosen, results)))
        except (IndexError, RuntimeError, TypeError) as error:
            return Answer(False, f"its results cannot be compared: {brief(error)}")
        if not verdict.is_right:
            return Answer(False, verdict.note or f"{verdict.ratio:.2g} tolerances off")
        if self._bytes <= _WORTH_COMPARING and not values_only:
            call = Call(arguments, returned, results)
            problem = contract_problem(self._case, dict(self._arguments), call, contender.writes)
            if problem:
                return Answer(False, problem)
        return Answer(True)


def brief(error: BaseException) -> str:
    """Return the first lines of an exception's text, as one."""
    lines = [line.strip() for line in describe(error).splitlines() if line.strip()]
    return " ".join(lines[:3])[:300]


def bound(operator: Operator, arguments: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return arguments as the contract passes them: by position where it can be."""
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    for name, parameter in operator.signature.parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            if name in arguments:
                keywords[name] = arguments[name]
        else:
            positional.append(arguments.get(name, parameter.default))
    return positional, keywords


def _device_of(arguments: Mapping[str, Any]) -> torch.device:
    return next(value.device for value in arguments.values() if isinstance(value, Tensor))


def _on_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def _case_for(op_name: str, arguments: Mapping[str, Any]) -> Case:
    """Return the case of the kit that has these arguments' form, to judge them with."""
    dtypes = {value.dtype for value in arguments.values() if isinstance(value, Tensor)}
    for case in SUITES[op_name].rows(2):
        if case.dtype in dtypes and _form(case.make()) == _form(arguments):
            return case
    raise LookupError(f"the conformance kit has no case of {op_name} to judge these arguments by")


def _form(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a case's judge may have kept of its own arguments: everything but sizes."""
    kinds: dict[str, Any] = {}
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            kinds[name] = "a tensor"
        elif value is None or isinstance(value, (bool, str)):
            kinds[name] = value
    return kinds

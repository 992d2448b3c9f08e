"""What an operator returned, against what its declaration promises.

A compiler takes what a torch operator returns for new, contiguous memory of the fake
result's shape and dtype, and reads it as that without looking. So every result of an
opaque operator is compared with the promise. Other strides, and memory of an argument,
are copied away: the numbers are right. Another shape or dtype is an error of the
implementation's, and the rules for errors hold.

In a :class:`Trial`, when a layer is built, every broken promise is an error: another
implementation can still take the layer then.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
from typing import TYPE_CHECKING
from typing import Any

import torch
from torch import Tensor

from vllm_fl.dispatch import RefusedBeforeWriting
from vllm_fl.dispatch.types import NATIVE
from vllm_fl.integration.log import logger

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Iterator
    from collections.abc import Sequence

    from vllm_fl.dispatch.calling.guard import Candidate
    from vllm_fl.dispatch.declaration import Operator
    from vllm_fl.dispatch.declaration import TorchForm

#: Kinds of arguments whose promise is kept, for each operator. Every number of rows is a kind.
_PROMISES_KEPT = 4096

#: Elements of the largest argument that a trial compares with itself: an expert's weights are larger.
_LARGEST_KEPT = 65536


@dataclass
class Trial:
    """What happened to first calls.

    Attributes:
        ran: who returned a result last; None where nobody did.
        refused: who raised "not for these inputs", and what it said.
    """

    ran: str | None = None
    refused: dict[str, str] = field(default_factory=dict)


_trial: ContextVar[Trial | None] = ContextVar("vllm_fl_trial", default=None)


@contextmanager
def on_trial() -> Iterator[Trial]:
    """Note in a :class:`Trial` who answers calls of :func:`checked` candidates."""
    trial = Trial()
    token = _trial.set(trial)
    try:
        yield trial
    finally:
        _trial.reset(token)


class BrokenPromiseError(RuntimeError):
    """An implementation returned, or wrote, what its operator's declaration does not allow."""


@dataclass(frozen=True)
class _Promise:
    """What one kind of arguments is answered with.

    Attributes:
        results: shape and dtype of every result, None for one that is None; None where
            the declaration promises nothing. Of an operator that writes its arguments,
            the places of those that it returns.
        kept: places of the arguments that it may neither write nor return.
        donated: places of those that the caller gives away, as far as it has not said
            that it writes none of them.
        is_in_place: the operator writes its arguments and returns them.
    """

    results: tuple[Any, ...] | None
    kept: tuple[int, ...] = ()
    donated: tuple[int, ...] = ()
    is_in_place: bool = False


def checked(
    operator: Operator,
    candidate: Candidate,
    *,
    keeps_all: bool = False,
    is_strict: bool = False,
    is_set_aside: Callable[[str, str], bool] | None = None,
) -> Candidate:
    """Return the candidate with every result compared with the promise.

    Args:
        operator: the declaration.
        candidate: called with all of the operator's arguments.
        keeps_all: what the caller gives away is kept too.
        is_strict: nothing is copied; every broken promise is an error.
        is_set_aside: asked at every call with the operator and the implementation; the
            candidate then refuses. Layers have guards of their own, and what failed in
            one is not called by another.
    """
    fn, impl_id = candidate.fn, candidate.impl_id
    _, promises = _promises.setdefault(id(operator), (operator, {}))

    def call(*args: Any, **kwargs: Any) -> Any:
        if is_set_aside is not None and is_set_aside(operator.name, impl_id):
            raise RefusedBeforeWriting(f"{impl_id} is set aside for {operator.name}")
        kind = tuple([(a.shape, a.dtype) if isinstance(a, Tensor) else a for a in (*args, *kwargs.values())])
        promise = promises.get(kind)
        if promise is None:
            if len(promises) >= _PROMISES_KEPT:
                promises.clear()
            promise = promises[kind] = _promise(operator, args, kwargs)
        kept = promise.kept + promise.donated if keeps_all else promise.kept
        trial = _trial.get()
        if trial is not None:
            return _tried(trial, promise, kept, candidate, operator, args, kwargs)
        result = fn(*args, **kwargs)
        if _is_kept(promise, kept, result, args):
            return result
        return _settled(promise, kept, result, args, impl_id, operator.name, is_strict=is_strict)

    return replace(candidate, fn=call)


# By identity: a declaration holds a signature, which takes long to hash. The entry keeps it alive.
_promises: dict[int, tuple[Operator, dict[Any, _Promise]]] = {}


def _promise(operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> _Promise:
    names = list(operator.signature.parameters)
    form = _form(operator, operator.bind(args, kwargs))
    if form is not None and form.in_place:
        return _Promise(tuple(operator.places(form.result)), is_in_place=True)
    given_away = operator.mutates if form is None else form.donated
    tensors = [place for place, value in enumerate(args) if isinstance(value, Tensor)]
    kept = tuple(place for place in tensors if names[place] not in given_away)
    donated = tuple(place for place in tensors if names[place] in given_away)
    if operator.fake is None:
        return _Promise(None, kept, donated)

    def stand_in(value: Any) -> Any:
        return torch.empty_like(value, device="meta") if isinstance(value, Tensor) else value

    its = {name: stand_in(value) for name, value in kwargs.items()}
    fakes = _parts(operator.fake(torch, *map(stand_in, args), **its))
    return _Promise(
        tuple(None if fake is None else (fake.shape, fake.dtype) for fake in fakes), kept, donated
    )


def _form(operator: Operator, values: dict[str, Any]) -> TorchForm | None:
    for form in operator.forms:
        is_fixed = all(values[name] is value for name, value in (form.fixed or {}).items())
        if is_fixed and all(values[name] is not None for name in form.present):
            return form
    return None


def _parts(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


# -- at every call ------------------------------------------------------------------


def _is_kept(promise: _Promise, kept: Sequence[int], result: Any, args: Sequence[Any]) -> bool:
    """Whether there is nothing to look at; what is not kept to the letter may be right."""
    if promise.results is None:
        return True
    parts = result if isinstance(result, tuple) else (result,)
    if len(parts) != len(promise.results):
        return False
    if promise.is_in_place:
        return all(part is args[place] for part, place in zip(parts, promise.results, strict=True))
    taken = [args[place].untyped_storage().data_ptr() for place in kept]
    for part, promised in zip(parts, promise.results, strict=True):
        if part is None or promised is None:
            if part is not promised:
                return False
            continue
        if not (
            isinstance(part, Tensor)
            and part.shape == promised[0]
            and part.dtype is promised[1]
            and part.is_contiguous()
        ):
            return False
        memory = part.untyped_storage().data_ptr()
        if memory in taken:
            return False
        taken.append(memory)
    return True


def _settled(
    promise: _Promise,
    kept: Sequence[int],
    result: Any,
    args: Sequence[Any],
    impl_id: str,
    op_name: str,
    *,
    is_strict: bool,
) -> Any:
    """Return what was promised, copied from ``result`` where that is possible.

    Raises:
        BrokenPromiseError: it is not, or ``is_strict`` wants no copy.
    """
    if promise.results is None or (promise.is_in_place and result is None):
        return result  # it has written its arguments, and the caller has them
    parts, wanted = _parts(result), promise.results
    if promise.is_in_place:
        wanted = tuple(None if args[i] is None else (args[i].shape, args[i].dtype) for i in promise.results)
    if impl_id == NATIVE:
        # vLLM's own path keeps vLLM's promises, which say less.
        is_strict = False
        parts = tuple(p.to(w[1]) if isinstance(p, Tensor) and w else p for p, w in zip(parts, wanted))  # noqa: B905
    if [_kind(part) for part in parts] != list(wanted):
        raise BrokenPromiseError(
            f"{impl_id} of {op_name} returns {_described(parts)} where {_described(wanted)} is promised, "
            f"for {_described(args)}"
        )
    settled: list[Any] = []
    taken = [args[place] for place in kept]
    for place, part in enumerate(parts):
        complaint = None
        if part is None:
            pass
        elif promise.is_in_place:
            written = args[promise.results[place]]
            if not _shares_memory(part, written):
                complaint = "returns a new tensor and does not write its argument"
                written.copy_(part)
            part = written
        elif not part.is_contiguous():
            complaint = "returns a tensor that is not contiguous"
            part = part.contiguous()
        elif any(_shares_memory(part, one) for one in taken):
            complaint = "returns one of its arguments or of its other results, or a view of it"
            part = part.clone(memory_format=torch.contiguous_format)
        if complaint is not None and is_strict:
            raise BrokenPromiseError(f"{impl_id} of {op_name} {complaint}")
        if complaint is not None and impl_id != NATIVE:
            _warn(impl_id, op_name, f"{complaint} (for {_described(args)})", complaint)
        settled.append(part)
        if part is not None:
            taken.append(part)
    return tuple(settled) if len(settled) > 1 else settled[0]


def _kind(part: Any) -> Any:
    if part is None:
        return None
    return (part.shape, part.dtype) if isinstance(part, Tensor) else type(part).__name__


def _shares_memory(one: Tensor, other: Tensor) -> bool:
    same = one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    return same and bool(one.numel() and other.numel())


def _described(values: Sequence[Any]) -> str:
    texts = []
    for value in values:
        its = _kind(value) if isinstance(value, Tensor) else value
        if isinstance(its, tuple):
            shape, dtype = its
            texts.append(f"{str(dtype).removeprefix('torch.')}[{'x'.join(map(str, shape))}]")
        else:
            texts.append(
                repr(its) if its is None or isinstance(its, (bool, int, float)) else type(its).__name__
            )
    return ", ".join(texts) or "nothing"


_warned: set[tuple[str, str, str]] = set()


def _warn(impl_id: str, op_name: str, text: str, complaint: str) -> None:
    if (impl_id, op_name, complaint) not in _warned:
        _warned.add((impl_id, op_name, complaint))
        logger.warning(
            "vllm-fl: %s of %s %s. It is copied: the numbers are right, and every such call costs the copy.",
            impl_id,
            op_name,
            text,
        )


# -- in a trial -----------------------------------------------------------------------


def _tried(
    trial: Trial,
    promise: _Promise,
    kept: Sequence[int],
    candidate: Candidate,
    operator: Operator,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    copies = [(place, args[place].clone()) for place in kept if args[place].numel() <= _LARGEST_KEPT]
    try:
        result = candidate.fn(*args, **kwargs)
    except NotImplementedError as refusal:
        trial.refused[candidate.impl_id] = str(refusal) or type(refusal).__name__
        raise
    trial.ran = candidate.impl_id
    settled = _settled(promise, kept, result, args, candidate.impl_id, operator.name, is_strict=True)
    for place, before in copies:
        if candidate.impl_id != NATIVE and not torch.allclose(args[place], before, 0, 0, equal_nan=True):
            name = list(operator.signature.parameters)[place]
            raise BrokenPromiseError(
                f"{candidate.impl_id} of {operator.name} writes {name!r}, which it must not"
            )
    return settled

"""The opaque form: a registered torch operator around a resolved operator.

What Dynamo cannot trace is called through one. The failure rules, the choice by
predicate and the counter live inside it, so that they hold in compiled code too.
All layers share it, so that vLLM's own path, which has a layer's weights, is no
candidate inside it: where nothing else is left, the exception is raised.
It is named ``vllm_fl::<form>__<implementation>``, and registered when a layer is
built, never while one is traced.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING
from typing import Any

import torch

from vllm_fl.dispatch import RefusedBeforeWriting

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_fl.dispatch._guard import Candidate
    from vllm_fl.dispatch.declaration import Operator
    from vllm_fl.dispatch.declaration import TorchForm
    from vllm_fl.dispatch.resolved import Resolved

# "Library.define" and never "custom_op", which costs several times as much a call.
_library: Any = torch.library.Library("vllm_fl", "FRAGMENT")  # type: ignore[no-untyped-call]

# Looked up at every call, so that another engine's choice takes the place of an
# earlier one under the same name.
_kernels: dict[str, Callable[..., Any]] = {}


def checked(operator: Operator, candidate: Candidate) -> Candidate:
    """Return the candidate with its first result checked.

    A compiler takes what an operator returns for new and contiguous memory, as
    the fake says; where it is not, the results are silently wrong. With and
    without an optional tensor an implementation may do two things, so that each
    is checked.
    """
    fn = candidate.fn
    names = list(operator.signature.parameters)
    in_place = {names.index(name) for form in operator.forms for name in form.result}
    # What it may write is a copy where something is returned; see `_registered`.
    ours = in_place | {names.index(name) for name in candidate.writes}
    seen: set[tuple[bool, ...]] = set()

    def first_result_checked(*args: Any, **kwargs: Any) -> Any:
        result = fn(*args, **kwargs)
        given = tuple(arg is not None for arg in args)
        if given not in seen:
            inputs = [a for i, a in enumerate(args) if isinstance(a, torch.Tensor) and i not in ours]
            for out in result if isinstance(result, tuple) else (result,):
                if isinstance(out, torch.Tensor) and not any(out is args[i] for i in in_place):
                    _check(candidate.impl_id, operator.name, out, inputs)
            seen.add(given)
        return result

    return replace(candidate, fn=first_result_checked)


def _check(impl_id: str, op_name: str, out: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    if not out.is_contiguous():
        raise RuntimeError(f"{impl_id} of {op_name} returns a tensor that is not contiguous")
    if out.numel() and any(_shares_memory(out, one) for one in inputs):
        raise RuntimeError(f"{impl_id} of {op_name} returns one of its arguments, or a view of it")


def _shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def opaque(operator: Operator, resolved: Resolved) -> Callable[..., Any]:
    """Register the torch operators of ``resolved`` and return what calls them.

    Args:
        operator: the declaration; its forms are registered.
        resolved: made of :func:`checked` candidates.

    Returns:
        A function that takes the operator's arguments and that Dynamo can trace.
    """
    impl_id = resolved.candidates[0].impl_id
    writes = {name for candidate in resolved.candidates for name in candidate.writes}
    ops = [_registered(operator, form, impl_id, resolved.fn, writes) for form in operator.forms]
    forms = list(zip(operator.forms, ops, strict=True))
    parameters = list(operator.signature.parameters.values())

    def call(*args: Any, **kwargs: Any) -> Any:
        values = {p.name: p.default for p in parameters}
        for parameter, value in zip(parameters, args, strict=False):
            values[parameter.name] = value
        values.update(kwargs)
        for form, op in forms:
            if any(values[name] is None for name in form.present):
                continue
            fixed = form.fixed or {}
            if form.in_place:
                # An operator that may do either way writes copies of the others.
                for name, value in fixed.items():
                    if values[name] is not value:
                        for written in form.in_place:
                            if values[written] is not None:
                                values[written] = values[written].clone(memory_format=torch.contiguous_format)
            elif any(values[name] is not value for name, value in fixed.items()):
                continue
            result = op(*[values[p.name] for p in parameters if p.name not in fixed])
            if not form.in_place:
                return result
            returned = tuple(values[name] for name in form.result)
            return returned if len(returned) > 1 else returned[0]
        raise RefusedBeforeWriting(f"no torch form of {operator.name} takes these arguments")

    return call


def _registered(
    operator: Operator, form: TorchForm, impl_id: str, fn: Callable[..., Any], writes: set[str]
) -> Callable[..., Any]:
    name = f"{form.name}__{impl_id.replace('.', '_').replace('-', '_')}"
    parameters = form.parameters(operator.signature)
    fixed = dict(form.fixed or {})
    # A functional schema promises that nothing is written; what an implementation
    # may write is copied for it.
    copied = writes.intersection(form.donated)

    def arguments(args: tuple[Any, ...]) -> tuple[list[Any], dict[str, Any]]:
        values = {p.name: value for p, value in zip(parameters, args, strict=True)} | fixed
        every = operator.signature.parameters.values()
        keywords = {p.name: values[p.name] for p in every if p.kind is p.KEYWORD_ONLY}
        return [values[p.name] for p in every if p.kind is not p.KEYWORD_ONLY], keywords

    def kernel(*args: Any) -> Any:
        if copied:
            args = tuple(
                value.clone(memory_format=torch.contiguous_format)
                if p.name in copied and value is not None
                else value
                for p, value in zip(parameters, args, strict=True)
            )
        positional, keywords = arguments(args)
        result = fn(*positional, **keywords)
        return None if form.in_place else result

    is_new = name not in _kernels
    _kernels[name] = kernel
    if is_new:
        _library.define(name + form.schema(operator.signature))
        _library.impl(name, lambda *args: _kernels[name](*args), "CompositeExplicitAutograd")

        def fake(*args: Any) -> Any:
            if form.in_place or operator.fake is None:
                return None
            positional, keywords = arguments(args)
            return operator.fake(torch, *positional, **keywords)

        torch.library.register_fake(f"vllm_fl::{name}", fake, lib=_library)
    return getattr(torch.ops.vllm_fl, name).default  # type: ignore[no-any-return]

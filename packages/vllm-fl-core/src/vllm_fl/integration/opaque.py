"""The opaque form: a registered torch operator around a resolved operator.

What Dynamo cannot trace is called through one. The failure rules, the choice by
predicate, vLLM's own path and the counter live inside it, so that they hold in
compiled code too. It is named ``vllm_fl::<form>__<implementation>``, and registered
when a layer is built, never while one is traced.

Layers share the torch operator, and each has candidates of its own: vLLM's own path
has the layer's weights, and another engine of the process another policy. So every
call brings the layer's ticket, a tensor with its number. A compiler takes a tensor
for an input, so that the graphs of all layers are one, and one that was compiled by
another process calls the layers of this one. A number or a name would be a constant
of the graph.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING
from typing import Any

import torch

from vllm_fl.dispatch import RefusedBeforeWriting
from vllm_fl.integration.results import checked

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_fl.dispatch.callables import Resolved
    from vllm_fl.dispatch.calling.guard import Candidate
    from vllm_fl.dispatch.declaration import Operator
    from vllm_fl.dispatch.declaration import TorchForm

# "Library.define" and never "custom_op", which costs several times as much a call.
_library: Any = torch.library.Library("vllm_fl", "FRAGMENT")  # type: ignore[no-untyped-call]
_registered: dict[str, Callable[..., Any]] = {}

#: What each ticket calls. Weakly: it has the layer's weights, and the layer has it.
_kernels: dict[int, weakref.ref[Callable[..., Any]]] = {}
_numbers = itertools.count()


def shielded(operator: Operator, candidate: Candidate, **how: Any) -> Candidate:
    """Return the candidate as :func:`opaque` needs it, one that does what the torch schema says.

    Its results are :func:`~vllm_fl.integration.results.checked`, which takes ``how``. A
    functional schema promises that nothing is written: what the candidate may write is
    copied for it. So nothing is lost where it fails, and the next candidate may run.
    """
    names = list(operator.signature.parameters)
    copied = [
        ([names.index(name) for name in form.present], [names.index(name) for name in form.donated])
        for form in operator.forms
        if set(candidate.writes).intersection(form.donated)
    ]
    donated = {name for form in operator.forms for name in form.donated}
    writes, fn = tuple(name for name in candidate.writes if name not in donated), candidate.fn

    def copying(*args: Any, **kwargs: Any) -> Any:
        values = list(args)
        for present, places in copied:
            if all(args[place] is not None for place in present):
                for place in places:
                    values[place] = args[place].clone(memory_format=torch.contiguous_format)
        return fn(*values, **kwargs)

    copier = replace(candidate, fn=copying if copied else fn, writes=writes)
    return checked(operator, copier, keeps_all=True, **how)


def opaque(operator: Operator, resolved: Resolved) -> Callable[..., Any]:
    """Return what calls ``resolved`` through torch operators, which are registered for it.

    Args:
        operator: the declaration; its forms are registered.
        resolved: made of :func:`shielded` candidates.
    """
    impl_id = resolved.candidates[0].impl_id
    forms = []
    for form in operator.forms:
        kernel = _kernel(operator, form, resolved.fn)
        forms.append((form, _torch_operator(operator, form, impl_id), _ticket(kernel), kernel))
    parameters = list(operator.signature.parameters.values())

    def call(*args: Any, **kwargs: Any) -> Any:
        values = {p.name: p.default for p in parameters}
        for parameter, value in zip(parameters, args, strict=False):
            values[parameter.name] = value
        values.update(kwargs)
        for form, op, ticket, _ in forms:
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
            result = op(*[values[p.name] for p in parameters if p.name not in fixed], ticket)
            if not form.in_place:
                return result
            returned = tuple(values[name] for name in form.result)
            return returned if len(returned) > 1 else returned[0]
        raise RefusedBeforeWriting(f"no torch form of {operator.name} takes these arguments")

    return call


def _ticket(kernel: Callable[..., Any]) -> torch.Tensor:
    number = next(_numbers)
    _kernels[number] = weakref.ref(kernel, lambda _: _kernels.pop(number, None))
    # On the host, where reading it waits for no device and may happen in a graph capture;
    # of one dimension, since a compiler may move what has none to the device.
    with torch.inference_mode(False):
        return torch.tensor([number], device="cpu")


def _by_position(operator: Operator, form: TorchForm) -> Callable[..., Any]:
    """Return what sorts a torch operator's arguments into the operator's own."""
    parameters = form.parameters(operator.signature)
    fixed = dict(form.fixed or {})
    every = list(operator.signature.parameters.values())

    def arguments(args: tuple[Any, ...]) -> tuple[list[Any], dict[str, Any]]:
        values = {p.name: value for p, value in zip(parameters, args, strict=True)} | fixed
        keywords = {p.name: values[p.name] for p in every if p.kind is p.KEYWORD_ONLY}
        return [values[p.name] for p in every if p.kind is not p.KEYWORD_ONLY], keywords

    return arguments


def _kernel(operator: Operator, form: TorchForm, fn: Callable[..., Any]) -> Callable[..., Any]:
    arguments = _by_position(operator, form)

    def kernel(*args: Any) -> Any:
        positional, keywords = arguments(args)
        result = fn(*positional, **keywords)
        return None if form.in_place else result

    return kernel


def _torch_operator(operator: Operator, form: TorchForm, impl_id: str) -> Callable[..., Any]:
    name = f"{form.name}__{impl_id.replace('.', '_').replace('-', '_')}"
    if name not in _registered:

        def kernel(*args: Any) -> Any:
            its = _kernels[args[-1].item()]()
            assert its is not None, "a layer that is gone is called"
            return its(*args[:-1])

        def fake(*args: Any) -> Any:
            if form.in_place or operator.fake is None:
                return None
            positional, keywords = arguments(args[:-1])
            return operator.fake(torch, *positional, **keywords)

        arguments = _by_position(operator, form)
        schema = form.schema(operator.signature).replace(") -> ", ", Tensor ticket) -> ", 1)
        _library.define(name + schema)
        _library.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"vllm_fl::{name}", fake, lib=_library)
        _registered[name] = getattr(torch.ops.vllm_fl, name).default
    return _registered[name]

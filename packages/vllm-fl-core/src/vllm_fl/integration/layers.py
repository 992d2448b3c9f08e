"""vLLM's layers, each served by an operator.

A layer's class is replaced by a subclass of it (of the vendor's, where a vendor's
plug-in has replaced it before). The subclass builds the layer as ever and then
decides once, for this instance, what its forward is: vLLM's own, or one that
calls the resolved operator.
"""

from __future__ import annotations

import functools
from contextlib import suppress
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING
from typing import Any

import torch

from vllm_fl.dispatch import NoImplementationError
from vllm_fl.dispatch import PolicyError
from vllm_fl.dispatch import _predicate
from vllm_fl.dispatch import _runtime
from vllm_fl.dispatch import get_default_manager
from vllm_fl.dispatch import get_policy
from vllm_fl.dispatch import trace
from vllm_fl.dispatch._fatal import is_fatal
from vllm_fl.dispatch._guard import Candidate
from vllm_fl.dispatch._runtime import is_one_of_several_ranks
from vllm_fl.dispatch._suggest import suggest
from vllm_fl.dispatch.environment import names_variable
from vllm_fl.dispatch.types import NATIVE
from vllm_fl.dispatch.types import BackendImplKind
from vllm_fl.dispatch.wheels import faster_wheels
from vllm_fl.integration import engine
from vllm_fl.integration import moe
from vllm_fl.integration import quantization
from vllm_fl.integration import ranks
from vllm_fl.integration import vendors
from vllm_fl.integration.bindings import BINDINGS as PLAIN
from vllm_fl.integration.bindings import Served
from vllm_fl.integration.log import logger
from vllm_fl.integration.opaque import opaque
from vllm_fl.integration.opaque import shielded
from vllm_fl.integration.results import Trial
from vllm_fl.integration.results import checked
from vllm_fl.integration.results import on_trial

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_fl.dispatch.resolved import Resolved
    from vllm_fl.integration.bindings import Binding

BINDINGS: tuple[Binding, ...] = (*PLAIN, *moe.BINDINGS, *quantization.BINDINGS)

_WHITELIST = "VLLM_FL_OOT_WHITELIST"
_BLACKLIST = "VLLM_FL_OOT_BLACKLIST"


# -- which classes are replaced -----------------------------------------------


def _lists() -> tuple[list[str] | None, list[str]]:
    allowed, denied = names_variable(_WHITELIST), names_variable(_BLACKLIST)
    if allowed is not None and denied is not None:
        raise PolicyError(f"{_BLACKLIST}: {_WHITELIST} is set too; keep one of them.")
    return allowed, denied or []


def check_lists() -> None:
    """Check the names in the two variables that say which layers are replaced.

    Raises:
        PolicyError: an unknown name, or both are set.
    """
    allowed, denied = _lists()
    known = {name for binding in BINDINGS for name in (binding.class_name, binding.vllm_name)}
    unknown = [name for name in [*(allowed or []), *denied] if name not in known]
    if unknown:
        # A subclass's name is known after an import that takes most of a second.
        for binding in BINDINGS:
            with suppress(ImportError, AttributeError):  # this vLLM has no such layer
                known |= {cls.__name__ for cls, _ in _classes(binding)}
    for name in unknown:
        if name not in known:
            variable = _WHITELIST if allowed is not None else _BLACKLIST
            raise PolicyError(f"{variable}: unknown layer {name!r}.{suggest(name, known)}")


def _classes(binding: Binding) -> list[tuple[type, str | None]]:
    """Return the binding's classes, each with the reason why it is not served, or None."""
    module = __import__(binding.module, fromlist=[binding.class_name])
    base = getattr(module, binding.class_name)
    if binding.with_subclasses:
        more = [(cls, _own_forward(cls, base)) for cls in _descendants(base)]
    else:
        # Those of vLLM's models; a vendor's stands in the place of the class itself.
        own = [cls for cls in _descendants(base) if cls.__module__.startswith("vllm.")]
        more = [(cls, f"of its kind {base.__name__} alone is served") for cls in own]
    return [(base, None), *more]


def _descendants(cls: type) -> list[type]:
    subclasses: list[type] = type.__subclasses__(cls)
    direct = [sub for sub in subclasses if not issubclass(sub, Served)]
    found = {sub.__name__: sub for parent in direct for sub in (parent, *_descendants(parent))}
    return [found[name] for name in sorted(found)]


def _own_forward(cls: type, base: type) -> str | None:
    """Say which forward a class between ``cls`` and ``base`` defines, or None."""
    for ancestor in cls.__mro__[: cls.__mro__.index(base)]:
        own = [name for name in vars(ancestor) if name.startswith("forward")]
        if own:
            return f"{ancestor.__name__} has its own {', '.join(sorted(own))}"
    return None


def replace_all() -> None:
    """Replace the layers; called before the process builds its first one."""
    try:
        _replace_all()
    except PolicyError:
        raise
    except Exception as error:  # noqa: BLE001 - our fault must not end somebody's server
        engine.note_fault("replace_all")
        ranks.withdraw(f"vllm-fl is off there: {type(error).__name__}: {error}")
        logger.error("vllm-fl is off, vLLM runs natively: %s: %s", type(error).__name__, error)
        logger.debug("vllm-fl failed to replace the layers", exc_info=True)


def _replace_all() -> None:
    from vllm.model_executor.custom_op import op_registry_oot

    allowed, denied = _lists()
    replaced, skipped = [], {}
    trace.on_traced = _note_graph
    for binding in BINDINGS:
        try:
            classes = _classes(binding)
        except (ImportError, AttributeError) as error:
            skipped[binding.class_name] = f"this vLLM has no {binding.class_name}: {error}"
            continue
        for cls, reason in classes:
            name = cls.__name__
            names = {name, binding.vllm_name}
            theirs = op_registry_oot.get(name, cls)
            if reason is None and allowed is not None and not names.intersection(allowed):
                reason = f"{_WHITELIST} does not name it"
            if reason is None and names.intersection(denied):
                reason = f"{_BLACKLIST} names it"
            if reason is None:
                reason = vendors.why_not_on(theirs, cls, binding)
            if reason is not None:
                skipped[name] = reason
                continue
            # Not register_oot, which asserts where another plug-in came first:
            # our class is then built on theirs, and theirs is its native path.
            op_registry_oot[name] = _served(theirs, cls, binding)
            replaced.append(name if theirs is cls else f"{name} on {vendors.name_of(theirs)}")
    vendors.make_way(_served)
    engine.remember("layers", sorted(replaced))
    logger.info("vllm-fl: serves %s", ", ".join(replaced) or "no layer")
    for name, reason in skipped.items():
        logger.info("vllm-fl: %s stays vLLM's own: %s", name, reason)
    record = trace.recorder()
    if record is not None:
        record.fact("served_layers", sorted(replaced))
        record.fact("skipped_layers", skipped)


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _note_graph(op_name: str, impl_id: str) -> bool:
    """Note a trace. Dynamo runs it while it traces and keeps nothing of it in the graph."""
    record = trace.recorder()
    if record is not None:
        record.traced(op_name, impl_id, str(torch._guards.CompileContext.current_compile_id()))
    return True


def _served(theirs: type, cls: type, binding: Binding) -> type:
    served = type(
        f"Served{cls.__name__}",
        (binding.mixin, theirs),
        {
            "__module__": __name__,
            "__doc__": f"vLLM's {cls.__name__}, served by the operator {binding.op_name}.",
            "forward_vllm_fl": binding.forward,
            "vllm_fl_binding": binding,
            "vllm_fl_decide": staticmethod(decide),
        },
    )
    if hasattr(cls, "name"):
        # vLLM's switch is "+rms_norm": the name of its own class.
        served.name = cls.name  # type: ignore[attr-defined]
    return served


# -- what one layer does --------------------------------------------------------


def decide(owner: Any, binding: Binding, layer: Any) -> None:
    """Choose the forward of ``owner``, once; on a fault of ours it stays vLLM's own.

    ``layer`` knows what the binding asks for: it is the owner itself, or what it is a part of.
    """
    from vllm.config import get_current_vllm_config

    own = getattr(owner, binding.attribute)
    name = _name(owner)
    try:
        vllm_config = get_current_vllm_config()
        engine.begin(vllm_config)
        reason = _why_native(owner, binding, layer)
        if reason is None:
            compiled = bool(vllm_config.compilation_config.mode)
            choice = _operator(layer, binding, own, compiled=compiled)
        else:
            choice = _Choice(NATIVE, "plain", None, reason)
        chosen, form, operator = choice.impl_id, choice.form, choice.operator
        if operator is not None:
            _say_once(f"vllm-fl: {name} is served by {chosen} ({binding.op_name}, {form}){choice.note}")
            _warn_of_the_reference(name, binding.op_name, chosen)
        else:
            _native[name] = choice.note
            _say_once(f"vllm-fl: {name} stays vLLM's own: {_native[name]}")
    except (PolicyError, NoImplementationError, _ExplicitFailure):
        raise
    except Exception as error:
        if is_one_of_several_ranks():
            raise  # alone on another path than the others, its answers would be wrong
        if engine.note_fault(name):
            logger.error("vllm-fl: %s runs vLLM's own path: %s: %s", name, type(error).__name__, error)
            logger.debug("vllm-fl failed to serve a layer", exc_info=True)
        return
    if operator is not None:
        owner._vllm_fl_operator = operator
        owner._vllm_fl_is_opaque = form == "opaque"
        owner._vllm_fl_tables = None
        setattr(owner, binding.attribute, MethodType(binding.forward, owner))
    record = trace.recorder()
    if record is not None:
        record.fact("compiled", bool(vllm_config.compilation_config.mode))
        if operator is None:
            record.fact("native_layers", dict(_native))
        if own is not None:
            record.layer(name, binding.op_name, chosen, form)
            if operator is None:
                setattr(owner, binding.attribute, trace.recorded(binding.op_name, NATIVE, own))


def _name(layer: Any) -> str:
    return type(layer).__name__.removeprefix("Served")


def _why_native(owner: Any, binding: Binding, layer: Any) -> str | None:
    from vllm import envs
    from vllm.model_executor.custom_op import CustomOp

    if bool(getattr(envs, "VLLM_BATCH_INVARIANT", False)):
        return "VLLM_BATCH_INVARIANT is set"
    reason = binding.refuses(layer)
    if reason is not None:
        return reason
    if isinstance(owner, CustomOp):
        enabled = owner._enforce_enable or owner.enabled()
    else:
        enabled = CustomOp.default_on()
    if not enabled and not get_policy().is_explicit_for(binding.op_name):
        return (
            "vLLM leaves it to its compiler (custom_ops); an explicit VLLM_FL_PREFER or "
            "VLLM_FL_PER_OP serves it all the same"
        )
    return vendors.wins(type(owner), binding) if isinstance(owner, Served) else None


class _ExplicitFailure(Exception):  # noqa: N818 - wraps what the implementation raised
    """What the user asked for in so many words fails: that stops the start."""


@dataclass(frozen=True)
class _Choice:
    """What a layer runs: ``operator`` is what it calls, None for vLLM's own path; ``note`` says more."""

    impl_id: str
    form: str
    operator: Callable[..., Any] | None
    note: str = ""


def _operator(layer: Any, binding: Binding, own: Callable[..., Any], *, compiled: bool) -> _Choice:
    manager, op_name = get_default_manager(), binding.op_name
    operator = manager.snapshot().operators[op_name]
    native = binding.native(own)
    is_tuned = bool(get_policy().measured(op_name))
    # Traced code looks at no rows, and a tuned table is one of them.
    is_traced = compiled and binding.is_traced and not is_tuned
    resolve = functools.partial(manager.resolve_with_native, op_name, only_traceable=is_traced)
    while True:
        resolved = resolve(native)
        first = resolved.candidates[0]
        if first.impl_id == NATIVE and (compiled or not is_tuned):
            return _Choice(NATIVE, "plain", None, "the policy chooses it")
        is_opaque = compiled and not (is_traced and first.traceable)
        # What is tried is watched; what a layer calls later is not, but in the opaque form.
        watch = functools.partial(shielded if is_opaque else checked, operator)
        if is_opaque:
            watch = functools.partial(watch, is_set_aside=manager.is_set_aside)
        own_path = watch(Candidate(NATIVE, native, writes=operator.mutates))
        watched = resolve(own_path.fn, wrap=watch)
        function = opaque(operator, watched) if is_opaque else watched.fn
        form = "opaque" if is_opaque else resolved.decision.form
        try_out = functools.partial(_first_calls, layer, binding, watched, form, function)
        # vLLM's own path is in the function, or needs to be chosen now.
        has_native = any(report.impl_id == NATIVE for report in resolved.decision.usable)
        passes_on = any(one.impl_id == NATIVE for one in watched.candidates)
        try:
            trial = try_out()
            gives_up = passes_on and is_opaque and trial.ran == NATIVE
            if first.impl_id in trial.refused and (gives_up or not passes_on) and has_native:
                # Every call would cost more than what a compiler makes of vLLM's own path.
                more = try_out(rows=_MORE_ROWS)
                if first.impl_id in more.refused and more.ran in (NATIVE, None):
                    why = trial.refused[first.impl_id]
                    manager.note_trial(op_name, first.impl_id, f"refused the trial of {_name(layer)} ({why})")
                    return _Choice(NATIVE, "plain", None, f"{first.impl_id} does not take its inputs: {why}")
        except Exception as error:
            is_alone = not is_one_of_several_ranks()
            if get_policy().strict or not has_native or not is_alone:
                why = (
                    "the policy leaves nothing else" if is_alone else "one rank of several runs nothing else"
                )
                raise _ExplicitFailure(
                    f"{first.impl_id} failed on its first call of {op_name}, and {why}: "
                    f"{type(error).__name__}: {error}"
                ) from error
            if passes_on or is_fatal(error):
                raise
            # No candidate inside the function, and right for this layer.
            manager.set_aside(op_name, first.impl_id, error)
            continue
        if first.impl_id not in manager.get_failed_impls(op_name).get(op_name, ()):
            note = ""
            if first.impl_id in trial.refused:
                why, other = trial.refused[first.impl_id], trial.ran or "nothing"
                note = f"; {first.impl_id} refused the trial of one row ({why}), which {other} ran"
                refused = f"refused the trial of {_name(layer)} with one row ({why}), which {other} ran"
                manager.note_trial(op_name, first.impl_id, refused)
            return _Choice(first.impl_id, form, function if is_opaque else resolve(native).fn, note)


#: Of a second trial, where one row is refused: kernels that take whole blocks take them.
_MORE_ROWS = 64

#: What has run once, and what came of it: operator, candidates, form and the kind of arguments.
_tried: dict[tuple[Any, ...], Trial] = {}


def _first_calls(
    layer: Any, binding: Binding, watched: Resolved, form: str, function: Callable[..., Any], rows: int = 1
) -> Trial:
    """Run the operator on tiny inputs: kernels that fail to compile fail here.

    That spends the copies that a first success needs, before vLLM measures its
    memory, and lets everything run before a graph is captured.

    Returns:
        Who ran, and who refused.
    """
    record = trace.recorder()
    keywords = binding.keywords(layer)
    first, whole = watched.candidates[0], Trial()
    for example in binding.examples(layer):
        arguments = [_repeated(value, rows) for value in example]
        selector = arguments[0]
        shapes = [getattr(argument, "shape", argument is None) for argument in arguments]
        kind = (selector.dtype, str(selector.device), *shapes, *keywords.values())
        key = (binding.op_name, *(one.impl_id for one in watched.candidates), form, *kind)
        if selector.device.type == "meta":
            continue
        if key not in _tried:
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
            if trial.ran != first.impl_id and first.supports is not None:
                reason = _predicate.refusal(first.supports, tuple(arguments), keywords)
                if reason:
                    trial.refused.setdefault(first.impl_id, reason)
            _tried[key] = trial
        whole.ran = _tried[key].ran
        whole.refused |= _tried[key].refused
    return whole


def _repeated(value: Any, rows: int) -> Any:
    if rows == 1 or not isinstance(value, torch.Tensor) or not value.dim() or value.shape[0] != 1:
        return value
    return value.repeat(rows, *[1] * (value.dim() - 1))


#: The layers of this process that are vLLM's own, and why.
_native: dict[str, str] = {}


def _warn_of_the_reference(name: str, op_name: str, impl_id: str) -> None:
    """Say once what would be faster, where there is a device for it and nobody asked for the reference."""
    manager = get_default_manager()
    asked = get_policy().order(op_name)[0].removeprefix("impl:")
    reference = BackendImplKind.REFERENCE.prefix
    if _REFERENCE_WARNED in _said or not impl_id.startswith(reference) or asked.startswith(reference):
        return
    choices = manager.plan.choices if manager.plan else {op_name: impl_id}
    slow = sorted(op for op, chosen in choices.items() if chosen and chosen.startswith(reference))
    wheels = faster_wheels(slow, manager.registry.plugins)
    if wheels and _runtime.has_accelerator():
        _said.add(_REFERENCE_WARNED)
        logger.warning(
            "vllm-fl: %s is served by the reference, in plain PyTorch, and so is every layer of %s. A chip's "
            "own kernels are faster: install its wheel and restart. %s",
            name,
            ", ".join(slow),
            "; ".join(f"pip install {wheel.distribution}  # {wheel.purpose}" for wheel in wheels),
        )


_REFERENCE_WARNED = "the reference"
_said: set[str] = set()


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        logger.info(text)

"""vLLM's layers, each served by an operator.

A layer's class is replaced by a subclass of it (of the vendor's, where a vendor's
plug-in has replaced it before). The subclass builds the layer as ever and then
decides once, for this instance, what its forward is: vLLM's own, or one that
calls the resolved operator.
"""

from __future__ import annotations

from contextlib import suppress
from types import MethodType
from typing import TYPE_CHECKING
from typing import Any

import torch

from vllm_fl.dispatch import NoImplementationError
from vllm_fl.dispatch import PolicyError
from vllm_fl.dispatch import _runtime
from vllm_fl.dispatch import get_default_manager
from vllm_fl.dispatch import get_policy
from vllm_fl.dispatch import trace
from vllm_fl.dispatch._config import names_variable
from vllm_fl.dispatch._fatal import is_fatal
from vllm_fl.dispatch._known import faster_wheels
from vllm_fl.dispatch._runtime import is_one_of_several_ranks
from vllm_fl.dispatch._suggest import suggest
from vllm_fl.dispatch.types import NATIVE
from vllm_fl.dispatch.types import BackendImplKind
from vllm_fl.integration import engine
from vllm_fl.integration import moe
from vllm_fl.integration import quantization
from vllm_fl.integration import ranks
from vllm_fl.integration import vendors
from vllm_fl.integration.bindings import BINDINGS as PLAIN
from vllm_fl.integration.bindings import Served
from vllm_fl.integration.log import logger

if TYPE_CHECKING:
    from collections.abc import Callable

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
    name = type(owner).__name__.removeprefix("Served")
    try:
        vllm_config = get_current_vllm_config()
        engine.begin(vllm_config)
        reason = _why_native(owner, binding, layer)
        if reason is None:
            compiled = bool(vllm_config.compilation_config.mode)
            chosen, form, operator = _operator(layer, binding, own, compiled=compiled)
        else:
            chosen, form, operator = NATIVE, "plain", None
        if operator is not None:
            _say_once(f"vllm-fl: {name} is served by {chosen} ({binding.op_name}, {form})")
            _warn_of_the_reference(name, binding.op_name, chosen)
        else:
            _native[name] = reason or "the policy chooses it"
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


def _operator(
    layer: Any, binding: Binding, own: Callable[..., Any], *, compiled: bool
) -> tuple[str, str, Callable[..., Any] | None]:
    """Return the implementation's id, its form and what the layer calls; None for native."""
    manager = get_default_manager()
    native = binding.native(own)
    is_tuned = bool(get_policy().measured(binding.op_name))
    while True:
        is_traced = compiled and binding.is_traced
        resolved = manager.resolve_with_native(binding.op_name, native, only_traceable=is_traced)
        impl_id = resolved.candidates[0].impl_id
        if impl_id == NATIVE and (compiled or not is_tuned):
            return NATIVE, "plain", None
        form, function = resolved.decision.form, resolved.fn
        # Traced code looks at no rows, and a tuned table is one of them.
        if compiled and (is_tuned or not (is_traced and resolved.candidates[0].traceable)):
            form, function = "opaque", _opaque(binding)
        has_native = any(report.impl_id == NATIVE for report in resolved.decision.usable)
        # Inside the function a failure is passed on to vLLM's own path, or left to us.
        passes_on = form != "opaque" and any(one.impl_id == NATIVE for one in resolved.candidates)
        try:
            is_taken = _first_calls(layer, binding, impl_id, form, function)
        except Exception as error:
            is_alone = not is_one_of_several_ranks()
            if get_policy().strict or not has_native or not is_alone:
                why = (
                    "the policy leaves nothing else" if is_alone else "one rank of several runs nothing else"
                )
                raise _ExplicitFailure(
                    f"{impl_id} failed on its first call of {binding.op_name}, and {why}: "
                    f"{type(error).__name__}: {error}"
                ) from error
            if passes_on or is_fatal(error):
                raise
            # No candidate inside the function, and right for this layer.
            manager.set_aside(binding.op_name, impl_id, error)
            continue
        if not is_taken and has_native and not passes_on:
            _say_once(f"vllm-fl: {impl_id} does not take the inputs of {type(layer).__name__}")
            return NATIVE, "plain", None
        if impl_id not in manager.get_failed_impls(binding.op_name).get(binding.op_name, ()):
            return impl_id, form, function


def _opaque(binding: Binding) -> Callable[..., Any]:
    from vllm_fl.integration import opaque

    manager = get_default_manager()
    operator = manager.snapshot().operators[binding.op_name]
    resolved = manager.resolve_with_native(
        binding.op_name, None, wrap=lambda candidate: opaque.checked(operator, candidate)
    )
    return opaque.opaque(operator, resolved)


#: What has run once: operator, implementation, form and the kind of arguments.
_tried: set[tuple[Any, ...]] = set()


def _first_calls(layer: Any, binding: Binding, impl_id: str, form: str, function: Callable[..., Any]) -> bool:
    """Run the operator on tiny inputs: kernels that fail to compile fail here.

    That spends the copies that a first success needs, before vLLM measures its
    memory, and lets everything run before a graph is captured.

    Returns:
        Whether it takes such inputs.
    """
    record = trace.recorder()
    keywords = binding.keywords(layer)
    for arguments in binding.examples(layer):
        first = arguments[0]
        shapes = [getattr(argument, "shape", argument is None) for argument in arguments]
        kind = (first.dtype, str(first.device), *shapes, *keywords.values())
        key = (binding.op_name, impl_id, form, *kind)
        if key in _tried or first.device.type == "meta":
            continue
        try:
            if record is not None:
                record.is_paused = True
            with torch.no_grad():
                function(*arguments, **keywords)
        except NotImplementedError:
            return False
        finally:
            if record is not None:
                record.is_paused = False
        _tried.add(key)
    return True


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

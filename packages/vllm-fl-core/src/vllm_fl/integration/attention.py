"""vLLM's attention backend, chosen by the operator ``attention_backend``.

One seam: the platform's ``get_attn_backend_cls``, which every layer of attention
asks through a cache. A backend that the user chose explicitly, or that vLLM chose
for a model, comes in as ``selected_backend`` and is never overridden.
"""

from __future__ import annotations

import functools
import threading
from dataclasses import replace
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.dispatch import NoImplementationError
from vllm_fl.dispatch import PolicyError
from vllm_fl.dispatch import get_default_manager
from vllm_fl.dispatch.calling.binding import signature_of
from vllm_fl.dispatch.common.foreign import describe
from vllm_fl.dispatch.types import NATIVE
from vllm_fl.integration import seam
from vllm_fl.integration import settings
from vllm_fl.integration.fit import load
from vllm_fl.integration.fit import problems_of
from vllm_fl.integration.log import logger

if TYPE_CHECKING:
    from vllm_fl.dispatch.calling.guard import Candidate

OPERATOR = "attention_backend"

_choosing = threading.local()


def install() -> None:
    """Wrap the selection of the current platform, once."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    original = platform.get_attn_backend_cls
    if hasattr(original, "__vllm_fl__"):
        return

    @functools.wraps(original)
    def get_attn_backend_cls(
        cls: Any, selected_backend: Any, attn_selector_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        ours = None
        # An implementation may ask the platform itself, which is then vLLM's own choice.
        if selected_backend is None and not getattr(_choosing, "now", False):
            _choosing.now = True
            try:
                ours = choose(attn_selector_config)
            finally:
                _choosing.now = False
        return ours or original(selected_backend, attn_selector_config, *args, **kwargs)

    get_attn_backend_cls.__vllm_fl__ = True  # type: ignore[attr-defined]
    platform.get_attn_backend_cls = classmethod(get_attn_backend_cls)


ATTENTION = seam.Seam("Attention", "attention", install)


def choose(config: Any) -> str | None:
    """Return the class path that the dispatch chooses, None for vLLM's own choice.

    Args:
        config: what vLLM asks of the attention, its ``AttentionSelectorConfig``.

    Raises:
        PolicyError: the configuration is wrong.
        NoImplementationError: the policy leaves nothing that serves this attention.
        Exception: a fault of ours or of an implementation, in a rank of several.
    """
    name = ATTENTION.class_name
    reason = seam.why_left_to_vllm()
    if reason is None:
        try:
            path, impl_id, reason = _answer(config)
        except Exception as error:  # noqa: BLE001 - what is not contained is raised again
            seam.contain(name, error)
            return None
        if path is not None:
            seam.note_served(name, OPERATOR, impl_id, "plain", f": {path}")
            return path
    # vLLM calls its own class, and nothing of ours: the record counts no layer of it.
    seam.note_native(name, OPERATOR, reason, is_counted=False)
    return None


def _answer(config: Any) -> tuple[str | None, str, str]:
    """Return a class path with the implementation that named it, or None, and why vLLM chooses itself."""
    answered: list[str] = []
    declined: list[str] = []
    has_native = True
    try:
        resolved = get_default_manager().resolve_with_native(
            OPERATOR,
            lambda *_, **__: None,
            wrap=lambda candidate: _asked(candidate, config, answered, declined),
        )
        if resolved.decision.impl_id == NATIVE:
            return None, NATIVE, settings.POLICY_CHOOSES_NATIVE
        has_native = any(report.impl_id == NATIVE for report in resolved.decision.usable)
        path: str | None = resolved.fn(config.use_mla, config.use_sparse, selector=config)
    except (PolicyError, NoImplementationError):
        raise
    except Exception as error:
        if has_native:
            raise
        raise NoImplementationError(
            f"nothing that the policy allows serves the attention of this model: "
            f"{'; '.join(declined) or describe(error)}. Let vLLM choose as well: "
            f"VLLM_FL_PER_OP='{OPERATOR}=...|native'."
        ) from error
    next_one = f"{answered[-1]} serves it" if path else "vLLM chooses the attention"
    for line in declined:
        logger.warning("vllm-fl: no attention of %s; %s", line, next_one)
    return path, answered[-1] if path else NATIVE, "; ".join(declined) or "what was asked before it failed"


def _asked(candidate: Candidate, config: Any, answered: list[str], declined: list[str]) -> Candidate:
    """Return the candidate, refusing what does not fit; why it refuses goes to ``declined``."""
    impl_id, predicate = candidate.impl_id, candidate.supports

    def ask(*args: Any, **kwargs: Any) -> Any:
        path = candidate.fn(*args, **kwargs)
        if path is None:
            # It does not say why: the class that it names where nothing is asked for does.
            general = candidate.fn(*args, **{**kwargs, "selector": None})
            reasons = _reasons_against(general, config) if general else []
            reasons = reasons or ["it leaves the choice to vLLM"]
        else:
            reasons = _reasons_against(path, config)
        if reasons:
            raise NotImplementedError("; ".join(reasons))
        answered.append(impl_id)
        return path

    def noting(*args: Any, **kwargs: Any) -> Any:
        try:
            return ask(*args, **kwargs)
        except NotImplementedError as error:
            declined.append(f"{impl_id}: {error}")
            raise

    def supports(*args: Any, **kwargs: Any) -> Any:
        assert predicate is not None
        answer = predicate(*args, **kwargs)
        if answer is not True:
            declined.append(f"{impl_id}: {answer}")
        return answer

    return replace(candidate, fn=noting, supports=supports if predicate else None)


def _reasons_against(path: str, config: Any) -> list[str]:
    """Ask the class itself whether it takes the configuration, as vLLM asks its own."""
    from vllm.platforms import current_platform

    backend = load(path)
    capability = current_platform.get_device_capability()
    is_vllms = path.startswith("vllm.")
    if is_vllms and capability is None:
        return []  # vLLM asks its own nothing there either
    problems = [] if is_vllms else problems_of(backend)
    if problems:
        return [f"it does not fit this vLLM: {problem}" for problem in problems]
    given = config._asdict()
    parameters = signature_of(backend.validate_configuration).parameters
    if "device_capability" in parameters:
        given["device_capability"] = capability
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        parameters = given
    # A later vLLM's field, which the class has never heard of: right where it asks for nothing.
    defaults = getattr(config, "_field_defaults", {})
    unknown = [name for name in given if name not in parameters]
    reasons = [f"it does not know {n}" for n in unknown if given[n] not in (None, False, defaults.get(n))]
    known = {name: value for name, value in given.items() if name in parameters}
    return reasons + list(backend.validate_configuration(**known))

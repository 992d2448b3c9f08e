"""What the platform is here and why, in plain values; nothing of a chip is imported or opened."""

from __future__ import annotations

import os
from dataclasses import MISSING
from dataclasses import fields
from importlib.util import find_spec
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.platform import bind
from vllm_fl.platform import choice
from vllm_fl.platform.description import Chip
from vllm_fl.platform.description import what_is_missing

if TYPE_CHECKING:
    from vllm_fl.platform.choice import Installed

#: What a field of a description is: used, left at a default that costs nothing, or at one that does.
USED = "used"
DEFAULT = "default"
MISSED = "missing"

_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"

#: The first vLLM that lets a platform replace its Triton kernels.
_WITHOUT_TRITON = (0, 32)


def report() -> dict[str, Any]:
    """Return what :func:`vllm_fl.platform.choice.chosen` chooses in a process of vLLM, and what follows.

    Returns:
        ``active`` (a title, or None), ``why``, ``problem``, ``not_used`` (pairs of a title and
        a reason), ``broken`` (the same, of descriptions that cannot be used), ``vllm`` (its
        version, or None), ``served_by`` (what gives vLLM its platform, or None) and, where a
        description is active, ``chip``.
    """
    version = _vllm_version()
    found = choice.chosen()
    claims = choice.claims() if version else []
    return {
        "active": str(found.active) if found.active else None,
        "why": found.why,
        "problem": found.problem,
        "not_used": [[str(one), reason] for one, reason in found.no if one.chip],
        "broken": [[str(one), one.problem] for one in choice.installed() if one.chip is None],
        "vllm": version,
        "served_by": _served_by(found.active, claims),
        "chip": _chip(found.active, _numbers(version)) if found.active else None,
    }


def _vllm_version() -> str | None:
    if find_spec("vllm") is None:
        return None
    # Before anything is chosen: some versions ask for the platform while they are imported.
    import vllm

    return str(vllm.__version__)


def _numbers(version: str | None) -> tuple[int, ...] | None:
    parts = (version or "").split(".")[:2]
    return tuple(map(int, parts)) if all(part.isdecimal() for part in parts) else None


def _served_by(active: Installed | None, claims: list[str]) -> str | None:
    if active is not None:
        return str(active)
    return " and ".join(choice.others() or [f"vLLM's own platform {one}" for one in claims]) or None


def _chip(active: Installed, version: tuple[int, ...] | None) -> dict[str, Any]:
    chip = active.chip
    assert chip is not None
    values = chip.to_dict()
    return {
        "fields": [
            [name, value, state_of(chip, name), what_is_missing(name)] for name, value in values.items()
        ],
        "bound": [
            *(f"torch.cuda.{name}" for name in chip.cuda_names),
            *(
                f"torch.{name}" if name in bind.OF_TORCH else f"torch.accelerator.{name}"
                for name in chip.accelerator
            ),
        ],
        "unbound": bind.unbound(active, version) if version else {},
        "overrides": [f"{name} {values[name]}" for name in ("worker", "runner") if values[name]],
        "quirks": [
            [quirk.name, version is None or quirk.applies_to(version), quirk.reason] for quirk in chip.quirks
        ],
        "runner": os.environ.get(_RUNNER) or "",
        "lacks_triton": bool(version and version < _WITHOUT_TRITON and find_spec("triton") is None),
        "is_bypassed": os.environ.get("VLLM_TARGET_DEVICE") == "cpu",
    }


def state_of(chip: Chip, name: str) -> str:
    """Return whether a field is used, left at a default, or missing at a cost."""
    (field,) = [one for one in fields(Chip) if one.name == name]
    default = field.default if field.default_factory is MISSING else field.default_factory()
    if getattr(chip, name) != default:
        return USED
    return MISSED if what_is_missing(name) else DEFAULT

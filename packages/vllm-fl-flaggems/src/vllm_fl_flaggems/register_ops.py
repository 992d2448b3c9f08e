"""The entry point ``vllm_fl.plugin: flaggems``. Imports neither torch nor FlagGems."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from vllm_fl.dispatch import OpRegistry

#: The plugin API that this plugin was written for.
VLLM_FL_PLUGIN_API = 1

WHITELIST = "VLLM_FL_FLAGOS_WHITELIST"
BLACKLIST = "VLLM_FL_FLAGOS_BLACKLIST"

#: The variables that this plugin reads, at registration.
VLLM_FL_VARIABLES = (WHITELIST, BLACKLIST)


def register_builtins(registry: OpRegistry) -> None:
    """Register FlagGems' operators as ``default.flagos``.

    An operator that the variables leave out is registered too, as one that is not
    available, so that whoever asks is told why.

    Raises:
        PolicyError: the variables name an unknown operator, or both are set.
    """
    from vllm_fl_flaggems.flaggems import FlagGemsBackend

    registry.register_backend(FlagGemsBackend(_left_out(FlagGemsBackend.operators())))


def _left_out(operators: Collection[str]) -> dict[str, str]:
    """Return the operators that the variables leave out, each with the reason."""
    from vllm_fl.dispatch import PolicyError

    allowed, denied = _names(WHITELIST, operators), _names(BLACKLIST, operators)
    if allowed is not None and denied is not None:
        raise PolicyError(f"{BLACKLIST}: {WHITELIST} is set too; keep one of them.")
    if allowed is not None:
        return {name: f"{WHITELIST} does not name it" for name in operators if name not in allowed}
    return dict.fromkeys(denied or (), f"{BLACKLIST} names it")


def _names(variable: str, known: Collection[str]) -> list[str] | None:
    """Return the operators that a variable names, None where it is unset or blank."""
    from vllm_fl.dispatch import PolicyError

    text = os.environ.get(variable, "").strip()
    if not text:
        return None
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise PolicyError(f"{variable}: FlagGems has no operator {name!r}.{_nearest(name, known)}")
    return names


def _nearest(name: str, known: Collection[str]) -> str:
    from difflib import get_close_matches

    close = get_close_matches(name.lower(), known, n=1)
    return f" Did you mean {close[0]!r}?" if close else f" It has {', '.join(sorted(known))}."

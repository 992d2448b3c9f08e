"""Every environment variable: what it says, and its default.

The one table of the core's variables; those of a policy are made of its keys'
(:mod:`vllm_fl.dispatch.policy.keys`). The documentation, ``vllm-fl doctor`` and the
registration with vLLM (which warns of every ``VLLM_*`` that it does not know) read
it here. A plugin names its own in ``VLLM_FL_VARIABLES`` of the module that its entry
point names; :attr:`~vllm_fl.dispatch.registry.PluginRecord.variables` has them.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from typing import NamedTuple

from vllm_fl.dispatch.common.suggest import did_you_mean
from vllm_fl.dispatch.policy.keys import KEYS

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Mapping

    from vllm_fl.dispatch.registry import PluginRecord

#: What the name of every variable begins with, those of plugins too.
PREFIX = "VLLM_FL_"


class Variable(NamedTuple):
    """One environment variable of the core.

    Attributes:
        name: its name.
        meaning: what it says, in a line.
        default: what holds where it is unset; empty where that is nothing.
    """

    name: str
    meaning: str
    default: str = ""


_ALL = (
    Variable(
        "VLLM_FL_CONFIG", "a YAML file with the whole policy; it replaces the variables of single keys below"
    ),
    *(
        Variable(key.variable, key.meaning_of_variable, key.type.written(key.type.default))
        for key in KEYS.values()
        if key.variable
    ),
    Variable("VLLM_FL_PREFER_ENABLED", "0 leaves every layer of vLLM to vLLM", "1"),
    Variable("VLLM_FL_OOT_ENABLED", "0 replaces none of vLLM's layers", "1"),
    Variable(
        "VLLM_FL_OOT_WHITELIST",
        "the only layers that are replaced, by vLLM's name or by class",
        "all",
    ),
    Variable("VLLM_FL_OOT_BLACKLIST", "layers that are not replaced"),
    Variable(
        "VLLM_FL_PLATFORM",
        "the chip's description that vLLM's platform is made of, by name; none makes none; unset, its probe "
        "decides",
    ),
    Variable("VLLM_FL_PLUGINS", "the only plugins that are loaded, by name", "all"),
    Variable("VLLM_FL_PLUGIN_MODULES", "modules that are loaded as plugins, beside the installed ones"),
    Variable("VLLM_FL_LOG_LEVEL", "print the log of vllm_fl on stderr: DEBUG, INFO, WARNING or ERROR"),
    Variable("VLLM_FL_TRACE_DIR", "a folder where every process writes what served each operator"),
    Variable(
        "VLLM_FL_TRACE_RUN", "written by vllm-fl for what a process starts, to tell runs apart; never set it"
    ),
    Variable(
        "VLLM_FL_RANKS_TIMEOUT", "seconds that a rank waits for the others' choices at the start", "120"
    ),
    Variable(
        "VLLM_FL_DISPATCH_FINGERPRINT", "written by vllm-fl into vLLM's compile-cache key; never set it"
    ),
)

#: Every variable that the core reads, by name.
VARIABLES: Mapping[str, Variable] = {variable.name: variable for variable in _ALL}


def known_variables(plugins: Iterable[PluginRecord]) -> set[str]:
    """Return the names of all variables that the core and ``plugins`` read."""
    return {*VARIABLES, *(name for plugin in plugins for name in plugin.variables)}


def hint(name: str, known: Iterable[str]) -> str:
    """Return `` Did you mean 'VLLM_FL_X'?`` for a variable, or ``""``."""
    # Without the prefix, which makes every name like every other.
    text = did_you_mean(name.removeprefix(PREFIX), (one.removeprefix(PREFIX) for one in known))
    return text.replace("'", f"'{PREFIX}", 1)


def unread_variables(plugins: Iterable[PluginRecord]) -> dict[str, str]:
    """Return the ``VLLM_FL_*`` variables that are set and that nobody reads, each with a hint."""
    known = known_variables(plugins)
    return {
        name: hint(name, known)
        for name in sorted(os.environ)
        if name.startswith(PREFIX) and name not in known
    }

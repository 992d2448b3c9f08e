"""Finding plugins: entry points of the group ``vllm_fl.plugin``, and named modules.

A plugin is a module with ``register_builtins(registry)`` (``vllm_fl_register``
and ``register`` are taken too), or such a function. It registers into a stage:
everything that is right is committed at once when the function returns, and
nothing where it raises. A broken plugin costs the user that plugin and one line.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.dispatch.common.distributions import PACKAGE
from vllm_fl.dispatch.common.distributions import PLUGIN_GROUP
from vllm_fl.dispatch.common.distributions import VLLM_GROUPS
from vllm_fl.dispatch.common.distributions import entry_points
from vllm_fl.dispatch.common.distributions import installed_twice
from vllm_fl.dispatch.common.distributions import rivals
from vllm_fl.dispatch.common.distributions import sentence
from vllm_fl.dispatch.common.distributions import text_of
from vllm_fl.dispatch.common.foreign import shortened
from vllm_fl.dispatch.common.fork import ForkSafeLock
from vllm_fl.dispatch.common.fork import after_fork_in_child
from vllm_fl.dispatch.common.log import get_logger
from vllm_fl.dispatch.common.log import level_from_environment
from vllm_fl.dispatch.common.slow_blocks import Watch
from vllm_fl.dispatch.common.suggest import did_you_mean
from vllm_fl.dispatch.environment import names_variable
from vllm_fl.dispatch.errors import PolicyError
from vllm_fl.dispatch.plugins.loading import PLUGIN_MODULES_ENV
from vllm_fl.dispatch.plugins.loading import PLUGINS_ENV
from vllm_fl.dispatch.plugins.loading import Found
from vllm_fl.dispatch.plugins.loading import load_plugin
from vllm_fl.dispatch.plugins.loading import title_of
from vllm_fl.dispatch.shared_work import Work
from vllm_fl.dispatch.types import Origin
from vllm_fl.dispatch.wheels import owner_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.metadata import EntryPoint

    from vllm_fl.dispatch.registry import OpRegistry
    from vllm_fl.dispatch.registry import PluginRecord

logger = get_logger(__name__)

_HEADERS = ("Name", "Version")
#: Of metadata; what lies beyond is no header.
_LONGEST_HEADERS = 2**20


class Discovery:
    """The plugins of one registry, loaded once: the first thread that needs them loads them.

    Args:
        registry: what is filled.
        is_wanted: a registry that somebody fills by hand discovers nothing.
    """

    def __init__(self, registry: OpRegistry, *, is_wanted: bool) -> None:
        self._registry = registry
        self._is_wanted = is_wanted
        self._work: Work | None = None
        self._lock = ForkSafeLock()
        after_fork_in_child(self._forget_the_parent)

    def _forget_the_parent(self) -> None:
        self._work = None

    @property
    def loading(self) -> str | None:
        """What is being loaded, in words; None where nothing is."""
        work = self._work
        return work.what if work else None

    def load(self) -> None:
        """Load the plugins, once; see :meth:`vllm_fl.dispatch.manager.OpManager.discover`."""
        if not self._is_wanted:
            return
        problem = level_from_environment()
        if problem:
            raise PolicyError(problem)
        mine = Work("the discovery of plugins")
        while True:
            with self._lock:
                if not self._is_wanted:
                    return
                work = self._work
                if work is None:
                    self._work = mine
                    break
            if work.wait() != "done":
                return
        has_ended = False
        try:
            discover_plugins(self._registry, mine.goes_on)
            has_ended = True
        finally:
            with self._lock:
                # In a child that was forked meanwhile, another one may be under way.
                if self._work is mine:
                    self._work = None
                self._is_wanted = self._is_wanted and not has_ended
                mine.is_done = True


def discover_plugins(registry: OpRegistry, begins: Callable[[str], None] | None = None) -> list[PluginRecord]:
    """Load every plugin into ``registry`` and return what became of each.

    A plugin that has a record in ``registry.plugins`` is not loaded again.

    Args:
        registry: what is filled.
        begins: told of each plugin before it is loaded.

    Raises:
        PolicyError: VLLM_FL_PLUGINS or VLLM_FL_PLUGIN_MODULES names something
            that is not there.
    """
    found = find_plugins()
    allowed = names_variable(PLUGINS_ENV)
    if allowed is not None:
        known = [plugin.name for plugin in found]
        for name in allowed:
            if name not in known:
                raise PolicyError(
                    f"{PLUGINS_ENV}: no plugin {name!r} is installed; installed are "
                    f"{', '.join(sorted(known)) or 'none'}.{did_you_mean(name, known)}"
                )
    with Watch() as watch:
        for plugin in found:
            if plugin.name in registry.plugins:
                _refuse_second(registry, plugin)
                continue
            by_module = plugin.origin.distribution == PLUGIN_MODULES_ENV
            if allowed is not None and plugin.name not in allowed and not by_module:
                record = plugin.record("not-allowed", f"{PLUGINS_ENV} does not name it")
            else:
                if begins is not None:
                    begins(title_of(plugin.record("loading")))
                record = load_plugin(registry, plugin, watch)
            registry.plugins[plugin.name] = record
            if record.state in ("failed", "incompatible", "refused"):
                logger.error("%s is not used: %s", title_of(record), record.reason)
            elif record.reason and record.success:
                logger.error("%s: not all is used: %s", title_of(record), record.reason)
    return list(registry.plugins.values())


def find_plugins() -> list[Found]:
    """Return every plugin that is installed or named, none of them loaded.

    Raises:
        PolicyError: VLLM_FL_PLUGIN_MODULES is no list of names.
    """
    return _installed() + _named_modules()


def load_alone(registry: OpRegistry, index: int) -> PluginRecord:
    """Load one of :func:`find_plugins` into ``registry``, whatever VLLM_FL_PLUGINS says."""
    with Watch() as watch:
        return load_plugin(registry, find_plugins()[index], watch)


def _installed() -> list[Found]:
    found = []
    every, damaged = entry_points(PLUGIN_GROUP, *VLLM_GROUPS)
    for problem in damaged:
        logger.warning("%s; its entry points are not used", problem)
    for entry in every:
        if entry.group == PLUGIN_GROUP:
            name, version = _name_and_version(entry.dist)
            found.append(Found(Origin(name, version, entry.name), entry.name, entry.value))
    _warn_of_others([entry for entry in every if entry.group != PLUGIN_GROUP])
    # Two distributions may use one name: the owner of a reserved name comes
    # first, then the order of names, so that every process chooses alike.
    return sorted(found, key=lambda p: (p.name, not _owns_its_name(p), p.origin.distribution))


def _warn_of_others(entry_points: list[EntryPoint]) -> None:
    try:
        problems = [
            f"{one} has a package {PACKAGE} too, and one hides the other" for one in rivals(entry_points)
        ]
        problems += [sentence(name, every) for name, every in installed_twice().items()]
    except Exception:  # damaged metadata of somebody; this is only a warning
        logger.debug("metadata cannot be read", exc_info=True)
        return
    for problem in problems:
        logger.warning("%s; `vllm-fl doctor` says what to do", problem)


def _name_and_version(distribution: Any) -> tuple[str, str]:
    # `distribution.metadata` parses the whole description, whenever it is asked for.
    text = text_of(distribution, "METADATA") or text_of(distribution, "PKG-INFO")
    headers: dict[str, str] = {}
    for line in text[:_LONGEST_HEADERS].partition("\n\n")[0].splitlines():
        header, _, value = line.partition(":")
        if header in _HEADERS and value.strip():
            headers[header] = shortened(value.strip())
    return headers.get("Name", "?"), headers.get("Version", "?")


def _owns_its_name(plugin: Found) -> bool:
    owner = owner_of(plugin=plugin.name)
    return owner is not None and owner.distribution == plugin.origin.distribution


def _named_modules() -> list[Found]:
    modules = names_variable(PLUGIN_MODULES_ENV) or []
    return [Found(Origin(PLUGIN_MODULES_ENV, "", module), module, module) for module in modules]


def _refuse_second(registry: OpRegistry, plugin: Found) -> None:
    first = registry.plugins[plugin.name]
    if (first.distribution, first.source) == (plugin.origin.distribution, plugin.source):
        return
    key = f"{plugin.name} ({plugin.origin.distribution})"
    if key not in registry.plugins:
        reason = f"the name {plugin.name!r} is taken by {first.distribution} {first.version}"
        registry.plugins[key] = replace(plugin.record("refused", reason), name=key)
        logger.error("%s is not used: %s", title_of(registry.plugins[key]), reason)

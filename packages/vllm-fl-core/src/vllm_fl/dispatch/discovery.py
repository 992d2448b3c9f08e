"""Finding plugins: entry points of the group ``vllm_fl.plugin``, and named modules.

A plugin is a module with ``register_builtins(registry)`` (``vllm_fl_register``
and ``register`` are taken too), or such a function. It registers into a stage:
everything that is right is committed at once when the function returns, and
nothing where it raises. A broken plugin costs the user that plugin and one line.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from dataclasses import replace
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.dispatch._foreign import absent_module
from vllm_fl.dispatch._foreign import describe
from vllm_fl.dispatch._foreign import is_loggable
from vllm_fl.dispatch._foreign import left_undone
from vllm_fl.dispatch._foreign import raise_if_from_a_signal
from vllm_fl.dispatch._foreign import shortened
from vllm_fl.dispatch._fork import ForkSafeLock
from vllm_fl.dispatch._fork import after_fork_in_child
from vllm_fl.dispatch._installed import CORE
from vllm_fl.dispatch._installed import PACKAGE
from vllm_fl.dispatch._installed import PLUGIN_GROUP
from vllm_fl.dispatch._installed import VLLM_GROUPS
from vllm_fl.dispatch._installed import entry_points
from vllm_fl.dispatch._installed import installed_twice
from vllm_fl.dispatch._installed import rivals
from vllm_fl.dispatch._installed import sentence
from vllm_fl.dispatch._installed import text_of
from vllm_fl.dispatch._installed import version_of
from vllm_fl.dispatch._kept import process_kept
from vllm_fl.dispatch._log import get_logger
from vllm_fl.dispatch._log import level_from_environment
from vllm_fl.dispatch._log import root_logger_kept
from vllm_fl.dispatch._stage import TOO_MANY
from vllm_fl.dispatch._stage import Stage
from vllm_fl.dispatch._suggest import did_you_mean
from vllm_fl.dispatch._suggest import shown
from vllm_fl.dispatch._watch import Watch
from vllm_fl.dispatch._work import Work
from vllm_fl.dispatch.environment import names_variable
from vllm_fl.dispatch.errors import PolicyError
from vllm_fl.dispatch.errors import RegistrationError
from vllm_fl.dispatch.registry import PluginRecord
from vllm_fl.dispatch.types import Origin
from vllm_fl.dispatch.variables import PREFIX
from vllm_fl.dispatch.wheels import owner_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.metadata import EntryPoint

    from vllm_fl.dispatch.registry import OpRegistry

logger = get_logger(__name__)

PLUGIN_MODULES_ENV = "VLLM_FL_PLUGIN_MODULES"
PLUGINS_ENV = "VLLM_FL_PLUGINS"

#: The newest plugin API that this core knows, and the oldest.
PLUGIN_API_VERSION = 1
OLDEST_PLUGIN_API_VERSION = 1

_ENTRY_FUNCTIONS = ("register_builtins", "vllm_fl_register", "register")
_HEADERS = ("Name", "Version")
#: Of metadata; what lies beyond is no header.
_LONGEST_HEADERS = 2**20
_API_LITERAL = re.compile(r"^VLLM_FL_PLUGIN_API\b[^=\n]*=[ \t]*(\d+)[ \t]*(?:#.*)?$", re.MULTILINE)


@dataclass(frozen=True)
class _Found:
    """A plugin that is installed or named, not yet loaded."""

    origin: Origin
    name: str
    source: str

    def record(self, state: str, reason: str = "", **more: Any) -> PluginRecord:
        return PluginRecord(
            self.name,
            self.origin.distribution,
            self.origin.version,
            self.source,
            more.pop("api_version", None),
            state,
            reason,
            **more,
        )


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
                    begins(_title(plugin.record("loading")))
                record = _watched_load(registry, plugin, watch)
            registry.plugins[plugin.name] = record
            if record.state in ("failed", "incompatible", "refused"):
                logger.error("%s is not used: %s", _title(record), record.reason)
            elif record.reason and record.success:
                logger.error("%s: not all is used: %s", _title(record), record.reason)
    return list(registry.plugins.values())


def find_plugins() -> list[_Found]:
    """Return every plugin that is installed or named, none of them loaded.

    Raises:
        PolicyError: VLLM_FL_PLUGIN_MODULES is no list of names.
    """
    return _installed() + _named_modules()


def load_alone(registry: OpRegistry, index: int) -> PluginRecord:
    """Load one of :func:`find_plugins` into ``registry``, whatever VLLM_FL_PLUGINS says."""
    with Watch() as watch:
        return _watched_load(registry, find_plugins()[index], watch)


def _title(record: PluginRecord) -> str:
    return f"plugin {record.name!r} of {record.distribution} {record.version}".rstrip()


def _installed() -> list[_Found]:
    found = []
    every, damaged = entry_points(PLUGIN_GROUP, *VLLM_GROUPS)
    for problem in damaged:
        logger.warning("%s; its entry points are not used", problem)
    for entry in every:
        if entry.group == PLUGIN_GROUP:
            name, version = _name_and_version(entry.dist)
            found.append(_Found(Origin(name, version, entry.name), entry.name, entry.value))
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


def _owns_its_name(plugin: _Found) -> bool:
    owner = owner_of(plugin=plugin.name)
    return owner is not None and owner.distribution == plugin.origin.distribution


def _named_modules() -> list[_Found]:
    modules = names_variable(PLUGIN_MODULES_ENV) or []
    return [_Found(Origin(PLUGIN_MODULES_ENV, "", module), module, module) for module in modules]


def _refuse_second(registry: OpRegistry, plugin: _Found) -> None:
    first = registry.plugins[plugin.name]
    if (first.distribution, first.source) == (plugin.origin.distribution, plugin.source):
        return
    key = f"{plugin.name} ({plugin.origin.distribution})"
    if key not in registry.plugins:
        reason = f"the name {plugin.name!r} is taken by {first.distribution} {first.version}"
        registry.plugins[key] = replace(plugin.record("refused", reason), name=key)
        logger.error("%s is not used: %s", _title(registry.plugins[key]), reason)


def _watched_load(registry: OpRegistry, plugin: _Found, watch: Watch) -> PluginRecord:
    title = _title(plugin.record("loading"))
    others = f"{PLUGINS_ENV} with the names of the others leaves it out"
    with (
        watch.over(f"{title} has been loading", f"{others}; `vllm-fl doctor` tests it by itself."),
        root_logger_kept() as changed,
        process_kept() as also_changed,
    ):
        record = _load(registry, plugin)
    if changed:
        logger.warning(
            "%s changed the root logger (%s) while it was loaded; that is undone", title, ", ".join(changed)
        )
    if also_changed:
        logger.warning("%s changed %s while it was loaded; that is undone", title, ", ".join(also_changed))
    return record


def _load(registry: OpRegistry, plugin: _Found) -> PluginRecord:
    owner = owner_of(plugin=plugin.name)
    if owner is not None and owner.distribution != plugin.origin.distribution:
        return plugin.record("refused", f"the name {plugin.name!r} is reserved to {owner.distribution}")
    module_name = plugin.source.partition(":")[0]
    api: int | None = None
    stage = Stage(registry, plugin.origin)
    try:
        api = _declared_api(module_name)
        problem = _api_problem(plugin, api)
        if problem:
            return plugin.record("incompatible", problem, api_version=api)
        module = import_module(module_name)
        api = getattr(module, "VLLM_FL_PLUGIN_API", api or PLUGIN_API_VERSION)
        problem = _api_problem(plugin, api)
        if problem:
            return plugin.record("incompatible", problem)
        undone = left_undone(_entry_function(module, plugin.source)(stage))
        if undone:
            raise RegistrationError(f"{plugin.source} has registered nothing: {undone}")
        if stage.too_many:  # and it went on when it was told
            raise RegistrationError(TOO_MANY)
        variables = _variables(module, stage)
        stage.is_closed = True
        problems = shortened("; ".join(stage.problems))
        if problems and not stage.impls and not stage.operators:
            return plugin.record("failed", problems, api_version=api)
        registry.commit(
            impls=tuple(stage.impls),
            operators=tuple(stage.operators),
            backends=tuple(stage.backends),
            origin=plugin.origin,
        )
    except PolicyError:
        raise  # a plugin refuses a variable of its own in this way
    except BaseException as error:
        raise_if_from_a_signal(error)
        absent = absent_module(error)
        is_named = plugin.origin.distribution == PLUGIN_MODULES_ENV
        if absent and is_named and f"{module_name}.".startswith(f"{absent}."):
            raise PolicyError(f"{PLUGIN_MODULES_ENV}: there is no module {module_name!r}.") from None
        logger.debug("plugin %r failed", plugin.name, exc_info=is_loggable(error))
        return plugin.record("failed", f"{describe(error)}{_line_of_it()}", api_version=api)
    finally:
        # A thread that it has started must not believe that it registers something.
        stage.is_closed = True
    return plugin.record(
        "loaded",
        problems,
        api_version=api,
        operators=tuple(dict.fromkeys(impl.op_name for impl in stage.impls)),
        variables=variables,
    )


def _variables(module: ModuleType, stage: Stage) -> tuple[str, ...]:
    """Return the environment variables that a plugin says it reads."""
    names = getattr(module, "VLLM_FL_VARIABLES", ())
    if isinstance(names, (tuple, list)) and all(
        isinstance(name, str) and name.startswith(PREFIX) for name in names
    ):
        return tuple(names)
    stage.problems.append(
        f"VLLM_FL_VARIABLES must be a tuple of names that begin with {PREFIX}, not {shown(names)}"
    )
    return ()


def _declared_api(module_name: str) -> int | None:
    """Read the literal VLLM_FL_PLUGIN_API without running the module or its package.

    A plugin for a newer API may not even import here, and that would be the
    wrong thing to say.
    """
    loaded = sys.modules.get(module_name)
    if loaded is not None:
        return getattr(loaded, "VLLM_FL_PLUGIN_API", None)
    package, *inner = module_name.split(".")
    spec = find_spec(package)
    for name in inner:
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(f"{spec.name}.{name}", spec.submodule_search_locations)
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return None
    try:
        with open(spec.origin, encoding="utf-8", errors="replace") as file:
            found = _API_LITERAL.search(file.read())
    except OSError:
        return None  # in an archive
    return int(found.group(1)) if found else None


def _api_problem(plugin: _Found, api: object) -> str | None:
    if api is None:
        return None
    if type(api) is not int:
        return f"VLLM_FL_PLUGIN_API must be an integer, not {shown(api)}"
    if OLDEST_PLUGIN_API_VERSION <= api <= PLUGIN_API_VERSION:
        return None
    core = f"{CORE} {version_of(CORE) or '(not installed)'}"
    wheel = f"{plugin.origin.distribution} {plugin.origin.version}".rstrip()
    newer = api > PLUGIN_API_VERSION
    mend = CORE if newer else plugin.origin.distribution
    return (
        f"{wheel} was written for plugin API {api}, and {core} knows {OLDEST_PLUGIN_API_VERSION} to "
        f"{PLUGIN_API_VERSION}; pip install --upgrade {mend}"
    )


def _entry_function(module: object, source: str) -> Callable[[OpRegistry], Any]:
    target: Any = module
    for name in filter(None, source.partition(":")[2].split(".")):
        target = getattr(target, name)
    if isinstance(target, ModuleType):
        for name in _ENTRY_FUNCTIONS:
            function = getattr(target, name, None)
            if callable(function):
                return function  # type: ignore[no-any-return]
        raise RegistrationError(f"module {target.__name__} has none of {', '.join(_ENTRY_FUNCTIONS)}")
    if not callable(target):
        raise RegistrationError(f"{source} is {shown(target)}, not a function")
    return target  # type: ignore[no-any-return]


def _line_of_it() -> str:
    """Say where the exception that is being handled was raised, outside this module."""
    where = ""
    traceback = sys.exc_info()[2]
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if code.co_filename != __file__ and "importlib" not in code.co_filename:
            where = f" ({code.co_filename}:{traceback.tb_lineno})"
        traceback = traceback.tb_next
    return where

"""Loading one plugin: into a stage, and committed as a whole where it is right.

Whatever it does, the process stays the user's: what it raises becomes the reason of its
record, and what it changes of the process is put back.
"""

from __future__ import annotations

import re
import sys
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING
from typing import Any
from typing import NamedTuple

from vllm_fl.dispatch.common.distributions import CORE
from vllm_fl.dispatch.common.distributions import version_of
from vllm_fl.dispatch.common.foreign import absent_module
from vllm_fl.dispatch.common.foreign import describe
from vllm_fl.dispatch.common.foreign import is_loggable
from vllm_fl.dispatch.common.foreign import left_undone
from vllm_fl.dispatch.common.foreign import raise_if_from_a_signal
from vllm_fl.dispatch.common.foreign import shortened
from vllm_fl.dispatch.common.log import get_logger
from vllm_fl.dispatch.common.log import root_logger_kept
from vllm_fl.dispatch.common.suggest import shown
from vllm_fl.dispatch.errors import PolicyError
from vllm_fl.dispatch.errors import RegistrationError
from vllm_fl.dispatch.plugins.process_state import process_kept
from vllm_fl.dispatch.plugins.staging import TOO_MANY
from vllm_fl.dispatch.plugins.staging import Stage
from vllm_fl.dispatch.registry import PluginRecord
from vllm_fl.dispatch.variables import PREFIX
from vllm_fl.dispatch.wheels import owner_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_fl.dispatch.common.slow_blocks import Watch
    from vllm_fl.dispatch.registry import OpRegistry
    from vllm_fl.dispatch.types import Origin

logger = get_logger(__name__)

PLUGIN_MODULES_ENV = "VLLM_FL_PLUGIN_MODULES"
PLUGINS_ENV = "VLLM_FL_PLUGINS"

#: The newest plugin API that this core knows, and the oldest.
PLUGIN_API_VERSION = 1
OLDEST_PLUGIN_API_VERSION = 1

_ENTRY_FUNCTIONS = ("register_builtins", "vllm_fl_register", "register")
_API_LITERAL = re.compile(r"^VLLM_FL_PLUGIN_API\b[^=\n]*=[ \t]*(\d+)[ \t]*(?:#.*)?$", re.MULTILINE)


class Found(NamedTuple):
    """A plugin that is installed or named, not yet loaded."""

    origin: Origin
    name: str
    source: str

    def record(self, state: str, reason: str = "", **more: Any) -> PluginRecord:
        """Return what became of it."""
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


def title_of(record: PluginRecord) -> str:
    """Name a plugin in a message."""
    return f"plugin {record.name!r} of {record.distribution} {record.version}".rstrip()


def load_plugin(registry: OpRegistry, plugin: Found, watch: Watch) -> PluginRecord:
    """Load one plugin into ``registry`` and return what became of it; nothing of its own is raised.

    Raises:
        PolicyError: a variable that it reads, or that names it, is wrong.
    """
    title = title_of(plugin.record("loading"))
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


def _load(registry: OpRegistry, plugin: Found) -> PluginRecord:
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


def _api_problem(plugin: Found, api: object) -> str | None:
    if api is None:
        return None
    if type(api) is not int:
        return f"VLLM_FL_PLUGIN_API must be an integer, not {shown(api)}"
    if OLDEST_PLUGIN_API_VERSION <= api <= PLUGIN_API_VERSION:
        return None
    core = f"{CORE} {version_of(CORE) or '(not installed)'}"
    wheel = f"{plugin.origin.distribution} {plugin.origin.version}".rstrip()
    newer = api > PLUGIN_API_VERSION
    by_module = plugin.origin.distribution == PLUGIN_MODULES_ENV
    upgrade = f"pip install --upgrade {CORE if newer else plugin.origin.distribution}"
    mend = f"adapt the module {plugin.name}" if by_module and not newer else upgrade
    return (
        f"{wheel} was written for plugin API {api}, and {core} knows {OLDEST_PLUGIN_API_VERSION} to "
        f"{PLUGIN_API_VERSION}; {mend}"
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

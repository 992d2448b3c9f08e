"""What is installed into vLLM, and when.

At load time as little as possible: the names of our environment variables, a
wrap of the methods that make an engine's configuration and an engine, and a hook on
the first layer. The layers are replaced when the first one is built: that is after a
vendor's plugin has registered its own, after the device is set, and only in
processes that build layers at all.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.dispatch import get_discovered_plugins
from vllm_fl.dispatch import get_policy
from vllm_fl.dispatch import trace
from vllm_fl.dispatch.variables import known_variables
from vllm_fl.dispatch.variables import unread_variables
from vllm_fl.integration import engine
from vllm_fl.integration import ranks
from vllm_fl.integration import replace
from vllm_fl.integration import settings
from vllm_fl.integration.log import logger

if TYPE_CHECKING:
    from collections.abc import Callable

#: The oldest vLLM that is supported, and the first that is not.
OLDEST_VLLM = (0, 26)
FIRST_UNKNOWN_VLLM = (0, 34)

_installed = False


def check_trace_folder() -> None:
    """Check VLLM_FL_TRACE_DIR, which nobody writes where every layer is vLLM's own.

    Raises:
        PolicyError: the folder cannot be made, or is somebody else's; or a switch is no boolean.
    """
    if settings.off_by() is None:
        trace.check_folder()


#: What checks the variables that the plug-in reads itself; the doctor asks the same. Each raises PolicyError.
CHECKS: tuple[Callable[[], object], ...] = (
    settings.off_by,
    replace.check_lists,
    ranks.time_limit,
    check_trace_folder,
)


def install() -> None:
    """Install the plug-in into this process's vLLM, once.

    Raises:
        PolicyError: the configuration is wrong.
    """
    global _installed
    if _installed:
        return
    problem = unsupported_vllm()
    if problem:
        logger.warning("vllm-fl is off, vLLM runs natively: %s", problem)
        _installed = True
        return
    get_policy()
    plugins = get_discovered_plugins()
    _teach_environment(known_variables(plugins))
    for name, hint in unread_variables(plugins).items():
        logger.warning("vllm-fl: the environment variable %s is read by nobody.%s", name, hint)
    for check in CHECKS:
        check()
    off = settings.off_by()
    if off is None:
        _wrap_engine_configuration()
        _at_first_layer(replace.take_over)
    else:
        # Newer vLLM sets up its log after it has loaded plug-ins, and drops this line until then.
        _at_first_layer(functools.partial(_stay_off, off))
    _installed = True


def _stay_off(variable: str) -> None:
    logger.info("vllm-fl: %s is off, every layer stays vLLM's own", variable)
    ranks.withdraw(f"{variable} is off there")


def unsupported_vllm() -> str | None:
    """Say why the installed vLLM is not supported, None if it is."""
    import vllm

    version = str(vllm.__version__)
    try:
        parsed = tuple(int(part) for part in version.split(".")[:2])
    except ValueError:
        return f"its version {version!r} cannot be read"
    if OLDEST_VLLM <= parsed < FIRST_UNKNOWN_VLLM:
        return None
    oldest, newest = ".".join(map(str, OLDEST_VLLM)), f"0.{FIRST_UNKNOWN_VLLM[1] - 1}"
    return f"vLLM {version} is not one of the supported {oldest} to {newest}"


def _teach_environment(names: set[str]) -> None:
    """Make our variables known to vLLM, which warns of every other ``VLLM_*``.

    Every entry of this dict is part of vLLM's compile-cache key. The fingerprint
    says there all that may change a graph, so that the others are constant.
    """
    from vllm import envs

    for name in names - {engine.FINGERPRINT_VARIABLE}:
        envs.environment_variables.setdefault(name, _constant)
    envs.environment_variables[engine.FINGERPRINT_VARIABLE] = engine.fingerprint


def _constant() -> str:
    return ""


def _wrap_engine_configuration() -> None:
    from vllm.engine.arg_utils import EngineArgs

    original = EngineArgs.create_engine_config

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        engine.ship_policy(self)
        _wrap_engine_core()
        return original(self, *args, **kwargs)

    EngineArgs.create_engine_config = create_engine_config


def _wrap_engine_core() -> None:
    """Let every engine that begins in this process get no layer of an earlier one, once.

    Not when its configuration is made: that of a second engine may be made before the
    first one is built.
    """
    from vllm.v1.engine.core import EngineCore

    original = EngineCore.__init__
    if hasattr(original, "__vllm_fl__"):
        return

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        engine.forget_shared_layers()
        original(self, *args, **kwargs)

    __init__.__vllm_fl__ = True  # type: ignore[attr-defined]
    EngineCore.__init__ = __init__


def _at_first_layer(function: Callable[[], None]) -> None:
    """Call ``function`` before the process builds its first layer, and only then."""
    from vllm.model_executor.custom_op import CustomOp
    from vllm.model_executor.custom_op import PluggableLayer

    own = {base: base.__new__ for base in (CustomOp, PluggableLayer)}

    def hook(base: Any) -> Callable[..., Any]:
        def first_layer(cls: Any, *args: Any, **kwargs: Any) -> Any:
            for one, original in own.items():
                one.__new__ = original
            function()
            return own[base](cls, *args, **kwargs)

        return first_layer

    for base in own:
        base.__new__ = hook(base)

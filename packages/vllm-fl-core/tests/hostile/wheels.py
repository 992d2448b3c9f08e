"""Wheels with plugins, written into a folder as an installer leaves them."""

from __future__ import annotations

import importlib
import textwrap
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.dispatch import get_default_manager

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from vllm_fl.dispatch import PluginRecord

OP = "silu_and_mul"
HEAD = """
from vllm_fl.dispatch import Backend, BackendImplKind, OpImpl, implementation, operator

def impl(name, fn=lambda x: {name!r}, op="silu_and_mul", **more):
    return OpImpl(op, f"vendor.{{name}}", BackendImplKind.VENDOR, fn, name.split(".")[0], **more)
"""
RIGHT = "def register(registry): registry.register_impl(impl({name!r}))\n"


class Site:
    """A folder of installed distributions."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def wheel(self, name: str, source: str = RIGHT, version: str = "1.0", **more: str) -> None:
        """Install a distribution, its plugin and its module ``<name>_ops``."""
        module = f"{name}_ops"
        text = HEAD.format(name=name) + textwrap.dedent(source).replace("{name!r}", repr(name))
        (self.folder / f"{module}.py").write_text(text)
        info = self.folder / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(more.get("entries", f"[vllm_fl.plugin]\n{name} = {module}\n"))
        importlib.invalidate_caches()


def discover() -> dict[str, PluginRecord]:
    """Return what became of every plugin of the default manager."""
    manager = get_default_manager()
    manager.ensure_initialized()
    return dict(manager.registry.plugins)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what vllm-fl has logged."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("vllm_fl")]


def reason_of(name: str, op_name: str = OP) -> str:
    """Return why an implementation of a vendor does not run."""
    candidates: list[Any] = list(get_default_manager().explain(op_name).candidates)
    (report,) = [c for c in candidates if c.impl_id == f"vendor.{name}"]
    return f"{report.status}: {report.reason}"

"""The plan's fingerprint follows the code of what can run, whatever its version says."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import zipfile
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable
    from pathlib import Path

_PLUGIN = """
from vllm_fl.dispatch import OpImpl
{imports}
def silu(x):
    return {value}
def register(registry):
    registry.register_impl(OpImpl("silu_and_mul", "vendor.acme", "vendor", silu, "acme", traceable=True))
"""

_LATE = """
def late(x):
    import os, acme_late
    return x * acme_late.SCALE
"""

# Without the installed plugins, of which one imports torch.
_FREEZE = """
from vllm_fl.dispatch import OpManager, OpRegistry
from vllm_fl.dispatch.discovery import find_plugins, load_alone
registry = OpRegistry()
for index, plugin in enumerate(find_plugins()):
    if plugin.origin.distribution == "VLLM_FL_PLUGIN_MODULES":
        record = registry.plugins[plugin.name] = load_alone(registry, index)
        assert record.success, record.reason
print(OpManager(registry).freeze().{what})
"""

#: Each a plugin of files, and the file that holds its constant.
_LAYOUTS: dict[str, tuple[dict[str, str], str]] = {
    "one module": ({"acme": _PLUGIN.format(imports="SCALE = 1.0", value="x * SCALE")}, "acme"),
    "a module beside it": (
        {"acme": _PLUGIN.format(imports="from acme_constants import SCALE", value="x * SCALE")},
        "acme_constants",
    ),
    "a module beside it, imported when it is called": (
        {"acme": _PLUGIN.format(imports="", value="late(x)") + _LATE},
        "acme_late",
    ),
    "another module of the package": (
        {
            "acme/__init__": _PLUGIN.format(imports="from .deep.constants import SCALE", value="x * SCALE"),
            "acme/deep/__init__": "",
        },
        "acme/deep/constants",
    ),
    "another package of the folder": (
        {"acme": _PLUGIN.format(imports="import acme_two.inner", value="x"), "acme_two/__init__": ""},
        "acme_two/inner",
    ),
    "a package without __init__": (
        {"acme/register": _PLUGIN.format(imports="from acme.constants import SCALE", value="x * SCALE")},
        "acme/constants",
    ),
}


def _write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def plan(tmp_path: Path, python: Callable[..., subprocess.CompletedProcess[str]]) -> Callable[..., str]:
    """Return a function that freezes in a new process and returns the plan's fingerprint, or more of it."""

    def frozen(folder: Path, module: str = "acme", what: str = "fingerprint", **variables: str) -> str:
        code = _FREEZE.format(what=what)
        done = python(code, folder, VLLM_FL_PLUGIN_MODULES=module, PYTHONDONTWRITEBYTECODE="1", **variables)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return frozen


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_a_constant_without_a_version(tmp_path: Path, plan: Callable[..., str], layout: str) -> None:
    files, constant = _LAYOUTS[layout]
    module = "acme.register" if "acme/register" in files else "acme"
    for name, value in (("one", "1.0"), ("two", "2.0"), ("elsewhere", "1.0")):
        _write(tmp_path / name, {constant: f"SCALE = {value}\n"} | files)
        if constant in files:
            text = files[constant].replace("SCALE = 1.0", f"SCALE = {value}")
            _write(tmp_path / name, {constant: text})
    first = plan(tmp_path / "one", module)
    assert plan(tmp_path / "two", module) != first
    # Neither the folder nor the times count: another host has the same plan.
    for path in (tmp_path / "elsewhere").rglob("*.py"):
        os.utime(path, (1, 1))
    assert plan(tmp_path / "elsewhere", module) == first
    (tmp_path / "one" / "notes.txt").write_text("not code")
    assert plan(tmp_path / "one", module) == first


def test_compiled_modules_of_the_package(tmp_path: Path, plan: Callable[..., str]) -> None:
    _write(tmp_path, {"acme/__init__": _PLUGIN.format(imports="", value="x")})
    library = tmp_path / "acme" / "_C.abi3.so"
    library.write_bytes(b"one")
    first = plan(tmp_path)
    library.write_bytes(b"two")
    assert plan(tmp_path) != first


def test_what_comes_after_the_choice(tmp_path: Path, plan: Callable[..., str]) -> None:
    """Where the choice refuses, the next one is in the graph."""
    next_one = _PLUGIN.format(imports="SCALE = 1.0", value="x").replace("acme", "next")
    files = {"acme": _PLUGIN.format(imports="", value="x"), "next": next_one}
    _write(tmp_path, files)
    first = plan(tmp_path, "acme,next", "choices['silu_and_mul']"), plan(tmp_path, "acme,next")
    assert first[0] == "vendor.acme"
    _write(tmp_path, {"next": next_one.replace("1.0", "2.0")})
    assert plan(tmp_path, "acme,next") != first[1]
    assert plan(tmp_path, "acme,next", VLLM_FL_DENY_VENDORS="next") != first[1]


def test_a_wheel_that_is_edited_in_place(tmp_path: Path, plan: Callable[..., str]) -> None:
    """Its folder is called ``site-packages``, its version stays, and what it imports there has its own."""
    site = tmp_path / "site-packages"
    _write(site, {"acme": _PLUGIN.format(imports="import library", value="x"), "library": "A = 1"})
    first = plan(site)
    _write(site, {"library": "A = 2"})
    assert plan(site) == first
    _write(site, {"acme": _PLUGIN.format(imports="import library", value="x + 1")})
    assert plan(site) != first


def test_a_zip_file(tmp_path: Path, plan: Callable[..., str]) -> None:
    prints = []
    for value in ("1.0", "2.0"):
        archive = tmp_path / "acme.zip"
        with zipfile.ZipFile(archive, "w") as file:
            file.writestr(zipfile.ZipInfo("acme.py"), _PLUGIN.format(imports=f"SCALE = {value}", value="x"))
        prints.append(plan(tmp_path, PYTHONPATH=os.pathsep.join([str(archive), *sys.path])))
    assert prints[0] != prints[1]


def test_code_that_cannot_be_read(tmp_path: Path, plan: Callable[..., str]) -> None:
    """A module that was made in memory: the process goes on, and says what it does not know."""
    text = """
import sys, types
module = types.ModuleType("made_up")
exec("def silu(x): return x", module.__dict__)
sys.modules["made_up"] = module
from vllm_fl.dispatch import OpImpl
def register(registry):
    registry.register_impl(OpImpl("silu_and_mul", "vendor.acme", "vendor", module.silu, "acme"))
"""
    _write(tmp_path, {"acme": text})
    assert plan(tmp_path, what="code['made_up']") == "unreadable"


def test_a_script_is_the_same_in_the_process_that_it_spawns(
    tmp_path: Path, python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    code = textwrap.dedent(
        """
        import multiprocessing
        from vllm_fl.dispatch import OpImpl, OpManager, OpRegistry

        def silu(x):
            return x * 1.0

        def frozen(_=None):
            manager = OpManager(OpRegistry())
            manager.registry.register_impl(OpImpl("silu_and_mul", "vendor.acme", "vendor", silu, "acme"))
            return manager.freeze().fingerprint

        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(frozen(), *pool.map(frozen, [0]))
        """
    )
    found = []
    for value in ("1.0", "2.0"):
        (tmp_path / "script.py").write_text(code.replace("1.0", value))
        script = str(tmp_path / "script.py")
        done = python(f"import subprocess, sys; subprocess.run([sys.executable, {script!r}], check=True)")
        assert done.returncode == 0, done.stderr
        one, other = done.stdout.split()
        assert one == other
        found.append(one)
    assert found[0] != found[1]


def test_the_variables_that_a_plugin_says_it_reads(tmp_path: Path, plan: Callable[..., str]) -> None:
    text = 'VLLM_FL_VARIABLES = ("VLLM_FL_ACME_SCALE",)\n' + _PLUGIN.format(imports="", value="x")
    _write(tmp_path, {"acme": text})
    values: tuple[dict[str, str], ...] = ({}, {"VLLM_FL_ACME_SCALE": "1"}, {"VLLM_FL_ACME_SCALE": "2"})
    assert len({plan(tmp_path, **one) for one in values}) == 3
    assert plan(tmp_path, **values[1]) == plan(tmp_path, **values[1])


def test_a_file_that_goes_away_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_fl.dispatch import code_digests

    _write(tmp_path, {"acme_gone/__init__": "", "acme_gone/one": "A = 1"})
    monkeypatch.syspath_prepend(tmp_path)
    whole = code_digests.digests(["acme_gone.one"])
    (tmp_path / "acme_gone" / "two.py").symlink_to(tmp_path / "nowhere.py")
    (tmp_path / "acme_gone" / "loop").symlink_to(tmp_path / "acme_gone")
    assert set(code_digests.digests(["acme_gone"])) == set(whole) == {"acme_gone"}
    shutil.rmtree(tmp_path / "acme_gone")
    assert code_digests.digests(["acme_gone"]) == {"acme_gone": "unreadable"}

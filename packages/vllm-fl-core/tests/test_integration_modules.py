"""The modules of the integration: small, in one order, and open where other folders enter."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import vllm_fl

SOURCES = Path(vllm_fl.__file__).parent
PACKAGE = "vllm_fl.integration"
MODULES = {f"{PACKAGE}.{file.stem}": file for file in (SOURCES / "integration").glob("*.py")}


def _imports(file: Path) -> list[tuple[str, str]]:
    """Return what a file imports, wherever it does, by module and name."""
    return [
        (node.module or "", alias.name)
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]


def test_no_circle() -> None:
    """Also none that a late import, or one for a type checker, would hide."""
    needs = {
        name: {
            needed
            for module, what in _imports(file)
            if (needed := f"{module}.{what}" if module == PACKAGE else module) in MODULES
        }
        for name, file in MODULES.items()
    }
    assert needs[f"{PACKAGE}.replace"] >= {f"{PACKAGE}.moe", f"{PACKAGE}.attention"}
    order = list(TopologicalSorter(needs).static_order())  # raises CycleError, which names it
    assert order.index(f"{PACKAGE}.layer") < order.index(f"{PACKAGE}.choice")


def test_no_module_is_long() -> None:
    long = {name: len(file.read_text("utf-8").splitlines()) for name, file in MODULES.items()}
    assert {name: lines for name, lines in long.items() if lines > 400} == {}


def test_what_other_folders_import_is_public() -> None:
    private = [
        (file.relative_to(SOURCES), module, name)
        for file in SOURCES.rglob("*.py")
        if file.parent.name != "integration"
        for module, name in _imports(file)
        if module.startswith(PACKAGE) and any(part.startswith("_") for part in (*module.split("."), name))
    ]
    assert private == []

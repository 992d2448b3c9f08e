"""Make this directory's helpers importable, and give each test a folder of wheels of its own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any

import pytest

from vllm_fl.dispatch import discovery

sys.path.insert(0, str(Path(__file__).parent))

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wheels import Site


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """No other plugin than the wheels of this folder is found."""
    from wheels import Site

    installed = discovery._installed
    here = str(tmp_path)

    def only_these() -> list[Any]:
        found = installed()
        return [one for one in found if (tmp_path / f"{one.source.partition(':')[0]}.py").exists()]

    monkeypatch.setattr(discovery, "_installed", only_these)
    monkeypatch.syspath_prepend(here)
    before = set(sys.modules)
    yield Site(tmp_path)
    for name in set(sys.modules) - before:
        if name.endswith("_ops") or str(getattr(sys.modules[name], "__file__", "")).startswith(here):
            del sys.modules[name]

"""Checkpoints for the tests that run a real vLLM."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest
from checkpoints import RECIPES
from checkpoints import build
from evidence import Evidence

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from checkpoints import Checkpoint


@pytest.fixture(scope="session", autouse=True)
def _needs_vllm() -> None:
    # Not importorskip: importing vLLM takes seconds, and only the children need it.
    if find_spec("vllm") is None:
        pytest.skip("needs vLLM")


@pytest.fixture(scope="session")
def checkpoint_root(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, _needs_vllm: None
) -> Path:
    """Where checkpoints are kept: pytest's cache, or a temporary folder if that is off."""
    cache = getattr(request.config, "cache", None)
    if cache is None:
        return tmp_path_factory.mktemp("checkpoints")
    folder: Path = cache.mkdir("vllm-fl-checkpoints")
    return folder


@pytest.fixture(scope="session")
def make_checkpoint(checkpoint_root: Path) -> Callable[[str], Checkpoint]:
    """Return a function from a recipe's name to its checkpoint."""
    return lambda name: build(name, checkpoint_root)


@pytest.fixture(scope="session", params=list(RECIPES))
def checkpoint(request: pytest.FixtureRequest, make_checkpoint: Callable[[str], Checkpoint]) -> Checkpoint:
    """Each checkpoint in turn."""
    return make_checkpoint(request.param)


@pytest.fixture(scope="session")
def qwen3(make_checkpoint: Callable[[str], Checkpoint]) -> Checkpoint:
    """The dense one that most tests use."""
    return make_checkpoint("qwen3")


@pytest.fixture(scope="session")
def qwen3_moe(make_checkpoint: Callable[[str], Checkpoint]) -> Checkpoint:
    """The mixture of experts."""
    return make_checkpoint("qwen3_moe")


@pytest.fixture(scope="session")
def llama(make_checkpoint: Callable[[str], Checkpoint]) -> Checkpoint:
    """The one whose rotary embedding is scaled as in Llama 3."""
    return make_checkpoint("llama")


@pytest.fixture(scope="session")
def gemma(make_checkpoint: Callable[[str], Checkpoint]) -> Checkpoint:
    """The one with Gemma's norm and the tanh approximation of GELU."""
    return make_checkpoint("gemma")


@pytest.fixture
def evidence(tmp_path: Path) -> Evidence:
    """Where a run leaves its record."""
    return Evidence(tmp_path / "trace")

"""Checkpoints for the tests that run a real vLLM."""

from __future__ import annotations

import signal
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest
from checkpoints import RECIPES
from checkpoints import build
from evidence import Evidence

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Any

    from checkpoints import Checkpoint


# A shell that starts us in the background has us ignore Ctrl-C, and with us the servers of the tests.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


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


# vLLM 0.32's kernel for CPUs misreads the rotary heads of latent attention: its own eager tokens are wrong.
_LATENT = {"deepseek_v2", "glm4_moe_lite"}


@pytest.fixture(scope="session", params=[name for name in RECIPES if name not in _LATENT])
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


# -- vLLM's layers in this process ---------------------------------------------------


@pytest.fixture(scope="module")
def served_vllm() -> Iterator[None]:
    """vLLM with our classes and the reference's choice, and vLLM as it was afterwards."""
    from vllm.model_executor.custom_op import op_registry_oot

    from vllm_fl.dispatch import SelectionPolicy
    from vllm_fl.dispatch import get_default_manager
    from vllm_fl.dispatch import reset_global_policy
    from vllm_fl.dispatch import set_global_policy
    from vllm_fl.integration import replace

    before = dict(op_registry_oot)
    get_default_manager().thaw()
    set_global_policy(SelectionPolicy.from_dict(prefer="reference"))
    replace.replace_classes()
    yield
    op_registry_oot.clear()
    op_registry_oot.update(before)
    reset_global_policy()


@pytest.fixture
def in_vllm(served_vllm: None) -> Iterator[None]:
    """Build layers without a compiler, with every custom op on."""
    from vllm.config import CompilationConfig
    from vllm.config import VllmConfig
    from vllm.config import set_current_vllm_config

    config = VllmConfig(compilation_config=CompilationConfig(mode=0, custom_ops=["all"]))
    with set_current_vllm_config(config):
        yield


@pytest.fixture
def compiled(served_vllm: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Return a function that builds a layer, for a compiler unless ``mode`` is 0."""
    from vllm.config import CompilationConfig
    from vllm.config import VllmConfig
    from vllm.config import set_current_vllm_config

    from vllm_fl.dispatch import OpManager
    from vllm_fl.dispatch import OpRegistry
    from vllm_fl.dispatch import SelectionPolicy
    from vllm_fl.dispatch import policy_context
    from vllm_fl.integration import choice
    from vllm_fl.integration import trial

    registry = OpRegistry()
    manager = OpManager(registry)
    monkeypatch.setattr(choice, "get_default_manager", lambda: manager)
    monkeypatch.setattr(trial, "tried", {})

    def build(cls: type, *args: Any, impls: list[Any], order: list[str], mode: int = 3, **kwargs: Any) -> Any:
        from vllm_fl_reference.register_ops import register_builtins

        if not registry.snapshot().impls_by_op:
            register_builtins(registry)
        registry.register_many([one for one in impls if one.impl_id not in registry.snapshot().impl_ids()])
        op_names = {impl.op_name for impl in impls}
        config = VllmConfig(compilation_config=CompilationConfig(mode=mode, custom_ops=["all"]))
        policy = SelectionPolicy.from_dict(per_op_order=dict.fromkeys(op_names, order))
        with set_current_vllm_config(config), policy_context(policy):
            return cls(*args, **kwargs)

    return build

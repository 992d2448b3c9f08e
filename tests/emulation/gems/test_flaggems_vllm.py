"""FlagGems' own kernels serve vLLM's layers, interpreted on the CPU: the tokens are right."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from checkpoints import build
from engine import run_vllm
from evidence import Evidence

if TYPE_CHECKING:
    from collections.abc import Mapping

    from checkpoints import Checkpoint

_SERVED = {"silu_and_mul": 2, "rms_norm": 9, "rotary_embedding": 2}


def _is_installed() -> bool:
    try:
        distribution("vllm-fl-flaggems")
    except PackageNotFoundError:
        return False
    return all(find_spec(name) is not None for name in ("flag_gems", "triton", "vllm"))


pytestmark = pytest.mark.skipif(not _is_installed(), reason="needs vLLM, flag-gems, triton and the wheel")


@pytest.fixture(scope="module")
def checkpoint_root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = getattr(request.config, "cache", None)
    root: Path = (
        tmp_path_factory.mktemp("checkpoints") if cache is None else cache.mkdir("vllm-fl-checkpoints")
    )
    return root


@pytest.fixture(scope="module")
def qwen3(checkpoint_root: Path) -> Checkpoint:
    return build("qwen3", checkpoint_root)


@pytest.fixture
def evidence(tmp_path: Path) -> Evidence:
    return Evidence(tmp_path / "trace")


def emulated(evidence: Evidence, **more: str) -> Mapping[str, str]:
    variables = dict(evidence.env())
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **variables,
        "PYTHONPATH": os.pathsep.join(paths),
        "VLLM_FL_PLUGIN_MODULES": "emulated_flag_gems",
        "TRITON_INTERPRET": "1",
        "GEMS_VENDOR": "arm",
        **more,
    }


def assert_served(calls: Mapping[tuple[str, str], int], by: Mapping[str, str]) -> None:
    """Fail unless every forward called every operator, of the implementation that is named."""
    forwards = calls["silu_and_mul", by["silu_and_mul"]] // _SERVED["silu_and_mul"]
    assert forwards >= 16
    assert calls == {(op, by[op]): n * forwards for op, n in _SERVED.items()}


def test_eager_flaggems(qwen3: Checkpoint, evidence: Evidence) -> None:
    result = run_vllm(qwen3, env=emulated(evidence)).checked()
    assert result.tokens == qwen3.golden
    assert_served(evidence.calls(), dict.fromkeys(_SERVED, "default.flagos"))
    assert {impl for _, impl, _ in evidence.layers()} == {"default.flagos"}
    # Nothing of FlagGems' raised and was replaced in silence.
    assert "set aside" not in result.log


def test_eager_flaggems_but_for_one_operator(qwen3: Checkpoint, evidence: Evidence) -> None:
    env = emulated(evidence, VLLM_FL_FLAGOS_BLACKLIST="rms_norm")
    result = run_vllm(qwen3, env=env, in_process=False).checked()
    assert result.tokens == qwen3.golden
    by = dict.fromkeys(_SERVED, "default.flagos") | {"rms_norm": "reference.torch"}
    assert_served(evidence.calls(), by)
    assert "VLLM_FL_FLAGOS_BLACKLIST is set and nobody reads it" not in result.log


def test_eager_flaggems_mixture_of_experts(checkpoint_root: Path, evidence: Evidence) -> None:
    qwen3_moe = build("qwen3_moe", checkpoint_root)
    result = run_vllm(qwen3_moe, env=emulated(evidence), timeout=1800).checked()
    assert result.tokens == qwen3_moe.golden
    calls = evidence.calls()
    # One of the two layers has experts.
    assert calls["fused_experts", "default.flagos"] == calls["topk_softmax", "default.flagos"] >= 16
    layers = evidence.layers()
    assert layers["UnquantizedFusedMoEMethod", "default.flagos", "guard"] == 1
    assert layers["CPURouter", "default.flagos", "guard"] == 1
    assert "set aside" not in result.log


def test_compiled_flaggems(qwen3: Checkpoint, evidence: Evidence) -> None:
    """Dynamo cannot trace Triton's launchers here: the calls are opaque, and happen at run time."""
    env = emulated(evidence, VLLM_FL_PREFER="flagos")
    result = run_vllm(qwen3, mode="compile", env=env).checked()
    assert result.tokens == qwen3.golden
    assert {(impl, form) for _, impl, form in evidence.layers()} == {("default.flagos", "opaque")}
    assert_served(evidence.calls(), dict.fromkeys(_SERVED, "default.flagos"))
    assert not any(evidence.graphs().values())

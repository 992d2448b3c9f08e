"""vLLM keeps compiled code on disk; it must never run another choice than the present one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from typing import Any

import pytest
from engine import run_vllm
from evidence import Evidence

from vllm_fl.cli.trace import served_operators
from vllm_fl.dispatch import trace

if TYPE_CHECKING:
    from pathlib import Path

    from checkpoints import Checkpoint
    from engine import Result

# vLLM 0.32 fails to load what it has saved in the mode that it uses on a CPU, so that
# nothing stale could be seen there. With this its artifacts load, as they do on a GPU.
_ARTIFACTS_LOAD = """
import torch

_load = torch.compiler.load_compiled_function

def load(*args, **kwargs):
    loaded = _load(*args, **kwargs)
    compiled = loaded._artifacts.compiled_fn
    if not hasattr(compiled, "finalize_loading"):
        compiled.finalize_loading = lambda config: None
    return loaded

torch.compiler.load_compiled_function = load
"""

# Not VLLM_PLUGINS, which is a part of vLLM's key itself.
_NOT_INSTALLED = """
from vllm_fl import integration

integration.register = lambda: None
"""

# Mutation: what keeps choices apart, the fingerprint and the policy that is sent along, is missing.
_NOTHING_IN_THE_KEY = """
from vllm_fl.integration import engine, plugin

engine.ship_policy = lambda engine_args: None
plugin._teach_environment = lambda names: None
"""
_LOADED = "Directly load AOT compilation"


@pytest.mark.long
def test_compiled_code_follows_the_choice(qwen3: Checkpoint, tmp_path: Path) -> None:
    cache = {
        "VLLM_CACHE_ROOT": str(tmp_path / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
    }

    def run(name: str, *plugins: str, setup: str = "", **how: Any) -> tuple[Result, Evidence]:
        evidence = Evidence(tmp_path / name)
        env = evidence.env(*plugins, **cache, **how.pop("env", {}))
        return run_vllm(
            qwen3, mode="compile", env=env, setup=_ARTIFACTS_LOAD + setup, **how
        ).checked(), evidence

    # vLLM alone fills the cache first, as before the plug-in was installed.
    result, evidence = run("native", setup=_NOT_INSTALLED)
    assert result.tokens == qwen3.golden
    assert not evidence.folder.exists()

    # The plug-in is installed. No vendor is, so that the reference serves; compiled code counts nothing.
    prefer = {"VLLM_FL_PREFER": "vendor"}
    result, evidence = run("reference", env=prefer)
    assert _LOADED not in result.log
    assert result.tokens == qwen3.golden
    operators = ("rms_norm", "rotary_embedding", "silu_and_mul")
    assert evidence.graphs() == {(op, "reference.torch"): 1 for op in operators}
    assert not any(evidence.calls().values())
    built = evidence.layers()
    assert built["RMSNorm", "reference.torch", "guard"] == 9

    # The same choice again: the artifact is loaded, nothing is traced, and the layers say what it is.
    result, evidence = run("reference again", env=prefer)
    assert _LOADED in result.log
    assert result.tokens == qwen3.golden
    assert evidence.graphs() == {}
    assert evidence.layers() == built
    served = served_operators(trace.merge(evidence.folder))
    assert [row["op"] for row in served if row.get("loaded_from_cache")] == list(operators)

    # A vendor's wheel is installed. The policy is the same, so that only the fingerprint differs.
    result, evidence = run("wrong", "wrong_vendor", env=prefer)
    assert _LOADED not in result.log
    assert all(got != right for got, right in zip(result.tokens, qwen3.golden, strict=True))
    assert evidence.graphs() == {(op, "vendor.wrong"): 1 for op in operators}

    # This test sees a stale artifact: with nothing in the key, vLLM's own is taken for the vendor's.
    result, evidence = run("stale", "wrong_vendor", env=prefer, setup=_NOTHING_IN_THE_KEY)
    assert _LOADED in result.log
    assert result.tokens == qwen3.golden
    assert evidence.layers()["SiluAndMul", "vendor.wrong", "guard"] == 2


# Traced, and right where its constant is 1; it has no version.
_SCALED = """
from vllm_fl.dispatch import OpImpl
from scaled_constants import SCALE

def silu_and_mul(x):
    from torch.nn import functional
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up * SCALE

def register_builtins(registry):
    registry.register_impl(
        OpImpl("silu_and_mul", "vendor.scaled", "vendor", silu_and_mul, "scaled", traceable=True)
    )
"""

# Mutation: the plan's fingerprint covers no code.
_NO_CODE_IN_THE_KEY = """
from vllm_fl.dispatch import plan

plan.digests = lambda modules: {}
"""


@pytest.mark.long
def test_compiled_code_follows_a_constant_of_a_plugin(qwen3: Checkpoint, tmp_path: Path) -> None:
    plugin = tmp_path / "plugin"
    plugin.mkdir()
    (plugin / "scaled_vendor.py").write_text(_SCALED)

    def run(scale: float, setup: str = "") -> Result:
        (plugin / "scaled_constants.py").write_text(f"SCALE = {scale}\n")
        env = {
            "PYTHONPATH": os.pathsep.join([str(plugin), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "VLLM_FL_PLUGIN_MODULES": "scaled_vendor",
            "VLLM_FL_PER_OP": "silu_and_mul=vendor:scaled",
            "VLLM_CACHE_ROOT": str(tmp_path / "vllm"),
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        }
        return run_vllm(qwen3, mode="compile", env=env, setup=_ARTIFACTS_LOAD + setup).checked()

    wrong = run(-8.0)
    assert all(got != right for got, right in zip(wrong.tokens, qwen3.golden, strict=True))
    right = run(1.0)
    assert _LOADED not in right.log
    assert right.tokens == qwen3.golden
    # The code of before: its graph is there, and loaded.
    again = run(-8.0)
    assert _LOADED in again.log
    assert again.tokens == wrong.tokens
    # This test sees a stale graph.
    assert run(-8.0, _NO_CODE_IN_THE_KEY).tokens == wrong.tokens
    stale = run(1.0, _NO_CODE_IN_THE_KEY)
    assert _LOADED in stale.log
    assert stale.tokens == wrong.tokens

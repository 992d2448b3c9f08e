"""Activations of quantised linear layers, chosen by the dispatch: int8 in a whole model, float8 as a layer.

vLLM's CPU build has no kernel for linear layers of float8, so that no model of those runs here.
"""

from __future__ import annotations

import inspect
import shutil
from types import SimpleNamespace
from typing import TYPE_CHECKING
from typing import Any

import pytest
from engine import more_engines
from engine import run_vllm
from evidence import is_served

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from checkpoints import Checkpoint
    from evidence import Evidence

KERNEL = "CPUInt8ScaledMMLinearKernel"
OP = "dynamic_per_token_quant_int8"

# vLLM's kernel for CPUs with AMX quantises inside of its product.
_WITHOUT_AMX = """
import torch
torch.cpu._is_amx_tile_supported = lambda: False
"""

_MORE_ENGINES = """
def report(llm):
    from vllm import LLM, SamplingParams
    from vllm_fl.dispatch import SelectionPolicy, get_default_manager, set_global_policy

    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    sampling = SamplingParams(temperature=0, max_tokens=16, detokenize=False, ignore_eos=True)
    found = {}
    for token in ("reference", "impl:vendor.wrong", "native"):
        get_default_manager().thaw()
        per_op = {"dynamic_per_token_quant_int8": [token]}
        set_global_policy(SelectionPolicy.from_dict(prefer="reference", per_op_order=per_op))
        outputs = LLM(**ENGINE_ARGS).generate(prompts, sampling, use_tqdm=False)
        found[token] = [list(output.outputs[0].token_ids) for output in outputs]
    return found
"""


@pytest.fixture(scope="module")
def int8(qwen3: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dense checkpoint with int8 weights, one scale for each output."""
    from eight_bits import quantize

    folder = tmp_path_factory.mktemp("int8")
    shutil.copytree(qwen3.path, folder, dirs_exist_ok=True)
    quantize(folder, "int8")
    return folder


def _setup(int8: Path, prompts: list[list[int]]) -> str:
    return f"{_WITHOUT_AMX}{more_engines(int8, prompts)}{_MORE_ENGINES}"


def test_int8_eager(int8: Path, qwen3: Checkpoint, evidence: Evidence) -> None:
    """Native first, then an engine with each of three policies in the same process."""
    prompts = [list(prompt) for prompt in qwen3.prompts]
    env = evidence.env("wrong_vendor", VLLM_FL_PREFER="reference", VLLM_FL_PER_OP=f"{OP}=native")
    result = run_vllm(int8, prompts=prompts, setup=_setup(int8, prompts), env=env).checked()
    native = [list(tokens) for tokens in result.tokens]
    assert result.report["reference"] == result.report["native"] == native
    wrong = result.report["impl:vendor.wrong"]
    assert all(got != right for got, right in zip(wrong, native, strict=True))
    # Four projections in each of two layers; gate and up are one, and so are q, k and v.
    layers = evidence.layers()
    assert layers[KERNEL, "native", "plain"] == 16
    assert layers[KERNEL, "reference.torch", "plain"] == layers[KERNEL, "vendor.wrong", "plain"] == 8
    calls = evidence.calls()
    for impl_id in ("native", "reference.torch", "vendor.wrong"):
        assert calls[OP, impl_id] >= 8 * 16, impl_id


@pytest.mark.long
def test_int8_compiled(int8: Path, qwen3: Checkpoint, evidence: Evidence) -> None:
    prompts = [list(prompt) for prompt in qwen3.prompts]
    native = run_vllm(int8, prompts=prompts, setup=_WITHOUT_AMX, native=True).checked()
    env = evidence.env(VLLM_FL_PREFER="reference")
    result = run_vllm(int8, mode="compile", prompts=prompts, setup=_WITHOUT_AMX, env=env).checked()
    assert result.tokens == native.tokens
    assert evidence.layers()[KERNEL, "reference.torch", "guard"] == 8
    assert evidence.graphs()[OP, "reference.torch"] > 0


# -- layers, built by hand ----------------------------------------------------------


@pytest.fixture
def in_vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """vLLM with our layers and the reference's choice, and vLLM as it was afterwards; yields our log."""
    from vllm import _custom_ops
    from vllm.config import CompilationConfig
    from vllm.config import VllmConfig
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import Int8ScaledMMLinearKernel

    from vllm_fl.dispatch import SelectionPolicy
    from vllm_fl.dispatch import get_default_manager
    from vllm_fl.dispatch import reset_global_policy
    from vllm_fl.dispatch import set_global_policy
    from vllm_fl.integration import quantization
    from vllm_fl.integration import replace
    from vllm_fl.integration import seam

    before = dict(op_registry_oot)
    # What is wrapped is put back; another file's tests may have left it wrapped.
    for name in ("scaled_int8_quant", "onednn_scaled_int8_quant"):
        monkeypatch.setattr(_custom_ops, name, inspect.unwrap(getattr(_custom_ops, name)))
    built = inspect.unwrap(Int8ScaledMMLinearKernel.__init__)
    monkeypatch.setattr(Int8ScaledMMLinearKernel, "__init__", built)
    monkeypatch.setattr(quantization, "chosen", {})
    said: list[str] = []
    monkeypatch.setattr(seam, "say_once", said.append)
    get_default_manager().thaw()
    set_global_policy(SelectionPolicy.from_dict(prefer="reference"))
    replace.replace_classes()
    quantization.install()
    config = VllmConfig(compilation_config=CompilationConfig(mode=0, custom_ops=["all"]))
    with set_current_vllm_config(config):
        yield said
    op_registry_oot.clear()
    op_registry_oot.update(before)
    reset_global_policy()


def _random(*shape: int) -> Any:
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(7)) * 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fp8(in_vllm: list[str], dtype: str) -> None:
    import torch
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    layer = QuantFP8(static=False, group_shape=GroupShape.PER_TOKEN)
    assert is_served(layer)
    assert in_vllm == ["vllm-fl: QuantFP8 is served by reference.torch (dynamic_per_token_quant_fp8, guard)"]
    x = _random(5, 64).to(getattr(torch, dtype))
    x[0] = 0
    quantized, scales = layer(x)
    wanted, wanted_scales = QuantFP8.forward_native(layer, x)
    assert quantized.dtype == wanted.dtype == torch.float8_e4m3fn
    torch.testing.assert_close(scales, wanted_scales)
    # vLLM multiplies by the reciprocal, which can round to the neighbour.
    torch.testing.assert_close(
        quantized.float() * scales, wanted.float() * wanted_scales, rtol=2**-3, atol=1e-6
    )
    assert (quantized.float() == wanted.float()).float().mean() > 0.98


def test_fp8_with_an_upper_bound_is_vllms_own(in_vllm: list[str]) -> None:
    """The bound comes with a call."""
    import torch
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    layer = QuantFP8(static=False, group_shape=GroupShape.PER_TOKEN)
    assert is_served(layer)
    x, bound = _random(5, 64), torch.tensor([0.5])
    layer.vllm_fl.uncompiled = layer.forward_native  # vLLM's CPU build has no kernel for it
    quantized, scales = layer(x, scale_ub=bound)
    wanted, wanted_scales = layer.forward_native(x, scale_ub=bound)
    assert scales.max() < layer(x)[1].max()
    torch.testing.assert_close(scales, wanted_scales)
    torch.testing.assert_close(quantized.float(), wanted.float())


def _fp8_refusals() -> dict[str, dict[str, Any]]:
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    return {
        "the operator has no scales of the checkpoint's": {
            "static": True,
            "group_shape": GroupShape.PER_TENSOR,
        },
        "the operator has a scale for each token, not for (-1, -1)": {
            "static": False,
            "group_shape": GroupShape.PER_TENSOR,
        },
        "the operator has a scale for each token, not for (1, 128)": {
            "static": False,
            "group_shape": GroupShape(1, 128),
        },
        "the operator pads no tokens": {
            "static": False,
            "group_shape": GroupShape.PER_TOKEN,
            "num_token_padding": 16,
        },
    }


@pytest.mark.parametrize("number", range(4))
def test_fp8_that_stays_native(in_vllm: list[str], number: int) -> None:
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8

    reason, arguments = list(_fp8_refusals().items())[number]
    layer = QuantFP8(**arguments)
    assert not is_served(layer)
    assert in_vllm == [f"vllm-fl: QuantFP8 stays vLLM's own: {reason}"]


def test_fp8_of_another_kind_stays_native(in_vllm: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "fp8_dtype", lambda *_: torch.float8_e4m3fnuz)
    layer = QuantFP8(static=False, group_shape=GroupShape.PER_TOKEN)
    assert not is_served(layer)
    assert "this device takes torch.float8_e4m3fnuz" in in_vllm[0]


_NAMES = ("weight", "weight_scale", "input_scale", "input_zero_point", "azp_adj")


def _int8_linear(*, symmetric: bool = True, static: bool = False) -> tuple[Any, Any]:
    """Return a kernel of vLLM's, with its weights prepared, and its layer."""
    import torch
    from vllm.model_executor.kernels.linear.scaled_mm import cpu

    config = cpu.Int8ScaledMMLinearLayerConfig(
        is_static_input_scheme=static, is_channelwise=True, input_symmetric=symmetric
    )
    layer = torch.nn.Module()
    layer.logical_widths = [32]
    layer.input_size_per_partition = 64
    layer.bias = None
    weight = torch.randint(-127, 128, (32, 64), generator=torch.Generator().manual_seed(1)).to(torch.int8)
    values = {
        "weight": weight,
        "weight_scale": torch.full((32, 1), 0.01),
        "input_scale": torch.tensor([0.05]) if static else None,
        "input_zero_point": torch.tensor([3], dtype=torch.int8) if static and not symmetric else None,
    }
    for name, value in values.items():
        setattr(layer, name, None if value is None else torch.nn.Parameter(value, requires_grad=False))
    kernel = cpu.CPUInt8ScaledMMLinearKernel(config, _NAMES)
    kernel.process_weights_after_loading(layer)
    return kernel, layer


@pytest.fixture
def without_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.kernels.linear.scaled_mm import cpu

    monkeypatch.setattr(cpu, "check_cpu_sgl_kernel", lambda *_: False)


@pytest.mark.parametrize("shape", [(5, 64), (2, 3, 64)])
def test_int8(
    in_vllm: list[str], without_amx: None, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    import torch

    from vllm_fl.dispatch import SelectionPolicy
    from vllm_fl.dispatch import policy_context

    x = _random(*shape)
    kernel, layer = _int8_linear()
    assert in_vllm == [f"vllm-fl: {KERNEL} is served by reference.torch ({OP}, guard)"]
    ours = kernel.apply_weights(layer, x)
    # Another engine's policy: vLLM's own takes the place of the earlier choice.
    with policy_context(SelectionPolicy.from_dict(prefer="native")):
        kernel, layer = _int8_linear()
    assert in_vllm[1] == f"vllm-fl: {KERNEL} stays vLLM's own: the policy chooses it"
    theirs = kernel.apply_weights(layer, x)
    torch.testing.assert_close(ours, theirs)


def test_a_refused_kernel_is_no_layer_of_the_record(
    in_vllm: list[str], without_amx: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It never calls what would count it, so that the record could only guess how it ran."""
    from vllm_fl.dispatch import trace

    monkeypatch.setenv(trace.TRACE_DIR_ENV, str(tmp_path))
    _int8_linear(symmetric=False)
    trace.recorder().write()
    record = trace.merge(tmp_path)
    assert record["layers"] == []
    assert record["processes"][0]["native_layers"][KERNEL] == "the operator has no zero points"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"static": True}, "the operator has no scales of the checkpoint's"),
        ({"static": True, "symmetric": False}, "the operator has no scales of the checkpoint's"),
        ({"symmetric": False}, "the operator has no zero points"),
    ],
)
def test_int8_that_stays_native(
    in_vllm: list[str], without_amx: None, arguments: dict[str, bool], reason: str
) -> None:
    """Beside a layer that is served: its calls are told apart by their arguments."""
    import torch

    from vllm_fl.dispatch import get_default_manager
    from vllm_fl.integration import quantization

    _int8_linear()
    kernel, layer = _int8_linear(**arguments)
    assert in_vllm[1] == f"vllm-fl: {KERNEL} stays vLLM's own: {reason}"
    asked = SimpleNamespace(calls=0)

    def counted(x: Any) -> Any:
        asked.calls += 1
        return get_default_manager().call(OP, x)

    quantization.chosen["onednn_scaled_int8_quant"] = counted
    result = kernel.apply_weights(layer, _random(5, 64))
    assert torch.isfinite(result).all()
    assert asked.calls == 0
    kernel, layer = _int8_linear()
    kernel.apply_weights(layer, _random(5, 64))
    assert quantization.chosen["onednn_scaled_int8_quant"] is kernel._vllm_fl_quantize


@pytest.mark.parametrize("order", [("reference", "native"), ("native", "reference")])
def test_int8_of_two_engines_alive(in_vllm: list[str], without_amx: None, order: tuple[str, str]) -> None:
    """They call one function of vLLM's, each with its own choice."""
    from vllm_fl.dispatch import SelectionPolicy
    from vllm_fl.dispatch import policy_context
    from vllm_fl.integration import quantization

    built = {}
    for prefer in order:
        with policy_context(SelectionPolicy.from_dict(prefer=prefer)):
            built[prefer] = _int8_linear()
    for prefer in (*order, *reversed(order)):
        kernel, layer = built[prefer]
        kernel.apply_weights(layer, _random(5, 64))
        chosen = quantization.chosen["onednn_scaled_int8_quant"]
        assert is_served(kernel) is (prefer == "reference")
        assert chosen is kernel._vllm_fl_quantize


def test_the_layer_that_marlins_engines_share(in_vllm: list[str]) -> None:
    """It is called by its name, by every engine: the second one leaves it to vLLM, and breaks nothing."""
    import torch
    from vllm.model_executor.layers.quantization.utils import marlin_utils

    from vllm_fl.integration import engine

    marlin_utils._quant_fp8_method = None
    try:
        layer = marlin_utils.get__quant_fp8_method()
        assert is_served(layer)
        layer.vllm_fl.uncompiled = layer.forward_native  # vLLM's CPU build has no kernel for it
        engine.forget_shared_layers()
        assert marlin_utils.get__quant_fp8_method() is layer
        assert layer._forward_method == layer.forward_native
        quantized, scales = marlin_utils.marlin_quant_input(_random(5, 64), torch.float8_e4m3fn)
        torch.testing.assert_close(quantized.float() * scales, _random(5, 64), rtol=0.1, atol=0.05)
    finally:
        marlin_utils._quant_fp8_method = None


def test_int8_inside_of_a_product_stays_native(in_vllm: list[str]) -> None:
    import torch

    if not torch.cpu._is_amx_tile_supported():
        pytest.skip("needs a CPU with AMX")
    _int8_linear()
    assert in_vllm == [f"vllm-fl: {KERNEL} stays vLLM's own: it quantises inside of its product"]


def test_int8_of_another_kernel_stays_native(in_vllm: list[str], without_amx: None) -> None:
    from vllm.model_executor.kernels.linear.scaled_mm import cpu

    from vllm_fl.integration import quantization

    class Another(cpu.CPUInt8ScaledMMLinearKernel):
        pass

    config = cpu.Int8ScaledMMLinearLayerConfig(
        is_static_input_scheme=False, is_channelwise=True, input_symmetric=True
    )
    kernel = Another(config, _NAMES)
    reason = quantization.Int8Linear(kernel, None).refuses()
    assert reason == "it quantises in a way of its own"


def test_function_for_gpus(in_vllm: list[str]) -> None:
    """vLLM's other function has kernels on GPUs alone; it calls what was chosen there."""
    import torch
    from vllm import _custom_ops

    from vllm_fl.integration import quantization
    from vllm_fl_reference.impl.quantization import dynamic_per_token_quant_int8

    quantization.chosen["scaled_int8_quant"] = dynamic_per_token_quant_int8
    x = _random(2, 3, 64)
    quantized, scales, zero_points = _custom_ops.scaled_int8_quant(x)
    assert quantized.shape == x.shape
    assert scales.shape == (6, 1)
    assert zero_points is None
    torch.testing.assert_close(quantized.reshape(6, 64) * scales, x.reshape(6, 64), rtol=0, atol=0.1)

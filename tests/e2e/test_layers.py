"""vLLM's layers in this process: which are served, and that each equals the class it replaces.

No engine runs here: the layers are built by hand, in vLLM's configuration.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import TYPE_CHECKING
from typing import Any

import pytest
from evidence import is_served

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Iterator

    import torch

_ROTARY: dict[str, dict[str, Any]] = {
    "RotaryEmbedding": {},
    "DynamicNTKAlphaRotaryEmbedding": {"scaling_alpha": 2.0},
    "DynamicNTKScalingRotaryEmbedding": {"scaling_factor": 2.0, "max_trained_positions": 16},
    "Gemma4RotaryEmbedding": {},
    "LinearScalingRotaryEmbedding": {"scaling_factors": 2.0},
    "Llama3RotaryEmbedding": {
        "scaling_factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "orig_max_position": 16,
    },
    "NTKScalingRotaryEmbedding": {"scaling_factor": 2.0},
    "YaRNScalingRotaryEmbedding": {"scaling_factor": 2.0},
}


def _both(cls: type, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Return the layer that vLLM builds now, and the one that it built without us."""
    from vllm.model_executor.custom_op import op_registry_oot

    ours = cls(*args, **kwargs)
    served = op_registry_oot.pop(cls.__name__)
    try:
        theirs = cls(*args, **kwargs)
    finally:
        op_registry_oot[cls.__name__] = served
    assert type(theirs) is cls
    assert type(ours) is served
    assert isinstance(ours, cls)
    assert type(ours).name == cls.name
    assert is_served(ours)
    return ours, theirs


def _random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(dtype)


def _dtypes() -> list[Any]:
    return [pytest.param(name, id=name) for name in ("float32", "bfloat16")]


def _check(ours: Any, theirs: Any, *, exact: bool = True) -> None:
    import torch

    for one, other in zip(_tuple(ours), _tuple(theirs), strict=True):
        if other is None:
            assert one is None
        elif exact:
            torch.testing.assert_close(one, other, rtol=0, atol=0)
        else:
            torch.testing.assert_close(one, other)


def _tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


# -- which classes -----------------------------------------------------------------


def test_classes_that_are_replaced(served_vllm: None) -> None:
    from vllm.model_executor.custom_op import op_registry_oot

    from vllm_fl.integration.layer import Served

    served = {name for name, cls in op_registry_oot.items() if issubclass(cls, Served)}
    others = {"UnquantizedFusedMoEMethod", "MoERunner", "QuantFP8"}
    assert served == {"SiluAndMul", "GeluAndMul", "RMSNorm", "GemmaRMSNorm", *_ROTARY, *others}


def test_classes_that_are_not(served_vllm: None) -> None:
    """The rule is computed: a subclass that has a forward of its own computes something else."""
    from vllm_fl.integration import replace

    rotary = next(layer for layer in replace.LAYERS if layer.with_subclasses)
    reasons = {cls.__name__: reason for cls, reason in replace.classes_of(rotary)}
    assert {name for name, reason in reasons.items() if reason is None} == set(_ROTARY)
    assert reasons["FourierRotaryEmbedding"] == "FourierRotaryEmbedding has its own forward_native"


def test_classes_of_models(served_vllm: None) -> None:
    """A model's own kind of a layer that is served stays vLLM's, and that is said."""
    import vllm.model_executor.models.transformers.moe  # noqa: F401 - as vLLM does for such a model

    from vllm_fl.integration import replace

    (runner,) = [layer for layer in replace.LAYERS if layer.class_name == "MoERunner"]
    reasons = {cls.__name__: reason for cls, reason in replace.classes_of(runner)}
    assert reasons["MoERunner"] is None
    assert reasons["TransformersMoERunner"] == "only MoERunner itself is served, not this subclass"


# -- each equals what it replaces ------------------------------------------------------


@pytest.mark.parametrize("dtype", _dtypes())
@pytest.mark.parametrize("shape", [(5, 64), (2, 3, 64)])
def test_silu_and_mul(in_vllm: None, dtype: str, shape: tuple[int, ...]) -> None:
    import torch
    from vllm.model_executor.layers.activation import SiluAndMul

    ours, theirs = _both(SiluAndMul, compile_native=False)
    x = _random(*shape, dtype=getattr(torch, dtype))
    # In bfloat16 vLLM's PyTorch rounds silu before it multiplies, and the contract rounds once.
    _check(ours(x), theirs(x), exact=dtype == "float32")


@pytest.mark.parametrize("dtype", _dtypes())
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_and_mul(in_vllm: None, dtype: str, approximate: str) -> None:
    import torch
    from vllm.model_executor.layers.activation import GeluAndMul

    ours, theirs = _both(GeluAndMul, approximate)
    x = _random(5, 64, dtype=getattr(torch, dtype))
    _check(ours(x), theirs(x), exact=dtype == "float32")


@pytest.mark.parametrize("dtype", _dtypes())
@pytest.mark.parametrize("weight", ["same", "float32", "none"])
@pytest.mark.parametrize("residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize("layout", ["2-D", "strided 3-D"])
def test_rms_norm(in_vllm: None, dtype: str, weight: str, residual: bool, layout: str) -> None:
    import torch
    from vllm.model_executor.layers.layernorm import RMSNorm

    its = getattr(torch, dtype)
    weight_dtype = torch.float32 if weight == "float32" else its
    ours, theirs = _both(RMSNorm, 32, 1e-5, has_weight=weight != "none", dtype=weight_dtype)
    if weight != "none":
        for layer in (ours, theirs):
            layer.weight.data.copy_(_random(32, dtype=weight_dtype))
    # As the queries of a fused projection.
    x = _random(5, 6, 32, dtype=its)[:, :4] if layout == "strided 3-D" else _random(5, 32, dtype=its)
    args = [x, _random(*x.shape, dtype=its).flip(0)] if residual else [x]
    _check(ours(*[a.clone() for a in args]), theirs(*[a.clone() for a in args]))


@pytest.mark.parametrize("dtype", _dtypes())
@pytest.mark.parametrize("residual", [False, True], ids=["plain", "residual"])
def test_gemma_rms_norm(in_vllm: None, dtype: str, residual: bool) -> None:
    import torch
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm

    its = getattr(torch, dtype)
    ours, theirs = _both(GemmaRMSNorm, 32, 1e-5)
    for layer in (ours, theirs):
        layer.to(its).weight.data.copy_(_random(32, dtype=its))
    args = (
        [_random(5, 32, dtype=its), _random(5, 32, dtype=its).flip(0)]
        if residual
        else [_random(5, 32, dtype=its)]
    )
    _check(ours(*[a.clone() for a in args]), theirs(*[a.clone() for a in args]))


@pytest.mark.parametrize("dtype", _dtypes())
@pytest.mark.parametrize("has_key", [True, False], ids=["key", "no key"])
@pytest.mark.parametrize("rotary_dim", [32, 16], ids=["whole", "partial"])
@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize("name", _ROTARY)
def test_rotary(in_vllm: None, name: str, is_neox: bool, rotary_dim: int, has_key: bool, dtype: str) -> None:
    import torch

    its = getattr(torch, dtype)
    ours, theirs = _both(
        _rotary_class(name),
        head_size=32,
        rotary_dim=rotary_dim,
        max_position_embeddings=64,
        base=10000.0,
        is_neox_style=is_neox,
        dtype=its,
        **_ROTARY[name],
    )
    positions = torch.tensor([0, 3, 17, 63, 5])
    # A fused projection: four heads of queries, two of keys, two of values.
    fused = _random(5, 8 * 32, dtype=its)

    def split() -> tuple[torch.Tensor, torch.Tensor | None]:
        query, key, _ = fused.clone().split([128, 64, 64], dim=-1)
        return query, key if has_key else None

    _check(ours(positions, *split()), theirs(positions, *split()), exact=False)
    # vLLM's PyTorch path, too; it rounds more often in bfloat16.
    if dtype == "float32":
        _check(ours(positions, *split()), theirs.forward_native(positions, *split()), exact=False)


def _rotary_class(name: str) -> type:
    from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

    from vllm_fl.integration.replace import descendants

    classes = [RotaryEmbedding, *descendants(RotaryEmbedding)]
    return next(cls for cls in classes if cls.__name__ == name)


# -- a layer that cannot be served ---------------------------------------------------


def test_norm_over_a_part_stays_native(in_vllm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.layernorm import RMSNorm

    from vllm_fl.integration import seam

    said: list[str] = []
    monkeypatch.setattr(seam, "say_once", said.append)
    layer = RMSNorm(32, var_hidden_size=16)
    assert not is_served(layer)
    import torch

    x = _random(5, 32, dtype=torch.float32)
    _check(layer(x), RMSNorm.forward_native(layer, x))
    assert said == ["vllm-fl: RMSNorm stays vLLM's own: the operator has no variance_size_override"]


def test_batch_invariant_keeps_every_layer_native(in_vllm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand, since with this variable vLLM needs Triton, which a CPU has not."""
    from vllm import envs
    from vllm.model_executor.layers.activation import GeluAndMul
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

    from vllm_fl.integration import seam

    said: list[str] = []
    monkeypatch.setattr(seam, "say_once", said.append)
    monkeypatch.setattr(envs, "VLLM_BATCH_INVARIANT", True, raising=False)
    rotary = {"head_size": 32, "rotary_dim": 32, "max_position_embeddings": 8, "base": 1e4}
    built = [SiluAndMul(), GeluAndMul(), RMSNorm(32), GemmaRMSNorm(32)]
    built.append(RotaryEmbedding(**rotary, is_neox_style=True, dtype=GemmaRMSNorm(8).weight.dtype))
    for layer in built:
        assert not is_served(layer)
        name = type(layer).__name__.removeprefix("Served")
        assert f"vllm-fl: {name} stays vLLM's own: VLLM_BATCH_INVARIANT is set" in said


def test_fault_of_ours_leaves_the_layer_alone(
    in_vllm: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm.model_executor.layers.layernorm import RMSNorm

    from vllm_fl.integration import choice
    from vllm_fl.integration import engine

    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(choice, "_Choosing", broken)
    monkeypatch.setattr(engine, "_faulty", set())
    for _ in range(2):
        layer = RMSNorm(32)
        assert layer._forward_method == layer.forward_cpu
    assert engine.fingerprint().endswith("-RMSNorm") or engine.fingerprint().startswith("unfrozen-")
    assert engine._faulty == {"RMSNorm"}


# -- beside another plug-in ---------------------------------------------------------------


@pytest.fixture
def vendors_norm(served_vllm: None) -> Iterator[type]:
    """RMSNorm as a vendor's plug-in replaces it, before our first layer."""
    from vllm.model_executor.custom_op import CustomOp
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.layers.layernorm import RMSNorm

    from vllm_fl.integration import replace

    before = dict(op_registry_oot)
    op_registry_oot.clear()

    class VendorRMSNorm(RMSNorm):
        def forward_cpu(self, x: Any, residual: Any = None) -> Any:
            return self.forward_native(x, residual) if residual is not None else self.forward_native(x) * 2

    CustomOp.register_oot(_decorated_op_cls=VendorRMSNorm, name="RMSNorm")
    replace.replace_classes()
    yield VendorRMSNorm
    op_registry_oot.clear()
    op_registry_oot.update(before)


def test_ours_is_built_on_the_vendors(in_vllm: None, vendors_norm: type) -> None:
    import torch
    from vllm.model_executor.layers.layernorm import RMSNorm

    from vllm_fl.dispatch import SelectionPolicy
    from vllm_fl.dispatch import policy_context

    x = _random(5, 32, dtype=torch.float32)
    ours = RMSNorm(32)
    assert isinstance(ours, vendors_norm)
    assert type(ours).name == "rms_norm"
    assert is_served(ours)
    with policy_context(SelectionPolicy.from_dict(prefer="native")):
        native = RMSNorm(32)
    # `native` is what would run without us: the vendor's.
    _check(native(x), RMSNorm.forward_native(native, x) * 2)
    _check(ours(x), RMSNorm.forward_native(native, x))


# -- the entry point, which vLLM calls ---------------------------------------------------


@pytest.fixture
def register(served_vllm: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[str]]]:
    """Return a function that registers as in a new process, and says what it has installed."""
    from vllm import envs
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.custom_op import CustomOp
    from vllm.model_executor.custom_op import PluggableLayer

    from vllm_fl.integration import plugin
    from vllm_fl.integration import register

    monkeypatch.setattr(plugin, "_installed", False)
    # vLLM's log, once it is set up, does not reach pytest's.
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    own = EngineArgs.create_engine_config, CustomOp.__new__, dict(envs.environment_variables)
    pluggable = PluggableLayer.__new__

    def installed() -> list[str]:
        register()
        return [
            what
            for what, is_there in {
                "configuration": EngineArgs.create_engine_config is not own[0],
                "first layer": CustomOp.__new__ is not own[1],
                "variables": envs.environment_variables != own[2],
            }.items()
            if is_there
        ]

    yield installed
    EngineArgs.create_engine_config, CustomOp.__new__ = own[:2]
    PluggableLayer.__new__ = pluggable
    envs.environment_variables.clear()
    envs.environment_variables.update(own[2])


def test_what_is_installed(register: Callable[[], list[str]]) -> None:
    assert register() == ["configuration", "first layer", "variables"]


def test_unsupported_vllm(
    register: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import vllm

    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    assert register() == []
    assert register() == []
    reason = "vLLM 0.99.0 is not one of the supported 0.26 to 0.33"
    assert caplog.messages == [f"vllm-fl is off, vLLM runs natively: {reason}"]


def test_fault_of_ours_at_the_start(
    register: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm_fl.integration import plugin

    def broken(names: set[str]) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(plugin, "_teach_environment", broken)
    assert register() == []
    assert caplog.messages == ["vllm-fl is off, vLLM runs natively: ZeroDivisionError: ours"]


def test_fault_of_ours_at_the_first_layer(
    in_vllm: None,
    register: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.layers.layernorm import RMSNorm

    from vllm_fl.integration import engine
    from vllm_fl.integration import replace

    def broken(binding: Any) -> Any:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(engine, "_faulty", set())
    monkeypatch.setattr(replace, "classes_of", broken)
    register()
    before = dict(op_registry_oot)
    op_registry_oot.clear()
    try:
        assert type(RMSNorm(8)) is type(RMSNorm(8)) is RMSNorm
    finally:
        op_registry_oot.update(before)
    assert caplog.messages == ["vllm-fl: every layer runs vLLM's own path: ZeroDivisionError: ours"]


@pytest.mark.parametrize("variable", ["VLLM_FL_PREFER_ENABLED", "VLLM_FL_OOT_ENABLED"])
def test_switched_off(
    register: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "0")
    # The first layer says so, in the log that vLLM has set up by then.
    assert register() == ["first layer", "variables"]


@pytest.mark.parametrize("variable", ["VLLM_FL_OOT_WHITELIST", "VLLM_FL_OOT_BLACKLIST"])
def test_unknown_layer_in_a_list(
    register: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    from vllm_fl.dispatch import PolicyError

    monkeypatch.setenv(variable, "rms_norm,Llama3RotaryEmbedding,SiluAndMull")
    with pytest.raises(PolicyError, match=rf"^{variable}: unknown layer 'SiluAndMull'\..*SiluAndMul"):
        register()


@pytest.mark.parametrize(
    ("names", "stay"),
    [
        ("RMSNorm", {"RMSNorm"}),
        ("rms_norm,gelu_and_mul", {"RMSNorm", "GeluAndMul"}),
        ("rotary_embedding", set(_ROTARY)),
        ("Llama3RotaryEmbedding", {"Llama3RotaryEmbedding"}),
    ],
)
@pytest.mark.parametrize("variable", ["VLLM_FL_OOT_WHITELIST", "VLLM_FL_OOT_BLACKLIST"])
def test_lists_of_layers(
    served_vllm: None, monkeypatch: pytest.MonkeyPatch, variable: str, names: str, stay: set[str]
) -> None:
    from vllm.model_executor.custom_op import op_registry_oot

    from vllm_fl.integration import replace

    every = set(op_registry_oot)
    before = dict(op_registry_oot)
    op_registry_oot.clear()
    monkeypatch.setenv(variable, names)
    try:
        replace.replace_classes()
        replaced = set(op_registry_oot)
    finally:
        op_registry_oot.clear()
        op_registry_oot.update(before)
    assert replaced == (stay if variable == "VLLM_FL_OOT_WHITELIST" else every - stay)


@pytest.mark.parametrize(
    ("accelerator", "policy", "warns"),
    [
        (True, {}, True),
        (True, {"prefer": "vendor"}, True),
        (True, {"prefer": "reference"}, False),
        (True, {"per_op_order": {"rms_norm": ["impl:reference.torch", "native"]}}, False),
        (False, {}, False),
    ],
)
def test_the_reference_is_a_warning_only_where_something_is_faster(
    served_vllm: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    accelerator: bool,
    policy: dict[str, Any],
    warns: bool,
) -> None:
    from vllm_fl.dispatch import SelectionPolicy
    from vllm_fl.dispatch import get_default_manager
    from vllm_fl.dispatch import policy_context
    from vllm_fl.dispatch.calling import torch_state
    from vllm_fl.integration import choice
    from vllm_fl.integration import seam

    monkeypatch.setattr(torch_state, "has_accelerator", lambda: accelerator)
    monkeypatch.setattr(seam, "said", set())
    monkeypatch.setattr(choice.logger, "propagate", True)
    get_default_manager().ensure_initialized()
    with policy_context(SelectionPolicy.from_dict(**policy)):
        for _ in range(2):
            choice.warn_of_the_reference("RMSNorm", "rms_norm", "reference.torch")
        choice.warn_of_the_reference("RMSNorm", "rms_norm", "vendor.cuda")
    found = [record for record in caplog.records if "in plain PyTorch" in record.getMessage()]
    assert len(found) == warns


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = (
        "import sys, vllm_fl.integration; print([n for n in ('torch', 'vllm', 'yaml') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_registering_twice_is_registering_once() -> None:
    code = """
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm_fl.integration import register
own = EngineArgs.create_engine_config
register()
once = EngineArgs.create_engine_config, CustomOp.__new__
register()
assert once == (EngineArgs.create_engine_config, CustomOp.__new__)
assert once[0].__wrapped__ is own
assert op_registry_oot == {}, "a layer's class was replaced before a layer was built"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

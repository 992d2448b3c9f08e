"""What the three seams share: the lists, batch invariance, faults, and what is decided once for a kind."""

from __future__ import annotations

import gc
import inspect
import logging
import sys
import weakref
from typing import TYPE_CHECKING
from typing import Any

import pytest
from evidence import is_served

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Iterator

SEAMS = {
    "layers": ("RMSNorm", "rms_norm"),
    "int8": ("Int8ScaledMMLinearKernel", "int8_linear"),
    "attention": ("Attention", "attention"),
}


@pytest.fixture
def bare_vllm(served_vllm: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], set[str]]]:
    """vLLM with nothing of ours in it; yields a function that says which seams are ours."""
    from vllm import _custom_ops
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import Int8ScaledMMLinearKernel
    from vllm.platforms import current_platform

    from vllm_fl.integration import engine
    from vllm_fl.integration import quantization
    from vllm_fl.integration import seam

    platform: Any = type(current_platform)
    own = inspect.unwrap(platform.get_attn_backend_cls.__func__)
    monkeypatch.setattr(platform, "get_attn_backend_cls", classmethod(own))
    for name in ("scaled_int8_quant", "onednn_scaled_int8_quant"):
        monkeypatch.setattr(_custom_ops, name, inspect.unwrap(getattr(_custom_ops, name)))
    built = inspect.unwrap(Int8ScaledMMLinearKernel.__init__)
    monkeypatch.setattr(Int8ScaledMMLinearKernel, "__init__", built)
    monkeypatch.setattr(quantization, "chosen", {})
    monkeypatch.setattr(engine, "_faulty", set())
    monkeypatch.setattr(seam, "said", set())
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.setattr(seam.logger, "propagate", True)
    before = dict(op_registry_oot)
    op_registry_oot.clear()

    def ours() -> set[str]:
        found = {
            "layers": "RMSNorm" in op_registry_oot,
            "int8": Int8ScaledMMLinearKernel.__init__ is not built,
            "attention": hasattr(platform.get_attn_backend_cls, "__vllm_fl__"),
        }
        return {name for name, is_ours in found.items() if is_ours}

    yield ours
    op_registry_oot.clear()
    op_registry_oot.update(before)


@pytest.mark.parametrize("number", [0, 1], ids=["class", "name"])
@pytest.mark.parametrize("seam_name", SEAMS)
@pytest.mark.parametrize("variable", ["VLLM_FL_OOT_WHITELIST", "VLLM_FL_OOT_BLACKLIST"])
def test_each_list_holds_for_each_seam(
    bare_vllm: Callable[[], set[str]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    variable: str,
    seam_name: str,
    number: int,
) -> None:
    from vllm_fl.integration import replace

    caplog.set_level("INFO")
    monkeypatch.setenv(variable, SEAMS[seam_name][number])
    replace.check_lists()
    replace.take_over()
    is_white = variable == "VLLM_FL_OOT_WHITELIST"
    assert bare_vllm() == ({seam_name} if is_white else set(SEAMS) - {seam_name})
    left = [names[0] for name, names in SEAMS.items() if (name == seam_name) is not is_white]
    said = "does not name it" if is_white else "names it"
    for class_name in left:
        assert f"vllm-fl: {class_name} stays vLLM's own: {variable} {said}" in caplog.text
    (line,) = [one for one in caplog.messages if one.startswith("vllm-fl: serves ")]
    served = line.removeprefix("vllm-fl: serves ").split(", ")
    assert {names[0] for names in SEAMS.values()} & set(served) == {n[0] for n in SEAMS.values()} - {*left}


@pytest.mark.parametrize("name", ["Atention", "int8_liner"])
def test_a_misspelt_seam(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    from vllm_fl.dispatch import PolicyError
    from vllm_fl.integration import replace

    monkeypatch.setenv("VLLM_FL_OOT_BLACKLIST", name)
    with pytest.raises(PolicyError, match=r"unknown layer .* Did you mean '([Aa]ttention|int8_linear)'"):
        replace.check_lists()


@pytest.mark.parametrize("broken", ["int8", "attention"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_seam_that_cannot_be_installed_is_contained(
    bare_vllm: Callable[[], set[str]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    broken: str,
    ranks: int,
) -> None:
    """The others are served, the fingerprint is another, and other ranks are told."""
    from dataclasses import replace as changed

    from vllm_fl.integration import engine
    from vllm_fl.integration import ranks as our_ranks
    from vllm_fl.integration import replace

    def install() -> None:
        raise ZeroDivisionError("ours")

    told: list[str] = []
    monkeypatch.setattr(our_ranks, "withdraw", told.append)
    class_name = SEAMS[broken][0]
    seams = [changed(s, install=install) if s.class_name == class_name else s for s in replace.SEAMS]
    monkeypatch.setattr(replace, "SEAMS", tuple(seams))
    replace.take_over()
    assert bare_vllm() == set(SEAMS) - {broken}
    assert f"vllm-fl: {class_name} runs vLLM's own path: ZeroDivisionError: ours" in caplog.messages
    assert engine._faulty == {class_name}
    assert told == [f"vllm-fl serves {class_name} not there: ZeroDivisionError: ours"]


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_fault_in_the_choice_of_attention(
    bare_vllm: Callable[[], set[str]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_alone: bool,
) -> None:
    from vllm_fl.integration import attention
    from vllm_fl.integration import engine
    from vllm_fl.integration import seam

    def broken() -> Any:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(attention, "get_default_manager", broken)
    monkeypatch.setattr(seam, "is_one_of_several_ranks", lambda: not is_alone)
    if not is_alone:
        with pytest.raises(ZeroDivisionError):
            attention.choose(None)
        return
    assert attention.choose(None) is None
    assert "vllm-fl: Attention runs vLLM's own path: ZeroDivisionError: ours" in caplog.messages
    assert engine._faulty == {"Attention"}


def test_batch_invariance_leaves_the_attention_to_vllm(
    bare_vllm: Callable[[], set[str]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm import envs

    from vllm_fl.integration import attention

    caplog.set_level("INFO")
    monkeypatch.setattr(envs, "VLLM_BATCH_INVARIANT", True, raising=False)
    assert attention.choose(None) is None
    assert "vllm-fl: Attention stays vLLM's own: VLLM_BATCH_INVARIANT is set" in caplog.messages


# -- a layer of an existing operator is one class ------------------------------------------


def test_a_new_layer_is_one_class(in_vllm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's own layer, which nothing in the core has heard of."""
    import torch
    from vllm.model_executor.custom_op import CustomOp
    from vllm.model_executor.custom_op import op_registry_oot

    from vllm_fl.integration import replace
    from vllm_fl.integration.layer import Layer

    class UpAndSilu(CustomOp):
        name = "up_and_silu"

        def forward_native(self, x: torch.Tensor) -> torch.Tensor:
            up, gate = x.chunk(2, dim=-1)
            return up * torch.nn.functional.silu(gate)

    class ServedUpAndSilu(Layer):
        module = __name__
        class_name = "UpAndSilu"
        vllm_name = "up_and_silu"
        op_name = "silu_and_mul"

        def forward(self, x: torch.Tensor) -> Any:
            return self.operator(torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1))

        def native(self, x: torch.Tensor) -> Any:
            return self.own(torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1))

        def examples(self) -> list[tuple[Any, ...]]:
            return [(torch.ones(1, 8),)]

    monkeypatch.setattr(sys.modules[__name__], "UpAndSilu", UpAndSilu, raising=False)
    monkeypatch.setattr(replace, "LAYERS", (ServedUpAndSilu,))
    try:
        served, skipped = replace.replace_classes()
        assert (served, skipped) == (["UpAndSilu"], {})
        layer = UpAndSilu()
    finally:
        op_registry_oot.pop("UpAndSilu", None)
    assert is_served(layer)
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(7))
    wanted = UpAndSilu().forward_native(x)
    torch.testing.assert_close(layer(x), wanted)
    torch.testing.assert_close(layer.vllm_fl.native(torch.cat(x.chunk(2, -1)[::-1], -1)), wanted)


# -- decided once for a kind, while the plan is frozen ------------------------------------------


@pytest.fixture
def frozen(served_vllm: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Return a function that builds layers under one frozen plan, until it is thawed."""
    from vllm.config import CompilationConfig
    from vllm.config import VllmConfig
    from vllm.config import set_current_vllm_config

    from vllm_fl.dispatch import OpManager
    from vllm_fl.dispatch import OpRegistry
    from vllm_fl.dispatch import SelectionPolicy
    from vllm_fl.dispatch import set_global_policy
    from vllm_fl.integration import choice
    from vllm_fl.integration import engine
    from vllm_fl.integration import trial
    from vllm_fl_reference.register_ops import register_builtins

    registry = OpRegistry()
    register_builtins(registry)
    manager = OpManager(registry)
    monkeypatch.setattr(choice, "get_default_manager", lambda: manager)
    monkeypatch.setattr(engine, "get_default_manager", lambda: manager)
    monkeypatch.setattr(trial, "tried", {})

    class Build:
        def __init__(self) -> None:
            self.manager = manager

        def __call__(self, cls: type, *args: Any, mode: int = 0) -> Any:
            config = VllmConfig(compilation_config=CompilationConfig(mode=mode, custom_ops=["all"]))
            object.__setattr__(config, "model_config", object())
            with set_current_vllm_config(config):
                return cls(*args)

        def register(self, *impls: Any) -> None:
            registry.register_many(list(impls))

        def policy(self, **policy: Any) -> None:
            manager.thaw()
            set_global_policy(SelectionPolicy.from_dict(**policy))

    build = Build()
    build.policy(prefer="reference")
    yield build
    build.policy(prefer="reference")


def _calls(build: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Return what a function builds, and the calls of ours that it takes."""
    import vllm_fl

    folder = str(vllm_fl.__path__[0])
    calls: list[str] = []

    def profile(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(folder):
            calls.append(f"{frame.f_code.co_filename.removeprefix(folder)}:{frame.f_code.co_qualname}")

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        return build(), calls
    finally:
        sys.setprofile(before)


def _impl(fn: Callable[..., Any], op_name: str, **more: Any) -> Any:
    from vllm_fl.dispatch import BackendImplKind
    from vllm_fl.dispatch import OpImpl

    return OpImpl(op_name, "vendor.unit", BackendImplKind.VENDOR, fn, vendor="unit", **more)


@pytest.mark.parametrize(
    ("prefer", "mode", "largest"),
    [("reference", 0, 30), ("vendor", 0, 30), ("vendor", 3, 60)],
    ids=["the reference", "a vendor's with a predicate", "opaque"],
)
def test_the_second_layer_of_a_kind_decides_nothing(
    frozen: Any, prefer: str, mode: int, largest: int
) -> None:
    from vllm.model_executor.layers.layernorm import RMSNorm

    from vllm_fl_reference.impl import normalization

    impl = _impl(normalization.rms_norm, "rms_norm", supports=lambda *_: True, writes=())
    frozen.register(impl)
    frozen.policy(prefer=prefer)
    first, many = _calls(lambda: frozen(RMSNorm, 48, mode=mode))
    second, calls = _calls(lambda: frozen(RMSNorm, 48, mode=mode))
    assert is_served(first)
    assert is_served(second)
    assert len(many) > 100
    assert len(calls) <= largest, "\n".join(calls)


@pytest.mark.parametrize("mode", [0, 3], ids=["eager", "opaque"])
def test_each_layer_of_a_kind_has_its_own_path(frozen: Any, mode: int) -> None:
    import torch
    from vllm.model_executor.layers.layernorm import RMSNorm

    from vllm_fl_reference.impl import normalization

    def supports(x: Any, *_: Any) -> bool | str:
        return x.shape[0] == 1 or "at most one row"

    frozen.register(_impl(normalization.rms_norm, "rms_norm", supports=supports))
    frozen.policy(per_op_order={"rms_norm": ["vendor", "native"]})
    layers = [frozen(RMSNorm, 32, mode=mode) for _ in range(3)]
    tickets = set()
    for number, layer in enumerate(layers):
        assert is_served(layer)
        assert layer.vllm_fl.is_opaque is (mode == 3)
        layer.weight.data.fill_(float(number + 2))
        tickets.add(id(layer.vllm_fl.operator))
    assert len(tickets) == 3
    for rows in (1, 4):
        x = torch.randn(rows, 32, generator=torch.Generator().manual_seed(rows))
        for layer in layers:
            torch.testing.assert_close(layer(x), RMSNorm.forward_native(layer, x))
    # What is kept of the kind keeps no layer of it.
    weights = [weakref.ref(layer.weight) for layer in layers]
    del layers, layer
    gc.collect()
    assert [weight() for weight in weights] == [None] * 3


def test_what_is_decided_is_forgotten_with_the_plan(frozen: Any) -> None:
    import torch
    from vllm.model_executor.layers.layernorm import RMSNorm

    frozen.policy(prefer="reference")
    assert is_served(frozen(RMSNorm, 32))
    plan = frozen.manager.plan
    frozen.policy(prefer="native")
    assert not is_served(frozen(RMSNorm, 32))
    assert frozen.manager.plan is not plan
    frozen.policy(prefer="reference")
    assert is_served(frozen(RMSNorm, 32))
    # Another width, dtype and mode is another kind; so is a choice that has been set aside since.
    frozen.manager.failures.set_aside("rms_norm", "reference.torch", RuntimeError("late"))
    assert not is_served(frozen(RMSNorm, 32))
    assert torch.is_tensor(frozen(RMSNorm, 64)(torch.ones(1, 64)))


@pytest.mark.parametrize("mode", [0, 3], ids=["eager", "opaque"])
def test_what_never_changes_for_a_layer_is_asked_once(frozen: Any, mode: int) -> None:
    import torch
    from vllm.model_executor.layers.layernorm import RMSNorm

    from vllm_fl_reference.impl import normalization

    asked: list[tuple[Any, ...]] = []
    ran: list[Any] = []

    def for_layer(x: Any, residual: Any, *_: Any) -> bool | str:
        asked.append((x.dtype, residual is None))
        return x.dtype is torch.float32 or "only float32"

    def norm(x: Any, residual: Any, weight: Any, epsilon: float) -> Any:
        ran.append(x.dtype)
        return normalization.rms_norm(x, residual, weight, epsilon)

    frozen.register(_impl(norm, "rms_norm", supports_layer=for_layer, writes=()))
    frozen.policy(per_op_order={"rms_norm": ["vendor", "native"]})
    layer = frozen(RMSNorm, 32, mode=mode)
    assert is_served(layer)
    assert set(asked) == {(torch.float32, True), (torch.float32, False)}
    asked.clear()
    ran.clear()
    x = torch.randn(4, 32)
    for residual in (None, x.clone()):
        both = [None if residual is None else residual.clone() for _ in range(2)]
        torch.testing.assert_close(
            layer(x.clone(), both[0]), RMSNorm.forward_native(layer, x.clone(), both[1])
        )
    assert (asked, ran) == ([], [torch.float32] * 2)
    # It was not asked of another dtype, which therefore goes vLLM's own way.
    half = x.bfloat16()
    torch.testing.assert_close(layer(half), RMSNorm.forward_native(layer, half))
    assert ran == [torch.float32] * 2


def test_what_a_layers_question_refuses_stays_vllms(frozen: Any) -> None:
    from vllm.model_executor.layers.layernorm import RMSNorm

    from vllm_fl_reference.impl import normalization

    def never(*_: Any) -> str:
        return "no such width"

    frozen.register(_impl(normalization.rms_norm, "rms_norm", supports_layer=never, writes=()))
    frozen.policy(per_op_order={"rms_norm": ["vendor", "native"]})
    assert not is_served(frozen(RMSNorm, 32))

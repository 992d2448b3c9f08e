"""Mixture of experts: the router and the experts of vLLM's MoE layers, each chosen by the dispatch."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import count
from typing import TYPE_CHECKING
from typing import Any

import pytest
from engine import more_engines
from engine import run_vllm
from evidence import is_served

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Iterator
    from pathlib import Path

    from checkpoints import Checkpoint
    from evidence import Evidence

EXPERTS = "UnquantizedFusedMoEMethod"

# The first engine has the policy of the environment; each further one has one wrong implementation.
_WRONG_ENGINES = """
def report(llm):
    from vllm import LLM, SamplingParams
    from vllm_fl.dispatch import SelectionPolicy, get_default_manager, set_global_policy

    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    sampling = SamplingParams(temperature=0, max_tokens=16, detokenize=False, ignore_eos=True)
    found = {}
    for op_name in OP_NAMES:
        get_default_manager().thaw()
        per_op = {op_name: ["impl:vendor.wrong"]}
        set_global_policy(SelectionPolicy.from_dict(prefer="reference", per_op_order=per_op))
        outputs = LLM(**ENGINE_ARGS).generate(prompts, sampling, use_tqdm=False)
        found[op_name] = [list(output.outputs[0].token_ids) for output in outputs]
    return found
"""


@pytest.fixture(scope="session")
def glm4_moe(checkpoint_root: Path) -> Checkpoint:
    """Grouped top-k with a correction bias, and a shared expert: DeepSeek-V3's layer, other attention."""
    import checkpoints

    recipe = checkpoints.Recipe(
        "Glm4MoeConfig",
        "Glm4MoeForCausalLM",
        {
            **checkpoints._COMMON,
            "tie_word_embeddings": False,
            "moe_intermediate_size": 64,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
            "first_k_dense_replace": 1,
        },
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(checkpoints.RECIPES, "glm4_moe", recipe)
        return checkpoints.build("glm4_moe", checkpoint_root)


def _with_wrong_engines(checkpoint: Checkpoint, *op_names: str) -> str:
    given = more_engines(checkpoint.path, checkpoint.prompts)
    return f"{given}OP_NAMES = {op_names!r}\n{_WRONG_ENGINES}"


# -- whole models -----------------------------------------------------------------


@pytest.mark.parametrize(("name", "router_op"), [("qwen3_moe", "topk_softmax"), ("glm4_moe", "grouped_topk")])
def test_eager_then_engines_with_a_fault(
    request: pytest.FixtureRequest, evidence: Evidence, name: str, router_op: str
) -> None:
    checkpoint: Checkpoint = request.getfixturevalue(name)
    setup = _with_wrong_engines(checkpoint, "fused_experts", router_op)
    env = evidence.env("wrong_vendor", VLLM_FL_PREFER="reference")
    result = run_vllm(checkpoint, setup=setup, env=env).checked()
    assert result.tokens == checkpoint.golden
    # What is wrong changes what every prompt gets: the implementation is what computes.
    golden = [list(tokens) for tokens in checkpoint.golden]
    for op_name in ("fused_experts", router_op):
        wrong = result.report[op_name]
        assert all(got != right for got, right in zip(wrong, golden, strict=True)), op_name
    calls = evidence.calls()
    # One of the two layers has experts; in one engine of the three the operator was the wrong one.
    for op_name in ("fused_experts", router_op):
        assert calls[op_name, "vendor.wrong"] >= 16
        assert calls[op_name, "reference.torch"] == 2 * calls[op_name, "vendor.wrong"]
    layers = {(name, impl_id): n for (name, impl_id, _), n in evidence.layers().items()}
    assert layers[EXPERTS, "reference.torch"] == layers["CPURouter", "reference.torch"] == 2
    assert layers[EXPERTS, "vendor.wrong"] == layers["CPURouter", "vendor.wrong"] == 1


def test_processes(qwen3_moe: Checkpoint, evidence: Evidence) -> None:
    """Front end, engine core and worker: the worker decides, before it prepares weights."""
    result = run_vllm(qwen3_moe, env=evidence.env(), in_process=False).checked()
    assert result.tokens == qwen3_moe.golden
    calls = evidence.calls()
    assert calls["fused_experts", "reference.torch"] == calls["topk_softmax", "reference.torch"] >= 16
    assert evidence.layers()[EXPERTS, "reference.torch", "plain"] == 1


def test_compiled(qwen3_moe: Checkpoint, evidence: Evidence) -> None:
    """The experts are opaque to the compiler, and called at every step; the router is traced."""
    env = evidence.env(VLLM_FL_PREFER="reference")
    result = run_vllm(qwen3_moe, mode="compile", env=env).checked()
    assert result.tokens == qwen3_moe.golden
    layers = evidence.layers()
    assert (
        layers[EXPERTS, "reference.torch", "opaque"] == layers["CPURouter", "reference.torch", "guard"] == 1
    )
    assert evidence.calls()["fused_experts", "reference.torch"] >= 16
    assert evidence.graphs()["fused_experts", "reference.torch"] == 0
    assert evidence.calls()["topk_softmax", "reference.torch"] == 0
    assert evidence.graphs()["topk_softmax", "reference.torch"] > 0


@pytest.mark.long
def test_compiled_stays_native_unless_asked(qwen3_moe: Checkpoint, evidence: Evidence) -> None:
    """Then vLLM prepares the weights for its own kernel."""
    result = run_vllm(qwen3_moe, mode="compile", env=evidence.env()).checked()
    assert result.tokens == qwen3_moe.golden
    layers = evidence.layers()
    assert layers[EXPERTS, "native", "plain"] == layers["CPURouter", "native", "plain"] == 1
    for name in (EXPERTS, "CPURouter"):
        line = f"vllm-fl: {name} stays vLLM's own: vLLM leaves it to its compiler (custom_ops)"
        assert result.log.count(line) == 1


@pytest.mark.parametrize("op_name", ["fused_experts", "topk_softmax"])
def test_chosen_apart(qwen3_moe: Checkpoint, evidence: Evidence, op_name: str) -> None:
    """One of the two is vLLM's own."""
    env = evidence.env(VLLM_FL_PREFER="reference", VLLM_FL_PER_OP=f"{op_name}=native")
    result = run_vllm(qwen3_moe, env=env).checked()
    assert result.tokens == qwen3_moe.golden
    calls = evidence.calls()
    other = {"fused_experts": "topk_softmax", "topk_softmax": "fused_experts"}[op_name]
    assert calls[op_name, "native"] == calls[other, "reference.torch"] >= 16
    assert (op_name, "reference.torch") not in calls


def test_experts_that_fail_at_the_start(qwen3_moe: Checkpoint, evidence: Evidence) -> None:
    """The first call comes before the weights are prepared: vLLM's own path can take over there."""
    order = "fused_experts=impl:vendor.faulty.experts|native"
    env = evidence.env("faulty_vendor", VLLM_FL_PREFER="reference", VLLM_FL_PER_OP=order)
    result = run_vllm(qwen3_moe, env=env).checked()
    assert result.tokens == qwen3_moe.golden
    assert evidence.layers()[EXPERTS, "native", "plain"] == 1
    assert "vendor.faulty.experts raised for fused_experts and is set aside" in result.log
    assert evidence.calls()["fused_experts", "native"] >= 16


# -- layers, built by hand ----------------------------------------------------------


class Factory:
    """Builds vLLM's MoE layers in this process, and runs one."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self._numbers = count()

    def build(self, *, native: bool = False, **kwargs: Any) -> Any:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory

        from vllm_fl.dispatch import SelectionPolicy
        from vllm_fl.dispatch import policy_context

        sizes = {"num_experts": 8, "top_k": 2, "hidden_size": 64, "intermediate_size": 32}
        policy = policy_context(SelectionPolicy.from_dict(prefer="native")) if native else nullcontext()
        with set_current_vllm_config(self.config), policy:
            return FusedMoEFactory(**{**sizes, "prefix": f"{next(self._numbers)}.mlp", **kwargs})

    def run(self, runner: Any) -> Any:
        import torch
        from vllm.config import set_current_vllm_config
        from vllm.forward_context import set_forward_context

        random = torch.Generator().manual_seed(3)
        experts = runner.routed_experts
        for weight in (experts.w13_weight, experts.w2_weight):
            weight.data.copy_(torch.randn(weight.shape, generator=random) * 0.2)
        x = torch.randn(5, 64, generator=random)
        logits = torch.randn(5, 8, generator=random)
        experts.quant_method.process_weights_after_loading(experts)
        with torch.no_grad(), set_current_vllm_config(self.config), set_forward_context(None, self.config):
            return runner(x, logits)


@pytest.fixture(scope="module")
def served_vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    from vllm import distributed
    from vllm.config import VllmConfig
    from vllm.config import set_current_vllm_config
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
    with set_current_vllm_config(VllmConfig()):
        store = f"file://{tmp_path_factory.mktemp('group') / 'store'}"
        distributed.init_distributed_environment(1, 0, store, 0, "gloo")
        distributed.ensure_model_parallel_initialized(1, 1)
    yield
    distributed.cleanup_dist_env_and_memory()
    op_registry_oot.clear()
    op_registry_oot.update(before)
    reset_global_policy()


@pytest.fixture
def factory(served_vllm: None) -> Factory:
    from vllm.config import CompilationConfig
    from vllm.config import VllmConfig

    return Factory(VllmConfig(compilation_config=CompilationConfig(mode=0, custom_ops=["all"])))


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    from vllm_fl.integration import seam

    lines: list[str] = []
    monkeypatch.setattr(seam, "say_once", lines.append)
    return lines


def _is_served(runner: Any) -> bool:
    return is_served(runner.routed_experts.quant_method)


def _bias() -> Any:
    import torch

    return torch.randn(8, generator=torch.Generator().manual_seed(5))


_GROUPS = {"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2}

_SERVED: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "not renormalised": lambda: {"renormalize": False},
    "gelu": lambda: {"activation": "gelu"},
    "weight on the input": lambda: {"top_k": 1, "apply_router_weight_on_input": True},
    "groups, sigmoid": lambda: {
        **_GROUPS,
        "scoring_func": "sigmoid",
        "e_score_correction_bias": _bias(),
        "routed_scaling_factor": 2.5,
    },
    "groups, softmax": lambda: {**_GROUPS, "e_score_correction_bias": _bias(), "renormalize": False},
    "one group without a bias": lambda: {"use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1},
}


@pytest.mark.parametrize("name", _SERVED)
def test_equals_vllms_own(factory: Factory, name: str) -> None:
    import torch

    ours, theirs = factory.build(**_SERVED[name]()), factory.build(native=True, **_SERVED[name]())
    for runner, wanted in ((ours, True), (theirs, False)):
        assert _is_served(runner) is wanted
        assert is_served(runner.router) is wanted
        assert runner.routed_experts.quant_method.moe_kernel is None
    torch.testing.assert_close(factory.run(ours), factory.run(theirs), rtol=1e-5, atol=1e-5)
    assert ours.routed_experts.quant_method.moe_kernel is None
    assert theirs.routed_experts.quant_method.moe_kernel is not None


def test_shared_experts(factory: Factory) -> None:
    """The runner calls them itself, beside ours."""
    import torch

    shared = torch.nn.Linear(64, 64)
    ours = factory.run(factory.build(shared_experts=shared))
    theirs = factory.run(factory.build(native=True, shared_experts=shared))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    alone = factory.run(factory.build())
    assert not torch.allclose(ours, alone)


def _refuses(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("not for these inputs")


@pytest.mark.parametrize("name", ["plain", "groups, sigmoid", "groups, softmax"])
def test_router_that_refuses(factory: Factory, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """vLLM's own router takes over, with the operator's arguments."""
    import torch

    from vllm_fl.dispatch import BackendImplKind
    from vllm_fl.dispatch import OpImpl
    from vllm_fl.dispatch import OpManager
    from vllm_fl.dispatch import OpRegistry
    from vllm_fl.dispatch import SelectionPolicy
    from vllm_fl.dispatch import policy_context
    from vllm_fl.integration import choice

    asked: list[str] = []

    def refuses(op_name: str) -> OpImpl:
        def supports(*_: Any, **__: Any) -> str:
            asked.append(op_name)
            return "not these"

        kind = BackendImplKind.VENDOR
        return OpImpl(op_name, "vendor.unit", kind, _refuses, vendor="unit", writes=(), supports=supports)

    registry = OpRegistry()
    registry.register_many([refuses("topk_softmax"), refuses("grouped_topk")])
    manager = OpManager(registry)
    monkeypatch.setattr(choice, "get_default_manager", lambda: manager)
    theirs = factory.run(factory.build(native=True, **_SERVED[name]()))
    policy = SelectionPolicy.from_dict(prefer="vendor", per_op_order={"fused_experts": ["native"]})
    with policy_context(policy):
        ours = factory.build(**_SERVED[name]())
    assert is_served(ours.router)
    torch.testing.assert_close(factory.run(ours), theirs, rtol=1e-5, atol=1e-5)
    assert asked


def test_routers_of_other_platforms(factory: Factory) -> None:
    """vLLM builds these two elsewhere, where they call kernels that a CPU lacks."""
    import torch
    from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter
    from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import GroupedTopKRouter

    plain = FusedTopKRouter(top_k=2, global_num_experts=8)
    ours = factory.run(factory.build(router=plain))
    assert is_served(plain)
    torch.testing.assert_close(ours, factory.run(factory.build(native=True)), rtol=1e-5, atol=1e-5)
    arguments = _SERVED["groups, sigmoid"]()
    grouped = GroupedTopKRouter(
        top_k=2,
        global_num_experts=8,
        **{name: value for name, value in arguments.items() if name != "use_grouped_topk"},
    )
    ours = factory.run(factory.build(router=grouped))
    assert is_served(grouped)
    theirs = factory.run(factory.build(native=True, **arguments))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


_REFUSED_EXPERTS: dict[str, dict[str, Any]] = {
    "the operator has no biases": {"has_bias": True},
    "the operator has no activation 'gelu_tanh'": {"activation": "gelu_tanh"},
    "the operator has no activation 'swigluoai'": {"activation": "swigluoai"},
    "the operator's activation has no clamp and no parameters": {"swiglu_limit": 7.0},
    "the operator weights the input of one expert for each token only": {
        "apply_router_weight_on_input": True
    },
}


@pytest.mark.parametrize("reason", _REFUSED_EXPERTS)
def test_experts_that_stay_native(factory: Factory, said: list[str], reason: str) -> None:
    runner = factory.build(**_REFUSED_EXPERTS[reason])
    assert not _is_served(runner)
    assert f"vllm-fl: {EXPERTS} stays vLLM's own: {reason}" in said
    # The router is chosen apart.
    assert is_served(runner.router)


def _as_expert_parallel(patch: pytest.MonkeyPatch, factory: Factory) -> dict[str, Any]:
    factory.config.parallel_config.enable_expert_parallel = True
    return {"tp_size": 2}


def _as_eplb(patch: pytest.MonkeyPatch, factory: Factory) -> dict[str, Any]:
    factory.config.parallel_config.enable_eplb = True
    return {"enable_eplb": True}


def _as_lora(patch: pytest.MonkeyPatch, factory: Factory) -> dict[str, Any]:
    from vllm.config import LoRAConfig

    factory.config.lora_config = LoRAConfig()
    return {}


def _as_data_parallel(patch: pytest.MonkeyPatch, factory: Factory) -> dict[str, Any]:
    return {"dp_size": 2}


def _as_padded(patch: pytest.MonkeyPatch, factory: Factory) -> dict[str, Any]:
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    def rounded(self: Any, hidden: int, intermediate: int, *_: Any) -> tuple[int, int]:
        return hidden, intermediate + 16

    patch.setattr(UnquantizedFusedMoEMethod, "maybe_roundup_sizes", rounded)
    return {}


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (_as_expert_parallel, "expert parallelism is a part of vLLM's kernels"),
        (_as_eplb, "the balancing of experts (EPLB) moves their weights"),
        (_as_lora, "LoRA extends vLLM's kernels"),
        (_as_data_parallel, "data, context and sequence parallelism are parts of vLLM's kernels"),
        (_as_padded, "vLLM pads the weights for its kernel"),
    ],
)
def test_experts_of_an_engine_that_stay_native(
    factory: Factory,
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
    prepare: Callable[[pytest.MonkeyPatch, Factory], dict[str, Any]],
    reason: str,
) -> None:
    runner = factory.build(**prepare(monkeypatch, factory))
    assert not _is_served(runner)
    assert f"vllm-fl: {EXPERTS} stays vLLM's own: {reason}" in said


def _custom(hidden_states: Any, gating_output: Any, topk: int, renormalize: bool) -> Any:
    return gating_output.sigmoid().topk(topk)


_REFUSED_ROUTERS: dict[str, Callable[[], dict[str, Any]]] = {
    "a custom routing function chooses": lambda: {"custom_routing_function": _custom},
    "the operator has no correction bias": lambda: {"e_score_correction_bias": _bias()},
    "the operator has no scoring function 'sigmoid'": lambda: {"scoring_func": "sigmoid"},
    "without a correction bias vLLM goes by the best expert of a group, the operator by its two best": (
        lambda: dict(_GROUPS)
    ),
    "8 experts do not make 8 groups": lambda: {
        **_GROUPS,
        "num_expert_group": 8,
        "e_score_correction_bias": _bias(),
    },
    "the balancing of experts (EPLB) replaces the chosen ones": lambda: {"enable_eplb": True},
}


@pytest.mark.parametrize("reason", _REFUSED_ROUTERS)
def test_router_that_stays_native(factory: Factory, said: list[str], reason: str) -> None:
    runner = factory.build(**_REFUSED_ROUTERS[reason]())
    assert not is_served(runner.router)
    assert f"vllm-fl: CPURouter stays vLLM's own: {reason}" in said


def test_routers_of_other_platforms_that_stay_native(factory: Factory, said: list[str]) -> None:
    from vllm.model_executor.layers.fused_moe.router.custom_routing_router import CustomRoutingRouter
    from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import GroupedTopKRouter

    groups = {"top_k": 2, "global_num_experts": 8, "num_expert_group": 4, "topk_group": 2}
    routers = {
        "GroupedTopKRouter stays vLLM's own: rows of padding are masked": GroupedTopKRouter(
            **groups, e_score_correction_bias=_bias(), skip_padding=True
        ),
        "GroupedTopKRouter stays vLLM's own: shared experts are chosen with them": GroupedTopKRouter(
            **groups, e_score_correction_bias=_bias(), num_fused_shared_experts=1
        ),
        "CustomRoutingRouter stays vLLM's own: CustomRoutingRouter chooses in a way of its own": (
            CustomRoutingRouter(top_k=2, global_num_experts=8, custom_routing_function=_custom)
        ),
    }
    for line, router in routers.items():
        factory.build(router=router)
        assert not is_served(router)
        assert f"vllm-fl: {line}" in said


def test_router_of_a_kernel_that_chooses_itself(
    factory: Factory, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM's own experts did on a CPU until 0.29, and as some do on a GPU; ours never do."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    monkeypatch.setattr(UnquantizedFusedMoEMethod, "is_monolithic", property(lambda self: True))
    runner = factory.build(native=True)
    assert runner.is_monolithic
    assert "vllm-fl: CPURouter stays vLLM's own: the experts' kernel chooses itself" in said
    runner = factory.build()
    assert not runner.is_monolithic
    assert is_served(runner.router)


def test_batch_invariant(factory: Factory, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import envs
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as module

    # By hand: with this variable vLLM has no experts for a CPU.
    method = factory.build().routed_experts.quant_method
    found = method.unquantized_backend, method.experts_cls
    monkeypatch.setattr(module, "select_unquantized_moe_backend", lambda **_: found)
    monkeypatch.setattr(envs, "VLLM_BATCH_INVARIANT", True, raising=False)
    runner = factory.build()
    assert not _is_served(runner)
    assert not is_served(runner.router)
    for name in (EXPERTS, "CPURouter"):
        assert f"vllm-fl: {name} stays vLLM's own: VLLM_BATCH_INVARIANT is set" in said


def test_a_vendors_experts_are_left_alone(served_vllm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vendor's class prepares the weights in a way of its own."""
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    from vllm_fl.integration import replace

    class VendorsExperts(UnquantizedFusedMoEMethod):
        pass

    before = dict(op_registry_oot)
    try:
        op_registry_oot.clear()
        op_registry_oot[EXPERTS] = VendorsExperts
        replace.replace_classes()
        assert op_registry_oot[EXPERTS] is VendorsExperts
        assert op_registry_oot["MoERunner"].__name__ == "ServedMoERunner"
    finally:
        op_registry_oot.clear()
        op_registry_oot.update(before)


def _dies(*_: Any, **__: Any) -> Any:
    raise RuntimeError("no such kernel")


@pytest.mark.parametrize("mode", [0, 3], ids=["eager", "compiled"])
@pytest.mark.parametrize("fn", [_dies, _refuses], ids=["fails", "refuses"])
@pytest.mark.parametrize("order", [["vendor", "native"], ["vendor"]], ids=["native next", "nothing next"])
def test_experts_whose_first_call_does_not_succeed(
    factory: Factory, monkeypatch: pytest.MonkeyPatch, order: list[str], fn: Callable[..., Any], mode: int
) -> None:
    """vLLM's own path takes over while its weights can still be prepared, or the start ends."""
    from vllm.config import CompilationConfig
    from vllm.config import VllmConfig

    from vllm_fl.dispatch import BackendImplKind
    from vllm_fl.dispatch import OpImpl
    from vllm_fl.dispatch import OpManager
    from vllm_fl.dispatch import OpRegistry
    from vllm_fl.dispatch import SelectionPolicy
    from vllm_fl.dispatch import policy_context
    from vllm_fl.integration import choice
    from vllm_fl.integration import trial

    registry = OpRegistry()
    registry.register_many(
        [OpImpl("fused_experts", "vendor.unit", BackendImplKind.VENDOR, fn, vendor="unit")]
    )
    manager = OpManager(registry)
    monkeypatch.setattr(choice, "get_default_manager", lambda: manager)
    monkeypatch.setattr(trial, "tried", {})
    factory.config = VllmConfig(compilation_config=CompilationConfig(mode=mode, custom_ops=["all"]))
    policy = SelectionPolicy.from_dict(per_op_order={"fused_experts": order, "topk_softmax": ["native"]})
    with policy_context(policy):
        if "native" not in order and fn is _dies:
            with pytest.raises(Exception, match=r"vendor\.unit failed on its first call of fused_experts"):
                factory.build()
            return
        runner = factory.build()
    if "native" not in order:
        # It may take other inputs; where it does not, the engine's first run ends the start.
        with pytest.raises(NotImplementedError):
            factory.run(runner)
        return
    experts = runner.routed_experts
    assert not _is_served(runner)
    experts.quant_method.process_weights_after_loading(experts)
    assert experts.quant_method.moe_kernel is not None


def test_the_decision_says_when_vllms_own_path_can_run() -> None:
    from vllm_fl.dispatch import OpManager
    from vllm_fl.dispatch import OpRegistry
    from vllm_fl_reference.register_ops import register_builtins

    registry = OpRegistry()
    register_builtins(registry)
    manager = OpManager(registry)
    reasons = {
        op_name: next(
            c.reason for c in manager.explain(op_name, native=True).candidates if c.impl_id == "native"
        )
        for op_name in ("fused_experts", "topk_softmax")
    }
    assert reasons["topk_softmax"] == "vLLM's own path, if those before it do not run"
    assert reasons["fused_experts"].endswith("fail when the layer is built; not at a later call")
    candidates = manager.resolve_with_native("fused_experts", lambda *_: None).candidates
    assert [candidate.impl_id for candidate in candidates] == ["reference.torch"]

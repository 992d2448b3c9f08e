"""Mixture of experts: the experts, and the choice of a token's experts.

Two seams, each chosen apart:

* ``UnquantizedFusedMoEMethod`` is the experts. After loading vLLM prepares their
  weights for its own kernel, and they can then have the same shape and another
  content. So the choice is made when the weights are created; where an
  implementation is chosen they stay as they were loaded, and from then on vLLM's
  own path is no fall-back.
* ``MoERunner`` brings a layer's router, which is asked for the experts of every
  token. What vLLM does before and after it with them stays vLLM's.

Outside of CPUs all of this runs inside an operator of vLLM's own that no compiler
looks into.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from vllm_fl.integration.choice import choose
from vllm_fl.integration.layer import Layer
from vllm_fl.integration.layer import Served
from vllm_fl.integration.layer import serving

_PACKAGE = "vllm.model_executor.layers.fused_moe"

# -- the experts ----------------------------------------------------------------


class ServedExperts(Served):
    """Decides when its weights are created."""

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        """Create the weights of ``layer`` as ever, then decide."""
        super().create_weights(layer, *args, **kwargs)  # type: ignore[misc]
        choose(self.vllm_fl_layer(self, layer))
        if serving(self) is not None:
            self.__class__ = _unprepared(type(self))  # type: ignore[arg-type]


@functools.cache
def _unprepared(cls: type) -> type:
    """Return the class of experts that are served, whose weights are left alone.

    Of those that are not, vLLM's own class says it all: a compiler reads its
    properties, and cannot look through one of ours to them.
    """

    def process_weights_after_loading(self: Any, layer: Any) -> None:
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)

    own = {
        "__module__": __name__,
        "process_weights_after_loading": process_weights_after_loading,
        # A kernel of vLLM's may choose a token's experts itself; an operator does not.
        "is_monolithic": False,
        # What another process has prepared for vLLM's kernel is refused by vLLM.
        "supports_pre_processed_weights": False,
    }
    return type(cls.__name__, (cls,), own)


class Experts(Layer):
    """The experts without quantisation.

    vLLM's own path is asked for as a candidate; where another one is chosen it is left out
    (``native_prepares``).
    """

    module = f"{_PACKAGE}.unquantized_fused_moe_method"
    class_name = "UnquantizedFusedMoEMethod"
    vllm_name = "unquantized_fused_moe"
    op_name = "fused_experts"
    when = ServedExperts
    # A vendor's class prepares the weights in a way of its own.
    stacks = False
    # Traced, the loop over the experts would become a part of the graph.
    is_traced = False

    def __init__(self, owner: Any, layer: Any) -> None:
        super().__init__(owner, layer)
        self.fixed = {
            "activation": layer.activation.value,
            "apply_router_weight_on_input": layer.apply_router_weight_on_input,
            "global_num_experts": layer.global_num_experts,
        }

    def forward(
        self, layer: Any, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, **_: Any
    ) -> torch.Tensor:
        """Add the weights. Shared experts the runner calls itself, without a kernel of vLLM's."""
        return self.operator(  # type: ignore[no-any-return]
            x, layer.w13_weight, layer.w2_weight, topk_weights, topk_ids, **self.fixed
        )

    def examples(self) -> list[tuple[Any, ...]]:
        """Return one token for the first experts."""
        layer = self.layer
        w1, w2 = layer.w13_weight.data, layer.w2_weight.data
        x = torch.zeros(1, w1.shape[2], dtype=w1.dtype, device=w1.device)
        weights = torch.ones(1, layer.top_k, dtype=torch.float32, device=w1.device)
        ids = torch.arange(layer.top_k, dtype=torch.int32, device=w1.device).unsqueeze(0)
        return [(x, w1, w2, weights, ids)]

    def refuses(self) -> str | None:
        """Refuse what the operator has no arguments for, or vLLM's own kernels do themselves."""
        layer = self.layer
        moe = layer.moe_config
        parallel = moe.moe_parallel_config
        parameters = (
            *("swiglu_limit", "swiglu_alpha", "swiglu_beta"),
            *("activation_situ_beta", "activation_situ_linear_beta"),
        )
        is_padded = (
            moe.hidden_dim != moe.hidden_dim_unpadded
            or moe.intermediate_size_per_partition != moe.intermediate_size_per_partition_unpadded
        )
        reasons = {
            "expert parallelism is a part of vLLM's kernels": parallel.use_ep or layer.expert_map is not None,
            "the balancing of experts (EPLB) moves their weights": parallel.enable_eplb,
            "data, context and sequence parallelism are parts of vLLM's kernels": (
                parallel.dp_size > 1 or parallel.pcp_size > 1 or parallel.is_sequence_parallel
            ),
            "LoRA extends vLLM's kernels": moe.is_lora_enabled,
            "the operator has no biases": moe.has_bias,
            f"the operator has no activation {layer.activation.value!r}": (
                layer.activation.value not in ("silu", "gelu")
            ),
            "the operator's activation has no clamp and no parameters": any(
                getattr(one, name, None) is not None for one in (moe, layer) for name in parameters
            ),
            "shared experts are fused with them": moe.num_local_experts != moe.num_experts,
            "vLLM pads the weights for its kernel": is_padded,
            "the operator weights the input of one expert for each token only": (
                layer.apply_router_weight_on_input and layer.top_k != 1
            ),
        }
        return next((reason for reason, applies in reasons.items() if applies), None)


# -- the choice of a token's experts ----------------------------------------------


class ServedRunner(Served):
    """Decides for its router when it is built."""

    router: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        choose((GroupedRouter if _is_grouped(self.router) else Router)(self.router, self))


#: The routers that do what the two operators do. vLLM's router for CPUs does it all.
_ROUTERS = {
    f"{_PACKAGE}.router.{name}"
    for name in (
        "cpu_router.CPURouter",
        "fused_topk_router.FusedTopKRouter",
        "grouped_topk_router.GroupedTopKRouter",
    )
}


def _is_grouped(router: Any) -> bool:
    return type(router).__name__ == "GroupedTopKRouter" or bool(getattr(router, "use_grouped_topk", False))


class Router(Layer):
    """The router of a layer of experts, which chooses by the softmax of the logits.

    Its owner is the router, its layer the runner.
    """

    module = f"{_PACKAGE}.runner.moe_runner"
    class_name = "MoERunner"
    vllm_name = "MoERunner"
    op_name = "topk_softmax"
    when = ServedRunner
    attribute = "_compute_routing"

    def forward(
        self,
        hidden_states: Any,
        router_logits: torch.Tensor,
        indices_type: torch.dtype | None,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Make the tensors that the operator writes."""
        router, shape = self.owner, (router_logits.shape[0], self.owner.top_k)
        weights = router_logits.new_empty(shape, dtype=torch.float32)
        ids = router_logits.new_empty(shape, dtype=indices_type or torch.int32)
        rows = router_logits.new_empty(shape, dtype=torch.int32)
        return self.operator(weights, ids, rows, router_logits, router.renormalize)  # type: ignore[no-any-return]

    def native(
        self,
        topk_weights: torch.Tensor,
        topk_indices: torch.Tensor,
        token_expert_indices: Any,
        gating_output: torch.Tensor,
        renormalize: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy what vLLM returns into them."""
        # Of the hidden states it reads the number of rows; token_expert_indices has no reader.
        found = self.own(gating_output, gating_output, topk_indices.dtype)
        for written, result in zip((topk_weights, topk_indices), found, strict=True):
            written.copy_(result)
        return topk_weights, topk_indices

    def examples(self) -> list[tuple[Any, ...]]:
        """Return one token."""
        logits = self.logits()
        shape = (1, self.owner.top_k)
        ids = [logits.new_empty(shape, dtype=torch.int32) for _ in range(2)]
        return [(logits.new_empty(shape, dtype=torch.float32), *ids, logits, self.owner.renormalize)]

    def logits(self) -> torch.Tensor:
        """Return the logits of one token."""
        moe = self.layer.moe_config
        dtype = moe.router_logits_dtype or moe.in_dtype
        return torch.zeros(1, self.owner.global_num_experts, dtype=dtype, device=moe.device)

    def refuses(self) -> str | None:
        """Refuse what chooses in another way than the operators."""
        router = self.owner
        if f"{type(router).__module__}.{type(router).__qualname__}" not in _ROUTERS:
            return f"{type(router).__name__} chooses in a way of its own"

        def has(name: str) -> bool:
            return getattr(router, name, None) is not None

        reasons = {
            "the experts' kernel chooses itself": self.layer.routed_experts.quant_method.is_monolithic,
            "the balancing of experts (EPLB) replaces the chosen ones": has("eplb_state"),
            "a custom routing function chooses": has("custom_routing_function"),
            "a table of tokens chooses": has("_hash_indices_table"),
            "shared experts are chosen with them": getattr(router, "num_fused_shared_experts", 0),
            "rows of padding are masked": getattr(router, "skip_padding", False),
        }
        return next((reason for reason, applies in reasons.items() if applies), None) or self.refuses_scores()

    def refuses_scores(self) -> str | None:
        """Refuse other scores than the operator's."""
        router = self.owner
        if router.scoring_func != "softmax":
            return f"the operator has no scoring function {router.scoring_func!r}"
        if getattr(router, "e_score_correction_bias", None) is not None:
            return "the operator has no correction bias"
        return None


class GroupedRouter(Router):
    """The router that chooses groups of experts first."""

    op_name = "grouped_topk"

    def forward(
        self, hidden_states: Any, router_logits: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Make scores of the logits where they are a softmax."""
        return self.operator(*self.arguments(router_logits))  # type: ignore[no-any-return]

    def arguments(self, logits: torch.Tensor) -> tuple[Any, ...]:
        """Return the operator's arguments for some logits."""
        router, scores, is_sigmoid = self.owner, logits, 1
        if router.scoring_func == "softmax":
            scores, is_sigmoid = logits.float().softmax(-1), 0
        bias = router.e_score_correction_bias
        if bias is None:
            bias = scores.new_zeros(scores.shape[-1], dtype=torch.float32)
        groups = (router.num_expert_group, router.topk_group, router.top_k)
        return (scores, *groups, router.renormalize, router.routed_scaling_factor, bias, is_sigmoid)

    def native(  # type: ignore[override]
        self,
        scores: torch.Tensor,
        n_group: int,
        topk_group: int,
        topk: int,
        renormalize: bool,
        routed_scaling_factor: float,
        bias: torch.Tensor,
        scoring_func: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Make logits of the scores: the softmax of the logarithm of a softmax is that softmax."""
        logits = scores if scoring_func else scores.log()
        weights, ids = self.own(logits, logits, None)
        # What a compiler takes the operator's results for.
        return weights.to(torch.float32), ids.to(torch.int32)

    def examples(self) -> list[tuple[Any, ...]]:
        """Return one token."""
        return [self.arguments(self.logits())]

    def refuses_scores(self) -> str | None:
        """Refuse other scores than the operator's, and groups that it chooses otherwise."""
        router = self.owner
        if router.scoring_func not in ("softmax", "sigmoid"):
            return f"the operator has no scoring function {router.scoring_func!r}"
        groups, experts = router.num_expert_group, router.global_num_experts
        if experts <= groups or experts % groups:
            return f"{experts} experts do not make {groups} groups"
        if router.e_score_correction_bias is None and router.topk_group != groups:
            return (
                "without a correction bias vLLM goes by the best expert of a group, the operator by its "
                "two best"
            )
        return None


LAYERS: tuple[type[Layer], ...] = (Experts, Router)

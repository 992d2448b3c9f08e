"""The operators: one method each, its docstring the contract.

An operator is declared once, here. Its name is the method's name and its
signature the schema; ``@operator`` carries what a signature cannot say. The
check of a backend's signature, the torch schema, the result's shape for tracing
and the documentation's table are derived from it. A plugin declares an operator
of its own in the same way and gives it to the registry::

    @operator(fake=lambda torch, x: torch.empty_like(x))
    def relu_squared(self, x: Tensor) -> Tensor:
        \"\"\"Return ``relu(x) ** 2``; x: T[...].\"\"\"

    registry.declare(relu_squared)

Rules for every implementation: accumulate in float32 or wider and round once to
the output's dtype; take any leading shape and any stride unless the contract
says otherwise; return tensors that are contiguous and none of the arguments,
unless the contract says that an argument is written; keep no value of an argument
and no result for a later call; leave the process's settings alone. ``T[...]`` is a tensor and
its shape, ``!`` an argument that may be written.

This is the only module of the core that knows an operator's name.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.dispatch.declaration import TorchForm
from vllm_fl.dispatch.declaration import declaration_of
from vllm_fl.dispatch.declaration import operator
from vllm_fl.dispatch.fakes import aligned_blocks
from vllm_fl.dispatch.fakes import chosen_of_each_row
from vllm_fl.dispatch.fakes import contiguous_like
from vllm_fl.dispatch.fakes import half_of_the_last
from vllm_fl.dispatch.fakes import one_or_with_the_sum
from vllm_fl.dispatch.fakes import quantized

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TypeAlias

    from vllm_fl.dispatch.declaration import Operator

    Tensor: TypeAlias = Any  # torch.Tensor; the core imports no torch


class Operators(abc.ABC):  # noqa: B024 - a backend overrides what it offers
    """Every operator that the core declares. A backend overrides those that it offers."""

    @operator(fake=half_of_the_last)
    def silu_and_mul(self, x: Tensor) -> Tensor:
        """Return ``silu(x[..., :d]) * x[..., d:]``.

        Args:
            x: T[..., 2d], floating.

        Returns:
            T[..., d], new, x's dtype.

        Source: SwiGLU, Shazeer 2020, arXiv:2002.05202.
        """
        raise NotImplementedError

    @operator(fake=half_of_the_last)
    def gelu_and_mul(self, x: Tensor, approximate: str = "none") -> Tensor:
        """Return ``gelu(x[..., :d]) * x[..., d:]``.

        Args:
            x: T[..., 2d], floating.
            approximate: ``"none"`` for the error function, ``"tanh"`` for its
                approximation.

        Returns:
            T[..., d], new, x's dtype.

        Raises:
            ValueError: another ``approximate``.

        Source: GEGLU, Shazeer 2020, arXiv:2002.05202.
        """
        raise NotImplementedError

    @operator(
        mutates=("x", "residual"),
        fake=one_or_with_the_sum,
        forms=(
            TorchForm("rms_norm", fixed={"residual": None}),
            TorchForm("add_rms_norm", "(Tensor, Tensor)", present=("residual",), donated=("x", "residual")),
        ),
    )
    def rms_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor | None, epsilon: float
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Normalise by the root mean square of the last dimension.

        ``y = x / sqrt(mean(x ** 2) + epsilon)``, in float32; then
        ``(y.to(weight.dtype) * weight).to(x.dtype)``.

        Args:
            x!: T[..., h], floating. Untouched where residual is None; donated
                otherwise: it may be reused, the caller uses what is returned.
            residual!: T[..., h] or None; added to x first. The float32 sum is
                normalised, the returned one is rounded to x's dtype. Donated.
            weight: T[h] or None, which means ones. Its dtype may differ from x's.
            epsilon: added to the mean square.

        Returns:
            Where residual is None: T[..., h], new, x's dtype. Otherwise the pair
            (normed, x + residual), of x's dtype.

        Source: Zhang and Sennrich 2019, arXiv:1910.07467.
        """
        raise NotImplementedError

    @operator(
        mutates=("query", "key"),
        hints=("cos_sin_cache",),
        fake=lambda torch, query, key, *_: (
            contiguous_like(torch, query),
            None if key is None else contiguous_like(torch, key),
        ),
        forms=(
            TorchForm(
                "rotary_embedding",
                fixed={"inplace": True},
                in_place=("query", "key"),
                result=("query", "key"),
            ),
        ),
    )
    def rotary_embedding(
        self,
        query: Tensor,
        key: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        position_ids: Tensor | None,
        rotary_interleaved: bool = False,
        inplace: bool = True,
        cos_sin_cache: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Rotate the first ``rot`` elements of every head by its position.

        With ``(a, b)`` the two elements of a pair, ``(a cos - b sin, b cos + a
        sin)``, in float32 and rounded once. Pairs are ``(i, i + rot / 2)``, or
        ``(2i, 2i + 1)`` where rotary_interleaved. What lies beyond ``rot`` passes
        through to the bit.

        Args:
            query!: T[n, heads, head], often a strided view of a fused qkv.
            key!: T[n, kv_heads, head] or None.
            cos: T[max, rot / 2], often a strided view.
            sin: T[max, rot / 2].
            position_ids: T[n], int32 or int64, rows of cos and sin; None means
                that cos and sin already hold one row per token.
            rotary_interleaved: the style of the pairs.
            inplace: write query and key; else they are untouched and the result
                is new.
            cos_sin_cache: T[max, rot], the packed table that cos and sin are
                halves of, where the caller has one: a kernel that wants it whole
                takes it without a copy.

        Returns:
            (query, key): the arguments themselves where inplace, else new.

        Source: RoFormer, Su et al. 2021, arXiv:2104.09864.
        """
        raise NotImplementedError

    @operator(hints=("selector",), forms=())
    def attention_backend(
        self, use_mla: bool = False, use_sparse: bool = False, *, selector: Any = None
    ) -> str | None:
        """Return the dotted path of a vLLM attention backend class.

        Args:
            use_mla: the model uses multi-head latent attention.
            use_sparse: the model uses sparse attention.
            selector: vLLM's ``AttentionSelectorConfig`` when vLLM asks. A backend
                that the user chose explicitly is never overridden.

        Returns:
            A path, or None for vLLM's own choice.

        Raises:
            NotImplementedError: what the selector asks for and the class lacks.
        """
        raise NotImplementedError

    @operator(
        mutates=("topk_weights", "topk_indices", "token_expert_indices"),
        forms=(
            TorchForm(
                "topk_softmax",
                in_place=("topk_weights", "topk_indices", "token_expert_indices"),
                result=("topk_weights", "topk_indices"),
            ),
        ),
        selector="gating_output",
    )
    def topk_softmax(
        self,
        topk_weights: Tensor,
        topk_indices: Tensor,
        token_expert_indices: Tensor,
        gating_output: Tensor,
        renormalize: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Softmax over the experts, then the k largest of each row.

        Args:
            topk_weights!: T[n, k], float32; written with the weights, in falling
                order.
            topk_indices!: T[n, k], int32, int64 or uint32; written with the experts,
                and of a row with a NaN with any that exist.
            token_expert_indices!: T[n, k], int32; written with ``slot * n + row``.
            gating_output: T[n, e], floating.
            renormalize: divide each row's weights by their sum.

        Returns:
            (topk_weights, topk_indices), the arguments.
        """
        raise NotImplementedError

    @operator(fake=chosen_of_each_row)
    def grouped_topk(
        self,
        scores: Tensor,
        n_group: int,
        topk_group: int,
        topk: int,
        renormalize: bool,
        routed_scaling_factor: float,
        bias: Tensor,
        scoring_func: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Choose topk experts from the topk_group best groups.

        A group's score is the sum of its two largest ``score + bias``; experts
        are chosen by ``score + bias`` and weighted by ``score`` alone.

        Args:
            scores: T[n, e], floating.
            n_group: number of groups; divides e.
            topk_group: groups that are kept.
            topk: experts per row.
            renormalize: divide each row's weights by their sum.
            routed_scaling_factor: multiplies the weights.
            bias: T[e], the correction of the scores.
            scoring_func: 0 where scores are final, 1 for their sigmoid.

        Returns:
            (weights T[n, topk] float32, indices T[n, topk] int32), new.

        Source: DeepSeek-V3, arXiv:2412.19437, section 2.1.2.
        """
        raise NotImplementedError

    @operator(fake=aligned_blocks, forms=(TorchForm("moe_align_block_size", "(Tensor, Tensor, Tensor)"),))
    def moe_align_block_size(
        self,
        topk_ids: Tensor,
        block_size: int,
        num_experts: int,
        expert_map: Tensor | None = None,
        pad_sorted_ids: bool = False,
        ignore_invalid_experts: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sort the (token, slot) pairs by expert, each expert padded to whole blocks.

        Args:
            topk_ids: T[n, k], int32 or int64.
            block_size: rows of a block.
            num_experts: number of experts that topk_ids names.
            expert_map: T[num_experts] int32: the local expert, or -1; applied to
                the experts of the blocks.
            pad_sorted_ids: round the length of sorted_ids up to whole blocks.
            ignore_invalid_experts: leave out pairs whose expert maps to -1.

        Returns:
            sorted_ids int32[m]: indices into the flattened topk_ids, in any order
            inside an expert, filled with ``n * k`` where there is none; m is
            ``n * k + num_experts * (block_size - 1)``, at most ``n * k *
            block_size`` where ``n * k < num_experts``. expert_ids
            int32[ceil(m / block_size)]: the expert of each block (what expert_map
            says of it), defined for the blocks that are used.
            num_tokens_post_pad int32[1]: the rows that are used.
        """
        raise NotImplementedError

    @operator(
        mutates=("out",),
        forms=(TorchForm("moe_sum", in_place=("out",), result=("out",)),),
    )
    def moe_sum(self, inp: Tensor, out: Tensor) -> Tensor:
        """Add up the experts' results of every token.

        Args:
            inp: T[n, k, h], floating.
            out!: T[n, h], inp's dtype; written with the sum over k.

        Returns:
            out.
        """
        raise NotImplementedError

    @operator(
        fake=contiguous_like,
        native_prepares=True,
    )
    def fused_experts(
        self,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        *,
        activation: str = "silu",
        apply_router_weight_on_input: bool = False,
        global_num_experts: int = -1,
        expert_map: Tensor | None = None,
    ) -> Tensor:
        """Run every token through its experts and add their weighted results.

        For each of a token's experts ``e``: ``w2[e] @ act(w1[e] @ x)``, where act
        is the gated activation of the first and second half. What act gives and each
        expert's result may be rounded to hidden_states' dtype in between.

        Args:
            hidden_states: T[n, h], floating.
            w1: T[e, 2i, h], gate and up projection.
            w2: T[e, h, i], down projection.
            topk_weights: T[n, k], floating.
            topk_ids: T[n, k], int32 or int64.
            activation: ``"silu"`` or ``"gelu"`` (with the error function).
            apply_router_weight_on_input: multiply x by the weight and not the
                result; k is 1 then.
            global_num_experts: experts that topk_ids names; -1 means e.
            expert_map: T[global_num_experts] int32: the local expert, or -1 for
                one that is elsewhere and adds nothing.

        Returns:
            T[n, h], new, hidden_states' dtype.

        Raises:
            NotImplementedError: an activation that the implementation lacks.
        """
        raise NotImplementedError

    @operator(fake=quantized("int8"))
    def dynamic_per_token_quant_int8(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Quantise each row symmetrically to int8.

        ``scale = max(abs(row)) / 127``, ``q = round_half_even(row / scale)``.

        Args:
            x: T[n, h], floating.

        Returns:
            (int8 T[n, h], float32 scales T[n, 1]), new. A row of zeros gives
            zeros and a finite scale that is not 0.
        """
        raise NotImplementedError

    @operator(fake=quantized("float8_e4m3fn"))
    def dynamic_per_token_quant_fp8(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Quantise each row to float8_e4m3fn.

        ``scale = max(max(abs(row)) / 448, 1 / (448 * 512))``,
        ``q = clamp(row / scale, -448, 448)``.

        Args:
            x: T[n, h], floating.

        Returns:
            (float8_e4m3fn T[n, h], float32 scales T[n, 1]), new.
        """
        raise NotImplementedError


def _declared() -> dict[str, Operator]:
    found = {}
    for method in vars(Operators).values():
        declaration = declaration_of(method)
        if declaration is not None:
            found[declaration.name] = declaration
    return found


#: Every operator that the core declares, by name.
OPERATORS: Mapping[str, Operator] = _declared()

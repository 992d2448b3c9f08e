"""Tiny random checkpoints, with the tokens that transformers generates from them.

The weights are random but large (``initializer_range`` 0.3, and norm weights that
are not all equal), so that a fault in any layer changes the greedy tokens. With
dummy or small weights even a wrong activation by a factor of three changes none.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import shutil
import sys
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING
from typing import Any
from typing import Final
from uuid import uuid4

if TYPE_CHECKING:
    from pathlib import Path

GOLDEN_FILE: Final = "golden.json"
NEW_TOKENS: Final = 16
VOCABULARY: Final = 512

#: The best logit is above the second by at least this much at every golden token,
#: so that float32 rounding, about 1e-4 here, cannot change one.
SMALLEST_MARGIN: Final = 2e-2

_COMMON: Final[dict[str, Any]] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}
_LLAMA3_ROPE: Final[dict[str, Any]] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # Short, so that the scaling already matters within the few tokens of a test.
    "original_max_position_embeddings": 64,
}

_LATENT: Final[dict[str, Any]] = {
    **{name: value for name, value in _COMMON.items() if name != "head_dim"},
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "q_lora_rank": None,
    # Their sum is 576, the one that vLLM has a CPU kernel for.
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """What one checkpoint is made of: the classes of transformers, and its configuration."""

    config_class: str
    model_class: str
    config: dict[str, Any]


RECIPES: Final[dict[str, Recipe]] = {
    # SiluAndMul, RMSNorm also on heads, plain rotary.
    "qwen3": Recipe("Qwen3Config", "Qwen3ForCausalLM", {**_COMMON, "tie_word_embeddings": False}),
    # The same, then a layer of eight experts, two for each token. The first layer stays
    # dense: experts do not use the SiluAndMul layer.
    "qwen3_moe": Recipe(
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {
            **_COMMON,
            "tie_word_embeddings": False,
            "moe_intermediate_size": 64,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
        },
    ),
    # Llama3RotaryEmbedding.
    "llama": Recipe(
        "LlamaConfig",
        "LlamaForCausalLM",
        {**_COMMON, "tie_word_embeddings": False, "rope_parameters": _LLAMA3_ROPE},
    ),
    # GemmaRMSNorm and GeluAndMul with the tanh approximation.
    "gemma": Recipe(
        "GemmaConfig",
        "GemmaForCausalLM",
        {**_COMMON, "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"},
    ),
    # Latent attention: rotary queries that are a slice of every head, and a key of one head.
    "deepseek_v2": Recipe(
        "DeepseekV2Config", "DeepseekV2ForCausalLM", {**_LATENT, "first_k_dense_replace": 2}
    ),
    "glm4_moe_lite": Recipe(
        "Glm4MoeLiteConfig",
        "Glm4MoeLiteForCausalLM",
        # vLLM takes no model of this kind without experts.
        {**_LATENT, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    ),
}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint on disk and what a right engine generates from it."""

    name: str
    path: Path
    prompts: tuple[tuple[int, ...], ...]
    #: Greedy tokens for each prompt, by transformers in float32.
    golden: tuple[tuple[int, ...], ...]
    #: The smallest distance between the two best logits over all golden tokens.
    margin: float


def build(name: str, root: Path) -> Checkpoint:
    """Return the checkpoint; make it under ``root`` if this recipe's is not there yet."""
    folder = root / f"{name}-{_digest(name)}"
    if not (folder / GOLDEN_FILE).exists():
        root.mkdir(parents=True, exist_ok=True)
        temporary = root / f".{folder.name}.{uuid4().hex[:8]}.tmp"
        try:
            _make(RECIPES[name], temporary)
            try:
                temporary.replace(folder)
            except OSError:
                # Another process was faster; both made the same.
                if not (folder / GOLDEN_FILE).exists():
                    raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    golden = json.loads((folder / GOLDEN_FILE).read_text())
    return Checkpoint(
        name=name,
        path=folder,
        prompts=tuple(map(tuple, golden["prompts"])),
        golden=tuple(map(tuple, golden["tokens"])),
        margin=golden["margin"],
    )


def _digest(name: str) -> str:
    """Identify the recipe, the code that follows it, and what computes the golden tokens."""
    parts = [
        repr(RECIPES[name]),
        inspect.getsource(sys.modules[__name__]),
        metadata.version("transformers"),
        metadata.version("torch"),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:10]


def _prompts() -> list[list[int]]:
    """Four prompts of different lengths; a plain recurrence, so that no library decides them."""
    prompts = []
    token = 7
    for length in (3, 8, 17, 40):
        prompt = []
        for _ in range(length):
            token = (token * 137 + 71) % (VOCABULARY - 3)
            # 0 to 2 are padding, begin and end.
            prompt.append(token + 3)
        prompts.append(prompt)
    return prompts


def _make(recipe: Recipe, folder: Path) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    prompts = _prompts()
    for seed in range(64):
        model = _random_model(recipe, seed)
        tokens, margin = _generate(model, prompts)
        if margin >= SMALLEST_MARGIN:
            break
    else:
        msg = f"no seed gives {recipe.model_class} a margin of {SMALLEST_MARGIN}"
        raise RuntimeError(msg)
    model.save_pretrained(folder)
    golden = {"seed": seed, "margin": margin, "prompts": prompts, "tokens": tokens}
    # Last: the folder is whole if this file is there.
    (folder / GOLDEN_FILE).write_text(json.dumps(golden) + "\n")


def _random_model(recipe: Recipe, seed: int) -> Any:
    import torch
    import transformers

    # The caller's own random numbers stay as they were.
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = getattr(transformers, recipe.config_class)(**recipe.config)
        model = getattr(transformers, recipe.model_class)(config).float().eval()
        with torch.no_grad():
            for key, weight in model.named_parameters():
                # All ones (Gemma: all zeros) would hide a norm that ignores its weight.
                if key.endswith("norm.weight"):
                    weight.add_(torch.randn_like(weight) * 0.3)
    return model


def _generate(model: Any, prompts: list[list[int]]) -> tuple[list[list[int]], float]:
    import torch

    tokens = []
    margins = []
    for prompt in prompts:
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens.append(out.sequences[0, len(prompt) :].tolist())
        best = torch.stack(out.logits).topk(2).values
        margins.append(float((best[..., 0] - best[..., 1]).min()))
    return tokens, min(margins)

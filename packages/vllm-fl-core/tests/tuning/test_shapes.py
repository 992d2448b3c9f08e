"""Where shapes come from: a model, a trace, a file, and the default list."""

from __future__ import annotations

import json

import pytest

from vllm_fl.dispatch import trace
from vllm_fl.tuning import models
from vllm_fl.tuning.shapes import SIZES
from vllm_fl.tuning.shapes import ShapesError
from vllm_fl.tuning.shapes import family
from vllm_fl.tuning.shapes import from_file

QWEN3_MOE = {
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
DEEPSEEK = {
    **QWEN3_MOE,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "n_routed_experts": 256,
    "n_group": 8,
    "topk_group": 4,
    "num_experts": None,
}


def of_model(tmp_path, config, dtype=None):
    (tmp_path / "config.json").write_text(json.dumps(config))
    return models.from_model(tmp_path, dtype).families


def test_a_model(tmp_path):
    assert of_model(tmp_path, QWEN3_MOE) == (
        family("rms_norm", "contiguous+residual", last=2048),
        family("rms_norm", last=2048),
        # Views of the fused projection of 40 heads.
        family("rms_norm", "strided", last=128, heads=32, room=40 * 128),
        family("rms_norm", "strided", last=128, heads=4, room=40 * 128),
        family("rotary_embedding", "strided", last=128, heads=32, kv_heads=4),
        family("silu_and_mul", last=2 * 6144),
        family("topk_softmax", last=128, k=8),
        family("moe_align_block_size", last=8, experts=128),
        family("moe_sum", last=2048, k=8),
        family("fused_experts", last=2048, inner=768, experts=128, k=8),
    )


def test_latent_attention_and_groups(tmp_path):
    found = of_model(tmp_path, DEEPSEEK)
    room = 1536 + 512 + 64
    assert family("rms_norm", "strided", last=512, room=room) in found
    rotary = {"last": 64, "heads": 32, "kv_heads": 1, "room": 192, "interleaved": True}
    assert family("rotary_embedding", "strided", **rotary) in found
    assert family("grouped_topk", last=256, k=8, groups=8, kept=4) in found
    assert "topk_softmax" not in {one.op for one in found}


_ROTARY = {"heads": 32, "kv_heads": 4}
_EXPERTS = {"last": 2048, "experts": 128, "k": 8}


@pytest.mark.parametrize(
    ("changes", "has", "lacks"),
    [
        (
            {"hidden_act": "gelu_pytorch_tanh"},
            family("gelu_and_mul", last=12288, approximate="tanh"),
            "silu_and_mul",
        ),
        ({"moe_intermediate_size": None}, ("fused_experts", {**_EXPERTS, "inner": 6144}), "silu_and_mul"),
        ({"num_experts": 0}, family("silu_and_mul", last=12288), "fused_experts"),
        ({"quantization_config": {"bits": 8}}, family("dynamic_per_token_quant_int8", last=2048), None),
        ({"partial_rotary_factor": 0.5}, ("rotary_embedding", {"last": 128, **_ROTARY, "rotary": 64}), None),
        ({"head_dim": None}, ("rotary_embedding", {"last": 64, **_ROTARY}), None),
        ({"torch_dtype": "float16"}, family("rms_norm", dtype="float16", last=2048), None),
    ],
)
def test_what_a_configuration_says(tmp_path, changes, has, lacks):
    found = of_model(tmp_path, {**QWEN3_MOE, **changes})
    same = [one for one in found if (one.op, dict(one.sizes)) == has]
    assert has in found or same
    assert lacks not in {one.op for one in found}


def test_a_model_of_text_and_images_and_another_dtype(tmp_path):
    found = of_model(tmp_path, {"text_config": QWEN3_MOE, "vision_config": {}}, "float32")
    assert {one.dtype for one in found} == {"float32"}


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"hidden_size": 8}', '{"hidden_size": "x"}'])
def test_what_is_no_configuration(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ShapesError, match=r"config\.json"):
        models.from_model(tmp_path, None)


def test_an_activation_that_no_operator_has_is_said(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3_MOE, "hidden_act": "relu2"}))
    assert "no operator has the activation 'relu2'" in models.from_model(tmp_path, None).notes[0]


def test_the_default_list_has_every_operator():
    for is_small in (False, True):
        assert {one.op for one in models.usual("float16", is_small=is_small).families} == {*SIZES}


def test_a_trace(tmp_path, monkeypatch):
    """What a run of real tensors recorded comes back as its shapes, with their tokens."""
    torch = pytest.importorskip("torch")
    monkeypatch.setenv("VLLM_FL_TRACE_DIR", str(tmp_path))
    monkeypatch.setenv("VLLM_FL_TRACE_RUN", "20260101T000000.000000-01234567")

    def called(op, *args):
        trace.recorded(op, "reference.torch", lambda *args: None)(*args)

    def ones(*shape, dtype=torch.bfloat16):
        return torch.ones(shape, dtype=dtype)

    for tokens in (1, 7):
        called("silu_and_mul", ones(tokens, 64))
    called("gelu_and_mul", ones(2, 64), "tanh")
    called("rms_norm", ones(7, 32), ones(7, 32), ones(32), 1e-6)
    called("rms_norm", ones(7, 4, 16), None, ones(16), 1e-6)
    cos = ones(9, 8)
    called("rotary_embedding", ones(7, 4, 16), ones(7, 2, 16), cos, cos, torch.arange(7), False, True, None)
    ids = ones(7, 2, dtype=torch.int32)
    called("topk_softmax", ones(7, 2, dtype=torch.float32), ids, ids, ones(7, 8), True)
    called("grouped_topk", ones(7, 16), 4, 2, 3, True, 1.0, ones(16), 1)
    called("moe_align_block_size", ids, 16, 8, None, False, False)
    called("moe_sum", ones(7, 2, 32), ones(7, 32))
    called("fused_experts", ones(7, 32), ones(8, 24, 32), ones(8, 32, 12), ones(7, 2), ids)
    called("dynamic_per_token_quant_fp8", ones(7, 32))
    called("silu_and_mul", "no tensor")
    called("something_else", ones(7, 32))
    trace.recorder().write()
    selection = models.from_trace(tmp_path)
    found = {(one.op, one.sizes, one.layout): one.tokens for one in selection.families}
    assert found == {
        (one.op, one.sizes, one.layout): tokens
        for one, tokens in (
            (family("silu_and_mul", last=64), (1, 7)),
            (family("gelu_and_mul", last=64, approximate="tanh"), (2,)),
            (family("rms_norm", "contiguous+residual", last=32), (7,)),
            (family("rms_norm", "strided", last=16, heads=4, room=192), (7,)),
            (family("rotary_embedding", "strided", last=16, heads=4, kv_heads=2), (7,)),
            (family("topk_softmax", last=8, k=2), (7,)),
            (family("grouped_topk", last=16, k=3, groups=4, kept=2), (7,)),
            (family("moe_align_block_size", last=2, block=16, experts=8), (7,)),
            (family("moe_sum", last=32, k=2), (7,)),
            (family("fused_experts", last=32, inner=12, experts=8, k=2), (7,)),
            (family("dynamic_per_token_quant_fp8", last=32), (7,)),
        )
    }
    assert len(selection.notes) == 2


def test_a_folder_without_a_trace(tmp_path):
    with pytest.raises(ShapesError, match="no "):
        models.from_trace(tmp_path)


FILE = """
rows: [16, 1, 16]
dtype: float16
shapes:
  silu_and_mul: [{last: 64}, {last: 64}]
  rms_norm:
    - {last: 32, layout: contiguous+residual, dtype: float32}
"""


def test_a_file(tmp_path):
    (tmp_path / "shapes.yaml").write_text(FILE)
    selection = from_file(tmp_path / "shapes.yaml", "bfloat16")
    assert selection.rows == (1, 16)
    assert selection.families == (
        family("silu_and_mul", dtype="float16", last=64),
        family("rms_norm", "contiguous+residual", "float32", last=32),
    )


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("shapes: {", 1, "invalid YAML"),
        ("- 1", 1, "must be a mapping"),
        ("rows: [1]", 1, "shapes is missing"),
        ("row: [1]\nshapes: {}", 1, "Did you mean 'rows'?"),
        ("rows: [0]\nshapes: {}", 1, "rows must be"),
        ("shapes:\n  silu_and_mull: [{last: 4}]", 2, "Did you mean 'silu_and_mul'?"),
        ("shapes:\n  silu_and_mul: {last: 4}", 2, "must be a list"),
        ("shapes:\n  silu_and_mul:\n    - {lasst: 4}", 3, "Did you mean 'last'?"),
        ("shapes:\n  silu_and_mul:\n    - {}", 3, "silu_and_mul lacks last"),
        ("shapes:\n  silu_and_mul:\n    - {last: 0}", 3, "last of silu_and_mul cannot be 0"),
        ("shapes:\n  silu_and_mul:\n    - {last: true}", 3, "last of silu_and_mul cannot be True"),
        ("shapes:\n  silu_and_mul:\n    - {last: 4, layout: strided}", 3, "must be one of contiguous"),
        ("shapes:\n  silu_and_mul:\n    - {last: 4, dtype: float61}", 3, "Did you mean 'float16'?"),
        ("shapes:\n  silu_and_mul:\n    - {last: 4, last: 5}", 3, "stand once"),
    ],
)
def test_a_wrong_file(tmp_path, text, line, said):
    path = tmp_path / "shapes.yaml"
    path.write_text(text)
    with pytest.raises(ShapesError) as caught:
        from_file(path, "bfloat16")
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert said in str(caught.value)

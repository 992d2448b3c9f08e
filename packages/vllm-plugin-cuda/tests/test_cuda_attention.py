"""Attention: vLLM's own choice, and the user's."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

import torch
from vllm.config import AttentionConfig
from vllm.config import VllmConfig
from vllm.config import set_current_vllm_config
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.selector import AttentionSelectorConfig

from vllm_fl_cuda.cuda import CudaBackend

if current_platform.is_cuda():
    pytest.skip("these are a CPU's answers", allow_module_level=True)


@pytest.fixture
def ask():
    return CudaBackend("cpu").attention_backend


def selector(**changes):
    fields = {"head_size": 64, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": None}
    return AttentionSelectorConfig(**(fields | changes))


def test_it_is_vllms_own_choice(ask):
    for use_mla in (False, True):
        path = ask(use_mla=use_mla)
        assert path == current_platform.get_attn_backend_cls(None, selector(use_mla=use_mla))
        assert isinstance(resolve_obj_by_qualname(path), type)
    assert ask(use_mla=True) != ask()


def test_vllms_selector_is_passed_on_as_it_is(ask, monkeypatch):
    seen = []
    own = current_platform.get_attn_backend_cls

    def recorded(selected, config, num_heads=None):
        seen.append((selected, config))
        return own(selected, config, num_heads)

    monkeypatch.setattr(type(current_platform), "get_attn_backend_cls", staticmethod(recorded))
    wanted = selector(use_mla=True, head_size=576)
    assert ask(selector=wanted) == own(None, wanted)
    assert seen == [(None, wanted)]
    assert seen[0][1] is wanted


def test_what_vllm_has_not_is_vllms_to_say(ask):
    """A CPU has no sparse attention."""
    with pytest.raises(NotImplementedError, match="Sparse Attention is not supported on CPU"):
        ask(use_mla=True, use_sparse=True)
    assert ask() is not None


@pytest.mark.parametrize(
    "chosen",
    [{"backend": "CPU_ATTN"}, {"backend_per_kind": {"full_attention": "CPU_ATTN"}}],
    ids=["one for all", "one for a kind"],
)
def test_the_users_choice_stands(ask, chosen):
    with set_current_vllm_config(VllmConfig(attention_config=AttentionConfig(**chosen))):
        assert ask() is None
        assert ask(selector=selector()) is None
    with set_current_vllm_config(VllmConfig()):
        assert ask() is not None


def test_a_platform_that_asks_back_gets_none(ask, monkeypatch):
    """The platform's method may be what asks for the operator."""
    own = current_platform.get_attn_backend_cls
    answers = []

    def hooked(selected, config, num_heads=None):
        answers.append(ask(selector=config))
        return answers[-1] or own(selected, config, num_heads)

    monkeypatch.setattr(type(current_platform), "get_attn_backend_cls", staticmethod(hooked))
    assert current_platform.get_attn_backend_cls(None, selector()) == own(None, selector())
    assert answers == [None, own(None, selector())]

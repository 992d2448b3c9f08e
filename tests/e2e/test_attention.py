"""Who serves vLLM's attention, decided when it selects a backend, and what is said of who does not."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING
from typing import Any

import pytest
from engine import run_vllm
from evidence import PLUGINS

if TYPE_CHECKING:
    from collections.abc import Callable

    from checkpoints import Checkpoint
    from evidence import Evidence

#: What each answer of the plug-in is passed over for; None where it serves.
_REASONS = {
    "Fits": None,
    "NoHeads": "head_size not supported",
    "OldBuilder": "Builder.build does not take fast_build",
    "OldQuestions": None,
    "None": "it leaves the choice to vLLM",
    "None for this": "head_size not supported",
    "refuses": "the chip has no attention of this kind",
}


@pytest.fixture
def select(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str | None]:
    """Return a function that selects as vLLM does, with an answer of the plug-in and an order."""
    from vllm.v1.attention.selector import AttentionSelectorConfig

    from vllm_fl.dispatch import OpManager
    from vllm_fl.dispatch import OpRegistry
    from vllm_fl.dispatch import SelectionPolicy
    from vllm_fl.dispatch import policy_context
    from vllm_fl.integration import attention

    monkeypatch.syspath_prepend(str(PLUGINS))
    plugin = importlib.import_module("attention_vendor")
    registry = OpRegistry()
    plugin.register_builtins(registry)
    manager = OpManager(registry)
    monkeypatch.setattr(attention, "get_default_manager", lambda: manager)
    monkeypatch.setattr(attention.logger, "propagate", True)

    def select(answer: str, *order: str, **changes: Any) -> str | None:
        import torch

        monkeypatch.setenv("ATTENTION_VENDOR", answer)
        asked = {"head_size": 32, "dtype": torch.float32, "kv_cache_dtype": "auto", "block_size": None}
        config = changes.pop("config", AttentionSelectorConfig)(**{**asked, **changes})
        with policy_context(SelectionPolicy.from_dict(per_op_order={"attention_backend": list(order)})):
            return attention.choose(config)

    yield select
    sys.modules.pop("attention_vendor", None)


@pytest.mark.parametrize("answer", _REASONS)
def test_vllms_own_takes_over(
    select: Callable[..., str | None], caplog: pytest.LogCaptureFixture, answer: str
) -> None:
    caplog.set_level("INFO", logger="vllm.plugins.vllm_fl")
    path, reason = select(answer, "vendor", "native"), _REASONS[answer]
    if reason is None:
        assert path == f"attention_vendor.{answer}"
        assert f"Attention is served by vendor.attention (attention_backend, plain): {path}" in caplog.text
        return
    assert path is None
    said = [record.getMessage() for record in caplog.records]
    (line,) = [one for one in said if one.startswith("vllm-fl: no attention of")]
    assert "vendor.attention" in line
    assert reason in line
    assert line.endswith("vLLM chooses the attention")


@pytest.mark.parametrize("answer", [*(name for name, reason in _REASONS.items() if reason), "dies"])
def test_where_the_policy_leaves_nothing_else(select: Callable[..., str | None], answer: str) -> None:
    """The reasons are the error, and nothing else is taken instead."""
    from vllm_fl.dispatch import NoImplementationError

    reason = "the driver is gone" if answer == "dies" else _REASONS[answer]
    with pytest.raises(NoImplementationError) as caught:
        select(answer, "vendor")
    assert str(reason) in str(caught.value)
    assert "native" in str(caught.value)


def test_a_predicate_says_why(select: Callable[..., str | None], caplog: pytest.LogCaptureFixture) -> None:
    assert select("Fits", "vendor", "native", use_mla=True) is None
    assert "no attention of vendor.attention: there is no latent attention on this chip" in caplog.text


def test_a_field_of_a_later_vllm(select: Callable[..., str | None], caplog: pytest.LogCaptureFixture) -> None:
    """A class that has never heard of it is right while nothing is asked for."""
    from typing import NamedTuple

    from vllm.v1.attention.selector import AttentionSelectorConfig

    fields = dict.fromkeys(AttentionSelectorConfig._fields, Any)
    later = NamedTuple("Later", [*fields.items(), ("use_dreams", bool)])
    defaults = AttentionSelectorConfig._field_defaults

    def made(**values: Any) -> Any:
        return later(**{"use_dreams": False, **defaults, **values})

    assert select("OldQuestions", "vendor", "native", config=made) == "attention_vendor.OldQuestions"
    assert select("OldQuestions", "vendor", "native", config=made, use_dreams=True) is None
    assert "it does not know use_dreams" in caplog.text


def test_a_platform_that_is_asked_by_the_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers itself: the implementation is not asked again, and nothing is said of it."""
    from types import SimpleNamespace

    from vllm_fl.integration import attention

    asked: list[str] = []

    class Platform:
        @classmethod
        def get_attn_backend_cls(cls, selected: Any, config: Any, num_heads: Any = None) -> str:
            return "vllm.Own"

    def chosen(config: Any) -> str:
        asked.append("once")
        return Platform.get_attn_backend_cls(None, config)

    monkeypatch.setattr("vllm.platforms._current_platform", Platform())
    monkeypatch.setattr(attention, "choose", chosen)
    attention.install()
    assert Platform.get_attn_backend_cls(None, SimpleNamespace()) == "vllm.Own"
    assert asked == ["once"]
    assert Platform.get_attn_backend_cls(None, SimpleNamespace()) == "vllm.Own"
    assert asked == ["once"] * 2


# -- in vLLM -------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", ["Fits", "OldBuilder"])
def test_in_vllm(qwen3: Checkpoint, evidence: Evidence, answer: str) -> None:
    env = evidence.env("attention_vendor", ATTENTION_VENDOR=answer, VLLM_FL_PREFER="vendor")
    result = run_vllm(qwen3, env=env).checked()
    assert result.tokens == qwen3.golden
    reason = _REASONS[answer]
    if reason is None:
        assert (
            "Attention is served by vendor.attention (attention_backend, plain): attention_vendor.Fits"
            in result.log
        )
    else:
        assert "no attention of vendor.attention: it does not fit this vLLM" in result.log
        assert reason in result.log


def test_in_vllm_where_the_policy_leaves_nothing_else(qwen3: Checkpoint, evidence: Evidence) -> None:
    per_op = "attention_backend=impl:vendor.attention"
    env = evidence.env("attention_vendor", ATTENTION_VENDOR="None for this", VLLM_FL_PER_OP=per_op)
    result = run_vllm(qwen3, env=env)
    assert result.returncode != 0
    assert "nothing that the policy allows serves the attention of this model" in result.log
    assert "head_size not supported" in result.log

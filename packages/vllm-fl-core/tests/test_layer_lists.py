"""The two variables that say which layers are replaced, where this vLLM lacks some of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vllm_fl.dispatch import PolicyError

pytest.importorskip("torch")

from vllm_fl.integration import layers


@pytest.mark.parametrize("name", ["VLLM_FL_OOT_WHITELIST", "VLLM_FL_OOT_BLACKLIST"])
def test_an_unknown_layer_is_named_where_a_module_is_not_there(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    absent = replace(layers.BINDINGS[0], module="vllm_of_another_year")
    monkeypatch.setattr(layers, "BINDINGS", (absent,))
    monkeypatch.setenv(name, f"{absent.class_name}X")
    with pytest.raises(PolicyError) as caught:
        layers.check_lists()
    assert str(caught.value).startswith(f"{name}: unknown layer '{absent.class_name}X'. Did you mean ")
    monkeypatch.setenv(name, absent.class_name)
    layers.check_lists()

"""The two variables that say which layers are replaced, where this vLLM lacks some of them."""

from __future__ import annotations

import pytest

from vllm_fl.dispatch import PolicyError

pytest.importorskip("torch")

from vllm_fl.integration import replace


@pytest.mark.parametrize("name", ["VLLM_FL_OOT_WHITELIST", "VLLM_FL_OOT_BLACKLIST"])
def test_an_unknown_layer_is_named_where_a_module_is_not_there(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    absent = type("Absent", (replace.LAYERS[0],), {"module": "vllm_of_another_year"})
    monkeypatch.setattr(replace, "LAYERS", (absent,))
    monkeypatch.setenv(name, f"{absent.class_name}X")
    with pytest.raises(PolicyError) as caught:
        replace.check_lists()
    assert str(caught.value).startswith(f"{name}: unknown layer '{absent.class_name}X'. Did you mean ")
    monkeypatch.setenv(name, absent.class_name)
    replace.check_lists()

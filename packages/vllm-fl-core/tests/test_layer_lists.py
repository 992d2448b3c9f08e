"""The two variables that say which layers are replaced, where this vLLM lacks some of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from vllm_fl.dispatch import PolicyError

pytest.importorskip("torch")

from vllm_fl.doctor import probes
from vllm_fl.integration import attention
from vllm_fl.integration import plugin
from vllm_fl.integration import replace
from vllm_fl.integration import settings
from vllm_fl.integration.layer import Layer

if TYPE_CHECKING:
    from collections.abc import Iterator


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


# -- what the command knows of them without importing them -----------------------------------------


def _all(layer: type[Layer]) -> Iterator[type[Layer]]:
    yield layer
    for one in layer.__subclasses__():
        if one.__module__.startswith("vllm_fl.integration."):
            yield from _all(one)


def test_the_names_are_those_of_the_layers_and_seams() -> None:
    layers = [one for one in _all(Layer) if hasattr(one, "class_name")]
    operators: dict[tuple[str, str], set[str]] = {}
    for one in layers:
        operators.setdefault((one.class_name, one.vllm_name), set()).add(one.op_name)
    seam = attention.ATTENTION
    operators[seam.class_name, seam.vllm_name] = {attention.OPERATOR}
    assert {(one.class_name, one.vllm_name): set(one.op_names) for one in settings.LAYERS} == operators
    served = {(one.class_name, one.vllm_name) for one in (*replace.LAYERS, *replace.SEAMS)}
    assert served == set(operators)


def test_what_the_plug_in_checks_is_what_the_doctor_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server stops with the message that the doctor prints: both go through one list."""
    pytest.importorskip("vllm")
    monkeypatch.setenv("VLLM_FL_RANKS_TIMEOUT", "abc")
    monkeypatch.setattr(plugin, "_installed", False)
    with pytest.raises(PolicyError) as stopped:
        plugin.install()
    assert probes.settings() == {"errors": [str(stopped.value)], "off": ""}

"""The wheels that are known to implement operators: whose a name is, and what to install."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from vllm_fl.dispatch import OPERATORS
from vllm_fl.dispatch.wheels import faster_wheels
from vllm_fl.dispatch.wheels import install_hint
from vllm_fl.dispatch.wheels import known_wheels
from vllm_fl.dispatch.wheels import owner_of

if TYPE_CHECKING:
    from vllm_fl.dispatch.wheels import Wheel


def test_they_name_operators_that_there_are() -> None:
    for wheel in known_wheels():
        assert set(wheel.operators) <= set(OPERATORS)
    assert {name for wheel in known_wheels() for name in wheel.operators} == set(OPERATORS)


@pytest.mark.parametrize("wheel", known_wheels(), ids=lambda wheel: wheel.plugin)
def test_whose_a_name_is(wheel: Wheel) -> None:
    assert owner_of(plugin=wheel.plugin) is wheel
    assert owner_of(impl_id=wheel.impl_id) is wheel
    assert owner_of(impl_id=f"{wheel.impl_id}.more") is wheel
    # Only what begins with the whole name is reserved.
    assert owner_of(impl_id=f"{wheel.impl_id}2") is None
    assert owner_of(plugin=f"{wheel.plugin}2") is None


def test_the_vendors_and_the_sample() -> None:
    vendors = {wheel.plugin: wheel.vendor for wheel in known_wheels()}
    assert (vendors["reference"], vendors["flaggems"], vendors["ascend"]) == (None, None, "ascend")
    assert [wheel.plugin for wheel in known_wheels() if wheel.sample] == ["template"]


def test_what_is_faster() -> None:
    """The reference is no chip's, and what is installed needs no hint."""
    named = [wheel.plugin for wheel in faster_wheels(OPERATORS)]
    assert named == ["flaggems", "cuda", "ascend"]
    assert [wheel.plugin for wheel in faster_wheels(OPERATORS, ["cuda"])] == ["flaggems", "ascend"]
    assert faster_wheels([]) == faster_wheels(["no_such_operator"]) == []


def test_what_to_install() -> None:
    assert install_hint("no_such_operator") == "No known wheel implements it."
    lines = install_hint("rms_norm").splitlines()
    assert lines[0] == "Install one of:"
    assert "  pip install vllm-fl-reference  # any device, in plain PyTorch" in lines

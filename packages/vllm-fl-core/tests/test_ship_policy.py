"""The policy that an engine's configuration carries to its workers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm_fl.dispatch import PolicyError
from vllm_fl.dispatch import SelectionPolicy
from vllm_fl.dispatch import set_global_policy
from vllm_fl.integration import engine

pytestmark = pytest.mark.usefixtures("no_plugins")


class Own:
    """A caller's own additional_config, which nothing can be written into."""


@pytest.mark.parametrize("variables", [{}, {"VLLM_FL_PREFER": "reference"}])
def test_what_the_environment_says_needs_no_carrier(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    given = Own()
    arguments = SimpleNamespace(additional_config=given)
    engine.ship_policy(arguments)
    assert arguments.additional_config is given


def test_a_policy_of_code_is_refused_where_it_cannot_be_carried() -> None:
    set_global_policy(SelectionPolicy.from_dict(prefer="reference"))
    with pytest.raises(PolicyError, match="Own and not a dict: set VLLM_FL_CONFIG"):
        engine.ship_policy(SimpleNamespace(additional_config=Own()))

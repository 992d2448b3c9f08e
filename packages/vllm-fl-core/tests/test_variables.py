"""The one table of environment variables: it has all that is read, and what plugins name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import vllm_fl
from vllm_fl.dispatch import PluginRecord
from vllm_fl.dispatch import PolicyError
from vllm_fl.dispatch import reset_global_policy
from vllm_fl.dispatch import trace
from vllm_fl.dispatch.policy.keys import KEYS
from vllm_fl.dispatch.variables import VARIABLES
from vllm_fl.dispatch.variables import known_variables
from vllm_fl.dispatch.variables import unread_variables

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Attributes of a plugin's module, which are named like variables.
ATTRIBUTES = {"VLLM_FL_PLUGIN_API", "VLLM_FL_VARIABLES"}

PLUGIN = PluginRecord("acme", "acme", "1.0", "acme", 1, "loaded", variables=("VLLM_FL_ACME_FAST",))


def _named(*, outside_of_the_table: bool) -> Iterator[str]:
    for path in Path(vllm_fl.__file__).parent.rglob("*.py"):
        if not (outside_of_the_table and path.name == "variables.py"):
            yield from re.findall(r"\bVLLM_FL_[A-Z_]*[A-Z]\b", path.read_text("utf-8"))


def test_every_variable_that_the_core_names_is_in_the_table() -> None:
    assert set(_named(outside_of_the_table=True)) - ATTRIBUTES <= set(VARIABLES)


def test_every_variable_of_the_table_is_read() -> None:
    assert set(VARIABLES) <= set(_named(outside_of_the_table=True))


def test_what_the_table_says() -> None:
    for name, variable in VARIABLES.items():
        assert variable.name == name
        assert variable.meaning
        assert not variable.meaning.endswith(".")
    assert VARIABLES["VLLM_FL_RANKS_TIMEOUT"].default == "120"


def test_a_plugins_variables_are_known() -> None:
    assert known_variables([]) == set(VARIABLES)
    assert known_variables([PLUGIN]) - set(VARIABLES) == {"VLLM_FL_ACME_FAST"}


def test_what_nobody_reads_has_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_FL_PERFER", "VLLM_FL_ACME_FSAT", "VLLM_FL_STRICT", "VLLM_USE_V1", "VLLM_FL_QQQQ"):
        monkeypatch.setenv(name, "1")
    assert unread_variables([PLUGIN]) == {
        "VLLM_FL_ACME_FSAT": " Did you mean 'VLLM_FL_ACME_FAST'?",
        "VLLM_FL_PERFER": " Did you mean 'VLLM_FL_PREFER'?",
        "VLLM_FL_QQQQ": "",
    }


def test_the_defaults_are_those_that_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_fl.dispatch import get_policy
    from vllm_fl.integration import ranks

    unset = get_policy()
    for key in KEYS.values():
        if key.variable and VARIABLES[key.variable].default not in ("", "all"):
            monkeypatch.setenv(key.variable, VARIABLES[key.variable].default)
    reset_global_policy()
    for name in KEYS:
        assert getattr(get_policy(), name) == getattr(unset, name)
    assert get_policy().explicit == {"prefer", "strict", "defaults"}
    assert float(VARIABLES["VLLM_FL_RANKS_TIMEOUT"].default) == ranks.time_limit()


@pytest.mark.parametrize("name", ["file/inside", "a" * 300])
def test_a_folder_that_cannot_be_made(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VLLM_FL_TRACE_DIR", str(tmp_path / name))
    with pytest.raises(PolicyError, match=r"^VLLM_FL_TRACE_DIR: the folder cannot be made: "):
        trace.check_folder()


def test_a_folder_is_not_made_before_there_is_something_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_FL_TRACE_DIR", str(tmp_path / "a" / "b"))
    trace.check_folder()
    assert list(tmp_path.iterdir()) == []

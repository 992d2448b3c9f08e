"""The ranks of one engine compare what they froze, through a real store of torch."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING
from typing import Any

import pytest

from vllm_fl.dispatch import BackendImplKind
from vllm_fl.dispatch import OpImpl
from vllm_fl.dispatch import OpManager
from vllm_fl.dispatch import OpRegistry
from vllm_fl.dispatch import Plan
from vllm_fl.dispatch import PolicyError
from vllm_fl.dispatch import SelectionPolicy
from vllm_fl.dispatch import manager as manager_module
from vllm_fl.integration import engine
from vllm_fl.integration import ranks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

distributed = pytest.importorskip("torch.distributed")

OP = "silu_and_mul"


def plan(choice: str = "vendor.a", version: str = "1.0", **policy: Any) -> Plan:
    from vllm_fl.dispatch import OpRegistrySnapshot
    from vllm_fl.dispatch.types import Origin

    impl = OpImpl(
        OP,
        choice,
        BackendImplKind.VENDOR,
        lambda x: x,
        choice.split(".")[1],
        origin=Origin("acme", version, "a"),
    )
    snapshot = OpRegistrySnapshot({OP: (impl,)})
    return Plan.of({OP: choice}, SelectionPolicy.from_dict(**policy), snapshot, {})


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank of a test is a thread, and has the same number of the round."""
    monkeypatch.setattr(ranks, "_rounds", itertools.repeat(1))
    monkeypatch.setattr(manager_module, "_default", OpManager(OpRegistry()))
    monkeypatch.setenv(ranks.TIMEOUT_VARIABLE, "600")


def run(*acts: Callable[[ranks.Group], Any]) -> list[str]:
    """Return what each rank raises, "" where it goes on."""
    store = distributed.HashStore()

    def one(rank: int) -> str:
        try:
            acts[rank](ranks.Group(rank, len(acts), store))
        except ranks.RanksDifferError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(acts)) as pool:
        return list(pool.map(one, range(len(acts))))


def agree(plan: Plan, **facts: Any) -> Callable[[ranks.Group], None]:
    return lambda group: ranks.agree(plan, facts, group)


def test_the_same_everywhere(rounds: None) -> None:
    assert run(*[agree(plan(), layers=["RMSNorm"])] * 4) == [""] * 4


def test_another_choice_names_rank_operator_and_both_choices(rounds: None) -> None:
    said = run(agree(plan()), agree(plan()), agree(plan("vendor.b")))
    assert said[1] == ""  # the other two stop, and vLLM ends this one
    assert f"choice of {OP}: rank 0 has vendor.a, rank 2 has vendor.b" in said[0]
    assert f"choice of {OP}: rank 2 has vendor.b, rank 0 has vendor.a" in said[2]
    for text in (said[0], said[2]):
        assert text.startswith("vLLM does not start, because its 3 ranks do not run the same.")
        assert "VLLM_FL_OOT_ENABLED=0 for every rank runs vLLM natively" in text


def test_the_rank_that_lacks_it_says_why(rounds: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(x: Any) -> Any:
        return x

    missing._is_available = lambda: False  # type: ignore[attr-defined]
    registry = OpRegistry()
    registry.register_impl(OpImpl(OP, "vendor.a", BackendImplKind.VENDOR, missing, "a"))
    monkeypatch.setattr(manager_module, "_default", OpManager(registry))
    said = run(agree(plan()), agree(plan("vendor.b")))
    assert "rank 1 has vendor.b, rank 0 has vendor.a; here vendor.a is not available" in said[1]


@pytest.mark.parametrize(
    ("other", "line"),
    [
        (agree(plan(version="1.1")), "wheel of acme: rank 0 has 1.0, rank 1 has 1.1"),
        (agree(plan(version="")), "wheel of acme: rank 0 has 1.0, rank 1 has no version"),
        (agree(plan(strict=True)), "policy of the process: rank 0 has "),
    ],
)
def test_another_wheel_or_policy(rounds: None, other: Callable[..., None], line: str) -> None:
    assert line in run(agree(plan()), other)[0]


def test_other_layers_only(rounds: None) -> None:
    one, other = (
        Plan.of({}, SelectionPolicy(), OpRegistry().snapshot(), {"layers": n}) for n in (["A"], ["B"])
    )
    said = run(agree(one, layers=["A"]), agree(other, layers=["B"]))
    assert 'fact of layers: rank 0 has ["A"], rank 1 has ["B"]' in said[0]


@pytest.mark.parametrize("missing", [0, 1])
def test_a_rank_that_publishes_nothing(rounds: None, monkeypatch: pytest.MonkeyPatch, missing: int) -> None:
    monkeypatch.setenv(ranks.TIMEOUT_VARIABLE, "0.3")
    acts: list[Any] = [agree(plan()), agree(plan())]
    acts[missing] = lambda group: None
    started = time.monotonic()
    said = run(*acts)
    assert 0.3 <= time.monotonic() - started < 60
    assert said[missing] == ""
    assert f"rank {missing} has published nothing within 0.3 s (VLLM_FL_RANKS_TIMEOUT)" in said[1 - missing]
    assert "VLLM_PLUGINS" in said[1 - missing]


@pytest.mark.parametrize("gone", [0, 1])
def test_a_rank_that_withdraws_is_not_waited_for(rounds: None, gone: int) -> None:
    acts: list[Any] = [agree(plan()), agree(plan())]
    acts[gone] = lambda group: ranks.withdraw("VLLM_FL_OOT_ENABLED is off there", group)
    started = time.monotonic()
    said = run(*acts)
    assert time.monotonic() - started < 300  # and not 600
    assert f"rank {gone} does not take part: VLLM_FL_OOT_ENABLED is off there" in said[1 - gone]


def test_a_store_that_has_died(rounds: None) -> None:
    class Dead:
        def set(self, *_: Any) -> None:
            raise distributed.DistNetworkError("connection reset by peer")

    with pytest.raises(ranks.RanksDifferError, match=r"rank 1 of 2 cannot read .*connection reset by peer"):
        ranks.agree(plan(), {}, ranks.Group(1, 2, Dead()))
    ranks.withdraw("it raises nothing", ranks.Group(1, 2, Dead()))


def test_one_process_alone_asks_no_store() -> None:
    assert ranks.group() is None
    ranks.agree(plan(), {})
    ranks.withdraw("")


@pytest.mark.parametrize("value", ["0", "-1", "soon", "inf", "nan"])
def test_a_wrong_time_limit(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(ranks.TIMEOUT_VARIABLE, value)
    with pytest.raises(PolicyError, match=f"^VLLM_FL_RANKS_TIMEOUT: must be a positive number.*{value!r}"):
        ranks.time_limit()


# -- where the worker freezes ------------------------------------------------------------


class Config:
    model_config = object()
    additional_config: Any = None


@pytest.fixture
def told(rounds: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(ranks, "withdraw", found.append)
    return found


def test_a_rank_that_fails_tells_the_others(told: list[str]) -> None:
    config = Config()
    config.additional_config = {
        engine.KEY: {"policy": SelectionPolicy().to_dict(), "fingerprint": "another"},
    }
    with pytest.raises(PolicyError):
        engine.begin(config)
    assert len(told) == 1
    assert told[0].startswith("PolicyError: this process reads the policy")


def test_a_rank_that_is_switched_off_tells_the_others(told: list[str]) -> None:
    from vllm_fl.integration import plugin

    plugin._stay_off("VLLM_FL_OOT_ENABLED")
    assert told == ["VLLM_FL_OOT_ENABLED is off there"]


def test_nothing_stays_frozen_that_was_not_agreed_on(
    told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def differ(*_: Any) -> None:
        raise ranks.RanksDifferError("they differ")

    with monkeypatch.context() as patch:
        patch.setattr(ranks, "agree", differ)
        with pytest.raises(ranks.RanksDifferError):
            engine.begin(Config())
    assert told == []  # its record is there to be compared
    agreed: list[Plan] = []
    monkeypatch.setattr(ranks, "agree", lambda plan, facts: agreed.append(plan))
    assert engine.begin(Config()) is engine.begin(Config()) is agreed[0]
    assert len(agreed) == 1  # once for an engine, not once for a layer


# -- two processes -----------------------------------------------------------------------

_RANK = """
import sys
from torch import distributed
from vllm_fl.dispatch import get_default_manager
from vllm_fl.integration import ranks

rank, store, chosen = int(sys.argv[1]), sys.argv[2], sys.argv[3]
distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
import os
os.environ["VLLM_FL_PREFER"] = chosen
for _ in range(2):  # two engines, one after the other
    ranks.agree(get_default_manager().freeze(), {})
    get_default_manager().thaw()
print(f"rank {rank} agreed twice")
"""


@pytest.mark.parametrize(("second", "agrees"), [("vendor", True), ("reference", False)])
def test_two_processes_over_gloo(tmp_path: Path, second: str, agrees: bool) -> None:
    started = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, str(rank), str(tmp_path / "store"), prefer],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, prefer in enumerate(("vendor", second))
    ]
    said = [process.communicate(timeout=600) for process in started]
    for rank, (out, err) in enumerate(said):
        assert (out == f"rank {rank} agreed twice\n") is agrees, err
        if not agrees:
            assert f"policy of the process: rank {rank} has " in err

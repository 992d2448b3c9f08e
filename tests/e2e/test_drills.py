"""Failures of a kernel in a server: what a client gets, what the log says, and the next start."""

from __future__ import annotations

import json
import os
import shutil
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING
from typing import Any

import pytest
from engine import run_vllm
from engine import serve
from evidence import PLUGINS
from evidence import Evidence
from evidence import wait_for_records
from test_compile_cache import _ARTIFACTS_LOAD
from test_compile_cache import _LOADED

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from checkpoints import Checkpoint
    from engine import Server


#: The operator of each of the vendor's implementations, and what those that write do.
_OF_ANOTHER = {"writes": "rms_norm", "lacks": "rms_norm"}


def _drill(evidence: Evidence, how: str, **more: str) -> Mapping[str, str]:
    order = f"{_OF_ANOTHER.get(how, 'silu_and_mul')}=impl:vendor.drill.{how}|reference"
    return evidence.env("drill_vendor", VLLM_FL_PER_OP=order, VLLM_FL_PREFER="reference", **more)


def _answer(server: Server, prompt: tuple[int, ...]) -> tuple[int, ...] | tuple[int, str]:
    """Return the tokens, or the status and the text of an error; a client that waits for ever fails."""
    try:
        return server.complete(prompt)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:  # refused: the server has ended
        return 0, str(error)


def _all_at_once(server: Server, checkpoint: Checkpoint) -> list[Any]:
    with ThreadPoolExecutor(len(checkpoint.prompts)) as pool:
        return list(pool.map(lambda prompt: _answer(server, prompt), checkpoint.prompts))


def test_one_that_raises_at_its_hundredth_call(qwen3: Checkpoint, evidence: Evidence) -> None:
    """Nobody notices but the log: the reference goes on, on the same arguments."""
    with serve(qwen3, env=_drill(evidence, "raises")) as server:
        answers = [_all_at_once(server, qwen3) for _ in range(4)]
        wait_for_records(evidence.folder)
    assert answers == [list(qwen3.golden)] * 4
    (line,) = [line for line in server.log.splitlines() if " is set aside; " in line]
    assert "vendor.drill.raises raised for silu_and_mul and is set aside" in line
    assert "kernel launch failed at call 100" in line
    assert server.returncode == 0
    calls = evidence.calls()
    # One of the hundred was the trial when the first layer was built, and one raised.
    assert calls["silu_and_mul", "vendor.drill.raises"] == 98
    assert calls["silu_and_mul", "reference.torch"] > 0
    assert evidence.layers()["SiluAndMul", "vendor.drill.raises", "guard"] == 2


@pytest.mark.parametrize(
    ("how", "more", "error"),
    [
        ("raises", {"VLLM_FL_STRICT": "1"}, "RuntimeError: kernel launch failed at call 100"),
        # Another implementation would only hide it: the same as with a kernel of vLLM's own.
        ("memory", {}, "torch.OutOfMemoryError: out of memory. Tried"),
        # It has written its arguments, and the copies were for its first success only.
        ("writes", {}, "rms_norm: vendor.drill.writes may have written x, residual, so no other"),
        ("lacks", {}, "which does not promise that x, residual is unchanged, so no other"),
    ],
)
def test_one_whose_failure_ends_the_engine(
    qwen3: Checkpoint, evidence: Evidence, how: str, more: dict[str, str], error: str
) -> None:
    """Requests in flight get an error, the log has the kernel's own, and the next start works."""
    env = _drill(evidence, how, **more)
    with serve(qwen3, env=env) as server:
        answers = [answer for _ in range(8) for answer in _all_at_once(server, qwen3)]
        wait_for_records(evidence.folder)
    right = [answer for answer in answers if answer in qwen3.golden]
    refused = [answer for answer in answers if answer not in qwen3.golden]
    assert right
    assert refused
    # Never half an answer, and never a wrong one.
    statuses = {status for status, _ in refused}
    assert statuses <= {0, 500, 503}
    assert statuses & {500, 503}, "somebody was in flight, and was told"
    assert all(json.loads(text)["error"]["message"] for status, text in refused if status)
    assert error in server.log
    assert "drill_vendor.py" in server.log
    assert " is set aside" not in server.log
    op_name = _OF_ANOTHER.get(how, "silu_and_mul")
    assert (op_name, f"vendor.drill.{how}") in evidence.calls()
    # What the log says to whoever reads it, done: the next start leaves that implementation out.
    after = Evidence(evidence.folder.with_name("after"))
    env = {**env, **after.env(VLLM_FL_PER_OP=f"{op_name}=reference")}
    result = run_vllm(qwen3, env=env).checked()
    assert result.tokens == qwen3.golden
    assert (op_name, "reference.torch") in after.calls()


@pytest.mark.parametrize("how", ["writes", "lacks"])
def test_one_that_writes_and_never_succeeds(qwen3: Checkpoint, evidence: Evidence, how: str) -> None:
    """Until a first success the next one gets what the first got, and every answer is right."""
    env = _drill(evidence, how, DRILL_CALLS="0")
    result = run_vllm(qwen3, env=env).checked()
    assert result.tokens == qwen3.golden
    calls = evidence.calls()
    assert calls["rms_norm", "reference.torch"] > 0
    # What a missing kernel raises says "not for these inputs": for that call only.
    assert (" is set aside" in result.log) == (how == "writes")


def test_one_that_returns_nan(qwen3: Checkpoint, evidence: Evidence) -> None:
    """Nothing looks at the numbers while serving: the record says whose they are."""
    with serve(qwen3, env=_drill(evidence, "nan")) as server:
        first = _answer(server, qwen3.prompts[0])
        for _ in range(4):
            _all_at_once(server, qwen3)
        broken = _all_at_once(server, qwen3)
        is_alive = server.ready()
        wait_for_records(evidence.folder)
    assert first == qwen3.golden[0]
    assert is_alive
    # Answers, all of their length, and none of them right.
    for answer, golden in zip(broken, qwen3.golden, strict=True):
        assert len(answer) == len(golden)
        assert answer != golden
    assert "vllm-fl: SiluAndMul is served by vendor.drill.nan (silu_and_mul, guard)" in server.log
    operators = {impl_id for op_name, impl_id in evidence.calls() if op_name == "silu_and_mul"}
    assert operators == {"vendor.drill.nan"}


def test_one_that_is_uninstalled_between_two_starts(qwen3: Checkpoint, tmp_path: Path) -> None:
    """The plan changes, the next start works, and compiled code with its kernels is not used again."""
    wheel = tmp_path / "site"
    info = wheel / "vendor_wrong-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vendor-wrong\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm_fl.plugin]\nwrong = wrong_vendor:register_builtins\n")
    shutil.copy(PLUGINS / "wrong_vendor.py", wheel)
    env = {
        "PYTHONPATH": os.pathsep.join([str(wheel), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "VLLM_CACHE_ROOT": str(tmp_path / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "VLLM_FL_PREFER": "vendor",
    }

    def start(name: str) -> tuple[Any, Evidence]:
        evidence = Evidence(tmp_path / name)
        both = {**env, **evidence.env()}
        result = run_vllm(qwen3, mode="compile", env=both, setup=_ARTIFACTS_LOAD).checked()
        return result, evidence

    with_it, installed = start("installed")
    shutil.rmtree(wheel)
    without, uninstalled = start("uninstalled")
    again, _ = start("again")
    # Its answers are wrong, so that they tell who computed.
    assert all(got != right for got, right in zip(with_it.tokens, qwen3.golden, strict=True))
    assert without.tokens == again.tokens == qwen3.golden
    assert _LOADED not in without.log
    assert _LOADED in again.log
    assert {impl_id for _, impl_id in installed.graphs()} == {"vendor.wrong"}
    assert {impl_id for _, impl_id in uninstalled.graphs()} == {"reference.torch"}
    assert "vendor-wrong 1.0" in with_it.log
    assert "vendor-wrong" not in without.log
    (before,), (after,) = installed.processes, uninstalled.processes
    assert before["policy"] == after["policy"]
    assert before["fingerprint"] != after["fingerprint"]

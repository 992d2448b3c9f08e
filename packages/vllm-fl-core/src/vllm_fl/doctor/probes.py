"""The questions that are asked in a process of their own, by :mod:`vllm_fl.doctor.probe_process`.

``python -m vllm_fl.doctor.probes FILE QUESTION [ARGUMENT...]`` writes the answer,
plain values, into a file. A plugin is named by its place in the list of what the
discovery finds, as two may have one name.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.child_processes import end_with_parent
from vllm_fl.dispatch import OpRegistry
from vllm_fl.dispatch import PolicyError
from vllm_fl.dispatch import discovery
from vllm_fl.dispatch import get_default_manager
from vllm_fl.dispatch import get_policy
from vllm_fl.dispatch.availability import availability
from vllm_fl.dispatch.calling.torch_state import has_accelerator
from vllm_fl.dispatch.policy.packaged import lies_below

if TYPE_CHECKING:
    from collections.abc import Callable


class _Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _load(index: str) -> tuple[OpRegistry, Any]:
    registry = OpRegistry()
    return registry, discovery.load_alone(registry, int(index))


def plugin(index: str) -> dict[str, Any]:
    """Load one plugin; say what became of it and what it leaves behind."""
    said = _Lines()
    logging.getLogger("vllm_fl.dispatch").addHandler(said)
    threads, started = set(threading.enumerate()), time.monotonic()
    _, record = _load(index)
    return {
        "state": record.state,
        "reason": record.reason,
        "variables": list(record.variables),
        "seconds": time.monotonic() - started,
        "threads": [thread.name for thread in threading.enumerate() if thread not in threads],
        "logged": said.lines,
    }


def backends(index: str) -> list[dict[str, Any]]:
    """Load one plugin and ask its backends whether they are available, and what they lack."""
    registry, _ = _load(index)
    found: dict[str, dict[str, Any]] = {}
    for op_name, impls in sorted(registry.snapshot().impls_by_op.items()):
        for impl in impls:
            reason, missing = availability(impl)
            row = found.setdefault(
                impl.impl_id,
                {"impl_id": impl.impl_id, "vendor": impl.vendor, "reason": reason, "missing": {}},
            )
            # With `_is_available` each function may answer for itself.
            row["reason"] = reason and row["reason"]
            if missing or reason:
                row["missing"][op_name] = missing or reason
    return list(found.values())


def policy() -> dict[str, Any]:
    """Read the configuration as vLLM's front end does."""
    try:
        found = get_policy()
    except PolicyError as error:
        return {"error": str(error)}
    return {
        "error": "",
        "fingerprint": found.fingerprint(),
        "sources": dict(found.sources),
        "notes": get_default_manager().check_policy(found),
    }


def decisions() -> dict[str, Any]:
    """Choose for every operator; say whether torch has an accelerator here."""
    manager = get_default_manager()
    manager.ensure_initialized()
    snapshot = manager.snapshot()
    names = sorted({*snapshot.operators, *snapshot.impls_by_op})
    return {
        "decisions": [manager.explain(name).to_dict() for name in names],
        "packaged": list(lies_below(get_policy(), snapshot).faults),
        "accelerator": _has_accelerator(),
    }


def _has_accelerator() -> bool:
    try:
        import torch  # noqa: F401 - asked for below
    except ImportError:
        return False
    return has_accelerator()


def torch() -> str:
    """Import torch; return its version."""
    import torch as found

    return str(found.__version__)


def vllm() -> dict[str, Any]:
    """Import vLLM; say whether it is supported."""
    import vllm as found

    from vllm_fl.integration.plugin import unsupported_vllm

    return {"version": str(found.__version__), "unsupported": unsupported_vllm() or ""}


def settings() -> dict[str, Any]:
    """Check the variables that the plug-in reads itself, by what it calls when vLLM starts."""
    from vllm_fl.integration import plugin
    from vllm_fl.integration.settings import off_by

    errors = []
    for check in plugin.CHECKS:
        try:
            check()
        except PolicyError as error:
            errors.append(str(error))
    off = "" if errors else off_by() or ""
    return {"errors": list(dict.fromkeys(errors)), "off": off}


def platform() -> dict[str, Any]:
    """Choose vLLM's platform as a process of vLLM does."""
    from vllm_fl.platform.report import report

    return report()


def workers(method: str) -> dict[str, Any]:
    """Start a worker from a process that has found its plugins; say what each of the two sees.

    Only the worker asks backends whether they are available, as in a server.
    """
    front_end = _registered()
    context: Any = multiprocessing.get_context(method)
    receive, send = context.Pipe(duplex=False)
    worker = context.Process(target=_worker, args=(send,))
    worker.start()
    send.close()
    try:
        seen = receive.recv()
    except EOFError:
        worker.join()
        seen = {"ended": worker.exitcode}
    return {"front end": front_end, "worker": seen}


def _worker(send: Any) -> None:
    registered = _registered()
    send.send({**registered, "fingerprint": get_default_manager().freeze().fingerprint})


def _registered() -> dict[str, Any]:
    manager = get_default_manager()
    manager.ensure_initialized()
    return {
        "plugins": {name: record.state for name, record in manager.registry.plugins.items()},
        "implementations": {
            op_name: [impl.impl_id for impl in impls]
            for op_name, impls in sorted(manager.registry.snapshot().impls_by_op.items())
        },
        "policy": get_policy().fingerprint(),
    }


_QUESTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (plugin, backends, policy, decisions, torch, vllm, settings, platform, workers)
}


def main() -> None:
    """Answer, and end whatever threads are left."""
    end_with_parent()
    file, question, *arguments = sys.argv[1:]
    answer = _QUESTIONS[question](*arguments)
    part = Path(f"{file}.part")
    part.write_text(json.dumps(answer), "utf-8")
    part.replace(file)
    os._exit(0)


if __name__ == "__main__":
    main()

"""The points that a vendor's engineer would tick off by hand, each with what was found."""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING
from typing import TypeAlias

from vllm_fl.conformance.result import Result
from vllm_fl.conformance.result import Status
from vllm_fl.dispatch import Backend
from vllm_fl.dispatch import BackendImplKind
from vllm_fl.dispatch import BackendPriority
from vllm_fl.dispatch.common.foreign import describe

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_fl.dispatch import OpImpl
    from vllm_fl.dispatch import PluginRecord

_VENDOR = re.compile(r"[a-z][a-z0-9_-]*")
_SECONDS = 120


@dataclass(frozen=True)
class _Subject:
    """What the points are asked of."""

    impls: list[OpImpl]
    backend: Backend | None
    record: PluginRecord | None

    @property
    def is_vendor(self) -> bool:
        return any(impl.kind is BackendImplKind.VENDOR for impl in self.impls)


def points(impls: list[OpImpl], record: PluginRecord | None) -> list[tuple[str, Callable[[], Result]]]:
    """Return the points by name, each to be asked when it is its turn.

    Args:
        impls: of one backend.
        record: of the plugin that registered them; None where code did.
    """
    subject = _Subject(impls, _backend_of(impls), record)
    return [(name, functools.partial(_asked, name, point, subject)) for name, point in _POINTS.items()]


def _asked(name: str, point: Callable[[_Subject], _Answer], subject: _Subject) -> Result:
    try:
        status, note = point(subject)
    except Exception as error:  # noqa: BLE001 - a point that the backend makes raise is not met
        status, note = Status.FAILED, describe(error)
    return Result(subject.impls[0].impl_id, "checklist", name, status, note=note, is_case=False)


def _backend_of(impls: list[OpImpl]) -> Backend | None:
    for impl in impls:
        owner = impl.backend or getattr(impl.fn, "__self__", None)
        if isinstance(owner, Backend):
            return owner
    return None


_Answer: TypeAlias = tuple[Status, str]


def _is(right: bool, note: str) -> _Answer:
    return (Status.PASSED if right else Status.FAILED), note


def _plugin(subject: _Subject) -> _Answer:
    record = subject.record
    if record is None:
        return Status.NOT_RUN, "registered by code, not by an installed plugin"
    if not record.success or record.reason:
        return Status.FAILED, record.reason
    return Status.PASSED, f"{record.distribution} {record.version}, entry point {record.name!r}"


def _inherits(subject: _Subject) -> _Answer:
    if subject.backend is not None:
        return Status.PASSED, f"{type(subject.backend).__module__}.{type(subject.backend).__qualname__}"
    if not subject.is_vendor:
        return Status.NOT_RUN, "registered as a list of OpImpl, without a class"
    if all(callable(getattr(impl.fn, "_is_available", None)) for impl in subject.impls):
        return Status.NOT_RUN, "registered as a list of OpImpl, each with its own _is_available"
    return Status.FAILED, (
        "nothing says whether its library and its card are here: make the implementations methods of a "
        "vllm_fl.dispatch.Backend"
    )


def _vendor(subject: _Subject) -> _Answer:
    if not subject.is_vendor:
        return Status.NOT_RUN, "serves every vendor"
    names = {impl.vendor for impl in subject.impls}
    if subject.backend is not None:
        names.add(subject.backend.vendor)
    (name, *more) = sorted(map(str, names))
    if more:
        return Status.FAILED, f"several names: {', '.join([name, *more])}"
    return _is(bool(_VENDOR.fullmatch(name)), repr(name))


def _kind(subject: _Subject) -> _Answer:
    kinds = sorted({impl.kind.name for impl in subject.impls})
    return _is(len(kinds) == 1, ", ".join(kinds))


def _impl_ids(subject: _Subject) -> _Answer:
    ids = sorted({impl.impl_id for impl in subject.impls})
    if not subject.is_vendor:
        return Status.PASSED, ", ".join(ids)
    vendor = subject.impls[0].vendor
    wrong = [one for one in ids if one != f"vendor.{vendor}" and not one.startswith(f"vendor.{vendor}.")]
    return _is(not wrong, ", ".join(wrong or ids))


def _priority(subject: _Subject) -> _Answer:
    usual = {impl.op_name for impl in subject.impls if impl.priority == BackendPriority[impl.kind.name]}
    other = [f"{i.op_name}: {i.priority}" for i in subject.impls if i.op_name not in usual]
    priority = int(BackendPriority[subject.impls[0].kind.name])
    return _is(not other, ", ".join(other) or str(priority))


def _is_available(subject: _Subject) -> _Answer:
    backend = subject.backend
    if backend is not None and not inspect.ismethod(backend.is_available):
        return Status.FAILED, "is_available is no method"
    reasons = {impl.op_name: impl.unavailable_reason() for impl in subject.impls}
    here = [op for op, reason in reasons.items() if reason is None]
    if not here:
        return Status.FAILED, f"not available here: {next(iter(reasons.values()))}"
    lacking = "; ".join(f"{op}: {reason}" for op, reason in reasons.items() if reason is not None)
    return Status.PASSED, f"{len(here)} of {len(reasons)} operators{f'; not {lacking}' if lacking else ''}"


# In another process nothing is installed but Python, the core and the plugin itself.
_CHILD = """
import json, sys
own = set(json.loads(sys.argv[1]))

class Hidden:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in own and top not in sys.stdlib_module_names:
            return None
        return self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)

from vllm_fl.dispatch import get_default_manager
import yaml
sys.meta_path[:] = [Hidden(finder) for finder in sys.meta_path]
manager = get_default_manager()
manager.discover()
record = manager.registry.plugins.get(sys.argv[2])
impls = [i for impls in manager.registry.snapshot().impls_by_op.values() for i in impls]
impls = [i for i in impls if i.impl_id == sys.argv[3]]
print("\\n" + json.dumps({
    "heavy": sorted({"torch", "vllm"}.intersection(sys.modules)),
    "record": record and [record.state, record.reason],
    "reasons": {i.op_name: i.unavailable_reason() for i in impls},
}))
"""


def _without_libraries(subject: _Subject) -> _Answer:
    """Ask a process that finds no library: every operator needs a reason, and none may be available."""
    record = subject.record
    if record is None:
        return Status.NOT_RUN, "registered by code: another process cannot find it"
    package = record.source.partition(":")[0].partition(".")[0]
    modules = {package, "vllm_fl", "yaml", "_yaml"}
    impl_id = subject.impls[0].impl_id
    command = [sys.executable, "-c", _CHILD, json.dumps(sorted(modules)), record.name, impl_id]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        return Status.FAILED, (
            f"a process without its library did not register {package} within {_SECONDS} seconds: its "
            f"import, or an is_available, waits for something that is not there"
        )
    if done.returncode:
        return Status.FAILED, f"the process ended with {done.returncode}: {done.stderr[-300:]}"
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    if answer["record"] is None or answer["record"][0] != "loaded":
        return Status.FAILED, f"registering needs a library: {answer['record']}"
    if subject.backend is None and not any(answer["reasons"].values()):
        return Status.NOT_RUN, "registered as a list of OpImpl; its modules are imported when chosen"
    available = [op for op, reason in answer["reasons"].items() if reason is None]
    if available:
        return (
            Status.FAILED,
            f"says that it is available although no library is there: {', '.join(available)}",
        )
    return Status.PASSED, next(iter(answer["reasons"].values()))


_POINTS = {
    "the plugin is loaded, and all of it": _plugin,
    "the class inherits Backend": _inherits,
    "vendor is a name": _vendor,
    "all are of one kind": _kind,
    "impl_id is of its kind": _impl_ids,
    "priority is that of its kind": _priority,
    "is_available finds the library and the card": _is_available,
    "missing libraries become reasons": _without_libraries,
}

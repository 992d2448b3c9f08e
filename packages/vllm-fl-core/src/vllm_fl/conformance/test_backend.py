"""The conformance of a backend as pytest.

``pytest -p vllm_fl.conformance.pytest_options --pyargs vllm_fl.conformance --vllm-fl-backend NAME``

A test for every case and every check. What an implementation refuses, and what is
larger than ``--vllm-fl-max-elements``, is skipped with the reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from vllm_fl.conformance import run
from vllm_fl.conformance.case import Tier
from vllm_fl.conformance.result import Status
from vllm_fl.dispatch import DispatchError

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_fl.conformance.steps import Step

_PREPARED = pytest.StashKey[run.PreparedRun]()


def _prepared(config: pytest.Config) -> run.PreparedRun:
    """Return what this run of pytest is to run, prepared once.

    Raises:
        UsageError: an option is missing or names what is not there.
    """
    if _PREPARED not in config.stash:
        backend = config.getoption("--vllm-fl-backend", None)
        if not backend:
            raise pytest.UsageError(
                "say which backend: -p vllm_fl.conformance.pytest_options --vllm-fl-backend NAME"
            )
        options = run.Options(
            config.getoption("--vllm-fl-op"),
            Tier[config.getoption("--vllm-fl-tier").upper()],
            config.getoption("--vllm-fl-device"),
            config.getoption("--vllm-fl-max-elements"),
            config.getoption("--vllm-fl-waivers"),
        )
        try:
            config.stash[_PREPARED] = run.prepare(backend, options)
        except (DispatchError, LookupError, ValueError) as error:
            raise pytest.UsageError(str(error)) from None
    return config.stash[_PREPARED]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of every step."""
    if "step" in metafunc.fixturenames:
        steps = _prepared(metafunc.config).steps
        metafunc.parametrize("step", steps, ids=[f"{step.op}: {step.name}" for step in steps])


def test_conformance(step: Step, record_property: Callable[[str, object], None]) -> None:
    """One case, or one check of the whole."""
    result = step.run()
    if result.status is Status.FAILED:
        pytest.fail(result.note, pytrace=False)
    if result.is_loosened:
        record_property("loosened", result.waiver)
    if result.status is not Status.PASSED:
        pytest.skip(f"{result.status}: {result.waiver or result.note}")


def test_every_waiver_is_needed(pytestconfig: pytest.Config) -> None:
    """It runs last."""
    unused = [result.note for result in _prepared(pytestconfig).unused()]
    if unused:
        pytest.fail("\n".join(unused), pytrace=False)

"""The options of ``pytest --pyargs vllm_fl.conformance``, and nothing else.

A plug-in of pytest that is loaded by name, ``-p vllm_fl.conformance.pytest_options``, and
is no entry point: no other run of pytest in the environment is to know of it. (A
``conftest.py`` inside a package that ``--pyargs`` names is read too late for options.)
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what ``vllm-fl conformance`` has, with ``--vllm-fl-`` in front."""
    group = parser.getgroup("vllm-fl", "conformance of a vllm-fl backend")
    group.addoption("--vllm-fl-backend", metavar="NAME", help="the backend whose operators are judged")
    group.addoption("--vllm-fl-op", action="append", default=[], metavar="OP", help="only this operator")
    group.addoption("--vllm-fl-tier", choices=("smoke", "full", "stress"), default="smoke")
    group.addoption("--vllm-fl-device", default="auto", metavar="D")
    group.addoption("--vllm-fl-max-elements", type=int, metavar="N")
    group.addoption("--vllm-fl-waivers", type=Path, metavar="FILE")

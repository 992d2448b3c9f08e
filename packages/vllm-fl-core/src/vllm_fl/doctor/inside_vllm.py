"""The checks of the installed vLLM: its version, and what its plug-in reads itself."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

from vllm_fl.doctor.checks import not_asked
from vllm_fl.doctor.checks import unanswered
from vllm_fl.doctor.finding import FAIL
from vllm_fl.doctor.finding import PASS
from vllm_fl.doctor.finding import SKIP
from vllm_fl.doctor.finding import WARN
from vllm_fl.doctor.finding import Finding

if TYPE_CHECKING:
    from vllm_fl.doctor.checks import Examination


def vllm(examination: Examination) -> list[Finding]:
    """The installed vLLM is one that is supported, and loads this plug-in."""
    if find_spec("vllm") is None:
        return [Finding(SKIP, "vLLM is not installed")]
    answer = examination.ask("vllm")
    if answer.problem:
        what = f"`import vllm` {answer.problem}: {answer.last_line}".removesuffix(": ")
        mend = "" if answer.is_late else "install what the last line misses, or reinstall vLLM"
        return [unanswered(answer, what, "it cannot serve", mend)]
    version, problem = answer.value["version"], answer.value["unsupported"]
    if problem:
        mend = "install a supported vLLM, or a newer core: pip install --upgrade vllm-fl-core"
        return [Finding(FAIL, problem, "vLLM serves, natively: nothing is chosen", mend)]
    if _leaves_us_out():
        what = f"VLLM_PLUGINS={os.environ['VLLM_PLUGINS']} leaves out 'fl'"
        why = "vLLM serves natively, and takes every VLLM_FL_* variable for unknown"
        return [Finding(WARN, what, why, "add fl to VLLM_PLUGINS")]
    return [Finding(PASS, f"vLLM {version} is supported")]


def _leaves_us_out() -> bool:
    allowed = os.environ.get("VLLM_PLUGINS")
    return allowed is not None and "fl" not in allowed.split(",")


def settings(examination: Examination) -> list[Finding]:
    """The variables that the plug-in reads when vLLM starts are right."""
    if find_spec("vllm") is None or find_spec("torch") is None:
        return [Finding(SKIP, "vLLM is not installed")]
    if _leaves_us_out():
        return [Finding(SKIP, "VLLM_PLUGINS leaves out 'fl', and vLLM reads none of them")]
    answer = examination.ask("settings")
    if answer.problem:
        return [not_asked("the settings", answer)]
    why = "vLLM does not start with a wrong configuration"
    wrong = [
        Finding(FAIL, error, why, f"correct or unset {error.partition(':')[0]}")
        for error in answer.value["errors"]
    ]
    off = answer.value["off"]
    right = f"{off} is off, every layer stays vLLM's own" if off else "what the plug-in reads is right"
    return wrong or [Finding(PASS, right)]

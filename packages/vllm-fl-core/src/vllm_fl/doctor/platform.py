"""The check of vLLM's platform: whose it is, and what the description of a chip leaves out."""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.doctor.checks import not_asked
from vllm_fl.doctor.finding import FAIL
from vllm_fl.doctor.finding import PASS
from vllm_fl.doctor.finding import WARN
from vllm_fl.doctor.finding import Finding
from vllm_fl.platform.names import VARIABLE
from vllm_fl.platform.report import MISSED
from vllm_fl.platform.report import USED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_fl.doctor.checks import Examination


def platform(examination: Examination) -> list[Finding]:
    """vLLM has a platform for this machine; a chip that a wheel describes lacks nothing that vLLM calls."""
    answer = examination.ask("platform")
    if answer.problem:
        return [not_asked("vLLM's platform", answer)]
    found: dict[str, Any] = answer.value
    return [*_broken(found), *_served(found), *(_of_chip(found["chip"]) if found["chip"] else ())]


def _broken(found: dict[str, Any]) -> Iterator[Finding]:
    for title, reason in found["broken"]:
        yield Finding(
            WARN,
            f"{title} is not used: {reason}",
            "vLLM has no platform from it",
            "report it to the authors of the wheel; its entry points of vllm_fl.platforms name the file",
        )


def _served(found: dict[str, Any]) -> Iterator[Finding]:
    if found["problem"]:
        mend = f"export {VARIABLE}=NAME  # of the one that is meant; none uses no description"
        yield Finding(FAIL, found["problem"], "vLLM does not start", mend)
        return
    for title, reason in found["not_used"]:
        yield Finding(PASS, f"{title} is not used: {reason}")
    if found["active"]:
        yield Finding(PASS, f"{found['active']} is vLLM's: {found['why']}")
    elif found["served_by"] or found["vllm"] is None:
        yield Finding(PASS, f"no description is used: {found['why']}")
    else:
        yield Finding(
            WARN,
            f"vLLM has no platform for this machine: {found['why']}",
            "it cannot serve: no platform of its own claims the machine, and no wheel brings one",
            "install the wheel of your chip, or describe it: docs/platform.md\n"
            f"export {VARIABLE}=NAME  # where one is installed and its probe is wrong",
        )


def _of_chip(chip: dict[str, Any]) -> Iterator[Finding]:
    rows = chip["fields"]
    yield Finding(PASS, f"described: {', '.join(name for name, _, state, _ in rows if state == USED)}")
    left = [f"{name} ({cost})" for name, _, state, cost in rows if state == MISSED]
    if left:
        yield Finding(PASS, f"left out: {'; '.join(left)}")
    yield Finding(PASS, f"bound in a worker: {', '.join(chip['bound']) or 'nothing'}")
    if chip["unbound"]:
        names = "; ".join(f"torch.cuda.{name} ({use})" for name, use in chip["unbound"].items())
        yield Finding(
            WARN,
            f"vLLM calls {names}, and the description names nothing in their place",
            "the call reaches CUDA's, which fails on this machine",
            "name them in the field cuda_names of the description",
        )
    yield from _settings(chip)
    counted = [*chip["overrides"], *(f"quirk {name} ({reason})" for name, on, reason in chip["quirks"] if on)]
    yield Finding(PASS, f"{len(counted)} overrides and quirks{': ' if counted else ''}{'; '.join(counted)}")


def _settings(chip: dict[str, Any]) -> Iterator[Finding]:
    if chip["is_bypassed"]:
        yield Finding(
            WARN,
            "VLLM_TARGET_DEVICE=cpu: vLLM takes its own platform for the CPU and asks for no other",
            "the description is not used",
            "unset VLLM_TARGET_DEVICE",
        )
    if chip["lacks_triton"]:
        yield Finding(
            WARN,
            "Triton is not installed, and this vLLM lets no platform replace its Triton kernels",
            "it cannot serve: its model runner launches one in every step",
            "install vLLM 0.32 or later, or the Triton of the chip",
        )
    if chip["runner"] in ("", "0"):
        yield Finding(PASS, "vLLM's first model runner: the second one needs Triton and unified addresses")
    else:
        yield Finding(
            WARN,
            f"VLLM_USE_V2_MODEL_RUNNER={chip['runner']}: vLLM's second model runner",
            "it needs Triton and unified addresses, and has not been tried on a described chip",
            "unset VLLM_USE_V2_MODEL_RUNNER",
        )

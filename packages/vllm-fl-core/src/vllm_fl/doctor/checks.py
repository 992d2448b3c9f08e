"""The checks of ``vllm-fl doctor``, but those of what is installed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.dispatch import PolicyError
from vllm_fl.dispatch import discovery
from vllm_fl.dispatch.common.text import printable
from vllm_fl.dispatch.plugins.loading import PLUGIN_MODULES_ENV
from vllm_fl.dispatch.plugins.loading import PLUGINS_ENV
from vllm_fl.dispatch.variables import PREFIX
from vllm_fl.dispatch.variables import VARIABLES
from vllm_fl.dispatch.variables import hint
from vllm_fl.dispatch.wheels import faster_wheels
from vllm_fl.doctor import probe_process
from vllm_fl.doctor.finding import FAIL
from vllm_fl.doctor.finding import PASS
from vllm_fl.doctor.finding import SKIP
from vllm_fl.doctor.finding import WARN
from vllm_fl.doctor.finding import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

#: A plugin that takes longer makes every process of a server wait.
_SLOW_SECONDS = 5.0

#: The time limit that is advised where one did not suffice.
MORE_SECONDS = 600


class Examination:
    """One run of the doctor: what it asks in other processes is asked once.

    Args:
        seconds: the time limit of each question.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._answers: dict[tuple[str, ...], probe_process.Answer] = {}
        self._plugins: list[Any] | None = None

    def ask(self, *question: str) -> probe_process.Answer:
        """Return the answer to a question of :mod:`vllm_fl.doctor.probes`."""
        if question not in self._answers:
            self._answers[question] = probe_process.ask(*question, seconds=self.seconds)
        return self._answers[question]

    def plugins(self) -> list[Any]:
        """Return what the discovery finds, not loaded.

        Raises:
            PolicyError: VLLM_FL_PLUGIN_MODULES is wrong.
        """
        if self._plugins is None:
            self._plugins = discovery.find_plugins()
        return self._plugins


def _title(plugin: Any) -> str:
    return f"plugin {plugin.name!r} of {plugin.origin.distribution} {plugin.origin.version}".rstrip()


def _removal(plugin: Any) -> str:
    """Return what takes a plugin away: a wheel, or a module that a variable names."""
    # A command of several lines is one of ours.
    wheel = printable(plugin.origin.distribution)
    if wheel == PLUGIN_MODULES_ENV:
        return f"take {printable(plugin.name)} out of {wheel}"
    return f"pip uninstall {wheel}"


def _without(plugin: Any, plugins: list[Any]) -> str:
    """Return what leaves a plugin out, or mends it."""
    wheel = printable(plugin.origin.distribution)
    if wheel == PLUGIN_MODULES_ENV:
        return _removal(plugin)
    others = printable(",".join(sorted({one.name for one in plugins} - {plugin.name})))
    leave_out = f"export {PLUGINS_ENV}={others}" if others else _removal(plugin)
    return f"pip install --upgrade {wheel}  # or leave it out: {leave_out}"


def _where(said: str) -> str:
    """Return the place that faulthandler names first, of what a process printed."""
    line = next((line.strip() for line in said.splitlines() if line.strip().startswith('File "')), "")
    return f" ({line})" if line else ""


def plugins(examination: Examination) -> list[Finding]:
    """Every plugin loads, fits this core, and leaves the process as it was."""
    try:
        found = examination.plugins()
    except PolicyError as error:
        return [Finding(SKIP, f"the plugins are not known: {error}")]
    seen: dict[str, Any] = {}
    findings = []
    for index, plugin in enumerate(found):
        mend = _without(plugin, found)
        first = seen.setdefault(plugin.name, plugin)
        if first is not plugin:
            findings.append(
                Finding(
                    FAIL,
                    f"{_title(plugin)}: the name is taken by {first.origin.distribution} ({first.source})",
                    "one name is one plugin, and the second is not loaded",
                    f"{_removal(plugin)}  # or {_removal(first)}",
                )
            )
            continue
        answer = examination.ask("plugin", str(index))
        if answer.problem:
            findings.append(
                unanswered(
                    answer,
                    f"{_title(plugin)} {answer.problem} while it was loaded{_where(answer.said)}",
                    "every process of vLLM loads it, and ends or waits in the same way",
                    mend,
                )
            )
        else:
            findings += _of_loaded(plugin, answer.value, mend)
    return findings or [Finding(WARN, "no plugin is installed", "nothing can be chosen", _INSTALL)]


_INSTALL = "pip install vllm-fl-reference  # and the wheel of your chip: `vllm-fl explain OP` names them"


def _of_loaded(plugin: Any, answer: dict[str, Any], mend: str) -> Iterator[Finding]:
    title = _title(plugin)
    if answer["state"] != "loaded":
        why = "its implementations cannot be chosen"
        yield Finding(FAIL, f"{title} is {answer['state']}: {answer['reason']}", why, mend)
        return
    if answer["reason"]:
        yield Finding(WARN, f"{title}: not all is used: {answer['reason']}", "the rest is", mend)
    if answer["threads"]:
        names = ", ".join(answer["threads"])
        yield Finding(
            WARN,
            f"{title} leaves threads running: {names}",
            "a process with threads does not fork safely, and vLLM may fork its workers",
            mend,
        )
    changed = [line for line in answer["logged"] if "changed the root logger" in line]
    if changed:
        yield Finding(WARN, changed[0], "the logs of a program are its own", mend)
    if answer["seconds"] > _SLOW_SECONDS:
        why = "every process of vLLM waits for it"
        yield Finding(WARN, f"{title} takes {answer['seconds']:.0f} s to load", why, mend)
    yield Finding(PASS, f"{title} loads")


def backends(examination: Examination) -> list[Finding]:
    """Every backend says whether it is available, and an available one has all its kernels."""
    try:
        found = examination.plugins()
    except PolicyError as error:
        return [Finding(SKIP, f"the plugins are not known: {error}")]
    findings = []
    for index, plugin in enumerate(found):
        answer = examination.ask("backends", str(index))
        if answer.problem:
            findings.append(
                unanswered(
                    answer,
                    f"{_title(plugin)} {answer.problem} when it was asked what is available"
                    f"{_where(answer.said)}",
                    "a worker asks the same before it serves, and ends or waits in the same way",
                    _without(plugin, found),
                )
            )
            continue
        for row in answer.value:
            findings.append(_of_backend(row, plugin))
    return findings or [Finding(SKIP, "there is no backend")]


def _of_backend(row: dict[str, Any], plugin: Any) -> Finding:
    if row["reason"]:
        return Finding(
            WARN,
            f"{row['impl_id']} is not available: {row['reason']}",
            "its wheel is installed, and none of its kernels can run here",
            f"install what it names, or {_removal(plugin)}",
        )
    if row["missing"]:
        lacks = "; ".join(f"{op_name} ({reason})" for op_name, reason in row["missing"].items())
        return Finding(
            WARN,
            f"{row['impl_id']} is available without {lacks}",
            "the next implementation runs these operators, or vLLM's own path",
            f"vllm-fl explain {' '.join(row['missing'])}  # what runs instead",
        )
    return Finding(PASS, f"{row['impl_id']} is available")


def vendors(examination: Examination) -> list[Finding]:
    """At most one vendor is available."""
    try:
        count = len(examination.plugins())
    except PolicyError as error:
        return [Finding(SKIP, f"the plugins are not known: {error}")]
    rows = [row for i in range(count) for row in examination.ask("backends", str(i)).value or ()]
    found = sorted({row["vendor"] for row in rows if row["vendor"] and not row["reason"]})
    if len(found) < 2:
        return [Finding(PASS, f"available vendors: {', '.join(found) or 'none'}")]
    return [
        Finding(
            WARN,
            f"{len(found)} vendors are available: {', '.join(found)}",
            "the packaged defaults of neither apply, and priorities decide between them",
            f"export VLLM_FL_ALLOW_VENDORS={found[0]}  # the one whose chip this is",
        )
    ]


def variables(examination: Examination) -> list[Finding]:
    """Somebody reads every VLLM_FL_* variable that is set."""
    known = set(VARIABLES)
    try:
        for index, _ in enumerate(examination.plugins()):
            known |= set((examination.ask("plugin", str(index)).value or {}).get("variables", ()))
    except PolicyError:
        pass  # the check of the policy says it
    given = [name for name in sorted(os.environ) if name.startswith(PREFIX)]
    findings = [
        Finding(
            WARN,
            f"{name} is set and read by nobody.{hint(name, known)}",
            "what it was meant to say is not done",
            f"unset {name}",
        )
        for name in given
        if name not in known
    ]
    return findings or [Finding(PASS, f"set and read: {', '.join(given) or 'none'}")]


def policy(examination: Examination) -> list[Finding]:
    """The configuration can be read, and names what is there."""
    answer = examination.ask("policy")
    if answer.problem:
        return [not_asked("the policy", answer)]
    if answer.value["error"]:
        return [
            Finding(
                FAIL,
                answer.value["error"],
                "vLLM does not start with a wrong configuration",
                "correct what the line names (docs/configuration.md lists every key and variable)",
            )
        ]
    sources = sorted(set(answer.value["sources"].values()))
    return [
        Finding(PASS, f"policy {answer.value['fingerprint']} from {', '.join(sources) or 'the defaults'}"),
        *(Finding(PASS, note) for note in answer.value["notes"]),
    ]


def operators(examination: Examination) -> list[Finding]:
    """No operator runs on the reference where a faster wheel could serve it."""
    wrong = _policy_error(examination)
    if wrong:
        return [wrong]
    answer = examination.ask("decisions")
    if answer.problem:
        return [not_asked("the choices", answer)]
    left_out = [
        Finding(
            WARN, line, "the operators that it names are chosen without it", "upgrade the wheel or the core"
        )
        for line in answer.value["packaged"]
    ]
    return left_out + _who_serves(answer.value)


def _who_serves(answer: dict[str, Any]) -> list[Finding]:
    decisions = answer["decisions"]
    chosen = {one["op_name"]: one["candidates"][0] for one in decisions if one["impl_id"]}
    slow = [name for name, candidate in chosen.items() if candidate["kind"] == "reference"]
    if not slow:
        return [Finding(PASS, f"{len(chosen)} operators are served, none by the reference")]
    if not answer["accelerator"]:
        return [Finding(PASS, f"the reference serves {', '.join(slow)}; torch sees no accelerator here")]
    wheels = [f"pip install {wheel.distribution}  # {wheel.purpose}" for wheel in faster_wheels(slow)]
    return [
        Finding(
            WARN,
            f"the reference serves {', '.join(slow)}",
            "it is plain PyTorch, and a chip's own kernels are faster",
            "\n".join(wheels) or "`vllm-fl explain OP` says why nothing else runs",
        )
    ]


def _policy_error(examination: Examination) -> Finding | None:
    answer = examination.ask("policy")
    if answer.problem or answer.value["error"]:
        return Finding(SKIP, "the policy cannot be read; see that check")
    return None


def unanswered(answer: probe_process.Answer, what: str, why: str, mend: str) -> Finding:
    """Say that a question has no answer: a failure, but a warning where the time did not suffice."""
    if not answer.is_late:
        return Finding(FAIL, what, why, mend)
    longer = f"vllm-fl doctor --seconds {MORE_SECONDS}  # more time; where that ends late too, it hangs"
    return Finding(
        WARN, what, f"the machine may be slow; or it hangs, and {why}", f"{longer}\n{mend}".strip()
    )


def not_asked(what: str, answer: probe_process.Answer) -> Finding:
    """Say that a question has no answer, because its process ended or hung."""
    return unanswered(
        answer,
        f"a process that asked for {what} {answer.problem}{_where(answer.said)}",
        "a process of vLLM does the same",
        "vllm-fl doctor --check plugins --check backends  # tests each plugin by itself",
    )


def workers(examination: Examination) -> list[Finding]:
    """A worker that is spawned or forked sees the plugins of its parent, and chooses alike."""
    import multiprocessing

    wrong = _policy_error(examination)
    if wrong:
        return [wrong]
    seen = {}
    for method in ("spawn", "fork"):
        if method not in multiprocessing.get_all_start_methods():
            continue
        answer = examination.ask("workers", method)
        if answer.problem:
            return [not_asked(f"a worker by {method}", answer)]
        if "ended" in answer.value["worker"]:
            code = answer.value["worker"]["ended"]
            return [not_asked(f"a worker by {method}", probe_process.Answer(None, f"saw it end with {code}"))]
        seen[f"the front end, {method}"] = answer.value["front end"]
        seen[f"a worker by {method}"] = answer.value["worker"]
    fingerprint = answer.value["worker"]["fingerprint"]
    text = f"workers by spawn and by fork see what their parents see; fingerprint {fingerprint}"
    return _differences(seen) or [Finding(PASS, text)]


def _differences(seen: dict[str, dict[str, Any]]) -> list[Finding]:
    findings = []
    for part in ("plugins", "implementations", "policy", "fingerprint"):
        values = {who: what[part] for who, what in seen.items() if part in what}
        if all(value == next(iter(values.values())) for value in values.values()):
            continue
        findings.append(
            Finding(
                FAIL,
                f"the {part} differ: " + "; ".join(f"{who} has {value}" for who, value in values.items()),
                "a rank that chooses otherwise gives wrong answers, so that vLLM does not start",
                "find the plugin that asks which process it is in: vllm-fl doctor --check plugins",
            )
        )
    return findings

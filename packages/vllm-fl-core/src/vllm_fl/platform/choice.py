"""Which description is active here, and why.

1. ``VLLM_FL_PLATFORM=none``: none is. ``VLLM_FL_PLATFORM=NAME``: that one is; where its
   probe says no, or there is none of that name, vLLM does not start.
2. Otherwise none is where another wheel brings vLLM a platform, or one of vLLM's own
   platforms claims the machine.
3. Otherwise the one whose probe says yes. A probe that raises, or takes longer than
   :data:`PROBE_SECONDS`, says no. Where two say yes, vLLM does not start.

A process hands its choice on to its children in ``VLLM_FL_PLATFORM``, so that the
processes of a server cannot disagree. Neither torch nor vLLM is imported here, but
by a probe, or to ask vLLM's own platforms.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import threading
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.dispatch import get_logger
from vllm_fl.dispatch.common.distributions import entry_points
from vllm_fl.dispatch.common.distributions import name_of
from vllm_fl.dispatch.common.distributions import version_of
from vllm_fl.dispatch.common.foreign import absent_module
from vllm_fl.dispatch.common.foreign import describe
from vllm_fl.dispatch.common.foreign import left_undone
from vllm_fl.dispatch.common.foreign import raise_if_from_a_signal
from vllm_fl.dispatch.common.foreign import shortened
from vllm_fl.dispatch.common.suggest import shown
from vllm_fl.dispatch.common.suggest import suggest
from vllm_fl.dispatch.common.text import printable
from vllm_fl.platform.description import Chip
from vllm_fl.platform.errors import PlatformError
from vllm_fl.platform.names import GROUP
from vllm_fl.platform.names import VARIABLE

if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.metadata import EntryPoint

logger = get_logger(__name__)

#: What :data:`VARIABLE` says where no description is to be used.
NONE = "none"

#: A probe runs in every process of a server; one that takes longer says no.
PROBE_SECONDS = 2.0

_VLLM_GROUP = "vllm.platform_plugins"


@dataclass(frozen=True, slots=True)
class Installed:
    """A description that a wheel brings.

    Attributes:
        name: of its entry point.
        wheel: the distribution, with its version.
        where: what the entry point names.
        chip: the description; None where it cannot be used.
        problem: why it cannot be used; empty where it can.
    """

    name: str
    wheel: str
    where: str
    chip: Chip | None
    problem: str = ""

    def __str__(self) -> str:
        return f"the platform {self.name!r} of {self.wheel} ({self.where})"

    def ask(self) -> str:
        """Ask whether the chip is here; return why not, nothing where it is."""
        if self.chip is None:
            return self.problem
        reference = self.chip.probe
        return _answer(lambda: self.load("probe", reference)())

    def load(self, field: str, reference: str) -> Any:
        """Return what a field names.

        Raises:
            PlatformError: it is not there; the message names the wheel and the field.
        """
        module, _, path = reference.partition(":")
        try:
            return functools.reduce(getattr, path.split(".") if path else [], import_module(module))
        except BaseException as error:
            raise_if_from_a_signal(error)
            absent = absent_module(error)
            # Its package is there: "torch is not installed" of torch.acme would mislead.
            reason = f"there is no module {absent}" if "." in absent else describe(error)
            text = f"{self}: field {field}: {reference} cannot be loaded: {reason}"
            raise PlatformError(printable(text)) from error

    def fingerprint(self) -> str:
        """Identify the description: what is compiled for one chip must not run on another."""
        known = [self.name, self.wheel, self.chip.to_dict() if self.chip else None]
        return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen.

    Attributes:
        active: the description that is used; None where none is.
        why: a sentence.
        problem: why vLLM must not start; empty where nothing is wrong.
        no: each description that was looked at and is not used, and why.
    """

    active: Installed | None
    why: str
    problem: str = ""
    no: tuple[tuple[Installed, str], ...] = ()


def installed() -> list[Installed]:
    """Return every installed description, loaded and checked, without asking a probe."""
    return [_loaded(entry) for entry in entry_points(GROUP)[0]]


def _loaded(entry: EntryPoint) -> Installed:
    wheel = "an unknown wheel"
    if entry.dist is not None:
        name = name_of(entry.dist)
        wheel = f"{name} {version_of(name) or ''}".rstrip()
    try:
        chip = entry.load()
    except BaseException as error:  # noqa: BLE001 - somebody else's code
        raise_if_from_a_signal(error)
        return Installed(entry.name, wheel, entry.value, None, describe(error))
    if not isinstance(chip, Chip):
        return Installed(entry.name, wheel, entry.value, None, f"it is no Chip but {shown(chip)}")
    if entry.name == NONE:
        return Installed(entry.name, wheel, entry.value, None, f"the name {NONE!r} means that none is used")
    return Installed(entry.name, wheel, entry.value, chip)


def choose(
    wanted: str | None,
    descriptions: list[Installed],
    rivals: list[str],
    ask_vllm: Callable[[], list[str]],
) -> Choice:
    """Choose by the rules at the top of this module.

    Args:
        wanted: what the variable says; None where it is unset.
        descriptions: what is installed.
        rivals: what :func:`others` returns.
        ask_vllm: returns what :func:`claims` returns; it is asked only where that counts.
    """
    if wanted == NONE:
        return Choice(None, f"{VARIABLE}={NONE}")
    if wanted is not None:
        return _named(wanted, descriptions)
    if not descriptions:
        return Choice(None, "no installed wheel describes a chip")
    if rivals:
        return Choice(
            None, f"{' and '.join(rivals)} brings vLLM a platform; {VARIABLE}=NAME uses a description instead"
        )
    answers = [(one, one.ask()) for one in descriptions]
    yes = [one for one, reason in answers if not reason]
    rejected = tuple((one, reason) for one, reason in answers if reason)
    if not yes:
        return Choice(None, "no installed wheel describes this machine", no=rejected)
    claimed = ask_vllm()
    if claimed:
        own = " and ".join(claimed)
        why = f"vLLM's own platform {own} serves this machine; {VARIABLE}=NAME uses a description instead"
        return Choice(None, why, no=rejected)
    if len(yes) > 1:
        names = " or ".join(f"{VARIABLE}={one.name}" for one in yes)
        problem = f"{' and '.join(map(str, yes))} both say that their chip is here: set {names}"
        return Choice(None, "two descriptions say yes", problem, rejected)
    return Choice(yes[0], "its probe says yes", no=rejected)


def _named(wanted: str, descriptions: list[Installed]) -> Choice:
    named = f"{VARIABLE}={wanted}"
    found = [one for one in descriptions if one.name == wanted]
    if not found:
        known = suggest(wanted, [*(one.name for one in descriptions), NONE])
        return Choice(None, named, f"{named}: no installed wheel has a platform of that name.{known}")
    if len(found) > 1:
        problem = f"{named}: {' and '.join(map(str, found))} have one name; uninstall one of them"
        return Choice(None, named, problem)
    reason = found[0].ask()
    if reason:
        return Choice(None, named, f"{named}: {found[0]} cannot be used: {reason}")
    return Choice(found[0], named)


def _answer(probe: Callable[[], object]) -> str:
    """Run a probe; return why it says no, nothing where it says yes."""
    answer: list[object] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            answer.append(probe())
        except BaseException as error:  # noqa: BLE001 - somebody else's code, SystemExit too
            failed.append(error)

    # What hangs in this process cannot be ended; the thread ends with it.
    thread = threading.Thread(target=run, name="vllm-fl-probe", daemon=True)
    thread.start()
    thread.join(PROBE_SECONDS)
    if failed:
        return f"its probe raises {describe(failed[0])}"
    if not answer:
        return f"its probe takes longer than {PROBE_SECONDS:g} s"
    if answer[0] is True:
        return ""
    if answer[0] is False:
        return "its probe says that the chip is not here"
    undone = left_undone(answer[0])
    if undone:
        return f"its probe has not run: {undone}"
    if isinstance(answer[0], str):
        return shortened(answer[0]) or "its probe says no, without a reason"
    return f"its probe answers {shown(answer[0])}, which is neither True, False nor a reason"


@functools.cache
def chosen() -> Choice:
    """Return the choice of this process, made once."""
    wanted = os.environ.get(VARIABLE, "").strip() or None
    return choose(wanted, installed(), others(), claims)


def others() -> list[str]:
    """Return the wheels, not this one, that bring vLLM a platform."""
    found = entry_points(_VLLM_GROUP)[0]
    # To ask its function whether it would serve could open the device: installed is enough.
    return sorted(
        {
            name_of(entry.dist) if entry.dist is not None else entry.name
            for entry in found
            if entry.value.partition(":")[0] != __package__
        }
    )


def claims() -> list[str]:
    """Return vLLM's own platforms that claim this machine; none where there is no vLLM."""
    try:
        from vllm.platforms import builtin_platform_plugins
    except ImportError:
        return []
    found = []
    for name, function in builtin_platform_plugins.items():
        try:
            if function() is not None:
                found.append(str(name))
        except Exception as error:  # noqa: BLE001 - vLLM itself takes that for a no
            logger.debug("vllm-fl: vLLM's platform %s cannot be asked: %s", name, describe(error))
    return found


@functools.cache
def for_vllm() -> str | None:
    """Return the class that vLLM makes its platform of, and hand the choice on to child processes."""
    choice = chosen()
    for one, reason in choice.no:
        if one.chip is None:
            logger.warning("vllm-fl: %s is not used: %s", one, reason)
        else:
            logger.debug("vllm-fl: %s is not used: %s", one, reason)
    if choice.problem:
        return f"{__name__}.{Refusal.__name__}"
    os.environ[VARIABLE] = choice.active.name if choice.active else NONE
    return "vllm_fl.platform.build.ChipPlatform" if choice.active else None


class Refusal:
    """What vLLM gets in the place of a platform where none may be made.

    vLLM swallows what an entry point raises, and not what a class does.

    Raises:
        PlatformError: always; the message is the problem.
    """

    def __init__(self) -> None:
        raise PlatformError(printable(f"vllm-fl: {chosen().problem}"))


def active() -> Installed:
    """Return the active description.

    Raises:
        PlatformError: there is none.
    """
    choice = chosen()
    if choice.active is None:
        text = f"vllm-fl: no platform is active: {choice.problem or choice.why}"
        raise PlatformError(printable(text))
    return choice.active

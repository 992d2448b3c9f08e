"""Which description is active, why, and what a hostile one costs: that description, with its reason."""

from __future__ import annotations

import importlib
import logging
import os
import re
import sys
import time
from typing import TYPE_CHECKING
from typing import Any

import pytest

from vllm_fl.platform import choice
from vllm_fl.platform import platform
from vllm_fl.platform.choice import Installed
from vllm_fl.platform.choice import choose
from vllm_fl.platform.description import Chip
from vllm_fl.platform.errors import PlatformError
from vllm_fl.platform.names import VARIABLE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from vllm_fl.platform.choice import Choice

#: This module, by a name that a description can write.
HERE = "vllm_fl_probes_of_a_test"
sys.modules[HERE] = sys.modules[__name__]


def probe_yes() -> bool:
    return True


def probe_no() -> bool:
    return False


def probe_reason() -> str:
    return "there is no /dev/acme0"


def probe_empty() -> str:
    return ""


def probe_none() -> None:
    return None


def probe_one() -> int:
    return 1


def probe_raises() -> bool:
    raise OSError("the driver is gone")


def probe_exits() -> bool:
    sys.exit("no chip")


def probe_interrupts() -> bool:
    raise KeyboardInterrupt


def probe_hangs() -> bool:
    time.sleep(3600)
    return True


async def probe_later() -> bool:
    return True


def described(name: str, probe: str = "probe_yes", wheel: str | None = None) -> Installed:
    chip = Chip(name=name.upper(), probe=f"{HERE}:{probe}", device_type=name, torch_module=f"torch.{name}")
    return Installed(name, wheel or f"vllm-plugin-{name} 1.0", f"{name}.chip:CHIP", chip)


def made(
    *descriptions: Installed, wanted: str | None = None, others: list[str] | None = None, claims: Any = ()
) -> Choice:
    return choose(wanted, list(descriptions), others or [], lambda: list(claims))


def name_of(found: Choice) -> str | None:
    return found.active.name if found.active else None


# -- the rules --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "active", "why"),
    [
        (made(), None, "no installed wheel describes a chip"),
        (made(described("a")), "a", "its probe says yes"),
        (made(described("a", "probe_no")), None, "no installed wheel describes this machine"),
        (made(described("a", "probe_no"), described("b")), "b", "its probe says yes"),
        (made(described("a"), others=["vllm-x"]), None, "vllm-x brings vLLM a platform"),
        (made(described("a"), claims=["cuda"]), None, "vLLM's own platform cuda serves this machine"),
        (made(described("a"), wanted="none"), None, "VLLM_FL_PLATFORM=none"),
        # A name wins over the other wheel and over vLLM's own platform.
        (made(described("a"), wanted="a", others=["vllm-x"], claims=["cpu"]), "a", "VLLM_FL_PLATFORM=a"),
        (made(described("a"), described("b"), wanted="b"), "b", "VLLM_FL_PLATFORM=b"),
        # Where none is made, two that say yes are no error.
        (made(described("a"), described("b"), claims=["cpu"]), None, "vLLM's own platform cpu"),
        (made(described("a"), described("b"), others=["vllm-x"]), None, "vllm-x brings"),
    ],
)
def test_the_rules(found: Choice, active: str | None, why: str) -> None:
    assert name_of(found) == active
    assert found.why.startswith(why)
    assert found.problem == ""


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        (
            made(described("a"), described("b")),
            "the platform 'a' of vllm-plugin-a 1.0 (a.chip:CHIP) and the platform 'b' of vllm-plugin-b 1.0 "
            "(b.chip:CHIP) both say that their chip is here: set VLLM_FL_PLATFORM=a or VLLM_FL_PLATFORM=b",
        ),
        (
            made(described("acme"), wanted="acne"),
            "VLLM_FL_PLATFORM=acne: no installed wheel has a platform of that name. Did you mean 'acme'?",
        ),
        (
            made(wanted="acme"),
            "VLLM_FL_PLATFORM=acme: no installed wheel has a platform of that name. Known: none.",
        ),
        (
            made(described("a", "probe_reason"), wanted="a"),
            "VLLM_FL_PLATFORM=a: the platform 'a' of vllm-plugin-a 1.0 (a.chip:CHIP) cannot be used: "
            "there is no /dev/acme0",
        ),
        (
            made(described("a"), described("a", wheel="other 2.0"), wanted="a"),
            "VLLM_FL_PLATFORM=a: the platform 'a' of vllm-plugin-a 1.0 (a.chip:CHIP) and the platform 'a' of "
            "other 2.0 (a.chip:CHIP) have one name; uninstall one of them",
        ),
    ],
)
def test_what_stops_vllm(found: Choice, problem: str) -> None:
    assert found.active is None
    assert found.problem == problem


def test_nobody_is_asked_whose_answer_does_not_count() -> None:
    def claims() -> list[str]:
        raise AssertionError("vLLM's own platforms may open a library")

    assert choose(None, [described("a", "probe_no")], [], claims).active is None
    assert choose("a", [described("a")], [], claims).active is not None
    assert choose(None, [described("a", "probe_hangs")], ["vllm-x"], claims).no == ()
    assert choose("none", [described("a", "probe_hangs")], [], claims).no == ()


# -- what a probe may do ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("probe", "reason"),
    [
        ("probe_no", "its probe says that the chip is not here"),
        ("probe_reason", "there is no /dev/acme0"),
        ("probe_empty", "its probe says no, without a reason"),
        ("probe_none", "its probe answers None, which is neither True, False nor a reason"),
        ("probe_one", "its probe answers 1, which is neither"),
        ("probe_raises", "its probe raises OSError: the driver is gone"),
        ("probe_exits", "its probe raises SystemExit: no chip"),
        ("probe_interrupts", "its probe raises KeyboardInterrupt"),
        ("probe_hangs", "its probe takes longer than 0.2 s"),
        ("probe_later", "its probe has not run: it is asynchronous (async def)"),
        ("absent", f"field probe: {HERE}:absent cannot be loaded: AttributeError"),
    ],
)
def test_a_probe_that_says_no(monkeypatch: pytest.MonkeyPatch, probe: str, reason: str) -> None:
    monkeypatch.setattr(choice, "PROBE_SECONDS", 0.2)
    found = made(described("a", probe), described("b"))
    assert name_of(found) == "b"
    ((one, said),) = found.no
    assert one.name == "a"
    assert reason in said


# -- what is installed -----------------------------------------------------------------------------

CHIP = """
from vllm_fl.platform.description import Chip
CHIP = Chip(name={name!r}, probe="{module}:probe", device_type="cpu", torch_module="{module}"{more})
def probe():
    return {answer}
"""


class Wheels:
    """A folder of installed distributions, and the choice that is made of them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self._monkeypatch = folder, monkeypatch

    def describe(
        self,
        name: str,
        *,
        answer: str = "True",
        more: str = "",
        source: str | None = None,
        group: str = "vllm_fl.platforms",
    ) -> None:
        module = f"{name}_chip"
        text = CHIP.format(name=name, module=module, answer=answer, more=more)
        (self.folder / f"{module}.py").write_text(text if source is None else source)
        info = self.folder / f"{name}_wheel-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-wheel\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {module}:CHIP\n")
        importlib.invalidate_caches()

    def vllm_asks(self, wanted: str = "", claims: Any = ()) -> str | None:
        self._monkeypatch.setenv(VARIABLE, wanted)
        self._monkeypatch.setattr(choice, "claims", lambda: list(claims))
        choice.chosen.cache_clear()
        choice.for_vllm.cache_clear()
        return platform()


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Wheels]:
    monkeypatch.syspath_prepend(tmp_path)
    yield Wheels(tmp_path, monkeypatch)
    choice.chosen.cache_clear()
    choice.for_vllm.cache_clear()


PLATFORM = "vllm_fl.platform.build.ChipPlatform"
REFUSAL = "vllm_fl.platform.choice.Refusal"


def test_an_installed_description_is_active_and_handed_on(wheels: Wheels) -> None:
    wheels.describe("acme")
    assert wheels.vllm_asks() == PLATFORM
    assert os.environ[VARIABLE] == "acme"
    # vLLM asks twice, and a child asks anew.
    assert platform() == PLATFORM
    assert wheels.vllm_asks("acme") == PLATFORM
    assert str(choice.active()) == "the platform 'acme' of acme-wheel 1.0 (acme_chip:CHIP)"


@pytest.mark.parametrize(("wanted", "claims"), [("none", ()), ("", ["cpu"])])
def test_that_none_is_active_is_handed_on(wheels: Wheels, wanted: str, claims: Any) -> None:
    wheels.describe("acme")
    assert wheels.vllm_asks(wanted, claims) is None
    assert os.environ[VARIABLE] == "none"
    with pytest.raises(PlatformError, match="no platform is active"):
        choice.active()


def test_another_wheels_platform_wins(wheels: Wheels) -> None:
    wheels.describe("acme")
    wheels.describe("rival", group="vllm.platform_plugins", source="def CHIP(): 1 / 0")
    assert wheels.vllm_asks() is None
    assert choice.chosen().why.startswith("rival-wheel brings vLLM a platform; VLLM_FL_PLATFORM=NAME")
    assert "rival_chip" not in sys.modules
    assert wheels.vllm_asks("acme") == PLATFORM


def test_vllm_gets_a_class_that_raises(wheels: Wheels) -> None:
    """What the entry point raises is swallowed, and vLLM would serve on another platform."""
    wheels.describe("acme")
    wheels.describe("bolt")
    assert wheels.vllm_asks() == REFUSAL
    with pytest.raises(PlatformError, match=r"'acme' of acme-wheel 1\.0 .* 'bolt' of bolt-wheel 1\.0"):
        choice.Refusal()
    assert wheels.vllm_asks("bold") == REFUSAL
    with pytest.raises(PlatformError, match="Did you mean 'bolt'"):
        choice.Refusal()


HOSTILE = {
    "a field is unknown": ({"more": ", device_name='x'"}, "there is no field 'device_name'. Did you mean"),
    "a field is wrong": (
        {"more": ", block_size='16'"},
        "field block_size: must be a positive number, not '16'",
    ),
    "a field is missing": (
        {"source": "from vllm_fl.platform.description import Chip\nCHIP = Chip(name='x')"},
        "these fields are missing: probe, device_type, torch_module",
    ),
    "it is no Chip": ({"source": "CHIP = {'name': 'x'}"}, "it is no Chip but {'name': 'x'}"),
    "it is not there": ({"source": ""}, "AttributeError"),
    "it raises": ({"source": "1 / 0"}, "ZeroDivisionError"),
    "it exits": ({"source": "import sys; sys.exit(3)"}, "SystemExit"),
    "it lacks a library": ({"source": "import torch_acme"}, "torch_acme is not installed"),
    "it forges a line": ({"source": "raise ValueError('a\\n\\x1b[31mERROR b')"}, r"a\n\x1b[31mERROR b"),
}


@pytest.mark.parametrize(("wheel", "reason"), HOSTILE.values(), ids=HOSTILE)
def test_a_wrong_description_costs_itself_and_one_line(
    wheels: Wheels, caplog: pytest.LogCaptureFixture, wheel: dict[str, str], reason: str
) -> None:
    wheels.describe("hostile", **wheel)
    wheels.describe("acme")
    with caplog.at_level(logging.INFO, "vllm_fl"):
        assert wheels.vllm_asks() == PLATFORM
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("vllm_fl")]
    assert line.startswith(
        "vllm-fl: the platform 'hostile' of hostile-wheel 1.0 (hostile_chip:CHIP) is not used: "
    )
    assert reason in line
    assert line.isprintable()
    # Named, it is an error that says the same.
    assert wheels.vllm_asks("hostile") == REFUSAL
    with pytest.raises(PlatformError, match=re.escape(reason)) as caught:
        choice.Refusal()
    assert str(caught.value).isprintable()


def test_none_is_no_name(wheels: Wheels) -> None:
    wheels.describe("none")
    assert wheels.vllm_asks() is None
    ((_, reason),) = choice.chosen().no
    assert reason == "the name 'none' means that none is used"


def test_what_is_compiled_for_one_chip_is_not_for_another(wheels: Wheels) -> None:
    wheels.describe("acme")
    wheels.describe("bolt")
    wheels.describe("cork", more=", block_size=16")
    found = [one.fingerprint() for one in choice.installed()]
    assert len(set(found)) == 3
    assert found == [one.fingerprint() for one in choice.installed()]

"""What a plugin does to its process: the streams, the folder, the variables and other people's metadata."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any

import pytest
from wheels import OP
from wheels import RIGHT
from wheels import Site
from wheels import discover
from wheels import lines

import vllm_fl
from vllm_fl.cli.output import ExitCode
from vllm_fl.dispatch import call_op
from vllm_fl.dispatch import get_default_manager

if TYPE_CHECKING:
    from collections.abc import Callable

CHANGES = {
    "stdout is None": ("sys.stdout = None", "sys.stdout"),
    "both are None": ("sys.stdout = sys.stderr = None", "sys.stdout, sys.stderr"),
    "stderr is replaced": ("import io; sys.stderr = io.StringIO()", "sys.stderr"),
    "stdout is no stream": ("sys.stdout = 5", "sys.stdout"),
    "a variable is set": ("os.environ['VLLM_FL_PREFER'] = 'vendor'", "VLLM_FL_PREFER"),
    "a variable is wrong": ("os.environ['VLLM_FL_CONFIG'] = '/nowhere'", "VLLM_FL_CONFIG"),
    "a variable is gone": ("del os.environ['VLLM_FL_STRICT']", "VLLM_FL_STRICT"),
    "the folder": ("os.chdir('/')", "the current folder"),
}


@pytest.mark.parametrize(("change", "what"), CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("then", ["", "raise RuntimeError('half way')"])
def test_what_belongs_to_the_program_is_put_back(
    site: Site,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    change: str,
    what: str,
    then: str,
) -> None:
    monkeypatch.setenv("VLLM_FL_STRICT", "1")
    before = sys.stdout, sys.stderr, os.getcwd(), dict(os.environ)
    site.wheel("acme", f"import os, sys\n{change}\n{then}\n{RIGHT}")
    site.wheel("good")
    records = discover()
    assert (sys.stdout, sys.stderr, os.getcwd(), dict(os.environ)) == before
    assert records["good"].success
    said = [line for line in lines(caplog) if "that is undone" in line]
    assert said == [f"plugin 'acme' of acme 1.0 changed {what} while it was loaded; that is undone"]


def test_a_variable_of_the_plugins_own_stays(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_FL_ACME_FAST", "0")
    variables = "VLLM_FL_VARIABLES = ('VLLM_FL_ACME_FAST',)\n"
    site.wheel("acme", f"import os\nos.environ['VLLM_FL_ACME_FAST'] = '1'\n{variables}{RIGHT}")
    assert discover()["acme"].success
    assert os.environ["VLLM_FL_ACME_FAST"] == "1"


#: What a plugin does, and where it still must be possible to say so.
CLOSES = {
    "when it is imported": "import sys\n{what}\n" + RIGHT,
    "when it is asked": """
import sys
class Acme(Backend):
    name = "acme"
    def is_available(self):
        {what}
        return True
    def silu_and_mul(self, x): return x
def register(registry): registry.register_backend(Acme())
""",
}


@pytest.mark.parametrize("when", CLOSES.values(), ids=CLOSES)
@pytest.mark.parametrize(
    "what",
    [
        "sys.stdout = sys.stderr = None",
        "sys.stdout.close(); sys.stderr.close()",
        "sys.stdout = sys.stderr = open('/dev/null', 'w')",
        "sys.stdout = 5",
    ],
)
@pytest.mark.parametrize("arguments", [["list", "--probe", "--json"], ["explain", OP]])
def test_the_command_still_speaks(
    tmp_path: Path, python: Callable[..., Any], when: str, what: str, arguments: list[str]
) -> None:
    Site(tmp_path).wheel("acme", when.replace("{what}", what))
    code = f"from vllm_fl.cli import main; raise SystemExit(main({arguments}))"
    done = python(code, tmp_path, VLLM_FL_PLUGINS="acme", VLLM_FL_LOG_LEVEL="warning")
    assert done.returncode == 0, done.stderr
    if "--json" in arguments:
        plugins = json.loads(done.stdout)["plugins"]
        assert [one["state"] for one in plugins if one["name"] == "acme"] == ["loaded"]
    else:
        assert "vendor.acme" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-", ">&- 2>&-"])
@pytest.mark.parametrize("command", ["list", "env --json", "explain silu_and_mul", "doctor --check vendors"])
def test_a_command_without_its_standard_files(tmp_path: Path, closed: str, command: str) -> None:
    Site(tmp_path).wheel("acme", "print('noise')\n" + RIGHT)
    paths = os.pathsep.join([str(tmp_path), str(Path(vllm_fl.__file__).parents[1])])
    done = subprocess.run(
        f"exec {sys.executable} -m vllm_fl {command} {closed}",
        shell=True,
        env={**os.environ, "PYTHONPATH": paths, "VLLM_FL_PLUGINS": "acme"},
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stderr + done.stdout


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "vllm_fl", "env"],
            env={**os.environ, "PYTHONPATH": str(Path(vllm_fl.__file__).parents[1])},
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=120,
            check=False,
        )
    assert done.returncode == 1
    assert b"stdout cannot be written: No space left on device" in done.stderr
    assert b"fault of vllm-fl" not in done.stderr


# -- metadata ---------------------------------------------------------------------------------------

#: What a file of an unrelated distribution holds, and whether Python can read entry points then.
DAMAGED = {
    "a line that is none": ("entry_points.txt", b"[console_scripts]\nnot an entry\n", False),
    "no section": ("entry_points.txt", b"a = b:c\n", True),
    "no text": ("entry_points.txt", b"[console_scripts]\n\xff\xfe = a:b\n", False),
    "zeros": ("entry_points.txt", b"\0" * 1000, True),
    "an open section": ("entry_points.txt", b"[vllm_fl.plugin\nx = y\n", None),
    "metadata of no text": ("METADATA", b"\xff\xfe\0Name\0: x", True),
    "metadata without a name": ("METADATA", b"Metadata-Version: 2.1\n", True),
    "empty metadata": ("METADATA", b"", True),
    "metadata of one line": ("METADATA", b"Name: " + b" " * 10**6, True),
    "an odd record": ("RECORD", b'"\n\0,,,,\n"', True),
    "an odd direct_url": ("direct_url.json", b"[1, {", True),
    "an odd top level": ("top_level.txt", b"\xff", True),
}


@pytest.mark.parametrize(("file", "content", "is_read"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_metadata_of_somebody_else(
    tmp_path: Path, python: Callable[..., Any], file: str, content: bytes, is_read: bool | None
) -> None:
    """Every command goes on, and what is damaged is named."""
    Site(tmp_path).wheel("good")
    info = tmp_path / "unrelated-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: unrelated\nVersion: 1.0\n")
    (info / file).write_bytes(content)
    commands = [["list"], ["env", "--json"], ["explain", OP]]
    commands += [["doctor", "--check", "requirements"], ["doctor", "--check", "installation"]]
    code = f"""
import sys
from vllm_fl.cli import main
print([int(main(arguments)) for arguments in {commands}], file=sys.stderr)
"""
    done = python(code, tmp_path, VLLM_FL_LOG_LEVEL="warning", VLLM_FL_PLUGINS="good")
    assert done.returncode == 0, done.stderr
    assert "fault of vllm-fl" not in done.stderr
    codes = json.loads(done.stderr.splitlines()[-1])
    assert codes[:3] == [0] * 3
    assert ExitCode.FAULT not in codes
    if is_read is None:
        return  # each Python takes it for something else
    named = f"the entry points of {info} cannot be read"
    assert (named in done.stderr) == (not is_read)
    assert (named in done.stdout) == (not is_read)  # of the doctor
    assert is_read or codes[4] == ExitCode.PROBLEM


@pytest.mark.parametrize("file", ["METADATA", "RECORD", "entry_points.txt"])
@pytest.mark.parametrize("content", [b"\xff\xfe\0", b"\n,,\n[", None], ids=["no text", "odd", "missing"])
def test_damaged_metadata_of_a_plugin(
    tmp_path: Path, python: Callable[..., Any], file: str, content: bytes | None
) -> None:
    site = Site(tmp_path)
    site.wheel("acme")
    site.wheel("good")
    path = tmp_path / "acme-1.0.dist-info" / file
    path.unlink(missing_ok=True)
    if content is not None:
        path.write_bytes(content)
    code = """
import sys
from vllm_fl.cli import main
for arguments in (["list", "--json"], ["env"], ["doctor", "--check", "installation"]):
    main(arguments)
"""
    done = python(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "fault of vllm-fl" not in done.stderr
    first, _ = json.JSONDecoder().raw_decode(done.stdout)
    assert "good" in {plugin["name"] for plugin in first["plugins"] if plugin["state"] == "loaded"}


def test_metadata_that_may_not_be_read(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever `importlib.metadata` raises of one distribution, the plugins of the others are found."""
    from importlib import metadata

    site.wheel("acme")
    site.wheel("good")
    read = metadata.PathDistribution.read_text

    def refuse(self: Any, filename: Any) -> str | None:
        if "acme-1.0" in str(self._path):
            raise OSError("stale file handle")
        return read(self, filename)

    monkeypatch.setattr(metadata.PathDistribution, "read_text", refuse)
    assert call_op(OP, 1) == "good"
    assert set(get_default_manager().registry.plugins) == {"good"}


def test_an_interrupt_ends_the_command(tmp_path: Path) -> None:
    """As documented: 130, and no traceback."""
    Site(tmp_path).wheel("acme", "import time\nopen('here', 'w').close()\nwhile True: time.sleep(0.01)\n")
    paths = os.pathsep.join([str(tmp_path), str(Path(vllm_fl.__file__).parents[1])])
    process = subprocess.Popen(
        [sys.executable, "-m", "vllm_fl", "list"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths, "VLLM_FL_PLUGINS": "acme"},
        stderr=subprocess.PIPE,
    )
    while not (tmp_path / "here").exists():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (130, b"")

"""``vllm-fl doctor``: real distributions in a folder, each with a fault that it names and mends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import vllm_fl
from vllm_fl.cli.doctor import CHECKS
from vllm_fl.dispatch.common.distributions import copies

IMPL = (
    "from vllm_fl.dispatch import BackendImplKind, OpImpl\n"
    "def impl(name, fn=lambda x: x, op='silu_and_mul'):\n"
    "    return OpImpl(op, f'vendor.{name}', BackendImplKind.VENDOR, fn, name.split('.')[0])\n"
)
RIGHT = "def register(registry): registry.register_impl(impl({name!r}))\n"


@dataclass
class Place:
    """A folder of installed distributions, before everything else on the path."""

    folder: Path

    def wheel(self, name: str, source: str | None = None, version: str = "1.0", **more: str) -> Path:
        """Install a distribution whose plugin is the module ``<name>_ops``; return its metadata's folder."""
        module = more.pop("module", f"{name.replace('-', '_')}_ops")
        self.folder.mkdir(exist_ok=True)
        if source is not None:
            (self.folder / f"{module}.py").write_text(IMPL + source)
        info = self.folder / f"{name.replace('-', '_')}-{version}.{more.pop('suffix', 'dist-info')}"
        info.mkdir(parents=True)
        head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (info / "METADATA").write_text(head + more.pop("metadata", ""))
        (info / "PKG-INFO").write_text(head)
        entries = more.pop("entries", f"[vllm_fl.plugin]\n{name} = {module}\n")
        (info / "entry_points.txt").write_text(entries)
        (info / "RECORD").write_text(more.pop("record", ""))
        for file, text in more.items():
            (info / file.replace("_json", ".json")).write_text(text)
        return info

    def doctor(self, *arguments: str, path: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_FL_")}
        # The core stays where it is found now; what is before it is this folder.
        paths = [path, str(self.folder), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        if not copies("vllm-fl-core"):
            paths.append(str(Path(vllm_fl.__file__).parents[1]))
        inherited["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        return subprocess.run(
            [sys.executable, "-m", "vllm_fl", "doctor", *arguments],
            env={**inherited, **variables},
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )

    def findings(self, check: str, *arguments: str, **variables: str) -> list[dict[str, str]]:
        """Return what one check found, but what is well."""
        said = self.doctor("--check", check, "--json", *arguments, **variables)
        assert said.stdout, said.stderr
        (one,) = json.loads(said.stdout)["checks"]
        assert one["name"] == check
        found: list[dict[str, str]] = [f for f in one["findings"] if f["status"] in ("fail", "warn")]
        # What is wrong is never said without the reason and the way out.
        assert all(f["what"] and f["why"] and f["mend"] for f in found)
        assert said.returncode == int(any(f["status"] == "fail" for f in found))
        return found

    def one(self, check: str, *arguments: str, **variables: str) -> dict[str, str]:
        (found,) = self.findings(check, *arguments, **variables)
        return found


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


# -- the command -----------------------------------------------------------------------------


def test_a_check_that_is_well(place: Place) -> None:
    place.wheel("acme", RIGHT.format(name="acme"))
    said = place.doctor("--check", "plugins")
    assert said.returncode == 0, said.stderr
    assert "pass  plugins       plugin 'acme' of acme 1.0 loads" in said.stdout
    assert said.stdout.endswith("1 pass\n")


def test_every_finding_says_why_and_what_mends_it(place: Place) -> None:
    place.wheel("acme", "import no_such_library\n")
    said = place.doctor("--check", "plugins", "--check", "policy")
    assert said.returncode == 1
    lines = said.stdout.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("fail  plugins"))
    assert "acme 1.0 is failed: no_such_library is not installed" in lines[at]
    assert lines[at + 1].strip().startswith("why:  ")
    assert lines[at + 2].strip().startswith("mend: pip install --upgrade acme  # or leave it out: ")
    assert lines[-1] == "1 fail, 1 pass"


def test_the_json_object(place: Place) -> None:
    place.wheel("acme", "print('noise')\n" + RIGHT.format(name="acme"))
    said = place.doctor("--check", "plugins", "--check", "vendors", "--json")
    told = json.loads(said.stdout)
    assert said.returncode == 0
    assert told["schema_version"] == 1
    assert told["status"] == "pass"
    assert [check["name"] for check in told["checks"]] == ["plugins", "vendors"]
    assert set(told["checks"][0]["findings"][0]) == {"status", "what", "why", "mend"}


def test_strict_counts_warnings(place: Place) -> None:
    variables = {"VLLM_FL_PERFER": "vendor"}
    assert place.doctor("--check", "variables", **variables).returncode == 0
    assert place.doctor("--check", "variables", "--strict", **variables).returncode == 1


@pytest.mark.parametrize(
    "arguments", [("--check", "plugin"), ("--seconds", "0"), ("--seconds", "x"), ("now",)]
)
def test_usage(place: Place, arguments: tuple[str, ...]) -> None:
    said = place.doctor(*arguments)
    assert said.returncode == 2
    assert said.stdout == ""
    assert said.stderr


def test_the_list_of_checks(place: Place) -> None:
    said = place.doctor("--list-checks", "--json")
    listed = json.loads(said.stdout)["checks"]
    assert [one["name"] for one in listed] == list(CHECKS)
    assert all(one["checks"].endswith(".") for one in listed)
    text = place.doctor("--list-checks").stdout
    assert all(name in text for name in CHECKS)


def test_a_fault_of_the_doctor_is_exit_code_3(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from vllm_fl.cli import main

    def broken(_: Any) -> Any:
        raise ZeroDivisionError("ours")

    monkeypatch.setitem(CHECKS, "vendors", broken)
    assert main(["doctor", "--check", "vendors"]) == 3
    assert "ZeroDivisionError: ours" in capfd.readouterr().err


# -- installation -------------------------------------------------------------------------------


def test_leftover_metadata_of_another_version(place: Place) -> None:
    place.wheel("acme", RIGHT.format(name="acme"), version="2.0")
    place.wheel("acme", version="1.0")
    found = place.one("installation")
    assert found["status"] == "fail"
    assert found["what"].startswith("acme is installed 2 times: ")
    assert "acme-1.0.dist-info" in found["what"]
    assert "acme-2.0.dist-info" in found["what"]
    assert "pip uninstall -y acme" in found["mend"]


def test_leftover_egg_info(place: Place) -> None:
    place.wheel("acme", RIGHT.format(name="acme"), version="2.0")
    place.wheel("acme", version="1.0", suffix="egg-info")
    found = place.one("installation")
    assert "acme-1.0.egg-info" in found["what"]


def test_an_editable_next_to_a_wheel(place: Place) -> None:
    place.wheel("acme", RIGHT.format(name="acme"))
    source = Place(place.folder / "source")
    editable = json.dumps({"url": source.folder.as_uri(), "dir_info": {"editable": True}})
    source.wheel("acme", RIGHT.format(name="acme"), version="1.1.dev0", direct_url_json=editable)
    found = place.one("installation", path=str(source.folder))
    assert "acme is installed 2 times: 1.1.dev0 in " in found["what"]
    assert "1.0 in " in found["what"]


def test_one_folder_twice_on_the_path_is_one_installation(place: Place, tmp_path: Path) -> None:
    place.wheel("acme", RIGHT.format(name="acme"))
    link = tmp_path.parent / f"{tmp_path.name}-link"
    link.symlink_to(tmp_path)
    assert place.findings("installation", path=str(link)) == []


def test_metadata_whose_files_are_gone(place: Place) -> None:
    place.wheel("acme", RIGHT.format(name="acme"), record="acme_ops.py,,\nacme/gone.py,,\n")
    found = place.one("installation")
    assert found["what"] == f"1 of the 2 modules of acme are not there, such as {Path('acme/gone.py')}"
    assert "--force-reinstall" in found["mend"]


@pytest.mark.parametrize(
    "more",
    [
        {"entries": "[vllm.general_plugins]\nfl_ops = vllm_fl.plugin:register\n"},
        {"entries": "[vllm.platform_plugins]\nfl_chip = vllm_fl:register\n"},
        {"entries": "", "record": "vllm_fl/__init__.py,,\n", "missing": "vllm_fl"},
        {"entries": "", "top_level.txt": "vllm_fl\n"},
    ],
    ids=["general plugin", "platform plugin", "files", "top level"],
)
def test_another_distribution_with_our_package(place: Place, more: dict[str, str]) -> None:
    more = {name: text for name, text in more.items() if name != "missing"}
    place.wheel("vllm-plugin-fl", version="0.2", **more)
    found = place.one("installation")
    assert found["what"] == "vllm-plugin-fl has an import package vllm_fl too"
    assert "pip uninstall -y vllm-plugin-fl" in found["mend"]


@pytest.mark.parametrize("group", ["vllm.general_plugins", "vllm.platform_plugins"])
def test_an_entry_point_twice(place: Place, group: str) -> None:
    place.wheel("other", entries=f"[{group}]\nfl = other.module:register\n")
    if not copies("vllm-fl-core"):
        pytest.skip("needs vllm-fl-core installed")
    found = place.one("installation")
    assert found["what"].startswith(f"the entry point 'fl' of {group} stands 2 times: ")


def test_a_package_that_hides_the_installed_one(place: Place, tmp_path: Path) -> None:
    if not copies("vllm-fl-core"):
        pytest.skip("needs vllm-fl-core installed")
    source = tmp_path / "checkout"
    source.mkdir()
    real = Path(vllm_fl.__file__).parent.resolve()
    subprocess.run(["cp", "-r", str(real), str(source / "vllm_fl")], check=True)
    found = place.one("installation", path=str(source))
    assert found["what"].startswith(f"vllm_fl is imported from {source / 'vllm_fl'}, and vllm-fl-core ")


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("torch==1.0", "acme requires torch==1.0, and "),
        ("no-such-distribution>=2", "acme requires no-such-distribution>=2, and none is installed"),
        ("torch=?=1", "acme requires 'torch=?=1': "),
    ],
)
def test_a_requirement_that_is_not_met(place: Place, line: str, what: str) -> None:
    pytest.importorskip("packaging")
    place.wheel("acme", RIGHT.format(name="acme"), metadata=f"Requires-Dist: {line}\n")
    assert place.one("requirements")["what"].startswith(what)


def test_requirements_that_do_not_count_here(place: Place) -> None:
    pytest.importorskip("packaging")
    lines = ["torch==1.0; extra == 'old'", "torch==1.0; python_version < '3'", "pyyaml"]
    place.wheel(
        "acme", RIGHT.format(name="acme"), metadata="".join(f"Requires-Dist: {line}\n" for line in lines)
    )
    assert place.findings("requirements") == []


# -- plugins --------------------------------------------------------------------------------------

#: Seconds for one that hangs; those beside it have to be loaded in them on a busy machine.
PATIENCE = "15"
CRASH = "import ctypes\ndef register(registry): ctypes.string_at(0)\n"


@pytest.mark.parametrize(
    ("source", "what"),
    [
        (CRASH, "was killed by SIGSEGV while it was loaded"),
        ("import os; os._exit(3)\n", "ended its process with exit status 3 while it was loaded"),
        ("import os; os.abort()\n", "was killed by SIGABRT while it was loaded"),
        ("import time; time.sleep(1000)\n", f"did not come back within {PATIENCE} s while it was loaded"),
        ("import sys; sys.exit(4)\n", "is failed: SystemExit: 4"),
        ("VLLM_FL_PLUGIN_API = 7\n", "is incompatible: acme 1.0 was written for plugin API 7"),
        (
            "def register(registry):\n    registry.register_many(impl(f'acme.n{i}') for i in range(10**6))\n",
            "is failed: RegistrationError: it registers more than 1000 implementations",
        ),
    ],
)
def test_a_plugin_that_ends_or_holds_a_process(place: Place, source: str, what: str) -> None:
    place.wheel("acme", source)
    place.wheel("beta", RIGHT.format(name="beta"))
    found = place.one("plugins", "--seconds", PATIENCE if "sleep" in source else "600")
    assert found["status"] == ("warn" if "sleep" in source else "fail")
    assert ("--seconds" in found["mend"]) is ("sleep" in source)
    assert found["what"].startswith(f"plugin 'acme' of acme 1.0 {what}")
    # The way out keeps the others.
    assert "VLLM_FL_PLUGINS=" in found["mend"]
    assert "beta" in found["mend"]


def test_a_crash_names_its_place(place: Place) -> None:
    place.wheel("acme", CRASH)
    found = place.one("plugins")
    assert "string_at" in found["what"] or "acme_ops.py" in found["what"]


@pytest.mark.parametrize(
    ("source", "what"),
    [
        (
            "import threading, time\n"
            "threading.Thread(target=time.sleep, args=(50,), name='pool').start()\n" + RIGHT,
            "plugin 'acme' of acme 1.0 leaves threads running: pool",
        ),
        (
            "import logging; logging.basicConfig(level=10)\n" + RIGHT,
            "plugin 'acme' of acme 1.0 changed the root logger (level, handlers) while it was loaded; "
            "that is undone",
        ),
        (
            "def register(registry):\n"
            "    registry.register_impl(impl('acme'))\n"
            "    registry.register_impl(impl('acme', op='rms_norm'))\n",
            "plugin 'acme' of acme 1.0: not all is used: vendor.acme of rms_norm: it does not take",
        ),
    ],
)
def test_a_plugin_that_is_loaded_with_a_warning(place: Place, source: str, what: str) -> None:
    place.wheel("acme", source.replace("{name!r}", "'acme'"))
    found = place.one("plugins")
    assert found["status"] == "warn"
    assert found["what"].startswith(what)


def test_two_plugins_of_one_name(place: Place) -> None:
    place.wheel("alpha", RIGHT.format(name="alpha"), entries="[vllm_fl.plugin]\nshared = alpha_ops\n")
    place.wheel("zeta", RIGHT.format(name="zeta"), entries="[vllm_fl.plugin]\nshared = zeta_ops\n")
    found = place.one("plugins")
    assert found["what"] == "plugin 'shared' of zeta 1.0: the name is taken by alpha (alpha_ops)"


# -- backends, vendors, operators ------------------------------------------------------------------

BACKEND = """
from vllm_fl.dispatch import Backend

class Acme(Backend):
    @property
    def name(self):
        return {name!r}
    def is_available(self):
        {answer}
    def missing(self, op_name):
        return "no kernel for this chip" if op_name == {missing!r} else None
    def silu_and_mul(self, x):
        return x
    def gelu_and_mul(self, x, approximate="none"):
        return x

def register(registry):
    registry.register_backend(Acme())
"""


def backend(name: str = "acme", answer: str = "return True", missing: str = "") -> str:
    return BACKEND.format(name=name, answer=answer, missing=missing)


@pytest.mark.parametrize(
    ("source", "status", "what"),
    [
        (
            backend(answer="import ctypes; ctypes.string_at(0)"),
            "fail",
            "plugin 'acme' of acme 1.0 was killed by SIGSEGV when it was asked what is available",
        ),
        (
            backend(answer="import time; time.sleep(1000)"),
            "warn",
            f"plugin 'acme' of acme 1.0 did not come back within {PATIENCE} s "
            "when it was asked what is available",
        ),
        (
            backend(answer="import acme_kernels"),
            "warn",
            "vendor.acme is not available: acme_kernels is not installed",
        ),
        (
            backend(missing="gelu_and_mul"),
            "warn",
            "vendor.acme is available without gelu_and_mul (no kernel for this chip)",
        ),
    ],
)
def test_a_backend(place: Place, source: str, status: str, what: str) -> None:
    place.wheel("acme", source)
    found = place.one("backends", "--seconds", PATIENCE if "sleep" in source else "600")
    assert found["status"] == status
    assert found["what"].startswith(what)


def test_two_active_vendors(place: Place) -> None:
    place.wheel("acme", backend("acme"))
    place.wheel("beta", backend("beta"))
    place.wheel("gone", backend("gone", answer="return False"))
    found = place.one("vendors")
    assert found["what"] == "2 vendors are available: acme, beta"
    assert "VLLM_FL_ALLOW_VENDORS=acme" in found["mend"]


def test_what_runs_on_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch has an accelerator: here it has none, so that its answer is given."""
    from vllm_fl.doctor import checks
    from vllm_fl.doctor import probe_process

    def decision(op_name: str, impl_id: str, kind: str) -> dict[str, Any]:
        return {"op_name": op_name, "impl_id": impl_id, "candidates": [{"kind": kind}]}

    answers = {
        "policy": {"error": ""},
        "decisions": {
            "decisions": [
                decision("rms_norm", "reference.torch", "reference"),
                decision("silu_and_mul", "vendor.acme", "vendor"),
                {"op_name": "attention_backend", "impl_id": None, "candidates": []},
            ],
            "accelerator": True,
            "packaged": [],
        },
    }
    monkeypatch.setattr(probe_process, "ask", lambda question, **_: probe_process.Answer(answers[question]))
    (found,) = checks.operators(checks.Examination(1))
    assert (found.status, found.what) == ("warn", "the reference serves rms_norm")
    assert "pip install vllm-plugin-cuda" in found.mend
    answers["decisions"]["accelerator"] = False
    (found,) = checks.operators(checks.Examination(1))
    assert found.status == "pass"


# -- variables and policy ---------------------------------------------------------------------------


def test_a_variable_that_nobody_reads(place: Place) -> None:
    place.wheel("acme", "VLLM_FL_VARIABLES = ('VLLM_FL_ACME_FAST',)\n" + RIGHT.format(name="acme"))
    variables = {"VLLM_FL_ACME_FAST": "1", "VLLM_FL_ACME_FSAT": "1", "VLLM_FL_PREFER": "vendor"}
    found = place.one("variables", **variables)
    assert found["what"] == "VLLM_FL_ACME_FSAT is set and read by nobody. Did you mean 'VLLM_FL_ACME_FAST'?"
    assert found["mend"] == "unset VLLM_FL_ACME_FSAT"


@pytest.mark.parametrize(
    ("variables", "what"),
    [
        ({"VLLM_FL_CONFIG": "/no/such/file.yaml"}, "VLLM_FL_CONFIG=/no/such/file.yaml: cannot be read: "),
        ({"VLLM_FL_PER_OP": "rms_nrm=vendor"}, "VLLM_FL_PER_OP: unknown operator 'rms_nrm'."),
        ({"VLLM_FL_ALLOW_VENDORS": "acmee"}, "VLLM_FL_ALLOW_VENDORS: unknown vendor 'acmee'."),
        ({"VLLM_FL_PLUGINS": "acmee"}, "VLLM_FL_PLUGINS: no plugin 'acmee' is installed"),
        ({"VLLM_FL_PLUGIN_MODULES": "no_such_module"}, "VLLM_FL_PLUGIN_MODULES: there is no module"),
    ],
)
def test_a_wrong_policy(place: Place, variables: dict[str, str], what: str) -> None:
    place.wheel("acme", RIGHT.format(name="acme"))
    found = place.one("policy", **variables)
    assert found["what"].startswith(what)
    # What cannot be asked then is left out, and nothing is a traceback.
    said = place.doctor(*(f"--check={name}" for name in ("operators", "workers", "variables")), **variables)
    assert said.returncode == 0, said.stdout + said.stderr
    assert "skip  operators" in said.stdout
    assert "Traceback" not in said.stderr


def test_what_has_no_effect_here_is_said_and_fails_nothing(place: Place) -> None:
    place.wheel("acme", RIGHT.format(name="acme"))
    said = place.doctor("--strict", "--check=policy", VLLM_FL_DENY_VENDORS="metax")
    assert said.returncode == 0, said.stdout + said.stderr
    assert (
        "pass  policy        VLLM_FL_DENY_VENDORS: denies vendor 'metax', which nothing here" in said.stdout
    )


PACKAGED = """
from vllm_fl.dispatch import Backend

class Acme(Backend):
    name = "acme"
    default_policy = {"per_op_order": {"silu_and_mul": "vendor", "moe_of_tomorrow": "vendor"}}

    def is_available(self):
        return True

    def silu_and_mul(self, x):
        return x

def register(registry):
    registry.register_backend(Acme())
"""


def test_an_entry_of_packaged_defaults_that_is_left_out(place: Place) -> None:
    place.wheel("acme", PACKAGED)
    found = place.one("operators")
    assert found["status"] == "warn"
    assert "the packaged defaults of acme" in found["what"]
    assert "unknown operator 'moe_of_tomorrow'" in found["what"]


# -- vLLM and workers ------------------------------------------------------------------------------------


def vllm(place: Place, source: str) -> None:
    (place.folder / "vllm").mkdir()
    (place.folder / "vllm" / "__init__.py").write_text(source)


def test_an_unsupported_vllm(place: Place) -> None:
    pytest.importorskip("torch")  # what reads the version of vLLM is in the part that plugs into it
    vllm(place, "__version__ = '0.99.0'\n")
    found = place.one("vllm")
    assert found["what"] == "vLLM 0.99.0 is not one of the supported 0.26 to 0.33"


def test_a_vllm_that_does_not_import(place: Place) -> None:
    vllm(place, "raise ImportError('libcudart.so.13: cannot open shared object file')\n")
    found = place.one("vllm")
    assert found["what"].endswith("ImportError: libcudart.so.13: cannot open shared object file")


def test_a_vllm_for_which_the_time_does_not_suffice(place: Place) -> None:
    """The machine may be slow, and nothing is said to be wrong with vLLM."""
    vllm(place, "import time; time.sleep(1000)\n")
    (found,) = place.findings("vllm", "--seconds", "2")
    assert found["status"] == "warn"
    assert found["what"] == "`import vllm` did not come back within 2 s"
    assert found["mend"].startswith("vllm-fl doctor --seconds ")
    assert "install" not in found["mend"]


def test_a_torch_for_which_the_time_does_not_suffice(place: Place) -> None:
    pytest.importorskip("packaging")
    (place.folder / "torch.py").write_text("import time; time.sleep(1000)\n")
    found = [f for f in place.findings("requirements", "--seconds", "2") if "import torch" in f["what"]]
    assert [f["status"] for f in found] == ["warn"]
    assert "install" not in found[0]["mend"]


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("VLLM_FL_RANKS_TIMEOUT", "abc", "must be a positive number of seconds, not 'abc'."),
        ("VLLM_FL_OOT_WHITELIST", "RMSNrom", "unknown layer 'RMSNrom'. Did you mean 'RMSNorm'?"),
        ("VLLM_FL_OOT_BLACKLIST", "atention", "unknown layer 'atention'. Did you mean 'attention'?"),
        ("VLLM_FL_OOT_BLACKLIST", "rms_norm,rms_norm", "names 'rms_norm' twice."),
        ("VLLM_FL_OOT_ENABLED", "offf", "must be one of 1/0, true/false, yes/no, on/off, not 'offf'."),
        ("VLLM_FL_PREFER_ENABLED", "2", "must be one of 1/0, true/false, yes/no, on/off, not '2'."),
        ("VLLM_FL_TRACE_DIR", f"{__file__}/trace", f"the folder cannot be made: {__file__} is no folder"),
    ],
)
def test_a_setting_with_which_no_server_starts(place: Place, name: str, value: str, what: str) -> None:
    pytest.importorskip("torch")
    vllm(place, "__version__ = '0.32.0'\n")
    found = place.one("settings", **{name: value})
    assert found["status"] == "fail"
    assert found["what"].startswith(f"{name}: {what}")
    assert found["mend"] == f"correct or unset {name}"


def test_every_wrong_setting_is_said_at_once(place: Place) -> None:
    pytest.importorskip("torch")
    vllm(place, "__version__ = '0.32.0'\n")
    wrong = {"VLLM_FL_RANKS_TIMEOUT": "0", "VLLM_FL_OOT_BLACKLIST": "Atention"}
    found = place.findings("settings", **wrong)
    assert {one["what"].partition(":")[0] for one in found} == set(wrong)


def test_right_settings(place: Place) -> None:
    pytest.importorskip("torch")
    vllm(place, "__version__ = '0.32.0'\n")
    assert place.findings("settings", VLLM_FL_OOT_BLACKLIST="RMSNorm,attention") == []
    # Nothing is written where every layer is vLLM's own.
    off = {"VLLM_FL_OOT_ENABLED": "0", "VLLM_FL_TRACE_DIR": f"{__file__}/trace"}
    said = place.doctor("--check", "settings", **off)
    assert said.returncode == 0, said.stdout + said.stderr
    assert "VLLM_FL_OOT_ENABLED is off, every layer stays vLLM's own" in said.stdout
    assert place.findings("settings", VLLM_PLUGINS="other", VLLM_FL_RANKS_TIMEOUT="abc") == []


@pytest.mark.parametrize(
    ("source", "check"),
    [
        ("import no_such_library\n", "plugins"),
        ("VLLM_FL_PLUGIN_API = 0\n", "plugins"),
        (BACKEND.format(name="acme", answer="return False", missing=""), "backends"),
        (BACKEND.format(name="acme", answer="return True", missing="gelu_and_mul"), "backends"),
    ],
)
def test_no_remedy_takes_a_variable_for_a_wheel(place: Place, source: str, check: str) -> None:
    place.folder.mkdir(exist_ok=True)
    (place.folder / "acme_ops.py").write_text(IMPL + source)
    found = place.one(check, VLLM_FL_PLUGIN_MODULES="acme_ops")
    assert "install VLLM_FL_" not in f"{found['what']} {found['mend']}"
    assert "upgrade VLLM_FL_" not in f"{found['what']} {found['mend']}"


def test_a_vllm_that_does_not_load_us(place: Place) -> None:
    pytest.importorskip("torch")
    vllm(place, "__version__ = '0.32.0'\n")
    found = place.one("vllm", VLLM_PLUGINS="other")
    assert found["what"] == "VLLM_PLUGINS=other leaves out 'fl'"
    assert place.findings("vllm", VLLM_PLUGINS="other,fl") == []


def test_a_worker_that_sees_another_registry(place: Place) -> None:
    source = (
        "import multiprocessing\n"
        "def register(registry):\n"
        "    registry.register_impl(impl('acme'))\n"
        "    if multiprocessing.parent_process() is not None:\n"
        "        registry.register_impl(impl('acme', op='gelu_and_mul'))\n"
    )
    place.wheel("acme", source)
    found = place.findings("workers")
    # A forked worker has what its parent registered, so that spawn and fork differ too.
    assert [f["what"].partition(" differ")[0] for f in found] == ["the implementations", "the fingerprint"]
    assert "a worker by spawn has" in found[0]["what"]


@pytest.mark.parametrize("ends", ["import os; os._exit(5)", "import ctypes; ctypes.string_at(0)"])
def test_a_worker_that_dies(place: Place, ends: str) -> None:
    """The front end asks no backend, so that only a worker dies."""
    place.wheel("acme", backend(answer=ends))
    found = place.one("workers")
    assert "a worker by spawn saw it end with" in found["what"]


def test_workers_that_see_the_same(place: Place) -> None:
    place.wheel("acme", RIGHT.format(name="acme"))
    said = place.doctor("--check", "workers")
    assert "workers by spawn and by fork see what their parents see" in said.stdout


# -- what it starts ends with it ----------------------------------------------------------------------

HANGS = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path({file!r}).write_text(f"{{os.getpid()}} {{child.pid}}")
while True: time.sleep(600)
"""


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"  # one that nobody has waited for


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
@pytest.mark.parametrize("ends", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGKILL])
def test_a_probe_ends_with_the_doctor(place: Place, tmp_path: Path, ends: signal.Signals) -> None:
    file = tmp_path / "pids"
    place.wheel("acme", HANGS.format(file=str(file)))
    paths = [str(place.folder), str(Path(vllm_fl.__file__).parents[1])]
    process = subprocess.Popen(
        [sys.executable, "-m", "vllm_fl", "doctor", "--check", "plugins"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 300
    while not file.exists() or not file.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    probe, its_child = map(int, file.read_text().split())
    process.send_signal(ends)
    try:
        assert process.wait(300) == (-9 if ends is signal.SIGKILL else 128 + ends)
        while is_running(probe) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not is_running(probe)
        # Nobody is left to end what the probe has started where the doctor was killed itself.
        assert ends is signal.SIGKILL or not is_running(its_child)
    finally:
        for pid in (probe, its_child):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

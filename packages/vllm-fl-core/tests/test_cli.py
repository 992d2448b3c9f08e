"""The command ``vllm-fl``: what it prints, where, and its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import vllm_fl
from vllm_fl.cli import main
from vllm_fl.cli.output import plain_table
from vllm_fl.cli.trace import served_operators
from vllm_fl.dispatch import trace

if TYPE_CHECKING:
    from collections.abc import Callable

#: Plugins that are broken, each in another way, and one that is well.
PLUGINS = {
    "broken_import": "import nothing_of_this_name",
    "broken_exit": "import sys\nsys.exit(7)",
    "broken_middle": "def register(registry):\n    raise RuntimeError('half way')",
    "noisy": (
        "import os\nprint('noise on stdout')\nos.write(1, b'noise from C\\n')\n"
        "def register(registry):\n    print('more noise')"
    ),
    "well": (
        "from vllm_fl.dispatch import BackendImplKind, OpImpl\n"
        "def register(registry):\n"
        "    registry.register_impl(OpImpl('silu_and_mul', 'vendor.well', BackendImplKind.VENDOR,\n"
        "        lambda x: x, 'well'))\n"
    ),
}


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder in which every plugin is an installed distribution."""
    for name, source in PLUGINS.items():
        (tmp_path / f"{name}.py").write_text(source)
        info = tmp_path / f"dist_{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: dist-{name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[vllm_fl.plugin]\n{name} = {name}\n")
    return tmp_path


@pytest.fixture
def command(installed: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_FL_")}
        path = os.pathsep.join([str(installed), str(Path(vllm_fl.__file__).parents[1])])
        return subprocess.run(
            [sys.executable, "-m", "vllm_fl", *arguments],
            env={**inherited, "PYTHONPATH": path, **variables},
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )

    return run


def test_list_reports_broken_plugins_and_exits_0(
    command: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    said = command("list", "--json")
    assert said.returncode == 0, said.stderr
    listed = json.loads(said.stdout)  # nothing but the object
    assert listed["schema_version"] == 1
    assert listed["generated_by"].startswith("vllm-fl-core")
    plugins = {plugin["name"]: plugin for plugin in listed["plugins"]}
    states = {name: plugins[name]["state"] for name in PLUGINS}
    assert states == {
        "broken_import": "failed",
        "broken_exit": "failed",
        "broken_middle": "failed",
        "noisy": "loaded",
        "well": "loaded",
    }
    assert "nothing_of_this_name is not installed" in plugins["broken_import"]["reason"]
    assert "half way" in plugins["broken_middle"]["reason"]
    assert "broken_middle.py:2" in plugins["broken_middle"]["reason"]
    assert "vendor.well" in {backend["impl_id"] for backend in listed["backends"]}
    assert "noise from C" in said.stderr


@pytest.mark.parametrize("what", ["ops", "backends", "plugins"])
def test_list_one_thing(command: Callable[..., subprocess.CompletedProcess[str]], what: str) -> None:
    said = command("list", what, "--json")
    assert said.returncode == 0
    keys = ["operators", "notes"] if what == "ops" else [what]
    assert list(json.loads(said.stdout))[2:] == keys
    said = command("list", what)
    assert said.returncode == 0
    assert said.stdout.startswith({"ops": "Operators", "backends": "Backends", "plugins": "Plugins"}[what])


def test_list_imports_no_torch(installed: Path) -> None:
    code = (
        "import sys\nfrom vllm_fl.cli import main\nassert main(['list', '--json']) == 0\n"
        "import vllm_fl.integration.settings\n"
        "print([m for m in ('torch', 'vllm', 'yaml') if m in sys.modules], file=sys.stderr)"
    )
    path = os.pathsep.join([str(installed), str(Path(vllm_fl.__file__).parents[1])])
    said = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stderr.splitlines()[-1] == "[]"


def test_explain_prints_the_decision(command: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    policy = {"VLLM_FL_PER_OP": "silu_and_mul=vendor:well"}
    said = command("explain", "silu_and_mul", **policy)
    assert said.returncode == 0, said.stderr
    assert said.stdout.startswith("silu_and_mul: vendor.well")
    assert "VLLM_FL_PER_OP" in said.stdout
    assert "dist-well 1.0" in said.stdout
    assert "half way" in said.stderr

    decision = json.loads(command("explain", "silu_and_mul", "--json", **policy).stdout)["decisions"][0]
    assert decision["impl_id"] == "vendor.well"
    assert decision["order"] == ["vendor:well"]
    assert decision["candidates"][0]["status"] == "chosen"

    every = json.loads(command("explain", "--all", "--json", **policy).stdout)["decisions"]
    assert {"silu_and_mul", "rms_norm", "attention_backend"} <= {d["op_name"] for d in every}


def test_explain_of_several_operators(command: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    policy = {"VLLM_FL_PER_OP": "silu_and_mul=vendor:well"}
    said = command("explain", "silu_and_mul", "attention_backend", "silu_and_mul", **policy)
    assert said.returncode == 1  # nothing can run for one of them
    starts = [line for line in said.stdout.splitlines() if line.startswith(("silu_and_mul: ", "attention"))]
    assert starts == ["silu_and_mul: vendor.well (plain)", "attention_backend: nothing can run"]
    said = command("explain", "silu_and_mul", "rms_nrm", **policy)
    assert said.returncode == 1
    assert "Did you mean 'rms_norm'?" in said.stderr
    assert said.stdout == ""


VENDOR_FIRST = {"VLLM_FL_PREFER": "vendor"}


@pytest.mark.parametrize(
    ("variables", "impl_id", "form", "reason"),
    [
        # A layer has vLLM's own path behind what serves it, and is guarded.
        (VENDOR_FIRST, "vendor.well", "guard", None),
        ({"VLLM_FL_OOT_ENABLED": "0"}, "native", "plain", "VLLM_FL_OOT_ENABLED is off"),
        ({"VLLM_FL_PREFER_ENABLED": "no"}, "native", "plain", "VLLM_FL_PREFER_ENABLED is off"),
        (
            {"VLLM_FL_OOT_WHITELIST": "rms_norm"},
            "native",
            "plain",
            "VLLM_FL_OOT_WHITELIST does not name it",
        ),
        ({"VLLM_FL_OOT_BLACKLIST": "SiluAndMul"}, "native", "plain", "VLLM_FL_OOT_BLACKLIST names it"),
        ({"VLLM_FL_OOT_BLACKLIST": "rms_norm", **VENDOR_FIRST}, "vendor.well", "guard", None),
        ({"VLLM_FL_PREFER": "native"}, "native", "plain", "the policy chooses it"),
    ],
)
def test_explain_says_what_a_layer_will_be(
    command: Callable[..., subprocess.CompletedProcess[str]],
    variables: dict[str, str],
    impl_id: str,
    form: str,
    reason: str | None,
) -> None:
    (decision,) = json.loads(command("explain", "silu_and_mul", "--json", **variables).stdout)["decisions"]
    layer = {"name": "SiluAndMul", "impl_id": impl_id, "form": form, "reason": reason}
    assert decision["layers"] == [layer]
    said = command("explain", "silu_and_mul", **variables).stdout
    fate = f"runs {impl_id} ({form})" if reason is None else f"stays vLLM's own: {reason}"
    assert f"inside vLLM: SiluAndMul {fate}\n" in said


@pytest.mark.parametrize("arguments", [("list",), ("list", "ops"), ("policy", "show"), ("explain", "--all")])
@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"VLLM_FL_OOT_ENABLED": "0"}, "every layer stays vLLM's own: VLLM_FL_OOT_ENABLED is off"),
        ({"VLLM_FL_OOT_BLACKLIST": "rms_norm"}, "RMSNorm stays vLLM's own: VLLM_FL_OOT_BLACKLIST names it"),
    ],
)
def test_what_is_left_to_vllm_is_said(
    command: Callable[..., subprocess.CompletedProcess[str]],
    arguments: tuple[str, ...],
    variables: dict[str, str],
    line: str,
) -> None:
    assert f"inside vLLM: {line}" in command(*arguments, **variables).stdout
    assert "inside vLLM" not in command(*arguments).stdout
    if arguments[0] != "explain":
        assert (
            f"inside vLLM: {line}" in json.loads(command(*arguments, "--json", **variables).stdout)["notes"]
        )


@pytest.mark.parametrize("variable", ["VLLM_FL_OOT_ENABLED", "VLLM_FL_PREFER_ENABLED"])
def test_a_switch_that_is_none(
    command: Callable[..., subprocess.CompletedProcess[str]], variable: str
) -> None:
    wrong = {variable: "offf"}
    for arguments in (("explain", "silu_and_mul"), ("policy", "show")):
        said = command(*arguments, **wrong)
        assert said.returncode == 1
        assert f"{variable}: must be one of 1/0" in said.stderr
    said = command("list", "ops", **wrong)
    assert said.returncode == 0
    assert f"{variable}: must be one of 1/0" in said.stdout


def test_explain_with_the_native_path(command: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    said = command("explain", "silu_and_mul", "--native", VLLM_FL_PREFER="native")
    assert said.stdout.startswith("silu_and_mul: native")


def test_a_probe_loads_what_is_a_name(
    command: Callable[..., subprocess.CompletedProcess[str]], installed: Path
) -> None:
    (installed / "well.py").write_text(PLUGINS["well"].replace("lambda x: x", "'no_such_library:silu'"))
    listed = json.loads(command("list", "backends", "--probe", "--json").stdout)
    [backend] = [row for row in listed["backends"] if row["impl_id"] == "vendor.well"]
    assert backend["available"] is False
    assert "no_such_library is not installed" in backend["reason"]


def test_explain_of_what_cannot_run_says_what_to_install(
    command: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    said = command("explain", "attention_backend")
    assert said.returncode == 1
    assert "nothing can run" in said.stdout
    assert "pip install" in said.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ((), 2, "usage: vllm-fl"),
        (("explain",), 2, "takes operators, or --all"),
        (("explain", "rms_norm", "--all"), 2, "takes operators, or --all"),
        (("lists",), 2, "Did you mean 'list'?"),
        (("policy", "shwo"), 2, "Did you mean 'show'?"),
        (("list", "backend"), 2, "Did you mean 'backends'?"),
        (("list", "wheels"), 2, "choose from ops, backends, plugins"),
        (("list", "--jsno"), 2, "Did you mean '--json'?"),
        (("demo", "--prefer", "vender"), 2, "Did you mean 'vendor'?"),
        (("doctor", "--check", "plugin"), 2, "Did you mean 'plugins'?"),
        (("demo", "--max-tokens", "0"), 2, "--max-tokens"),
        (("explain", "rms_nrm"), 1, "Did you mean 'rms_norm'?"),
        (("trace", "/no/such/folder"), 1, "VLLM_FL_TRACE_DIR=/no/such/folder"),
        (("--version",), 0, "vllm-fl-core"),
        (("--help",), 0, "vllm-fl demo --compare-native"),
        (("explain", "--help"), 0, "example: "),
        (("list", "--help"), 0, "example: "),
        (("demo", "--help"), 0, "example: "),
        (("trace", "--help"), 0, "example: "),
    ],
)
def test_exit_codes(
    command: Callable[..., subprocess.CompletedProcess[str]], arguments: tuple[str, ...], code: int, text: str
) -> None:
    said = command(*arguments)
    assert said.returncode == code, said.stderr
    assert text in said.stdout + said.stderr
    assert "Traceback" not in said.stderr
    assert len(said.stdout.splitlines()) <= 40  # a screen


def test_a_wrong_configuration_is_a_problem_and_no_traceback(
    command: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    said = command("explain", "silu_and_mul", VLLM_FL_PREFER="vender")
    assert said.returncode == 1
    assert "VLLM_FL_PREFER" in said.stderr
    assert "Did you mean 'vendor'?" in said.stderr
    assert "Traceback" not in said.stderr
    # What is installed can be listed all the same.
    assert command("list", VLLM_FL_PREFER="vender").returncode == 0
    assert command("list", VLLM_FL_PLUGINS="wel").returncode == 1


def test_a_fault_of_ours_is_exit_code_3(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from vllm_fl.cli import list_and_explain

    def fail(*_: object) -> list[dict[str, object]]:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(list_and_explain, "plugin_rows", fail)
    assert main(["list", "--json"]) == 3
    said = capfd.readouterr()
    assert said.out == ""
    assert "ZeroDivisionError: ours" in said.err


def test_a_closed_pipe_is_no_error(installed: Path) -> None:
    path = os.pathsep.join([str(installed), str(Path(vllm_fl.__file__).parents[1])])
    process = subprocess.Popen(
        [sys.executable, "-m", "vllm_fl", "list"],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.close()
    _, errors = process.communicate(timeout=600)
    assert "BrokenPipeError" not in errors
    assert process.returncode == 0


def test_plain_table() -> None:
    assert plain_table("T", ("a", "bb"), [["1", "2"], ["333", ""]]) == "T\na    bb\n---  --\n1    2\n333\n"
    assert "(none)" in plain_table("T", ("a",), [])


def test_trace_merges_what_processes_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_FL_TRACE_DIR", str(tmp_path))
    calling = trace.recorded("silu_and_mul", "reference.torch", lambda x: x)
    for _ in range(3):
        calling([1])
    record = trace.recorder()
    assert record is not None
    record.traced("rms_norm", "reference.torch", "0/0")
    record.layer("RotaryEmbedding", "rotary_embedding", "reference.torch", "guard")
    record.fact("fingerprint", "f00d")
    record.write()
    # Nothing is compiled: the layer was built and never called.
    served = {row["op"]: row for row in served_operators(trace.merge(tmp_path))}
    assert served["rotary_embedding"]["calls"] == 0

    record.fact("compiled", True)
    record.write()
    # Another process wrote the same.
    (mine,) = (json.loads(path.read_text()) for path in tmp_path.glob(f"*-{os.getpid()}-*.json"))
    (tmp_path / "1.json").write_text(json.dumps({**mine, "pid": 1}))

    served = {row["op"]: row for row in served_operators(trace.merge(tmp_path))}
    assert served["silu_and_mul"]["calls"] == 6
    assert served["rms_norm"]["graphs"] == 2
    assert "calls" not in served["rms_norm"]
    assert served["rotary_embedding"]["loaded_from_cache"] == "f00d"

    monkeypatch.delenv("VLLM_FL_TRACE_DIR")
    assert main(["trace", str(tmp_path)]) == 0
    said = capfd.readouterr().out
    assert "traced in 2 graphs" in said
    assert "loaded from the compile cache, fingerprint f00d" in said
    assert main(["trace", str(tmp_path), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["served"] == list(served.values())


def test_without_the_variable_nothing_is_wrapped() -> None:
    def function(x: object) -> object:
        return x

    assert trace.recorded("silu_and_mul", "reference.torch", function) is function

"""What the integration relies on in vLLM is there: installed, and in every supported release."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any

import pytest

if TYPE_CHECKING:
    from types import ModuleType

HERE = Path(__file__).parent
INTEGRATION = HERE.parents[1] / "packages" / "vllm-fl-core" / "src" / "vllm_fl" / "integration"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_vllm", HERE / "check_vllm.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


check = _load()
RECORDED: dict[str, dict[str, Any]] = check.recorded()


def _installed(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{name} is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


# -- the installed vLLM --------------------------------------------------------


@pytest.fixture(scope="module")
def installed() -> dict[str, Any]:
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    folder = Path(next(iter(spec.submodule_search_locations)))
    facts: dict[str, Any] = check.read_facts(check.Source(folder))
    return facts


def test_the_installed_vllm(installed: dict[str, Any]) -> None:
    assert check.problems(installed) == {}
    if installed["version"] in RECORDED:
        assert check.differences(installed, RECORDED[installed["version"]]) == []


def test_the_installed_vllm_serves_the_subclasses_that_are_read(installed: dict[str, Any]) -> None:
    """The rule of layers.py, as it runs, and as it is read here."""
    pytest.importorskip("vllm_fl")
    code = (
        "import json, vllm.config\n"
        "from vllm_fl.integration import replace\n"
        "found = [one for it in replace.LAYERS if it.with_subclasses for one in replace.classes_of(it)[1:]]\n"
        "print(json.dumps({cls.__name__: reason is None for cls, reason in found}))"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    at_run_time = json.loads(child.stdout.splitlines()[-1])
    # A class in a model's file is known when that file is imported.
    layers = {n: f for n, f in installed[check.SUBCLASSES].items() if f["module"].startswith(check.LAYERS)}
    assert at_run_time == {name: not fact["own_forward"] for name, fact in layers.items()} != {}


# -- the recorded releases -----------------------------------------------------


@pytest.mark.parametrize("version", RECORDED)
def test_a_recorded_release(version: str) -> None:
    assert check.problems(RECORDED[version]) == {}


def test_every_supported_minor_release_is_recorded() -> None:
    constants = {
        target.id: node.value
        for node in ast.parse((INTEGRATION / "plugin.py").read_text()).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    oldest = ast.literal_eval(constants["OLDEST_VLLM"])
    unknown = ast.literal_eval(constants["FIRST_UNKNOWN_VLLM"])
    recorded = [tuple(int(part) for part in version.split(".")[:2]) for version in RECORDED]
    assert oldest[0] == unknown[0]
    assert recorded == [(oldest[0], minor) for minor in range(oldest[1], unknown[1])]


PLACES = {place for need in check.NEEDS for place in need.at}


def test_every_import_of_vllm_is_a_need() -> None:
    modules = {place.partition(":")[0] for place in PLACES}
    imported = {
        (node.module or "", alias.name)
        for path in INTEGRATION.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and re.match(r"vllm(\.|$)", node.module or "")
        for alias in node.names
    }
    assert imported
    for module, name in imported:
        # Some modules make a name when it is asked for.
        place = re.compile(rf"{re.escape(module)}:({re.escape(name)}\b|__getattr__$)")
        assert f"{module}.{name}" in modules or any(map(place.match, PLACES)), (module, name)


def test_every_layer_is_a_need() -> None:
    pytest.importorskip("vllm_fl")
    pytest.importorskip("torch")
    from vllm_fl.integration.replace import LAYERS

    assert {layer.class_name: layer.module for layer in LAYERS} == check.SERVED
    said = {text for need in check.NEEDS for text in need.says}
    for layer in LAYERS:
        assert f"{layer.module}:{layer.class_name}" in PLACES
        # A runner is no CustomOp, and has no switch.
        is_switched = layer.vllm_name != layer.class_name
        assert (f"@CustomOp.register('{layer.vllm_name}')" in said) is is_switched


# -- the checker: what moves is named ------------------------------------------

#: The least that satisfies every need.
SMALL_VLLM = HERE / "small_vllm.txt"


@pytest.fixture
def small(tmp_path: Path) -> Path:
    parts = re.split(r"^# file: (.*)\n", SMALL_VLLM.read_text(), flags=re.MULTILINE)
    for name, text in zip(parts[1::2], parts[2::2], strict=True):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for folder in {parent for path in tmp_path.rglob("*.py") for parent in path.parents} - {
        *tmp_path.parents
    }:
        if folder != tmp_path:
            (folder / "__init__.py").touch()
    return tmp_path


def _problems(source: Any) -> dict[str, str]:
    found: dict[str, str] = check.problems(json.loads(json.dumps(check.read_facts(source))))
    return found


def test_a_vllm_in_which_nothing_moved(small: Path) -> None:
    assert _problems(check.Source(small)) == {}
    assert _problems(check.Source(small / "vllm")) == {}
    assert check.Source(small).version == "0.33.7"


@pytest.mark.parametrize("need", check.NEEDS, ids=lambda need: need.name)
def test_a_renamed_thing_is_named(small: Path, need: Any) -> None:
    source = check.Source(small)
    node = check.find(source, need.at[0])
    name = need.at[0].rpartition(":")[2].rpartition(".")[2]
    if isinstance(node, ast.ImportFrom):
        node.names = [ast.alias(alias.name, "moved") for alias in node.names]
    elif isinstance(node, ast.Assign):
        node.targets = [ast.Name("moved")]
    elif isinstance(node, ast.Expr):
        node.value = ast.Name("moved")
    else:
        assert node.name == name
        node.name = "moved"
    assert name in _problems(source)[need.name]


@pytest.mark.parametrize(
    ("need", "text"),
    [pytest.param(need, text, id=f"{need.name}: {text}") for need in check.NEEDS for text in need.says],
)
def test_another_text_is_named(small: Path, need: Any, text: str) -> None:
    source = check.Source(small)
    module = need.at[0].partition(":")[0]
    before = ast.unparse(source.tree(module))
    last = list(re.finditer(r"[A-Za-z_]\w*", text))[-1]
    after = before.replace(text, f"{text[: last.end()]}_moved{text[last.end() :]}")
    assert before != after
    source._trees[module] = ast.parse(after)
    assert repr(text) in _problems(source)[need.name]


@pytest.mark.parametrize(
    ("need", "at"),
    [
        pytest.param(need, at, id=f"{need.name}: {need.takes[at]}")
        for need in check.NEEDS
        for at in range(len(need.takes or ()))
    ],
)
def test_another_parameter_is_named(small: Path, need: Any, at: int) -> None:
    source = check.Source(small)
    function = check.find(source, need.at[0])
    given = function.args
    every = [*given.args, *filter(None, [given.vararg, given.kwarg])]
    every[at].arg += "_moved"
    assert f"{need.takes[at].partition('=')[0]}_moved" in _problems(source)[need.name]


@pytest.mark.parametrize(
    "need", [need for need in check.NEEDS if need.takes], ids=lambda need: f"{need.name}: one more"
)
def test_one_more_parameter_is_named(small: Path, need: Any) -> None:
    for is_required in (True, False):
        source = check.Source(small)
        given = check.find(source, need.at[0]).args
        given.kwonlyargs.append(ast.arg("more"))
        given.kw_defaults.append(None if is_required else ast.Constant(1))
        assert ("more" in _problems(source).get(need.name, "")) is is_required


def test_an_environment_that_an_older_place_checks(small: Path) -> None:
    source = check.Source(small)
    function = check.find(source, "vllm.platforms.interface:Platform.validate_environ")
    source.tree("vllm.envs").body.append(function)
    check.find(source, "vllm.platforms.interface:Platform").body.remove(function)
    assert _problems(source) == {}
    assert check.read_facts(source)["validate_environ"]["place"] == "vllm.envs:validate_environ"


def _append(source: Any, module: str, text: str) -> None:
    source.tree(module).body += ast.parse(text).body


def test_a_served_subclass_that_computes_is_named(small: Path) -> None:
    yarn = "vllm.model_executor.layers.rotary_embedding.yarn_scaling_rope"
    source = check.Source(small)
    facts = check.read_facts(source)[check.SUBCLASSES]
    assert {name: bool(fact["own_forward"]) for name, fact in facts.items()} == {
        "FourierRotaryEmbedding": True,
        "FourierYaRNRotaryEmbedding": True,
        "YaRNScalingRotaryEmbedding": False,
    }
    _append(
        source, yarn, "class Odd(YaRNScalingRotaryEmbedding):\n def _match_cos_sin_cache_dtype(s, q): pass"
    )
    assert "Odd would be served" in _problems(source)[check.SUBCLASSES]
    check.find(source, f"{yarn}:Odd").body += ast.parse("def forward_cuda(self): pass").body
    assert _problems(source) == {}


def test_no_subclass_at_all_is_named(small: Path) -> None:
    source = check.Source(small)
    for module in source.modules("RotaryEmbedding"):
        if not module.endswith(("base", "rotary_embedding")):
            source._trees[module] = None
    assert _problems(source)[check.SUBCLASSES] == "there is none"


@pytest.mark.parametrize("name", [*check.SERVED, "YaRNScalingRotaryEmbedding"])
def test_a_class_of_a_served_name_is_named(small: Path, name: str) -> None:
    model = small / "vllm" / "model_executor" / "models" / "a_model.py"
    model.write_text(f"from torch import nn\nclass {name}(nn.Module): pass\n")
    assert _problems(check.Source(small)) == {}
    model.write_text(f"from ..custom_op import PluggableLayer as Layer\nclass {name}(Layer): pass\n")
    assert f"a_model:{name}" in _problems(check.Source(small))[check.NAMESAKES]


_KEEPERS = {
    "_CACHE": "_CACHE = {'silu': SiluAndMul()}",
    "Model.act": "class Model:\n    act = GeluAndMul(approximate='tanh')",
    "make": "@functools.lru_cache(maxsize=None)\ndef make(name):\n    return get_rope(name)",
    "keep": "_KEPT = {}\ndef keep(key):\n    layer = Llama3RotaryEmbedding()\n    _KEPT[key] = layer",
    "once": "_norm = None\ndef once():\n    global _norm\n    _norm = RMSNorm(8)",
}


@pytest.mark.parametrize("name", _KEEPERS)
def test_a_layer_that_outlives_its_engine_is_named(small: Path, name: str) -> None:
    model = small / "vllm" / "model_executor" / "models" / "a_model.py"
    model.write_text("class Model:\n    def __init__(self):\n        self.norm = RMSNorm(8)\n")
    assert _problems(check.Source(small)) == {}
    model.write_text(f"{_KEEPERS[name]}\n")
    last = name.rpartition(".")[2]
    assert f"a_model:{last} keeps a layer" in _problems(check.Source(small))[check.KEPT]


def test_what_is_kept_is_forgotten() -> None:
    pytest.importorskip("vllm_fl")
    pytest.importorskip("torch")
    from vllm_fl.integration import engine

    assert {place.partition(":")[0] for place in check.FORGOTTEN} == set(engine._SHARED)
    for version, facts in RECORDED.items():
        assert set(facts[check.KEPT]) == check.FORGOTTEN, version


def test_differences_say_what_reads_otherwise(small: Path) -> None:
    before = check.read_facts(check.Source(small))
    source = check.Source(small)
    check.find(source, "vllm.model_executor.layers.activation:SiluAndMul.forward_native").body.insert(
        0, ast.parse("x = x + 0").body[0]
    )
    _append(
        source,
        "vllm.model_executor.layers.rotary_embedding.yarn_scaling_rope",
        "class New(YaRNScalingRotaryEmbedding): pass",
    )
    after = check.read_facts(source)
    assert check.problems(after) == {}
    lines = check.differences(after, before)
    assert lines[0] == "SiluAndMul.forward_native: text"
    assert lines[1].startswith(f"{check.SUBCLASSES}: New: None -> ")
    assert len(lines) == 2


def test_the_command(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main([str(small)]) == 0
    assert "MOVED" not in capsys.readouterr().out
    (small / "vllm" / "plugins.py").write_text("")
    assert check.main([str(small)]) == 1
    said = capsys.readouterr().out
    assert re.search(r"^load_general_plugins +MOVED$", said, re.MULTILINE)
    assert "vLLM 0.33.7: load_general_plugins moved: vllm.plugins:load_general_plugins is not there" in said


def test_a_version_is_downloaded(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def download(version: str, cache: Path) -> Path:
        asked.append(version)
        return small

    monkeypatch.setattr(check, "download", download)
    assert check.main(["0.33.7"]) == 0
    assert asked == ["0.33.7"]
    with pytest.raises(SystemExit, match="no wheel, no folder and no version"):
        check.main(["vllm-of-tomorrow.whl"])


@pytest.mark.parametrize(("version", "is_known"), [("0.25.9", False), ("0.33.7", True), ("0.34.0", False)])
def test_what_happens_with_a_version_that_is_not_supported(
    small: Path, capsys: pytest.CaptureFixture[str], version: str, is_known: bool
) -> None:
    (small / "vllm" / "_version.py").write_text(f"__version__ = version = '{version}'\n")
    assert check.main([str(small)]) == 0
    said = capsys.readouterr().out
    assert (f"vLLM {version}: vllm-fl stays off and vLLM runs natively" in said) is not is_known

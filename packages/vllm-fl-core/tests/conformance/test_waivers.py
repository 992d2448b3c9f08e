"""Waivers: what a file of them may say, and that nothing in it is idle."""

from __future__ import annotations

import json

import pytest
import torch

from vllm_fl.cli.conformance import print_summary
from vllm_fl.cli.output import Output
from vllm_fl.conformance import html
from vllm_fl.conformance import report
from vllm_fl.conformance import run
from vllm_fl.conformance import waivers
from vllm_fl.conformance.case import Tier
from vllm_fl.conformance.result import Status
from vllm_fl.dispatch import BackendImplKind
from vllm_fl.dispatch import OpImpl
from vllm_fl.dispatch import get_default_manager

pytestmark = pytest.mark.usefixtures("no_plugins")


def write(path, text):
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[waiver", "waivers.toml: "),
        ("[exemption]", "unknown key 'exemption'; entries are [[waiver]]."),
        ("[[waiver]]\nop = 'a'\ncas = 'b'", "number 1: unknown key 'cas'. Did you mean 'case'?"),
        ("[[waiver]]\nop = 'a'\ncase = 'b'\nskip = true", "reason is missing"),
        ("[[waiver]]\nop = 'a'\ncase = 'b'\nreason = 'c'", "either skip = true or loosen"),
        (
            "[[waiver]]\nop='a'\ncase='b'\nreason='c'\nskip=true\nloosen=2.0",
            "either skip = true or loosen",
        ),
        ("[[waiver]]\nop='a'\ncase='b'\nreason='c'\nloosen=0.5", "loosen must be more than 1"),
        ("[[waiver]]\nop='a'\ncase='b'\nreason='c'\nloosen=true", "loosen must be a float or int"),
        ("[[waiver]]\nop='a'\ncase='b'\nreason='c'\nskip='yes'", "skip must be a bool"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, text, message):
    with pytest.raises(waivers.WaiverError) as caught:
        waivers.read(write(tmp_path / "waivers.toml", text))
    assert message in str(caught.value)


def test_a_file_of_the_older_name_is_read(tmp_path):
    entry = "op = 'a'\ncase = ['b', 'c']\nskip = true\nreason = 'd'\n"
    older = waivers.read(write(tmp_path / "older.toml", f"[[exception]]\n{entry}"), "x")
    assert older == waivers.read(write(tmp_path / "newer.toml", f"[[waiver]]\n{entry}"), "x")
    assert [one.case for one in older] == ["b", "c"]


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(waivers.WaiverError, match="No such file"):
        waivers.read(tmp_path / "none.toml")


def sum_of(inp, out):
    """Right but for an error that bfloat16 does not show."""
    return out.copy_(inp.float().sum(1) * 1.0001)


def conform(path, text, *, function=sum_of, tier=Tier.SMOKE, most=None):
    function._is_available = lambda: True
    get_default_manager().registry.register_impl(
        OpImpl("moe_sum", "vendor.acme", BackendImplKind.VENDOR, function, vendor="acme", writes=("out",))
    )
    file = write(path / "waivers.toml", text)
    options = run.Options(tier=tier, device="cpu", max_elements=most, waivers=file)
    return list(run.prepare("acme", options).run())


ENTRY = "[[waiver]]\nop = 'moe_sum'\nreason = 'it is so'\n"


def test_loosened_and_skipped_cases_pass_with_the_reason(tmp_path):
    text = f"{ENTRY}case = 'float32*'\nloosen = 1000.0\n{ENTRY}case = 'float16*'\nskip = true\n"
    results = [r for r in conform(tmp_path, text) if r.is_case]
    statuses = {r.dtype: {x.status for x in results if x.dtype == r.dtype} for r in results}
    assert statuses["float32"] == {Status.PASSED}
    assert statuses["float16"] == {Status.SKIPPED}
    assert statuses["bfloat16"] == {Status.PASSED}
    assert all("it is so" in r.waiver for r in results if r.dtype == "float16")
    loosened = [r for r in results if r.dtype == "float32" and r.waiver]
    assert loosened
    assert all(r.waiver == "tolerances times 1000: it is so" and r.ratio > 1 for r in loosened)


def test_what_is_loosened_is_counted_and_said_in_every_report(tmp_path, capsys):
    """A word of praise must not stand over results that are right only with waivers."""
    results = conform(tmp_path, f"{ENTRY}case = 'float*'\nloosen = 1000.0\n")
    found = report.Report("acme", {"device": "cpu"}, {"tier": "smoke"})
    for result in results:
        found.add(result)
    many = sum(r.is_loosened for r in results)
    assert many == sum("tolerances times 1000" in r.waiver for r in results) > 3
    assert found.verdict == "passed with waivers"
    passed = sum(r.status is Status.PASSED for r in results)
    assert f"{passed} passed ({many} of them loosened)" in found.counts()
    with Output(as_json=False) as output:
        print_summary(found, output)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith(f"passed with waivers: {passed} passed ({many} of them loosened)")
    (row,) = [line.split() for line in lines if line.startswith("moe_sum")]
    assert row[2:4] == [str(sum(r.status is Status.PASSED and r.op == "moe_sum" for r in results)), str(many)]
    report.write_json(found, tmp_path / "r.json")
    values = json.loads((tmp_path / "r.json").read_text())
    assert (values["passed"], values["loosened"]) == (True, many)
    assert sum(one["is_loosened"] for one in values["results"]) == many
    report.write_junit(found, tmp_path / "r.xml")
    assert (tmp_path / "r.xml").read_text().count('name="loosened"') == many
    page = html.page(found)
    assert '<p class="verdict but">Passed with waivers</p>' in page
    assert page.count("<td>loosened</td>") == many
    for verdict in (report.Report("a", {}, {}, results[:1]), report.Report("a", {}, {})):
        assert verdict.verdict == "passed"


def test_a_waiver_that_nothing_needs_is_a_failure(tmp_path):
    text = f"{ENTRY}case = 'bfloat16 7x*'\nloosen = 3.0\n{ENTRY}case = 'float*'\nloosen = 1000.0\n"
    (failed,) = [r for r in conform(tmp_path, text, tier=Tier.FULL, most=2**15) if r.is_failure]
    assert (failed.op, failed.name) == ("moe_sum", "bfloat16 7x*")
    assert "passes without it" in failed.note


def test_a_waiver_that_a_larger_tier_may_need_is_left_alone(tmp_path):
    text = f"{ENTRY}case = 'bfloat16*'\nloosen = 3.0\n{ENTRY}case = 'float*'\nloosen = 1000.0\n"
    assert not [r for r in conform(tmp_path, text) if r.is_failure]


def test_a_waiver_for_another_device_is_left_alone(tmp_path):
    text = (
        f"{ENTRY}case = 'bfloat16*'\nloosen = 3.0\ndevice = 'cuda'\n{ENTRY}case = 'float*'\nloosen = 1000.0\n"
    )
    assert not [r for r in conform(tmp_path, text) if r.is_failure]


def test_a_waiver_for_no_case_is_refused(tmp_path):
    with pytest.raises(waivers.WaiverError, match="there is no such case"):
        conform(tmp_path, f"{ENTRY}case = 'float33*'\nskip = true\n")


def test_what_is_wrong_beyond_any_tolerance_cannot_be_loosened(tmp_path):
    def not_written(inp, out):
        return inp.float().sum(1)

    results = conform(tmp_path, f"{ENTRY}case = '*'\nloosen = 1e9\n", function=not_written)
    failed = [r for r in results if r.is_failure and r.is_case]
    assert failed
    assert torch.isinf(torch.tensor(max(r.ratio for r in failed)))

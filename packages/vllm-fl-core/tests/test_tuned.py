"""A tuned table reorders the choice for the shapes that it has measured, and nothing else."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING
from typing import Any

import pytest

from vllm_fl.dispatch import BackendImplKind
from vllm_fl.dispatch import OpImpl
from vllm_fl.dispatch import OpManager
from vllm_fl.dispatch import OpRegistry
from vllm_fl.dispatch import PolicyError
from vllm_fl.dispatch import SelectionPolicy
from vllm_fl.dispatch import policy_context
from vllm_fl.dispatch import policy_from_config
from vllm_fl.dispatch.calling import torch_state

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

OP = "silu_and_mul"
ACME, TORCH, FLAGOS = "vendor.acme", "reference.torch", "default.flagos"
TABLE = {
    OP: [
        {"dtype": "bfloat16", "last": 8, "max_rows": 16, "order": [TORCH, ACME]},
        {"dtype": "bfloat16", "last": 8, "max_rows": 64, "order": [ACME]},
        {"dtype": "float32", "last": 8, "max_rows": 4, "order": [TORCH]},
    ]
}


class Tensor:
    """What an operator looks at of a tensor."""

    def __init__(self, *shape: int, dtype: str = "bfloat16") -> None:
        self.shape = shape
        self.dtype = f"torch.{dtype}"


def _manager(**functions: Any) -> OpManager:
    """Return a manager with FlagOS, a vendor and the reference, that return their own id."""
    registry = OpRegistry()
    kinds = {
        FLAGOS: (BackendImplKind.DEFAULT, None),
        ACME: (BackendImplKind.VENDOR, "acme"),
        TORCH: (BackendImplKind.REFERENCE, None),
    }
    for impl_id, (kind, vendor) in kinds.items():
        fn = functions.get(impl_id.partition(".")[2], lambda x, its=impl_id: its)
        registry.register_impl(OpImpl(OP, impl_id, kind, fn, vendor))
    return OpManager(registry)


def _policy(table: Mapping[str, Any] = TABLE, **values: Any) -> SelectionPolicy:
    return SelectionPolicy.from_dict(tuned=table, **values)


@pytest.mark.parametrize(
    ("tensor", "runs"),
    [
        (Tensor(1, 8), TORCH),
        (Tensor(16, 8), TORCH),
        (Tensor(4, 4, 8), TORCH),
        # All of the leading dimensions are rows.
        (Tensor(4, 8, 8), ACME),
        (Tensor(17, 8), ACME),
        (Tensor(64, 8), ACME),
        (Tensor(0, 8), TORCH),
        # Not measured: more rows, another last dimension, another dtype, no tensor.
        (Tensor(65, 8), FLAGOS),
        (Tensor(5, 8, dtype="float32"), FLAGOS),
        (Tensor(1, 16), FLAGOS),
        (Tensor(1, 8, dtype="float16"), FLAGOS),
        (None, FLAGOS),
    ],
)
def test_the_shape_chooses(tensor: Any, runs: str) -> None:
    manager = _manager()
    with policy_context(_policy()):
        assert manager.call(OP, tensor) == runs
        assert manager.resolve(OP)(x=tensor) == runs
    assert manager.call(OP, tensor) == FLAGOS


def test_what_it_does_not_name_follows_in_the_policys_order() -> None:
    def refuses(x: Any) -> str:
        raise NotImplementedError("not for these inputs")

    manager = _manager(torch=refuses, acme=refuses)
    with policy_context(_policy()):
        assert manager.call(OP, Tensor(1, 8)) == FLAGOS


def test_what_cannot_run_is_passed_over() -> None:
    manager = _manager()
    with policy_context(_policy(deny_vendors=["acme"])):
        assert manager.call(OP, Tensor(64, 8)) == FLAGOS
    with policy_context(_policy(per_op_order={OP: ["flagos"]})):
        assert manager.call(OP, Tensor(1, 8)) == FLAGOS


def test_a_failure_costs_the_one_that_fails() -> None:
    def fails(x: Any) -> str:
        raise RuntimeError("no such kernel")

    manager = _manager(torch=fails)
    with policy_context(_policy()):
        assert manager.call(OP, Tensor(1, 8)) == ACME
        assert list(manager.get_failed_impls(OP)[OP]) == [TORCH]
        assert manager.call(OP, Tensor(1, 8)) == ACME


def test_traced_code_looks_at_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_state, "tracing_probe", lambda: lambda: True)
    manager = _manager()
    with policy_context(_policy()):
        assert manager.call(OP, Tensor(1, 8)) == FLAGOS


def test_the_decision_says_so() -> None:
    manager = _manager()
    with policy_context(_policy()):
        decision = manager.explain(OP)
    assert decision.form == "guard"
    assert decision.tuned == (
        "up to 16 rows of 8, bfloat16: reference.torch",
        "up to 64 rows of 8, bfloat16: vendor.acme",
        "up to 4 rows of 8, float32: reference.torch",
    )
    assert "tuned: up to 16 rows of 8, bfloat16: reference.torch" in str(decision)


def test_the_fingerprint_covers_it_and_it_reaches_a_worker() -> None:
    policy = _policy()
    other = _policy({OP: [{**TABLE[OP][0], "max_rows": 17}]})
    assert len({policy.fingerprint(), other.fingerprint(), SelectionPolicy().fingerprint()}) == 3
    again = SelectionPolicy.from_dict(**json.loads(json.dumps(policy.to_dict())))
    assert again == policy
    assert again.fingerprint() == policy.fingerprint()
    assert policy.is_explicit_for(OP)
    assert not policy.is_explicit_for("rms_norm")


def test_a_file(tmp_path: Path) -> None:
    (tmp_path / "table.yaml").write_text(
        f"{OP}:\n  - {{dtype: bfloat16, last: 8, max_rows: 16, order: [{TORCH}, {ACME}]}}\n"
        f"  - {{dtype: bfloat16, last: 8, max_rows: 64, order: [{ACME}]}}\n"
        f"  - {{dtype: float32, last: 8, max_rows: 4, order: [{TORCH}]}}\n"
    )
    policy = tmp_path / "policy.yaml"
    policy.write_text("tuned: table.yaml\n")
    assert policy_from_config(str(policy)).tuned == _policy().tuned


@pytest.mark.parametrize(
    ("table", "place", "said"),
    [
        ("[1]", "table.yaml:1", "must be a mapping"),
        ("silu_and_mul: 1", "table.yaml:1", "must be a list of entries"),
        ("silu_and_mul: []", "table.yaml:1", "must be a list of entries"),
        ("silu_and_mul:\n  - 1", "table.yaml:2", "must be a mapping"),
        ("silu_and_mul:\n  - {dtype: bfloat16}", "table.yaml:2", "lacks last, max_rows, order"),
        ("silu_and_mul:\n  - {dtyp: a}", "table.yaml:2", "Did you mean 'dtype'?"),
        ("silu_and_mul:\n  - {last: 1, last: 2}", "table.yaml:2", "'last' stands twice"),
        (
            "silu_and_mul:\n  - {dtype: bfloat16, last: 0, max_rows: 1, order: [a]}",
            "table.yaml:2",
            "last of 'silu_and_mul' must be at least 1, not 0",
        ),
        (
            "silu_and_mul:\n  - {dtype: bfloat16, last: 1, max_rows: true, order: [a]}",
            "table.yaml:2",
            "max_rows of 'silu_and_mul' must be at least 1, not True",
        ),
        ("silu_and_mul:\n  - {dtype: 1, last: 1, max_rows: 1, order: [a]}", "table.yaml:2", "dtype of"),
        ("silu_and_mul:\n  - {dtype: b, last: 1, max_rows: 1, order: []}", "table.yaml:2", "order of"),
        ("silu_and_mul:\n  - {dtype: b, last: 1, max_rows: 1, order: [a, a]}", "table.yaml:2", "twice"),
        (
            "silu_and_mul:\n" + "  - {dtype: b, last: 1, max_rows: 1, order: [a]}\n" * 2,
            "table.yaml:1",
            "two entries for up to 1 rows of 1, b",
        ),
        ("a: !!bool maybe", "table.yaml:1", "is no YAML"),
        ("a: {", "table.yaml:1", "is no YAML"),
    ],
)
def test_a_wrong_table(tmp_path: Path, table: str, place: str, said: str) -> None:
    (tmp_path / "table.yaml").write_text(table)
    (tmp_path / "policy.yaml").write_text("strict: true\ntuned: table.yaml\n")
    with pytest.raises(PolicyError) as caught:
        policy_from_config(str(tmp_path / "policy.yaml"))
    assert str(caught.value).startswith(str(tmp_path / place))
    assert said in str(caught.value)


def test_a_missing_table(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text("strict: true\ntuned: nowhere.yaml\n")
    with pytest.raises(PolicyError) as caught:
        policy_from_config(str(tmp_path / "policy.yaml"))
    assert str(caught.value).startswith(f"{tmp_path / 'policy.yaml'}:2: tuned: {tmp_path / 'nowhere.yaml'}: ")


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"silu_and_mull": TABLE[OP]}, "unknown operator 'silu_and_mull'. Did you mean 'silu_and_mul'?"),
        ({OP: [{**TABLE[OP][0], "order": ["vendor.acm"]}]}, "unknown implementation 'vendor.acm'."),
    ],
)
def test_unknown_names(table: Mapping[str, Any], said: str) -> None:
    manager = _manager()
    with policy_context(_policy(table)), pytest.raises(PolicyError, match=re.escape(said)):
        manager.call(OP, Tensor(1, 8))


# -- layouts, modes and what a table says of itself ---------------------------------

NORM = "rms_norm"


class Strided(Tensor):
    """A tensor that says whether it is contiguous, and counts how often it is asked."""

    asked = 0

    def __init__(self, *shape: int, contiguous: bool) -> None:
        super().__init__(*shape)
        self._contiguous = contiguous

    def is_contiguous(self) -> bool:
        Strided.asked += 1
        return self._contiguous


def _norms() -> OpManager:
    registry = OpRegistry()
    for impl_id, vendor in ((FLAGOS, None), (ACME, "acme"), (TORCH, None)):
        kind = {"d": BackendImplKind.DEFAULT, "v": BackendImplKind.VENDOR, "r": BackendImplKind.REFERENCE}
        fn = lambda x, residual, weight, epsilon, its=impl_id: its  # noqa: E731
        registry.register_impl(OpImpl(NORM, impl_id, kind[impl_id[0]], fn, vendor, writes=()))
    return OpManager(registry)


def _entry(rows: int, *order: str, **more: str) -> dict[str, Any]:
    return {"dtype": "bfloat16", "last": 8, "max_rows": rows, "order": list(order), **more}


@pytest.mark.parametrize(
    ("entries", "strided", "residual", "runs"),
    [
        ([_entry(16, TORCH, layout="strided"), _entry(16, ACME, layout="contiguous")], True, False, TORCH),
        ([_entry(16, TORCH, layout="strided"), _entry(16, ACME, layout="contiguous")], False, False, ACME),
        # No such layout was measured.
        ([_entry(16, TORCH, layout="strided")], False, False, FLAGOS),
        ([_entry(16, TORCH, layout="contiguous")], False, True, FLAGOS),
        ([_entry(16, TORCH, layout="contiguous+residual")], False, True, TORCH),
        ([_entry(16, TORCH, layout="strided+residual")], True, True, TORCH),
        ([_entry(16, TORCH, layout="strided+residual")], True, False, FLAGOS),
        # Without a layout it holds for all, and one that names it holds before it for as many rows.
        ([_entry(16, TORCH)], True, True, TORCH),
        ([_entry(16, TORCH), _entry(16, ACME, layout="strided")], True, False, ACME),
        ([_entry(16, TORCH), _entry(16, ACME, layout="strided")], False, False, TORCH),
        # The one with the fewest rows holds, whether it names its layout or not.
        ([_entry(8, TORCH), _entry(16, ACME, layout="strided")], True, False, TORCH),
        # A call looks at what was measured eagerly, and at what holds for all modes.
        ([_entry(16, TORCH, mode="graph")], False, False, FLAGOS),
        ([_entry(16, TORCH, mode="compile")], False, False, FLAGOS),
        ([_entry(16, TORCH, mode="eager")], False, False, TORCH),
        ([_entry(16, TORCH, mode="eager"), _entry(16, ACME)], False, False, TORCH),
        ([_entry(16, TORCH, mode="graph"), _entry(16, ACME, mode="eager")], False, False, ACME),
    ],
)
def test_layouts_and_modes(entries: list[dict[str, Any]], strided: bool, residual: bool, runs: str) -> None:
    manager = _norms()
    x = Strided(7, 8, contiguous=not strided)
    with policy_context(SelectionPolicy.from_dict(tuned={NORM: entries})):
        assert manager.call(NORM, x, x if residual else None, None, 1e-6) == runs
        assert manager.resolve(NORM)(x, residual=x if residual else None, weight=None, epsilon=1e-6) == runs


def test_nobody_asks_for_a_layout_that_decides_nothing() -> None:
    manager, x = _norms(), Strided(7, 8, contiguous=True)
    Strided.asked = 0
    for entry, asked in ((_entry(16, TORCH), 0), (_entry(16, TORCH, layout="contiguous"), 1)):
        with policy_context(SelectionPolicy.from_dict(tuned={NORM: [entry]})):
            assert manager.call(NORM, x, None, None, 1e-6) == TORCH
        assert Strided.asked == asked


def test_explain_says_what_decides_and_what_does_not_yet() -> None:
    entries = [_entry(16, TORCH, mode="eager", layout="strided"), _entry(16, ACME, mode="graph")]
    with policy_context(SelectionPolicy.from_dict(tuned={NORM: entries})):
        assert _norms().explain(NORM).tuned == (
            "up to 16 rows of 8, bfloat16, graph (kept, not looked at yet): vendor.acme",
            "up to 16 rows of 8, bfloat16, strided, eager: reference.torch",
        )


def test_layouts_and_modes_reach_a_worker_and_change_the_fingerprint() -> None:
    made = [
        SelectionPolicy.from_dict(tuned={NORM: [_entry(16, TORCH, **more)]})
        for more in ({}, {"mode": "eager"}, {"mode": "graph"}, {"layout": "strided"})
    ]
    assert len({policy.fingerprint() for policy in made}) == 4
    for policy in made:
        again = SelectionPolicy.from_dict(**json.loads(json.dumps(policy.to_dict())))
        assert again.tuned == policy.tuned
        assert again.fingerprint() == policy.fingerprint()


ABOUT = """about:
  card: Acme A1
  driver: null
  date: today
  by: vllm-fl-core 1
  shapes: the default list
  versions: {torch: 2.13.0}
  conformance: {reference.torch: right at 1 of 1 shapes}
"""


def test_a_table_that_says_where_it_was_measured(tmp_path: Path) -> None:
    entry = (
        "rms_norm:\n  - {dtype: bfloat16, last: 8, max_rows: 1, order: [a], mode: eager, layout: strided}\n"
    )
    (tmp_path / "table.yaml").write_text(ABOUT + entry)
    (tmp_path / "policy.yaml").write_text("tuned: table.yaml\n")
    policy = policy_from_config(str(tmp_path / "policy.yaml"))
    expected = {NORM: [_entry(1, "a", mode="eager", layout="strided")]}
    assert policy.tuned == SelectionPolicy.from_dict(tuned=expected).tuned


@pytest.mark.parametrize(
    ("table", "line", "said"),
    [
        ("about: 1", 1, "must be a mapping"),
        ("about:\n  crad: a", 2, "Did you mean 'card'?"),
        ("about:\n  date: a\n  card: 1", 3, "card of about must be a text, not 1"),
        ("about:\n  card: null", 2, "card of about must be a text"),
        ("about:\n  versions: a", 2, "versions of about must map names to texts"),
        ("about:\n  versions: {torch: 2.1}", 2, "versions of about must map names to texts"),
        ("a:\n  - {dtype: b, last: 1, max_rows: 1, order: [c], mode: egaer}", 2, "Did you mean 'eager'?"),
        ("a:\n  - {dtype: b, last: 1, max_rows: 1, order: [c], mode: 1}", 2, "mode of 'a' must be one of"),
        ("a:\n  - {dtype: b, last: 1, max_rows: 1, order: [c], layout: dense}", 2, "layout of 'a' must be"),
        (
            "a:\n  - {dtype: b, last: 1, max_rows: 1, order: [c], layout: strided+}",
            2,
            "layout of 'a' must be",
        ),
        (
            "a:\n" + "  - {dtype: b, last: 1, max_rows: 1, order: [c], mode: graph, layout: strided}\n" * 2,
            1,
            "two entries for up to 1 rows of 1, b, strided, graph",
        ),
    ],
)
def test_a_wrong_layout_mode_or_description(tmp_path: Path, table: str, line: int, said: str) -> None:
    (tmp_path / "table.yaml").write_text(table)
    (tmp_path / "policy.yaml").write_text("tuned: table.yaml\n")
    with pytest.raises(PolicyError) as caught:
        policy_from_config(str(tmp_path / "policy.yaml"))
    assert str(caught.value).startswith(f"{tmp_path / 'table.yaml'}:{line}: ")
    assert said in str(caught.value)

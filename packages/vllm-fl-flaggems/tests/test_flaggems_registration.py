"""The entry point: what it registers, what the two variables leave out, and what is not imported."""

from __future__ import annotations

import importlib.metadata

import pytest

from vllm_fl.dispatch import BackendImplKind
from vllm_fl.dispatch import OpManager
from vllm_fl.dispatch import OpRegistry
from vllm_fl.dispatch import PolicyError
from vllm_fl.dispatch.backend import forget_availability
from vllm_fl_flaggems import _availability
from vllm_fl_flaggems import limits
from vllm_fl_flaggems import register_ops
from vllm_fl_flaggems.impl.attention import attention_backend

OPERATORS = {
    "silu_and_mul",
    "gelu_and_mul",
    "rms_norm",
    "rotary_embedding",
    "topk_softmax",
    "grouped_topk",
    "moe_align_block_size",
    "moe_sum",
    "fused_experts",
    "attention_backend",
}
ATTENTION = {"attention_backend": limits.NO_ATTENTION}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    for variable in register_ops.VLLM_FL_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    forget_availability()
    yield
    forget_availability()


def registered() -> OpManager:
    registry = OpRegistry()
    register_ops.register_builtins(registry)
    return OpManager(registry)


def reasons(manager: OpManager) -> dict[str, str]:
    found = {}
    for op_name in OPERATORS:
        (report,) = [c for c in manager.explain(op_name).candidates if c.impl_id == "default.flagos"]
        if report.status == "missing":
            found[op_name] = report.reason.removeprefix("not available: ")
    return found


def test_every_operator_is_registered_as_the_default():
    by_op = registered().snapshot().impls_by_op
    assert set(by_op) == OPERATORS
    for (impl,) in by_op.values():
        assert impl.impl_id == "default.flagos"
        assert impl.kind is BackendImplKind.DEFAULT
        assert impl.vendor is None
        assert impl.priority == 150
        assert not impl.traceable
        assert impl.predicates()


def test_what_each_writes():
    impls = {op: impls[0] for op, impls in registered().snapshot().impls_by_op.items()}
    allowed = registered().snapshot().operators
    writes = {op: allowed[op].mutates if impl.writes is None else impl.writes for op, impl in impls.items()}
    assert writes.pop("rms_norm") == ("x", "residual")
    assert writes.pop("rotary_embedding") == ("query", "key")
    assert writes.pop("topk_softmax") == ("topk_weights", "topk_indices", "token_expert_indices")
    assert writes.pop("moe_sum") == ("out",)
    assert set(writes.values()) == {()}


@pytest.fixture
def available(monkeypatch):
    monkeypatch.setattr(_availability, "check", lambda: None)


def test_attention_alone_is_left_out_by_default(available):
    assert reasons(registered()) == ATTENTION
    # It must not answer None either: that would hide the attention of a vendor.
    with pytest.raises(NotImplementedError, match="no attention backend"):
        attention_backend()


def test_the_blacklist_leaves_out_what_it_names(available, monkeypatch):
    monkeypatch.setenv(register_ops.BLACKLIST, "rms_norm, moe_sum")
    reason = "VLLM_FL_FLAGOS_BLACKLIST names it"
    assert reasons(registered()) == ATTENTION | {"rms_norm": reason, "moe_sum": reason}


def test_the_whitelist_leaves_out_everything_else(available, monkeypatch):
    monkeypatch.setenv(register_ops.WHITELIST, "rms_norm")
    left_out = reasons(registered())
    assert set(left_out) == OPERATORS - {"rms_norm"}
    assert left_out.pop("attention_backend") == limits.NO_ATTENTION
    assert set(left_out.values()) == {"VLLM_FL_FLAGOS_WHITELIST does not name it"}


def test_blank_is_unset(available, monkeypatch):
    monkeypatch.setenv(register_ops.WHITELIST, "  ")
    monkeypatch.setenv(register_ops.BLACKLIST, "rms_norm")
    assert set(reasons(registered())) == {"rms_norm", "attention_backend"}


@pytest.mark.parametrize("variable", register_ops.VLLM_FL_VARIABLES)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rms_norms", "FlagGems has no operator 'rms_norms'. Did you mean 'rms_norm'?"),
        ("SILU_AND_MUL", "Did you mean 'silu_and_mul'?"),
        ("rms_norm,,moe_sum", "FlagGems has no operator ''"),
        ("softmax_of_everything", "It has attention_backend, fused_experts, gelu_and_mul"),
        ("dynamic_per_token_quant_int8", "FlagGems has no operator 'dynamic_per_token_quant_int8'"),
    ],
)
def test_a_wrong_name_is_an_error(text, message, variable, monkeypatch):
    monkeypatch.setenv(variable, text)
    with pytest.raises(PolicyError) as caught:
        registered()
    assert str(caught.value).startswith(f"{variable}: ")
    assert message in str(caught.value)


def test_both_are_an_error(monkeypatch):
    monkeypatch.setenv(register_ops.WHITELIST, "rms_norm")
    monkeypatch.setenv(register_ops.BLACKLIST, "moe_sum")
    with pytest.raises(PolicyError, match=r"BLACKLIST: VLLM_FL_FLAGOS_WHITELIST is set too; keep one"):
        registered()


def test_registering_imports_nothing_heavy(python):
    program = (
        "import sys\n"
        "from vllm_fl.dispatch import OpRegistry\n"
        "from vllm_fl_flaggems import register_ops\n"
        "register_ops.register_builtins(OpRegistry())\n"
        "print(sorted({'torch', 'vllm', 'numpy', 'triton', 'flag_gems'} & set(sys.modules)))"
    )
    assert python(program) == "[]"


def test_the_discovery_finds_it_and_knows_its_variables():
    try:
        entries = importlib.metadata.distribution("vllm-fl-flaggems").entry_points
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("not installed, only on the path")
    assert [(e.group, e.name, e.value) for e in entries] == [
        ("vllm_fl.plugin", "flaggems", "vllm_fl_flaggems.register_ops")
    ]
    manager = OpManager()
    manager.ensure_initialized()
    record = manager.registry.plugins["flaggems"]
    assert record.success
    assert record.reason == ""
    assert set(record.operators) == OPERATORS
    assert record.variables == ("VLLM_FL_FLAGOS_WHITELIST", "VLLM_FL_FLAGOS_BLACKLIST")

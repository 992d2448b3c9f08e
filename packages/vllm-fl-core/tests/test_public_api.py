"""The names and the habits that code outside this repository relies on."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import io
import logging
import tokenize
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any

import pytest

from vllm_fl import dispatch
from vllm_fl.dispatch import OPERATORS
from vllm_fl.dispatch import Backend
from vllm_fl.dispatch import BackendImplKind
from vllm_fl.dispatch import BackendPriority
from vllm_fl.dispatch import OpImpl
from vllm_fl.dispatch import call_op
from vllm_fl.dispatch import get_default_manager
from vllm_fl.dispatch import get_logger
from vllm_fl.dispatch import policy_from_config
from vllm_fl.dispatch import set_log_level
from vllm_fl.dispatch.wheels import known_wheels

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Iterator

SOURCE = Path(dispatch.__file__).parent

NAMES = """
    OpImpl BackendImplKind BackendPriority Backend OpRegistry OpRegistrySnapshot SelectionPolicy
    policy_from_config get_policy set_global_policy reset_global_policy policy_context with_preference
    with_strict_mode with_allowed_vendors with_denied_vendors PREFER_DEFAULT PREFER_VENDOR PREFER_REFERENCE
    match_token discover_plugins get_discovered_plugins clear_discovered_plugins PLUGIN_GROUP
    PLUGIN_MODULES_ENV OpManager get_default_manager reset_default_manager call_op resolve_op set_log_level
    get_logger RefusedBeforeWriting
"""


@pytest.mark.parametrize("name", NAMES.split())
def test_a_name_is_there(name: str) -> None:
    assert hasattr(dispatch, name)
    assert name in dispatch.__all__


def test_every_public_name_is_there_and_sorted() -> None:
    assert all(hasattr(dispatch, name) for name in dispatch.__all__)
    assert len(set(dispatch.__all__)) == len(dispatch.__all__)


@pytest.mark.parametrize("module", ["types", "registry", "manager", "policy", "discovery", "ops", "backends"])
def test_a_module_is_there(module: str) -> None:
    assert importlib.import_module(f"vllm_fl.dispatch.{module}")


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("types", "OpImpl"),
        ("types", "BackendImplKind"),
        ("types", "BackendPriority"),
        ("types", "match_token"),
        ("registry", "OpRegistry"),
        ("registry", "OpRegistrySnapshot"),
        ("manager", "OpManager"),
        ("manager", "get_default_manager"),
        ("manager", "reset_default_manager"),
        ("policy", "SelectionPolicy"),
        ("policy", "policy_context"),
        ("policy", "policy_from_config"),
        ("discovery", "discover_plugins"),
        ("backends.base", "Backend"),
    ],
)
def test_a_name_is_where_older_code_looks_for_it(module: str, name: str) -> None:
    there = getattr(importlib.import_module(f"vllm_fl.dispatch.{module}"), name)
    assert there is getattr(dispatch, name)


def test_a_refusal_is_what_older_code_catches() -> None:
    assert issubclass(dispatch.RefusedBeforeWriting, dispatch.DispatchError)
    assert issubclass(dispatch.RefusedBeforeWriting, NotImplementedError)


def test_constants() -> None:
    assert dispatch.PLUGIN_GROUP == "vllm_fl.plugin"
    assert dispatch.PLUGIN_MODULES_ENV == "VLLM_FL_PLUGIN_MODULES"
    assert {p.name: p.value for p in BackendPriority} == {"DEFAULT": 150, "VENDOR": 100, "REFERENCE": 50}
    assert {k.name: k.value for k in BackendImplKind} == {
        "DEFAULT": "flagos",
        "VENDOR": "vendor",
        "REFERENCE": "reference",
    }


def test_positional_arguments_of_an_implementation() -> None:
    parameters = inspect.signature(OpImpl).parameters
    positional = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == ["op_name", "impl_id", "kind", "fn", "vendor", "priority"]


@pytest.mark.parametrize(
    ("op_name", "parameters"),
    [
        ("silu_and_mul", "x"),
        ("gelu_and_mul", "x approximate"),
        ("rms_norm", "x residual weight epsilon"),
        (
            "rotary_embedding",
            "query key cos sin position_ids rotary_interleaved inplace cos_sin_cache",
        ),
        ("attention_backend", "use_mla use_sparse selector"),
        ("topk_softmax", "topk_weights topk_indices token_expert_indices gating_output renormalize"),
        (
            "moe_align_block_size",
            "topk_ids block_size num_experts expert_map pad_sorted_ids ignore_invalid_experts",
        ),
        ("moe_sum", "inp out"),
    ],
)
def test_positional_arguments_of_an_operator(op_name: str, parameters: str) -> None:
    assert list(OPERATORS[op_name].signature.parameters) == parameters.split()


def test_every_operator_has_a_contract() -> None:
    for operator in OPERATORS.values():
        assert operator.doc.splitlines()[0].endswith("."), operator.name
        assert set(operator.mutates) <= set(operator.signature.parameters)
        for name in operator.signature.parameters:
            written = f"{name}!: " in operator.doc
            assert written == (name in operator.mutates), (operator.name, name)


# -- an import costs nothing -----------------------------------------------------------------

HEAVY = ("torch", "vllm", "yaml", "numpy", "triton", "torch_npu", "json", "importlib.metadata", "asyncio")


@pytest.mark.parametrize(
    "code",
    [
        "import vllm_fl",
        "import vllm_fl.dispatch",
        "from vllm_fl.dispatch.backends.base import Backend",
        "from vllm_fl.dispatch import types, registry, manager, policy, discovery, ops, decision, backend",
        "import vllm_fl.dispatch as d; d.OpManager(d.OpRegistry()); d.get_default_manager()",
    ],
)
def test_an_import_is_light(python: Callable[..., Any], code: str) -> None:
    done = python(
        f"import sys; before = set(sys.modules)\n{code}\nprint({{*sys.modules}} - before & {{*{HEAVY}}})"
    )
    assert done.stdout == "set()\n", done.stderr


def test_the_first_use_imports_neither_torch_nor_vllm(python: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text("strict: on\n")
    done = python(
        "import sys\n"
        "from vllm_fl.dispatch import *\n"
        "get_default_manager().registry.register_impl("
        "OpImpl('silu_and_mul', 'vendor.x', BackendImplKind.VENDOR, lambda x: x, 'x'))\n"
        "from vllm_fl.dispatch import discovery; discovery._installed = list\n"
        "get_policy(); get_default_manager().explain('silu_and_mul'); get_default_manager().freeze()\n"
        "print(call_op('silu_and_mul', 1), {'torch', 'vllm', 'numpy'} & {*sys.modules})",
        VLLM_FL_CONFIG=str(tmp_path / "policy.yaml"),
    )
    assert done.stdout == "1 set()\n", done.stderr


# -- what the core does not know -----------------------------------------------------------------

#: Names of vendors, of their chips and of their libraries.
VENDORS = """
    nvidia cuda cudnn cublas ascend npu huawei cann amd rocm hip intel xpu gaudi hpu habana cambricon mlu
    neuware metax maca mooreth musa iluvatar corex kunlun kunlunxin enflame gcu biren hygon dcu tpu neuron
    apple mps flaggems
"""


def words(text: str) -> set[str]:
    """Split into lower-case words; those of an identifier too."""
    return set("".join(c if c.isalpha() else " " for c in text.lower()).split())


def code_of(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every name and string that is no docstring, and every comment."""
    source = file.read_text("utf-8")
    tree = ast.parse(source)
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                docstrings.add(first.lineno)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.STRING and token.start[0] in docstrings:
            continue
        if token.type in (tokenize.NAME, tokenize.STRING, tokenize.COMMENT):
            yield token.start[0], token.string


FILES = sorted(SOURCE.rglob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_no_vendor_is_named(file: Path) -> None:
    known = {*VENDORS.split(), *(wheel.vendor for wheel in known_wheels() if wheel.vendor)}
    # In prose too: a docstring that names a vendor is as wrong.
    found = [
        (number, sorted(words(line) & known))
        for number, line in enumerate(file.read_text("utf-8").splitlines(), 1)
        if words(line) & known
    ]
    assert found == []


def test_vendors_are_named_in_data_files_only() -> None:
    found = [f.name for f in SOURCE.rglob("*") if f.is_file() and f.suffix not in (".py", ".pyc", ".typed")]
    assert sorted(found) == ["fatal_errors.json", "known_wheels.json"]


@pytest.mark.parametrize(
    "file", [f for f in FILES if f.name != "ops.py"], ids=lambda file: str(file.relative_to(SOURCE))
)
def test_no_operator_is_named_outside_ops(file: Path) -> None:
    """A docstring may show an example, and an error message the form of a name; code knows none."""
    allowed = {("types.py", "f\"op_name must be a name like 'rms_norm', not {shown(self.op_name)}\"")}
    found = [
        (line, text)
        for line, text in code_of(file)
        if any(name in text for name in OPERATORS) and (file.name, text) not in allowed
    ]
    assert found == []


# -- the guide that people know --------------------------------------------------------------------

GUIDE = """
from vllm_fl.dispatch.backends.base import Backend
from vllm_fl.dispatch.types import OpImpl, BackendImplKind, BackendPriority


class MyBackend(Backend):
    @property
    def name(self) -> str:
        return "x"

    @property
    def vendor(self):
        return "x"

    def is_available(self) -> bool:
        return {available}

    def silu_and_mul(self, x):
        return ("x", x)


def register_builtins(registry) -> None:
    backend = MyBackend()
    impls = [
        OpImpl(
            op_name="silu_and_mul",
            impl_id="vendor.x",
            kind=BackendImplKind.VENDOR,
            fn=backend.silu_and_mul,
            vendor="x",
            priority=BackendPriority.VENDOR,
        ),
    ]
    registry.register_many(impls)
"""


@pytest.mark.parametrize("available", [True, False])
def test_the_guide_runs_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, available: bool
) -> None:
    (tmp_path / f"guide_{available}.py").write_text(GUIDE.format(available=available))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("VLLM_FL_PLUGIN_MODULES", f"guide_{available}")
    monkeypatch.setattr(dispatch.discovery, "_installed", list)
    manager = get_default_manager()
    manager.ensure_initialized()
    for op_name, impls in manager.registry.snapshot().impls_by_op.items():
        for impl in impls:
            print(op_name, impl.impl_id, impl.kind.value, impl.priority, impl.vendor, impl.is_available())
    assert capsys.readouterr().out == f"silu_and_mul vendor.x vendor 100 x {available}\n"
    if available:
        assert call_op("silu_and_mul", 5) == ("x", 5)
        assert manager.get_selected_impl_id("silu_and_mul") == "vendor.x"
    else:
        with pytest.raises(RuntimeError, match=r"MyBackend\.is_available\(\) is False"):
            call_op("silu_and_mul", 5)


def test_the_older_wiring_of_availability() -> None:
    """Functions carried ``_is_available`` through ``functools.wraps``."""

    def bind_is_available(fn: Any, is_available: Any) -> Any:
        @functools.wraps(fn)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return fn(*args, **kwargs)

        wrapper._is_available = is_available  # type: ignore[attr-defined]
        return wrapper

    class Away(Backend):
        name = "x"

        def is_available(self) -> bool:
            return False

        def silu_and_mul(self, x: Any) -> Any:
            return x

    backend = Away()
    impls = [
        OpImpl("silu_and_mul", "vendor.x", BackendImplKind.VENDOR, fn, vendor="x")
        for fn in (
            backend.silu_and_mul,
            bind_is_available(backend.silu_and_mul, backend.is_available),
            functools.wraps(bind_is_available(len, backend.is_available))(lambda x: x),
        )
    ]
    assert [impl.is_available() for impl in impls] == [False, False, False]


# -- the rest ---------------------------------------------------------------------------------------


def test_policy_from_config_takes_a_path(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("prefer: vendor\n")
    assert policy_from_config(str(tmp_path / "p.yaml")) == policy_from_config(tmp_path / "p.yaml")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("vllm_fl.dispatch.x", "vllm_fl.dispatch.x"),
        ("mine", "vllm_fl.mine"),
        ("vllm_flx", "vllm_fl.vllm_flx"),
    ],
)
def test_loggers_are_ours(name: str, full: str) -> None:
    assert get_logger(name).name == full


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger("vllm_fl")
    before = logger.level, logger.handlers[:], logger.propagate
    yield logger
    logger.level, logger.handlers[:], logger.propagate = before
    logger.setLevel(before[0])


def test_set_log_level(root_logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    root_logger.handlers.clear()
    for level in ("info", "INFO", logging.INFO):
        set_log_level(level)
        assert root_logger.level == logging.INFO
    assert len(root_logger.handlers) == 1
    get_logger().info("said once")
    assert capsys.readouterr().err.count("said once") == 1
    with pytest.raises(ValueError):
        set_log_level("loud")


def test_no_handler_unless_it_is_asked_for(python: Callable[..., Any]) -> None:
    handlers = "logging.getLogger('vllm_fl').handlers, logging.root.handlers"
    code = f"import logging, vllm_fl.dispatch; print({handlers})"
    assert python(code).stdout == "[] []\n"
    assert "StderrHandler" in python(code, VLLM_FL_LOG_LEVEL="debug").stdout

"""Plugins as they are installed: what is loaded, what is refused, and in which words."""

from __future__ import annotations

import importlib
import logging
import sys
import textwrap
from typing import TYPE_CHECKING
from typing import Any

import pytest

from vllm_fl.dispatch import NoImplementationError
from vllm_fl.dispatch import OpManager
from vllm_fl.dispatch import PluginRecord
from vllm_fl.dispatch import PolicyError
from vllm_fl.dispatch import SelectionPolicy
from vllm_fl.dispatch import call_op
from vllm_fl.dispatch import clear_discovered_plugins
from vllm_fl.dispatch import discover_plugins
from vllm_fl.dispatch import discovery
from vllm_fl.dispatch import get_default_manager
from vllm_fl.dispatch import get_discovered_plugins
from vllm_fl.dispatch import get_policy
from vllm_fl.dispatch import policy_context
from vllm_fl.dispatch import reset_default_manager
from vllm_fl.dispatch import reset_global_policy
from vllm_fl.dispatch.common.distributions import version_of
from vllm_fl.dispatch.plugins import loading
from vllm_fl.dispatch.wheels import known_wheels

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Iterator
    from pathlib import Path

OP = "silu_and_mul"

HEAD = """
from vllm_fl.dispatch import Backend, BackendImplKind, OpImpl, implementation, operator

def impl(op_name, fn=lambda x: {vendor!r}, impl_id="vendor.{vendor}", **more):
    return OpImpl(op_name, impl_id, BackendImplKind.VENDOR, fn, impl_id.split(".")[1], **more)
"""

#: A plugin that is right.
RIGHT = 'def register_builtins(registry): registry.register_impl(impl("silu_and_mul"))'


class Site:
    """A folder on ``sys.path`` with installed distributions in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.distributions: set[str] = set()

    def module(self, path: str, text: str, vendor: str = "acme") -> None:
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(HEAD.format(vendor=vendor) + textwrap.dedent(text))

    def wheel(self, name: str, text: str | None = None, version: str = "1.0", **plugins: str) -> None:
        """Install a distribution; its plugin is ``<name>_plugin`` unless it is named."""
        module = f"{name.replace('-', '_')}_plugin"
        if text is not None:
            self.module(f"{module}.py", text, vendor=name)
        entries = "".join(f"{key} = {value}\n" for key, value in (plugins or {name: module}).items())
        info = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[vllm_fl.plugin]\n{entries}")
        (info / "RECORD").write_text("")
        self.distributions.add(name)
        importlib.invalidate_caches()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    made = Site(tmp_path)
    installed = discovery._installed
    here = lambda: [p for p in installed() if p.origin.distribution in made.distributions]  # noqa: E731
    monkeypatch.setattr(discovery, "_installed", here)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield made
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def discover() -> tuple[OpManager, dict[str, PluginRecord]]:
    manager = get_default_manager()
    manager.ensure_initialized()
    return manager, dict(manager.registry.plugins)


def registered(manager: OpManager) -> dict[str, list[str]]:
    return {op: [i.impl_id for i in impls] for op, impls in manager.registry.snapshot().impls_by_op.items()}


# -- what a plugin is --------------------------------------------------------------------------


def test_a_plugin_is_loaded_when_first_needed_and_once(site: Site) -> None:
    site.wheel("acme", "print('loaded')\n" + RIGHT, version="1.2")
    assert "acme_plugin" not in sys.modules
    assert call_op(OP, 1) == "acme"
    assert get_discovered_plugins() == [
        PluginRecord("acme", "acme", "1.2", "acme_plugin", 1, "loaded", "", (OP,))
    ]
    decision = get_default_manager().explain(OP)
    assert decision.candidates[0].distribution == "acme 1.2"
    (impl,) = get_default_manager().registry.snapshot().impls_by_op[OP]
    assert str(impl.origin) == "acme 1.2 (entry point 'acme')"


@pytest.mark.parametrize("function", ["register_builtins", "vllm_fl_register", "register"])
def test_three_names_of_the_function(site: Site, function: str) -> None:
    site.wheel("acme", RIGHT.replace("register_builtins", function))
    assert registered(discover()[0]) == {OP: ["vendor.acme"]}


def test_the_first_of_the_names_is_taken(site: Site) -> None:
    site.wheel("acme", f"{RIGHT}\ndef register(registry): raise ZeroDivisionError")
    assert discover()[1]["acme"].success


@pytest.mark.parametrize("target", ["acme_plugin:start", "acme_plugin:inner.start"])
def test_an_entry_point_may_name_the_function(site: Site, target: str) -> None:
    text = RIGHT.replace("register_builtins", "start") + "\nclass inner: start = staticmethod(start)"
    site.wheel("acme", text, acme=target)
    manager, records = discover()
    assert records["acme"].source == target
    assert registered(manager) == {OP: ["vendor.acme"]}


def test_a_backend_as_a_whole(site: Site) -> None:
    site.wheel(
        "acme",
        """
        class Acme(Backend):
            name = "acme"
            def is_available(self): return True
            def silu_and_mul(self, x): return "backend"
            def moe_sum(self, inp, out): return out

        VLLM_FL_VARIABLES = ["VLLM_FL_ACME_FAST"]
        def register(registry): registry.register_backend(Acme())
        """,
    )
    assert call_op(OP, 1) == "backend"
    record = discover()[1]["acme"]
    assert (record.operators, record.variables) == ((OP, "moe_sum"), ("VLLM_FL_ACME_FAST",))
    assert [backend.name for backend in get_default_manager().registry.snapshot().backends] == ["acme"]


def test_a_plugin_declares_an_operator_of_its_own(site: Site) -> None:
    site.wheel(
        "acme",
        """
        @operator(mutates=("y",))
        def axpy(self, a, x, y): "Add."

        def register(registry):
            registry.declare(axpy)
            registry.register_impl(impl("axpy", lambda a, x, y: a * x + y))
        """,
    )
    assert call_op("axpy", 2, 3, 4) == 10
    assert get_default_manager().registry.snapshot().operators["axpy"].mutates == ("y",)
    with policy_context(SelectionPolicy.from_dict(per_op_order={"axpy": ["vendor"]})):
        assert call_op("axpy", 2, 3, y=4) == 10


# -- broken plugins ------------------------------------------------------------------------------

BROKEN = [
    ("import no_such_library", "no_such_library is not installed: No module named 'no_such_library'"),
    ("from json import no_such_name", "ImportError: cannot import name 'no_such_name' from 'json'"),
    ("raise ImportError('libacme.so is damaged')", "ImportError: libacme.so is damaged"),
    ("def register(registry):\n    x = (", "SyntaxError: '(' was never closed"),
    ("import sys; sys.exit(3)", "SystemExit: 3"),
    ("def register(registry):\n    import sys; sys.exit('bye')", "SystemExit: bye"),
    ("def register(registry):\n    1 / 0", "ZeroDivisionError: division by zero"),
    ("def register(registry):\n    registry.register_impl(impl('silu_and_mul')); 1 / 0", "ZeroDivisionError"),
    (
        "def register(registry):\n    registry.register_impl(impl('Silu'))",
        "RegistrationError: OpImpl('Silu', ",
    ),
    ("def register(): pass", "TypeError: register() takes 0 positional arguments but 1 was given"),
    (
        "x = 1",
        "RegistrationError: module acme_plugin has none of register_builtins, vllm_fl_register, register",
    ),
    ("register = 1", "RegistrationError: module acme_plugin has none of "),
    ("class Odd(BaseException): pass\nraise Odd('odd')", "Odd: odd"),
    ("def register(registry): register(registry)", "RecursionError: maximum recursion depth exceeded"),
]


@pytest.mark.parametrize(("text", "reason"), BROKEN)
def test_a_broken_plugin_costs_itself_and_one_line(
    site: Site, caplog: pytest.LogCaptureFixture, text: str, reason: str
) -> None:
    site.wheel("acme", text, version="1.2")
    site.wheel("good", RIGHT)
    with caplog.at_level(logging.INFO):
        assert call_op(OP, 1) == "good"
        discover()
    manager, records = discover()
    assert registered(manager) == {OP: ["vendor.good"]}
    assert records["acme"].state == "failed"
    assert records["acme"].reason.startswith(reason)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"plugin 'acme' of acme 1.2 is not used: {reason}")


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("no_such_plugin", "no_such_plugin is not installed: No module named 'no_such_plugin'"),
        ("no_such.inner:register", "no_such is not installed: No module named 'no_such'"),
        ("acme_plugin:no_such", "AttributeError: module 'acme_plugin' has no attribute 'no_such'"),
        ("acme_plugin:HEAD", "RegistrationError: acme_plugin:HEAD is 'x', not a function"),
        ("acme_plugin.inner", "acme_plugin is not installed: No module named 'acme_plugin.inner'"),
    ],
)
def test_an_entry_point_that_names_nothing(site: Site, target: str, reason: str) -> None:
    site.wheel("acme", f"HEAD = 'x'\n{RIGHT}", acme=target)
    record = discover()[1]["acme"]
    assert record.state == "failed"
    assert record.reason.startswith(reason)


def test_where_it_was_raised(site: Site) -> None:
    site.wheel("acme", "def register(registry):\n    1 / 0\n")
    file = site.folder / "acme_plugin.py"
    line = file.read_text().splitlines().index("    1 / 0") + 1
    assert discover()[1]["acme"].reason.endswith(f" ({file}:{line})")


def test_a_plugin_that_raises_in_the_middle_registers_nothing(site: Site) -> None:
    site.wheel(
        "acme",
        """
        @operator()
        def mine(self, x): "Mine."

        def register(registry):
            registry.declare(mine)
            registry.register_many([impl("silu_and_mul"), impl("gelu_and_mul")])
            raise OSError("no device")
        """,
    )
    manager, _ = discover()
    assert registered(manager) == {}
    assert "mine" not in manager.registry.snapshot().operators
    with pytest.raises(NoImplementationError, match=r"plugin 'acme' of acme 1\.0: OSError: no device"):
        call_op(OP, 1)


def test_one_bad_operator_does_not_take_its_siblings(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.wheel(
        "acme",
        """
        class Acme(Backend):
            name = "acme"
            def is_available(self): return True
            def silu_and_mul(self, x): return "kept"
            def moe_sum(self, inp): return inp
            def gelu_and_mul(self, x): return "kept too"
            @implementation(writes=("x", "weight"))
            def rms_norm(self, x, residual, weight, epsilon): return x
            @implementation(priority="high")
            def dynamic_per_token_quant_int8(self, x): return x

        def register(registry): registry.register_backend(Acme())
        """,
    )
    assert call_op(OP, 1) == "kept"
    assert call_op("gelu_and_mul", 1) == "kept too"
    manager, records = discover()
    assert set(registered(manager)) == {OP, "gelu_and_mul"}
    assert records["acme"].success
    parts = records["acme"].reason.split("; ")
    for part in (
        "vendor.acme of moe_sum: it does not take 'out'",
        "vendor.acme of rms_norm: writes weight, which the contract does not allow",
        "OpImpl('dynamic_per_token_quant_int8', 'vendor.acme'): priority must be an integer, not 'high'.",
    ):
        assert any(found.startswith(part) for found in parts), parts
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("plugin 'acme' of acme 1.0: not all is used: ")


def test_a_plugin_of_which_nothing_is_right_has_failed(site: Site) -> None:
    site.wheel("acme", "def register(registry): registry.register_impl(impl('rms_norm'))")
    record = discover()[1]["acme"]
    assert (record.state, record.operators) == ("failed", ())
    assert record.reason.startswith("vendor.acme of rms_norm: it does not take 'residual'")


@pytest.mark.parametrize("ask", ["get_policy()", "get_default_manager().ensure_initialized()"])
def test_a_plugin_may_ask_for_the_policy_while_it_is_loaded(
    site: Site, monkeypatch: pytest.MonkeyPatch, ask: str
) -> None:
    monkeypatch.setenv("VLLM_FL_DENY_VENDORS", "later")
    text = "def register(registry):\n    import vllm_fl.dispatch as d\n    d."
    site.wheel("early", f"{text}{ask}\n    registry.register_impl(impl('silu_and_mul'))")
    site.wheel("later", RIGHT)
    assert call_op(OP, 1) == "early"
    assert {r.state for r in discover()[1].values()} == {"loaded"}


def test_an_interrupt_ends_the_discovery_and_the_next_goes_on(site: Site) -> None:
    site.wheel(
        "acme",
        """
        import signal, sys
        def register(registry):
            sys.interrupts = getattr(sys, "interrupts", 0) + 1
            if sys.interrupts == 1:
                signal.raise_signal(signal.SIGINT)
            registry.register_impl(impl("silu_and_mul"))
        """,
    )
    try:
        with pytest.raises(KeyboardInterrupt):
            call_op(OP, 1)
        assert call_op(OP, 1) == "acme"
    finally:
        del sys.interrupts  # type: ignore[attr-defined]


@pytest.mark.parametrize("damage", ["", "Metadata-Version: 2.1\n"])
def test_a_damaged_metadata_file(site: Site, damage: str) -> None:
    site.wheel("acme", RIGHT)
    site.wheel("good", RIGHT)
    (site.folder / "acme-1.0.dist-info" / "METADATA").write_text(damage)
    site.distributions.add("?")
    _, records = discover()
    assert records["good"].success
    assert (records["acme"].distribution, records["acme"].version) == ("?", "?")


# -- names ------------------------------------------------------------------------------------------


def test_two_distributions_with_one_name(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.wheel("zeta", RIGHT, shared="zeta_plugin")
    site.wheel("alpha", RIGHT, shared="alpha_plugin", version="2.0")
    manager, records = discover()
    assert registered(manager) == {OP: ["vendor.alpha"]}
    assert records["shared"].distribution == "alpha"
    second = records["shared (zeta)"]
    assert (second.state, second.reason) == ("refused", "the name 'shared' is taken by alpha 2.0")
    assert [record.getMessage() for record in caplog.records] == [
        "plugin 'shared (zeta)' of zeta 1.0 is not used: the name 'shared' is taken by alpha 2.0"
    ]
    discover_plugins(manager.registry)
    assert len(caplog.records) == 1


WHEELS = {wheel.plugin: wheel for wheel in known_wheels()}


@pytest.mark.parametrize("name", sorted(WHEELS))
def test_a_reserved_name(site: Site, name: str) -> None:
    site.wheel("acme", RIGHT, **{name: "acme_plugin"})
    record = discover()[1][name]
    assert record.state == "refused"
    assert record.reason == f"the name {name!r} is reserved to {WHEELS[name].distribution}"


def test_the_owner_of_a_name_comes_first(site: Site) -> None:
    site.wheel("aaa", RIGHT, cuda="aaa_plugin")
    site.wheel(
        "vllm-plugin-cuda",
        RIGHT.replace('"silu_and_mul"', '"silu_and_mul", impl_id="vendor.cuda"'),
        cuda="vllm_plugin_cuda_plugin",
    )
    manager, records = discover()
    assert registered(manager) == {OP: ["vendor.cuda"]}
    assert records["cuda"].success
    assert records["cuda (aaa)"].state == "refused"


@pytest.mark.parametrize("impl_id", ["vendor.cuda", "vendor.ascend.fast"])
def test_a_reserved_id(site: Site, impl_id: str) -> None:
    site.wheel(
        "acme",
        f"""
        def register(registry):
            registry.register_many([impl("silu_and_mul", impl_id="{impl_id}"), impl("gelu_and_mul")])
        """,
    )
    manager, records = discover()
    owner = f"vllm-plugin-{impl_id.split('.')[1]}"
    assert registered(manager) == {"gelu_and_mul": ["vendor.acme"]}
    assert records["acme"].reason == f"{impl_id} of {OP}: this id is reserved to {owner}"


def test_an_id_that_only_begins_like_a_reserved_one(site: Site) -> None:
    site.wheel("acme", RIGHT.replace('"silu_and_mul"', '"silu_and_mul", impl_id="vendor.cuda2"'))
    assert registered(discover()[0]) == {OP: ["vendor.cuda2"]}


def test_an_id_that_another_distribution_has(site: Site) -> None:
    text = RIGHT.replace('"silu_and_mul"', '"silu_and_mul", impl_id="vendor.both"')
    site.wheel("alpha", text)
    site.wheel("beta", text)
    manager, records = discover()
    assert call_op(OP, 1) == "alpha"
    assert records["beta"].reason == (
        "vendor.both of silu_and_mul: this id is registered already by alpha 1.0 (entry point 'alpha')"
    )
    assert registered(manager) == {OP: ["vendor.both"]}


# -- the plugin API -----------------------------------------------------------------------------------

NEWER = (
    "acme 3.1 was written for plugin API 7, and vllm-fl-core {core} knows 1 to 1; "
    "pip install --upgrade vllm-fl-core"
)


@pytest.mark.parametrize(
    "text",
    [
        f"VLLM_FL_PLUGIN_API = 7\n{RIGHT}",
        f"VLLM_FL_PLUGIN_API: int = 7  # the newest\n{RIGHT}",
        "VLLM_FL_PLUGIN_API = 7\nfrom vllm_fl.dispatch import SomethingNew",
        "VLLM_FL_PLUGIN_API = 7\nraise SystemExit",
        "VLLM_FL_PLUGIN_API = 7\nsyntax of a later Python !",
        f"VLLM_FL_PLUGIN_API = 3 + 4\n{RIGHT}",
    ],
)
def test_a_newer_plugin_is_refused_with_one_line(
    site: Site, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    site.wheel("acme", text, version="3.1")
    manager, records = discover()
    expected = NEWER.format(core=version_of("vllm-fl-core"))
    assert (records["acme"].state, records["acme"].reason) == ("incompatible", expected)
    assert registered(manager) == {}
    assert [r.getMessage() for r in caplog.records] == [f"plugin 'acme' of acme 3.1 is not used: {expected}"]


def test_a_newer_plugin_in_a_package_that_does_not_import(site: Site) -> None:
    site.module("newer/__init__.py", "from vllm_fl.dispatch import SomethingNew")
    site.module("newer/inner/__init__.py", "1 / 0")
    site.module("newer/inner/register_ops.py", f"VLLM_FL_PLUGIN_API = 7\n{RIGHT}")
    site.wheel("acme", version="3.1", acme="newer.inner.register_ops:register_builtins")
    record = discover()[1]["acme"]
    assert (record.state, record.api_version) == ("incompatible", 7)
    assert record.reason == NEWER.format(core=version_of("vllm-fl-core"))
    assert "newer" not in sys.modules


def test_an_older_plugin_api_names_the_plugin_to_upgrade(site: Site) -> None:
    site.wheel("acme", f"VLLM_FL_PLUGIN_API = 0\n{RIGHT}")
    record = discover()[1]["acme"]
    assert record.state == "incompatible"
    assert record.reason.endswith("pip install --upgrade acme")


@pytest.mark.parametrize("value", ["'1'", "1.0", "True", "[1]"])
def test_an_api_that_is_no_number(site: Site, value: str) -> None:
    site.wheel("acme", f"VLLM_FL_PLUGIN_API = [{value}][0]\n{RIGHT}")
    record = discover()[1]["acme"]
    assert record.state == "incompatible"
    assert record.reason.startswith("VLLM_FL_PLUGIN_API must be an integer, not ")


def test_this_api(site: Site) -> None:
    site.wheel("acme", f"VLLM_FL_PLUGIN_API = {loading.PLUGIN_API_VERSION}\n{RIGHT}")
    assert discover()[1]["acme"].success


def test_the_policy_for_plugin_apis() -> None:
    """A core takes its own and the one before; docs/releasing.md says so to vendors."""
    assert max(1, loading.PLUGIN_API_VERSION - 1) == loading.OLDEST_PLUGIN_API_VERSION


@pytest.mark.parametrize("newest", [2, 3])
def test_a_plugin_of_the_api_before(site: Site, monkeypatch: pytest.MonkeyPatch, newest: int) -> None:
    monkeypatch.setattr(loading, "PLUGIN_API_VERSION", newest)
    monkeypatch.setattr(loading, "OLDEST_PLUGIN_API_VERSION", newest - 1)
    for api in range(newest + 2):
        site.wheel(f"of{api}", f"VLLM_FL_PLUGIN_API = {api}\n{RIGHT}")
    manager, records = discover()
    loaded = {newest - 1, newest}
    states = {record.api_version: record.state for record in records.values()}
    assert states == {api: "loaded" if api in loaded else "incompatible" for api in range(newest + 2)}
    assert registered(manager) == {OP: [f"vendor.of{api}" for api in sorted(loaded)]}
    assert records["of0"].reason.endswith("pip install --upgrade of0")
    assert records[f"of{newest + 1}"].reason.endswith("pip install --upgrade vllm-fl-core")


# -- VLLM_FL_PLUGINS and VLLM_FL_PLUGIN_MODULES -------------------------------------------------------


def test_only_named_plugins_are_loaded(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.wheel("alpha", "raise ZeroDivisionError")
    site.wheel("beta", RIGHT)
    site.module("named.py", RIGHT, vendor="named")
    monkeypatch.setenv("VLLM_FL_PLUGINS", " beta ")
    monkeypatch.setenv("VLLM_FL_PLUGIN_MODULES", "named")
    manager, records = discover()
    assert "alpha_plugin" not in sys.modules
    assert {name: r.state for name, r in records.items()} == {
        "alpha": "not-allowed",
        "beta": "loaded",
        "named": "loaded",
    }
    assert records["alpha"].reason == "VLLM_FL_PLUGINS does not name it"
    assert registered(manager) == {OP: ["vendor.beta", "vendor.named"]}


def test_a_plugin_that_is_not_there_names_the_nearest(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.wheel("alpha", RIGHT)
    site.wheel("beta", RIGHT)
    monkeypatch.setenv("VLLM_FL_PLUGINS", "beta,aplha")
    with pytest.raises(PolicyError) as caught:
        get_policy()
    assert str(caught.value) == (
        "VLLM_FL_PLUGINS: no plugin 'aplha' is installed; installed are alpha, beta. Did you mean 'alpha'?"
    )
    monkeypatch.setenv("VLLM_FL_PLUGINS", "alpha")
    assert call_op(OP, 1) == "alpha"


def test_modules_are_plugins(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.module("one.py", RIGHT, vendor="one")
    site.module("pack/__init__.py", "")
    site.module("pack/two.py", RIGHT.replace("register_builtins", "register"), vendor="two")
    site.module("bad.py", "import no_such_library")
    monkeypatch.setenv("VLLM_FL_PLUGIN_MODULES", "one, pack.two,bad")
    manager, records = discover()
    assert registered(manager) == {OP: ["vendor.one", "vendor.two"]}
    assert records["pack.two"].distribution == "VLLM_FL_PLUGIN_MODULES"
    assert records["bad"].state == "failed"  # it is there, and broken
    assert records["bad"].reason.startswith("no_such_library is not installed")


def test_a_module_that_is_not_there(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.module("pack/__init__.py", "")
    monkeypatch.setenv("VLLM_FL_PLUGIN_MODULES", "pack.no_such")
    for _ in range(2):
        with pytest.raises(PolicyError) as caught:
            call_op(OP, 1)
        assert str(caught.value) == "VLLM_FL_PLUGIN_MODULES: there is no module 'pack.no_such'."


# -- a wrong name in a policy, beside a broken plugin ---------------------------------------------------


@pytest.mark.parametrize("order", ["vendor:acme", "impl:vendor.acme", "impl:vendor.acme.fast"])
def test_a_broken_plugin_makes_no_policy_wrong(
    site: Site, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    site.wheel("vllm-plugin-acme", "1 / 0", acme="vllm_plugin_acme_plugin")
    site.wheel("good", RIGHT)
    monkeypatch.setenv("VLLM_FL_PER_OP", f"{OP}={order}|vendor")
    assert call_op(OP, 1) == "good"
    monkeypatch.setenv("VLLM_FL_PER_OP", f"{OP}=vendor:goood")
    reset_default_manager()
    reset_global_policy()
    with pytest.raises(PolicyError, match=r"unknown vendor 'goood'\. Did you mean 'good'\?"):
        call_op(OP, 1)


# -- again, anew, and another process -------------------------------------------------------------------


def test_clear_forgets_the_records_and_keeps_what_is_registered(site: Site) -> None:
    site.wheel("acme", RIGHT)
    manager, _ = discover()
    clear_discovered_plugins()
    assert get_discovered_plugins() == []
    assert registered(manager) == {OP: ["vendor.acme"]}
    (record,) = discover_plugins(manager.registry)
    assert record.success
    assert registered(manager) == {OP: ["vendor.acme"]}
    assert call_op(OP, 1) == "acme"


def test_a_plugin_that_is_gone_is_gone(site: Site) -> None:
    site.wheel("acme", RIGHT)
    assert call_op(OP, 1) == "acme"
    (site.folder / "acme-1.0.dist-info" / "entry_points.txt").unlink()
    importlib.invalidate_caches()
    reset_default_manager()
    with pytest.raises(NoImplementationError):
        call_op(OP, 1)


def test_a_registry_of_ones_own_discovers_nothing(site: Site) -> None:
    site.wheel("acme", RIGHT)
    manager = OpManager(get_default_manager().registry)
    manager.ensure_initialized()
    assert registered(manager) == {}
    assert "acme_plugin" not in sys.modules


def test_another_process_finds_the_same_and_imports_nothing_heavy(
    tmp_path: Path, python: Callable[..., Any]
) -> None:
    site = Site(tmp_path)
    site.wheel("acme", RIGHT)
    done = python(
        "import sys\n"
        "from vllm_fl.dispatch import call_op, get_default_manager\n"
        "print(call_op('silu_and_mul', 1), get_default_manager().explain('silu_and_mul').impl_id)\n"
        "print([m for m in ('torch', 'vllm', 'yaml', 'numpy') if m in sys.modules])",
        tmp_path,
        VLLM_FL_PLUGINS="acme",
    )
    assert done.stdout == "acme vendor.acme\n[]\n", done.stderr

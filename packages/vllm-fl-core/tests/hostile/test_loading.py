"""What a plugin does while it is loaded: it is left out with one line that names it, the rest works."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import TYPE_CHECKING
from typing import Any

import pytest
from wheels import OP
from wheels import RIGHT
from wheels import Site
from wheels import discover
from wheels import lines

from vllm_fl.dispatch import call_op
from vllm_fl.dispatch import get_default_manager

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

#: An exception, its text, and what is said of it.
EXCEPTIONS = {
    "its text raises": ("def __str__(self): 1 / 0", "Odd, whose text cannot be read"),
    "its text exits": ("def __str__(self): raise SystemExit(0)", "Odd, whose text cannot be read"),
    "its text interrupts": ("def __str__(self): raise KeyboardInterrupt", "Odd, whose text cannot be read"),
    "its text is a number": ("def __str__(self): return 5", "Odd, whose text cannot be read"),
    "its text recurses": ("def __str__(self): return str(self)", "Odd, whose text cannot be read"),
    "its text is odd": ("def __str__(self): return Text('odd')", "Odd: odd"),
    "its text is long": ("def __str__(self): return 'x' * 10**8", "x... (100,000,000 characters)"),
    "its class lies": ("__class__ = property(lambda self: 1 / 0)", "Odd"),
    "its traceback is gone": ("__traceback__ = None", "Odd"),
    "its repr raises": ("def __repr__(self): 1 / 0", "Odd"),
}
ODD = """
class Text(str):
    def __getitem__(self, key): raise RuntimeError
    def __len__(self): raise RuntimeError
    def __format__(self, spec): raise RuntimeError
class Odd({base}):
    {body}
"""

RAISED = {
    "KeyboardInterrupt": ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    "KeyboardInterrupt with a text": ("raise KeyboardInterrupt('mine') from None", "KeyboardInterrupt: mine"),
    "KeyboardInterrupt that is thrown": ("(_ for _ in ()).throw(KeyboardInterrupt)", "KeyboardInterrupt"),
    "KeyboardInterrupt in a group": (
        "raise BaseExceptionGroup('g', [KeyboardInterrupt()])",
        "BaseExceptionGroup",
    ),
    "KeyboardInterrupt raised again": (
        "try: raise KeyboardInterrupt\nexcept BaseException: raise",
        "KeyboardInterrupt",
    ),
    "GeneratorExit": ("raise GeneratorExit", "GeneratorExit"),
    "SystemExit": ("raise SystemExit", "SystemExit"),
    "sys.exit(0)": ("import sys; sys.exit(0)", "SystemExit: 0"),
    "sys.exit(odd)": ("import sys; sys.exit(type('Odd', (), {'__str__': lambda s: 1})())", "SystemExit"),
    "CancelledError": ("import asyncio; raise asyncio.CancelledError", "CancelledError"),
    "StopIteration": ("raise StopIteration(1)", "StopIteration: 1"),
    "MemoryError": ("raise MemoryError", "MemoryError"),
    "too deep": ("def f(): return f()\nf()", "RecursionError"),
    "a module without a name": ("raise ModuleNotFoundError('x', name=5)", "ModuleNotFoundError: x"),
    "a module with an odd name": (
        "raise ModuleNotFoundError('x', name=type('Odd', (), {'__str__': lambda s: 1})())",
        "ModuleNotFoundError: x",
    ),
    "a module with a long name": ("raise ModuleNotFoundError('x', name='y' * 10**7)", "is not installed: x"),
    "a class without a name": (
        "class Meta(type):\n    __name__ = property(lambda c: 1 / 0)\n"
        "class Odd(Exception, metaclass=Meta): pass\nraise Odd",
        "an exception whose class has no name",
    ),
    "a cause without an end": ("e = ValueError('e')\ne.__cause__ = e\nraise e", "ValueError: e"),
    "a warning": ("raise DeprecationWarning('old')", "DeprecationWarning: old"),
    "no exception": ("raise 5", "TypeError: exceptions must derive"),
    "not Python": ("def (", "SyntaxError"),
    "a byte that is no text": ("x = '\\0'", ""),
}

MODULES = {
    "its getattr raises": ("def __getattr__(name): raise RuntimeError(name)", "RuntimeError"),
    "its getattr interrupts": ("def __getattr__(name): raise KeyboardInterrupt", "KeyboardInterrupt"),
    "its getattr answers everything": (
        "def __getattr__(name): return object()",
        "VLLM_FL_PLUGIN_API must be",
    ),
    "its API raises": (
        "import sys, types\nclass Odd(types.ModuleType):\n"
        "    VLLM_FL_PLUGIN_API = property(lambda self: 1 / 0)\nsys.modules[__name__].__class__ = Odd",
        "ZeroDivisionError",
    ),
    "its API is true": ("VLLM_FL_PLUGIN_API = True", "must be an integer, not True"),
    "its API is a text": ("VLLM_FL_PLUGIN_API = '1'", "must be an integer, not '1'"),
    "its API is an odd number": (
        "class Odd(int):\n    def __le__(self, other): 1 / 0\nVLLM_FL_PLUGIN_API = Odd(1)",
        "VLLM_FL_PLUGIN_API must be an integer",
    ),
    "its API has no end": (f"VLLM_FL_PLUGIN_API = {'9' * 5000}", "Exceeds the limit"),
    "it is None": ("import sys; sys.modules[__name__] = None", "acme_ops is None, not a function"),
    "it is a number": ("import sys; sys.modules[__name__] = 5", "acme_ops is 5, not a function"),
    "it is a mock": (
        "import sys\nfrom unittest.mock import Mock\nsys.modules[__name__] = Mock()",
        "VLLM_FL_PLUGIN_API must be",
    ),
    "it is gone": ("import sys; del sys.modules[__name__]", "KeyError"),
    "it has no function": ("register = 5", "has none of register_builtins"),
    "its variables raise": (
        "import sys, types\nclass Odd(types.ModuleType):\n"
        "    VLLM_FL_VARIABLES = property(lambda self: 1 / 0)\nsys.modules[__name__].__class__ = Odd\n"
        + RIGHT,
        "ZeroDivisionError",
    ),
    "register() is asynchronous": (
        "async def register(registry): registry.register_impl(impl('acme'))",
        "acme_ops has registered nothing: it is asynchronous (async def), and nobody awaits it",
    ),
    "register() is a generator": ("def register(registry): yield", "it is a generator function"),
    "register() is an asynchronous generator": ("async def register(registry): yield", "it is a generator"),
    "register() takes nothing": ("def register(): pass", "takes 0 positional arguments"),
    "register() takes more": ("def register(registry, more): pass", "missing 1 required positional"),
    "register() is odd": (
        "class Odd:\n    def __call__(self, registry): raise KeyboardInterrupt\nregister = Odd()",
        "KeyboardInterrupt",
    ),
    "register() raises GeneratorExit": ("def register(registry): raise GeneratorExit", "GeneratorExit"),
}


def expect(
    site: Site, caplog: pytest.LogCaptureFixture, source: str, said: str, state: str = "failed"
) -> None:
    """The plugin is left out with one line, and the other one is used."""
    site.wheel("acme", source)
    site.wheel("good")
    assert call_op(OP, 1) == "good"
    record = discover()["acme"]
    assert record.state in (state, "incompatible")
    assert said in record.reason
    assert len(record.reason) < 3000
    (line,) = lines(caplog)
    assert line == f"plugin 'acme' of acme 1.0 is not used: {record.reason}"


@pytest.mark.parametrize("base", ["Exception", "BaseException", "ImportError"])
@pytest.mark.parametrize(("body", "said"), EXCEPTIONS.values(), ids=EXCEPTIONS)
def test_an_exception_is_odd(
    site: Site, caplog: pytest.LogCaptureFixture, base: str, body: str, said: str
) -> None:
    expect(site, caplog, ODD.format(base=base, body=body) + "raise Odd", said)


@pytest.mark.parametrize(("source", "said"), RAISED.values(), ids=RAISED)
@pytest.mark.parametrize("where", ["import", "register"])
def test_it_raises(site: Site, caplog: pytest.LogCaptureFixture, source: str, said: str, where: str) -> None:
    if where == "register":
        body = source.replace("\n", "\n    ")
        source = f"def register(registry):\n    {body}\n"
    if "'\\0'" in source:
        source = source.replace("\\0", "\0")
    expect(site, caplog, source, said)


@pytest.mark.parametrize(("source", "said"), MODULES.values(), ids=MODULES)
def test_a_module_is_odd(site: Site, caplog: pytest.LogCaptureFixture, source: str, said: str) -> None:
    expect(site, caplog, source, said)


@pytest.mark.parametrize("target", ["nothing", "number", "inner.raises", "Mock"])
def test_an_entry_point_names_something_odd(site: Site, target: str) -> None:
    source = "class inner:\n    pass\nclass M(type):\n    raises = property(lambda c: 1 / 0)\n"
    source += "class inner(metaclass=M): pass\nnumber = 5\nMock = 'text'\n"
    site.wheel("acme", source, entries=f"[vllm_fl.plugin]\nacme = acme_ops:{target}\n")
    site.wheel("good")
    assert call_op(OP, 1) == "good"
    assert discover()["acme"].state == "failed"


def test_what_is_registered_too_late_is_told_to_who_does_it(site: Site) -> None:
    """A thread that a plugin leaves running must not believe that it registers something."""
    site.wheel(
        "acme",
        """
        def register(registry):
            global stage
            stage = registry
            registry.register_impl(impl("acme"))
        """,
    )
    assert call_op(OP, 1) == "acme"
    stage = sys.modules["acme_ops"].stage
    late = sys.modules["acme_ops"].impl("acme.late")
    with pytest.raises(Exception, match=r"register\(\) has returned"):
        stage.register_impl(late)
    assert get_default_manager().registry.snapshot().impl_ids() == {"vendor.acme"}


@pytest.mark.parametrize("where", ["import", "register"])
def test_ctrl_c_ends_the_program_while_a_plugin_is_loaded(tmp_path: Path, where: str) -> None:
    wait = "print('here', flush=True)\nimport time\nwhile True: time.sleep(0.01)\n"
    body = wait.replace("\n", "\n    ")
    source = wait if where == "import" else f"def register(registry):\n    {body}"
    Site(tmp_path).wheel("acme", source)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    code += "from vllm_fl.dispatch import call_op\ncall_op('silu_and_mul', 1)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"here\n"
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=600)
    assert process.returncode == -signal.SIGINT
    assert b"KeyboardInterrupt" in said


def test_a_servers_own_handler_ends_it_while_a_plugin_is_loaded(tmp_path: Path) -> None:
    """vLLM's processes end by a handler of SIGTERM that raises SystemExit."""
    Site(tmp_path).wheel("acme", "print('here', flush=True)\nimport time\nwhile True: time.sleep(0.01)\n")
    code = f"""
import signal, sys
sys.path.insert(0, {str(tmp_path)!r})
def end(number, frame): raise SystemExit(7)
signal.signal(signal.SIGTERM, end)
from vllm_fl.dispatch import call_op
call_op('silu_and_mul', 1)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"here\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(300) == 7


# -- the command, with all of them installed ------------------------------------------------------


def every_source() -> dict[str, str]:
    """Return the sources of all of the above, by the name of a wheel."""
    found = [ODD.format(base="BaseException", body=body) + "raise Odd" for body, _ in EXCEPTIONS.values()]
    found += [source for source, _ in RAISED.values() if "\\0" not in source]
    found += [source for source, _ in MODULES.values()]
    return {f"acme{number}": source for number, source in enumerate(found)}


def test_the_command_lists_all_of_them(tmp_path: Path, python: Callable[..., Any]) -> None:
    site, sources = Site(tmp_path), every_source()
    for name, source in sources.items():
        site.wheel(name, source)
    site.wheel("good")
    for arguments in (["list", "--json"], ["list", "--probe"], ["explain", OP], ["env"], ["policy", "show"]):
        done = python(
            f"from vllm_fl.cli import main; raise SystemExit(main({arguments}))",
            tmp_path,
            VLLM_FL_PLUGINS=",".join([*sources, "good"]),
        )
        assert done.returncode == 0, (arguments, done.stderr[-3000:])
        assert "fault of vllm-fl" not in done.stderr
        if "--json" in arguments:
            states = {plugin["name"]: plugin["state"] for plugin in json.loads(done.stdout)["plugins"]}
            assert states["good"] == "loaded"
            assert {states[name] for name in sources} == {"failed", "incompatible"}


@pytest.mark.parametrize(
    "source",
    [
        "raise KeyboardInterrupt",
        "def __getattr__(name): raise RuntimeError(name)",
        ODD.format(base="BaseException", body="def __str__(self): 1 / 0") + "raise Odd",
        "import sys; sys.stdout = sys.stderr = None\nraise RuntimeError",
    ],
)
def test_the_doctor_names_it(tmp_path: Path, python: Callable[..., Any], source: str) -> None:
    site = Site(tmp_path)
    site.wheel("acme", source)
    site.wheel("good")
    code = "from vllm_fl.cli import main; raise SystemExit(main(['doctor', '--check', 'plugins', '--json']))"
    done = python(code, tmp_path, VLLM_FL_PLUGINS="acme,good")
    assert done.returncode == 1, done.stderr
    findings = json.loads(done.stdout)["checks"][0]["findings"]
    of_acme = [one for one in findings if one["what"].startswith("plugin 'acme' of acme 1.0")]
    assert [one["status"] for one in of_acme] == ["fail"]
    assert {"status": "pass", "what": "plugin 'good' of good 1.0 loads", "why": "", "mend": ""} in findings


def test_three_hundred_plugins(site: Site) -> None:
    """That their time grows with their number alone is counted in test_speed.py."""
    for number in range(300):
        site.wheel(f"acme{number}", f"def register(registry): registry.register_impl(impl('acme{number}'))")
    assert all(record.success for record in discover().values())
    assert len(get_default_manager().registry.snapshot().impls_by_op[OP]) == 300

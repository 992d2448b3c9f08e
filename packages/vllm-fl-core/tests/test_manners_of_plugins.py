"""Every manner in which plug-ins have written an implementation runs as it did."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING
from typing import Any

import pytest

from vllm_fl.dispatch import Backend
from vllm_fl.dispatch import BackendImplKind
from vllm_fl.dispatch import OpImpl
from vllm_fl.dispatch import OpManager
from vllm_fl.dispatch import OpRegistry
from vllm_fl.dispatch import implementation

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A library of kernels; nothing has imported it."""
    name = f"kernels_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(
        "def silu_and_mul(x):\n    return ['silu', x]\ndef supports(x):\n    return x >= 0 or 'negative'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return name


class Old(Backend):
    """What the manners have in common."""

    def __init__(self, library: str) -> None:
        self.library = library

    @property
    def name(self) -> str:
        return "old"

    def is_available(self) -> bool:
        return True


class CachedModule(Old):
    @cached_property
    def _activation(self) -> Any:
        return import_module(self.library)

    @implementation(supports=lambda x: x >= 0 or "negative", writes=())
    def silu_and_mul(self, x: Any) -> Any:
        return self._activation.silu_and_mul(x)


class SetByAvailability(Old):
    def is_available(self) -> bool:
        self._kernels = import_module(self.library)
        return True

    @implementation(supports=lambda x: x >= 0 or "negative")
    def silu_and_mul(self, x: Any) -> Any:
        return self._kernels.silu_and_mul(x)


class Undecorated(Old):
    def silu_and_mul(self, x: Any) -> Any:
        from vllm_fl.dispatch import RefusedBeforeWriting

        if x < 0:
            raise RefusedBeforeWriting("negative")
        return import_module(self.library).silu_and_mul(x)


class Later:
    """A function that is imported by its first call; it tells no signature of its own."""

    def __init__(self, library: str, name: str) -> None:
        self.library, self.name = library, name
        self.function: Callable[..., Any] = self._first

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def _first(self, *args: Any, **kwargs: Any) -> Any:
        self.function = getattr(import_module(self.library), self.name)
        return self.function(*args, **kwargs)


def later(library: str) -> list[OpImpl]:
    fn = Later(library, "silu_and_mul")

    class Lazy(Old):
        @implementation(supports=Later(library, "supports"))
        def silu_and_mul(self, x: Any) -> Any:
            return fn(x)

    return Lazy(library).implementations()


def by_hand(fn: Callable[..., Any] | str, supports: Callable[..., Any] | None = None) -> list[OpImpl]:
    supports = supports or (lambda x: x >= 0 or "negative")
    kind = BackendImplKind.VENDOR
    return [OpImpl("silu_and_mul", "vendor.old", kind, fn, vendor="old", supports=supports)]


def named(library: str) -> list[OpImpl]:
    return by_hand(f"{library}:silu_and_mul")


def hooked(library: str) -> list[OpImpl]:
    def silu_and_mul(x: Any) -> Any:
        return import_module(library).silu_and_mul(x)

    silu_and_mul._is_available = lambda: True  # type: ignore[attr-defined]
    return by_hand(silu_and_mul)


def partial(library: str) -> list[OpImpl]:
    def silu_and_mul(library: str, x: Any) -> Any:
        return import_module(library).silu_and_mul(x)

    return by_hand(functools.partial(silu_and_mul, library))


def wrapped(library: str) -> list[OpImpl]:
    method = CachedModule(library).silu_and_mul

    @functools.wraps(method)
    def around(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return by_hand(around)


def one_line(library: str) -> list[OpImpl]:
    line = implementation(f"{library}:silu_and_mul", supports=f"{library}:supports")
    return type("OneLine", (Old,), {"silu_and_mul": line})(library).implementations()


MANNERS: list[Callable[[str], list[OpImpl]]] = [
    lambda library: CachedModule(library).implementations(),
    lambda library: SetByAvailability(library).implementations(),
    lambda library: Undecorated(library).implementations(),
    later,
    named,
    hooked,
    partial,
    wrapped,
    one_line,
]
NAMES = ["cached module", "set by availability", "undecorated", *(manner.__name__ for manner in MANNERS[3:])]


@pytest.mark.parametrize("manner", MANNERS, ids=NAMES)
def test_a_plugin_of_any_manner_runs(manner: Callable[[str], list[OpImpl]], kernels: str) -> None:
    registry = OpRegistry()
    registry.register_many(manner(kernels))
    assert kernels not in sys.modules
    manager = OpManager(registry)
    for call in (functools.partial(manager.call, "silu_and_mul"), manager.resolve("silu_and_mul")):
        assert call(3) == ["silu", 3]
        with pytest.raises(NotImplementedError, match="negative"):
            call(-1)
    assert manager.explain("silu_and_mul").impl_id == "vendor.old"


def test_an_operator_more_is_a_function_and_a_line(tmp_path: Path) -> None:
    """In the package that the sample becomes: nothing else is touched, and the kit judges it."""
    pytest.importorskip("torch")
    pytest.importorskip("vllm_fl_template")
    made = [sys.executable, "-m", "vllm_fl", "new-vendor", "acme", str(tmp_path / "acme")]
    subprocess.run(made, check=True, capture_output=True)
    package = tmp_path / "acme" / "src" / "vllm_fl_acme"
    function, line = package / "impl" / "moe.py", package / "acme.py"
    with function.open("a") as file:
        file.write("\n\ndef moe_sum(inp: Tensor, out: Tensor) -> Tensor:\n")
        file.write("    return out.copy_(inp.float().sum(1))\n")
    with line.open("a") as file:
        file.write('    moe_sum = implementation("vllm_fl_acme.impl.moe:moe_sum", traceable=True)\n')
    paths = os.pathsep.join(filter(None, [str(package.parent), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"VLLM_FL_PLUGIN_MODULES": "vllm_fl_acme.register_ops", "PYTHONPATH": paths}
    judge = ["conformance", "--backend", "acme", "--op", "moe_sum", "--tier", "smoke"]
    done = subprocess.run(
        [sys.executable, "-m", "vllm_fl", *judge], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "vendor.acme" in done.stdout

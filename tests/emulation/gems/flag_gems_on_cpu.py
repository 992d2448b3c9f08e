"""Run FlagGems' real kernels on CPU tensors, in Triton's interpreter.

FlagGems 5.0.2 does not import on a machine without an accelerator, and Triton's
interpreter is not what it expects. :func:`install` prepares the process, and the
next ``import flag_gems`` works: its own Triton kernels, line by line in numpy. It
is slow (a million elements take minutes), and it says nothing about a real
device's speed, memory or races. Triton 3.6 truncates float32 to bfloat16, so
float32 and float16 are what exact tests use.

TRITON_INTERPRET=1 must be set before triton is first imported; ``install`` sets it.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import importlib.abc
import importlib.machinery
import inspect
import os
import sys
import textwrap
import types
from typing import TYPE_CHECKING
from typing import Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Iterator
    from collections.abc import Sequence

_VENDORS = (
    "NVIDIA CAMBRICON METAX ILUVATAR MTHREADS KUNLUNXIN HYGON AMD AIPU ASCEND TSINGMICRO SUNRISE ENFLAME ARM"
)


def install() -> None:
    """Prepare this process for ``import flag_gems``; the second time does nothing."""
    if any(isinstance(finder, _FlagGemsFinder) for finder in sys.meta_path):
        return
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["GEMS_VENDOR"] = "arm"  # the shipped backend whose device is the CPU
    from triton.runtime.interpreter import InterpretedFunction

    import_error = "triton was imported without TRITON_INTERPRET=1"
    assert _is_interpreted(InterpretedFunction), import_error
    _name_the_vendor()
    _complete_torch_cpu()
    _replace_tuning()
    _give_the_face_of_jit_functions(InterpretedFunction)
    _provide_libdevice()
    _widen_bfloat16_products()
    sys.meta_path.insert(0, _FlagGemsFinder())


def _is_interpreted(interpreted: type) -> bool:
    import triton

    return isinstance(triton.jit(lambda: None), interpreted)


def _name_the_vendor() -> None:
    """FlagGems ships a backend for the CPU, but its list of vendors lacks it."""
    vendors: Any = enum.Enum("vendors", {name: i for i, name in enumerate(_VENDORS.split())})
    vendors.get_all_vendors = classmethod(lambda cls: {member.name.lower(): member for member in cls})
    common: Any = types.ModuleType("flag_gems.runtime.common")
    common.vendors = vendors
    sys.modules[common.__name__] = common


def _complete_torch_cpu() -> None:
    """torch.cpu lacks what FlagGems asks of torch.cuda."""
    import torch

    properties = types.SimpleNamespace(
        name="cpu",
        major=8,
        minor=0,
        multi_processor_count=4,
        max_threads_per_multi_processor=2048,
        warp_size=32,
        total_memory=1 << 34,
        L2_cache_size=1 << 20,
        shared_memory_per_block_optin=166912,
        shared_memory_per_multiprocessor=167936,
    )
    cpu: Any = torch.cpu
    cpu.device = lambda device=None: contextlib.nullcontext()
    cpu.current_device = lambda: 0
    cpu.get_device_name = lambda *_: "cpu"
    cpu.get_device_capability = lambda *_: (8, 0)
    cpu.get_device_properties = lambda *_: properties


class _FirstConfig:
    """Stands for an autotuner: runs the first configuration and measures nothing."""

    def __init__(self, fn: Any, configs: Sequence[Any]) -> None:
        self.fn = fn
        self.configs = list(configs)
        self.arg_names = fn.arg_names
        self.best_config = self.configs[0]
        self.__name__ = getattr(fn, "__name__", "kernel")

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: self.run(*args, grid=grid, **kwargs)

    def run(self, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
        config = self.best_config
        if config.pre_hook is not None:
            named = dict(zip(self.arg_names, args, strict=False))
            config.pre_hook({**named, **kwargs, **config.all_kwargs()})
        return self.fn.run(*args, grid=grid, warmup=warmup, **{**config.kwargs, **kwargs})


class _Entry:
    """Stands for FlagGems' LibEntry: a launch returns (kernel, constexprs)."""

    def __init__(self, fn: Any) -> None:
        self.fn = fn
        self.arg_names = fn.arg_names
        self.__name__ = getattr(fn, "__name__", "kernel")

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: self.run(*args, grid=grid, **kwargs)

    def run(self, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
        plain = [_tensor_of(arg) for arg in args]
        named = {name: _tensor_of(arg) for name, arg in kwargs.items()}
        return self.fn.run(*plain, grid=grid, warmup=warmup, **named), {}


def _tensor_of(arg: Any) -> Any:
    """The interpreter takes tensors; a StridedBuffer is one, with other strides."""
    if type(arg).__name__ != "StridedBuffer":
        return arg
    base = arg._base
    offset = getattr(arg, "offset", 0) or 0
    return base.as_strided(base.size(), base.stride(), base.storage_offset() + offset) if offset else base


def _replace_tuning() -> None:
    """The originals want a compiled kernel, and a driver to measure it."""
    import triton

    def autotune(configs: Sequence[Any], key: Any = None, *_: Any, **__: Any) -> Callable[[Any], Any]:
        return lambda fn: _FirstConfig(fn, configs) if configs else fn

    class LibTuner:
        @staticmethod
        def register(name: str) -> Callable[[Any], Any]:
            return lambda decorated: decorated

        register_policy = register
        register_strategy = register

    triton.autotune = autotune
    module: Any = types.ModuleType("flag_gems.utils.libentry")
    module.libentry = lambda: _Entry
    module.libtuner = autotune
    module.LibEntry = _Entry
    module.LibTuner = LibTuner
    module.libcache = {}
    sys.modules[module.__name__] = module


def _give_the_face_of_jit_functions(interpreted: Any) -> None:
    """FlagGems generates code from a kernel's source, which the interpreter does not keep."""

    def source(self: Any) -> str:
        text = textwrap.dedent(inspect.getsource(self.fn))
        return text[text.index("def ") :]

    def cache_key(self: Any) -> str:
        return hashlib.sha256((self.src + self.fn.__module__).encode()).hexdigest()

    interpreted.src = property(source)
    interpreted.cache_key = property(cache_key)
    interpreted.__globals__ = property(lambda self: self.fn.__globals__)
    interpreted.__module__ = property(lambda self: self.fn.__module__)


def _provide_libdevice() -> None:
    """Device libraries are machine code: the few functions that are used, in Triton itself."""
    import triton.language as tl

    def power(x: Any, y: Any) -> Any:
        x = x.to(tl.float32)
        exponent = getattr(y, "value", y)
        if isinstance(exponent, int | float) and float(exponent).is_integer() and 0 < exponent <= 8:
            result = x
            for _ in range(int(exponent) - 1):
                result = result * x
            return result
        return tl.exp2(y * tl.log2(tl.abs(x)))

    class LibDevice(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)

            def missing(*_: Any, **__: Any) -> Any:
                raise NotImplementedError(f"libdevice.{name} has no stand-in")

            missing.__name__ = name
            return missing

    libdevice: Any = LibDevice("triton.language.extra.cpu.libdevice")
    libdevice.tanh = lambda x: 1.0 - 2.0 / (tl.exp(2.0 * x.to(tl.float32)) + 1.0)
    libdevice.erf = lambda x: tl.math.erf(x.to(tl.float32))
    libdevice.exp = libdevice.fast_expf = lambda x: tl.exp(x)
    libdevice.log = lambda x: tl.log(x)
    libdevice.pow = power
    libdevice.rsqrt = lambda x: tl.math.rsqrt(x)
    libdevice.div_rn = libdevice.div_rz = lambda x, y: x / y
    libdevice.trunc = lambda x: tl.where(x >= 0, tl.math.floor(x), tl.math.ceil(x))
    libdevice.isnan = lambda x: x != x
    libdevice.isinf = lambda x: tl.abs(x) == float("inf")
    libdevice.isfinited = libdevice.finitef = lambda x: tl.abs(x) < float("inf")
    extra: Any = types.ModuleType("triton.language.extra.cpu")
    extra.libdevice = libdevice
    sys.modules[extra.__name__] = extra
    sys.modules[libdevice.__name__] = libdevice


def _widen_bfloat16_products() -> None:
    """The interpreter keeps bfloat16 as integers, and tl.dot multiplies those."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    create_dot = interpreter.InterpreterBuilder.create_dot

    def widen(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        data = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(data, tl.float32)

    def create_wide_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return create_dot(self, widen(a), widen(b), *rest)

    interpreter.InterpreterBuilder.create_dot = create_wide_dot


@contextlib.contextmanager
def _interpreted_functions_pass_for_jit_functions() -> Iterator[None]:
    """FlagGems checks the type of its kernels while it is imported."""
    import triton.runtime.jit
    from triton.runtime.interpreter import InterpretedFunction

    places: tuple[Any, ...] = (triton, triton.runtime, triton.runtime.jit)
    original = triton.runtime.jit.JITFunction
    for place in places:
        place.JITFunction = InterpretedFunction
    try:
        yield
    finally:
        for place in places:
            place.JITFunction = original


class _FlagGemsFinder(importlib.abc.MetaPathFinder):
    """Finds flag_gems where it is, and lets it run with what its import needs."""

    def find_spec(
        self, fullname: str, path: Any, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "flag_gems":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _FlagGemsLoader(spec.loader)
        return spec


class _FlagGemsLoader(importlib.abc.Loader):
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        return self._inner.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        with _interpreted_functions_pass_for_jit_functions():
            self._inner.exec_module(module)

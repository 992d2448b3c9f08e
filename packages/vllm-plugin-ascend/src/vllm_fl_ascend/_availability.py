"""Whether this process can use an Ascend device, and if not, why and what to do."""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import os

#: For tests only: the kernels are simulated on CPU tensors, and there is no device.
EMULATED_ENV = "VLLM_FL_ASCEND_EMULATED"

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("", "0", "false", "no", "off")

#: The first libraries of CANN that torch_npu needs.
_CANN_LIBRARIES = ("libhccl.so", "libascendcl.so")


@functools.cache
def emulated() -> bool:
    """Whether VLLM_FL_ASCEND_EMULATED says that the kernels are simulated; read once.

    Raises:
        ValueError: it is neither a yes nor a no.
    """
    value = os.environ.get(EMULATED_ENV, "").strip().lower()
    if value not in _TRUE + _FALSE:
        raise ValueError(f"{EMULATED_ENV} must be 1 or 0, not {value!r}")
    return value in _TRUE


@functools.cache
def device_type() -> str:
    """The ``device.type`` of the tensors that the kernels take."""
    return "cpu" if emulated() else "npu"


def require_device() -> None:
    """Import torch_npu and find a device.

    Raises:
        ModuleNotFoundError: torch_npu is not installed.
        ImportError: it is installed and cannot be imported; CANN is missing or
            does not fit.
        RuntimeError: there is no device.
        ValueError: see :func:`emulated`.
    """
    simulated = emulated()
    if importlib.util.find_spec("torch_npu") is None:
        raise ModuleNotFoundError(
            "No module named 'torch_npu'; install the version that belongs to your torch: "
            "pip install 'torch-npu==<the version of torch>'",
            name="torch_npu",
        )
    # Before torch is touched: where CANN is missing, importing torch_npu leaves half of
    # itself behind, and a torch that loads it by itself cannot be imported a second time.
    for library in _CANN_LIBRARIES:
        try:
            ctypes.CDLL(library)
        except OSError as error:
            raise ImportError(
                f"{error}; torch_npu needs CANN, and its libraries are not on LD_LIBRARY_PATH: run "
                "'source <where CANN is>/set_env.sh' in the shell that starts this process. Where there "
                "is no CANN, TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch itself importable"
            ) from error
    try:
        torch = importlib.import_module("torch")
        importlib.import_module("torch_npu")
    except Exception as error:
        raise ImportError(
            f"torch_npu cannot be imported: {type(error).__name__}: {error}; its version must be that of "
            "torch, and CANN's must be one that this torch_npu was made for"
        ) from error
    if simulated:
        if not torch._C._dispatch_has_kernel_for_dispatch_key("npu::npu_swiglu", "CPU"):
            raise RuntimeError(f"{EMULATED_ENV} is set and no kernel is simulated on the CPU")
    elif not torch.npu.is_available() or not torch.npu.device_count():
        raise RuntimeError(
            "torch_npu finds no Ascend device (torch.npu.is_available() is "
            f"{torch.npu.is_available()}, device_count() {torch.npu.device_count()}): see 'npu-smi info', "
            "ASCEND_RT_VISIBLE_DEVICES, and whether this process may open /dev/davinci*"
        )


def missing_kernel(names: tuple[str, ...]) -> str | None:
    """Say which of torch_npu's operators is not there; None if all are.

    Args:
        names: ``namespace.operator``, such as ``npu.npu_swiglu``.
    """
    torch = importlib.import_module("torch")
    for name in names:
        namespace, _, operator = name.partition(".")
        if not hasattr(getattr(torch.ops, namespace), operator):
            remedy = (
                "CANN's NNAL package brings it: install it and run 'source <where it is>/nnal/atb/set_env.sh'"
                if namespace == "atb"
                else "it is too old"
            )
            return f"this torch_npu has no {namespace}::{operator}: {remedy}"
    return None

"""A lost device, no memory, a signal: nothing else is tried, and nothing is set aside."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any

import pytest

from vllm_fl.dispatch import BackendImplKind
from vllm_fl.dispatch import OpImpl
from vllm_fl.dispatch import OpManager
from vllm_fl.dispatch import OpRegistry
from vllm_fl.dispatch import RefusedBeforeWriting
from vllm_fl.dispatch.calling import fatal
from vllm_fl.dispatch.calling.fatal import is_fatal

if TYPE_CHECKING:
    from collections.abc import Callable

TABLE = json.loads(Path(fatal.__file__).with_name("fatal_errors.json").read_text("utf-8"))

#: As the libraries and torch's builds for their devices print them.
DEAD = [
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB",
    "MUSA out of memory. Tried to allocate 2.00 GiB",
    "[enforce fail at alloc_cpu.cpp:114] err == 0. DefaultCPUAllocator: can't allocate memory: you tried",
    "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be reported later",
    "CUDA error: the launch timed out and was terminated",
    "CUDA error: uncorrectable ECC error encountered",
    "CUDA error: uncorrectable NVLink error detected during the execution",
    "CUDA error: context is destroyed",
    "CUDA error: unspecified launch failure",
    "CUDA error: unspecified launch failure in prior launch",
    "CUDA error: hardware stack error",
    "CUDA error: CUDA-capable device(s) is/are busy or unavailable",
    "CUDA error: unknown error",
    "CUDA driver error: device-side assert triggered",
    "CUDA driver error: CUDA_ERROR_LAUNCH_FAILED",
    "CUDA error 719 at kernel.cu:20",
    "CUDA error: 700",
    "Cuda failure 702 'the launch timed out'",
    "Triton Error [CUDA]: an illegal memory access was encountered",
    "cudaErrorIllegalAddress: an illegal memory access",
    "HIP error: unspecified launch failure",
    "HIP error: the launch timed out and was terminated",
    "hipErrorLaunchFailure",
    "MUSA error: unspecified launch failure",
    "MUSA error: launch failed",
    "MUSA error: page fault",
    "MUSA error: the launch timed out and was terminated",
    "musaErrorLaunchTimeout",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, ...)`",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "MUSA error: MUBLAS_STATUS_EXECUTION_FAILED when calling `mublasSgemm`",
    "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
    "rocblas_status_internal_error",
    "NCCL error in: ProcessGroupNCCL.cpp:1970, unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    "NCCL communicator was aborted on rank 2.",
    "Watchdog caught collective operation timeout: WorkNCCL(OpType=ALLREDUCE, Timeout(ms)=600000)",
    "HCCL function error: hcclCommInitRootInfoConfig(numRanks, &rootInfo), error code is 15",
    "ERR02200 DIST call hccl api failed.",
    "NPU function error: c10_npu::acl::AclrtSynchronizeStreamWithTimeout, error code is 507035",
    "ACL stream synchronize failed, error code:507011",
    "call aclnnAddRmsNorm failed, detail: EZ9999 runtime result = 507015",
    "copy_d2d: NPU function error: error code is 507899",
    "[Error]: The vector core execution is abnormal.",
    "[Error]: Vector core execution timed out.",
    "The aicore execution is abnormal",
    "getDevice: current context null, error code is 107002",
    "ACL_ERROR_RT_HBM_MULTI_BIT_ECC_ERROR",
    "CNRT error: MLU error.",
    "cnrtErrorKernelTrap",
    "level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)",
    "Native API failed. Native API returns: ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY",
    "the device is lost",
    "GPU has fallen off the bus",
]

#: A kernel or its arguments are wrong, or it does not run on this chip: the next one may run.
ALIVE = [
    "CUDA error: no kernel image is available for execution on the device",
    "CUDA error: invalid argument",
    "CUDA error: invalid configuration argument",
    "CUDA error: invalid device function",
    "CUDA error: too many resources requested for launch",
    "CUDA error: operation not supported",
    "CUDA error: a PTX JIT compilation failed",
    "CUDA error 209 at kernel.cu:20",
    "CUDA error: 1",
    "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx`",
    "CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasGemmEx`",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED",
    "out of resource: shared memory, Required: 200000, Hardware limit: 101376",
    "kernel launch failed at call 100",
    "PassManager::run failed",
    "CNRT error: invalid argument.",
    "NPU error, error code is 107000",
    "aclnnAddRmsNorm is not implemented, error code is 207000",
    "the kernel timed out while it was tuned",
    "expected 507035120 elements, got 1",
    "weights of shape [200000, 5] do not fit",
    "device memory is contiguous only",
    "UR_RESULT_ERROR_INVALID_VALUE",
    "the context of this attention is too long",
    "shapes cannot be broadcast",
    "",
]


class AcceleratorError(RuntimeError):
    """Named as torch's."""


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


class LibraryError(Exception):
    """A library's own."""


@pytest.mark.parametrize("kind", [RuntimeError, LibraryError, OSError, SystemError])
@pytest.mark.parametrize("text", DEAD)
def test_a_lost_device(text: str, kind: type[Exception]) -> None:
    assert is_fatal(kind(text))


@pytest.mark.parametrize("kind", [RuntimeError, LibraryError])
@pytest.mark.parametrize("text", ALIVE)
def test_a_device_that_is_well(text: str, kind: type[Exception]) -> None:
    assert not is_fatal(kind(text))


@pytest.mark.parametrize("kind", [ValueError, TypeError, NotImplementedError, RefusedBeforeWriting, KeyError])
@pytest.mark.parametrize("text", DEAD)
def test_words_of_another_kind_of_exception(text: str, kind: type[Exception]) -> None:
    assert not is_fatal(kind(text))


@pytest.mark.parametrize(
    "text", [text for text in ALIVE if text.startswith("CUDA error: ") and "CUBLAS" not in text]
)
def test_torch_has_one_type_for_every_error_of_a_device(text: str) -> None:
    """A chip for which a wheel has no kernels is not dead."""
    assert is_fatal(AcceleratorError("CUDA error: something new"))
    assert is_fatal(AcceleratorError("CUDA error: operation not supported on global/shared address space"))
    assert not is_fatal(
        AcceleratorError(f"{text}\nCUDA kernel errors might be reported at some other API call")
    ) or (text.endswith(": 1"))


@pytest.mark.parametrize("library", TABLE["libraries"], ids=lambda library: library["library"])
def test_every_library_has_a_source_and_every_pattern_a_text(library: dict[str, Any]) -> None:
    assert len(library["source"]) > 40
    for pattern in library["patterns"]:
        assert re.compile(pattern, re.IGNORECASE)
    assert any(re.search(pattern, text, re.IGNORECASE) for pattern in library["patterns"] for text in DEAD)


# -- wherever it is ----------------------------------------------------------------------------


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def caused(error: BaseException) -> Exception:
    try:
        try:
            raise error
        except BaseException as inner:
            raise ValueError("around it") from inner
    except ValueError as outer:
        return outer


def while_handling(error: BaseException) -> Exception:
    try:
        try:
            raise error
        except BaseException:
            raise ValueError("around it")  # noqa: B904 - that is what is tested
    except ValueError as outer:
        return outer


def in_a_group(error: Any) -> Exception:
    return ExceptionGroup("several", [ValueError("one"), ExceptionGroup("inner", [KeyError(1), error])])


def deeper(error: Exception) -> Exception:
    return caused(while_handling(in_a_group(caused(error))))


WRAPPERS: list[Callable[[Any], Exception]] = [caused, while_handling, in_a_group, deeper]


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("error", [OutOfMemoryError(), MemoryError(), RuntimeError(DEAD[4])], ids=repr)
def test_inside_of_another_one(wrap: Callable[[Any], Exception], error: Exception) -> None:
    assert is_fatal(wrap(error))
    assert not is_fatal(wrap(RuntimeError("no kernel")))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_a_signal_that_was_turned_into_an_exception(error: BaseException) -> None:
    assert is_fatal(caused(error))
    assert is_fatal(while_handling(error))


def test_what_was_handled_and_put_away() -> None:
    def fails() -> None:
        try:
            raise OutOfMemoryError
        except OutOfMemoryError:
            raise ValueError("in its place") from None

    with pytest.raises(ValueError, match="in its place") as caught:
        fails()
    assert not is_fatal(caught.value)


def test_what_the_caller_was_handling_already() -> None:
    """Python makes it the context of every exception inside the call."""
    outcome = []

    def fails(x: Any) -> Any:
        raise ValueError("of a")

    op = two(fails).resolve("silu_and_mul")
    try:
        raise OutOfMemoryError
    except OutOfMemoryError:
        outcome.append(op(1))
    assert outcome == ["b"]


def test_a_circle() -> None:
    one, other = ValueError(1), ValueError(2)
    one.__cause__, other.__cause__ = other, one
    assert not is_fatal(one)
    other.__context__ = OutOfMemoryError()
    other.__suppress_context__ = False
    assert is_fatal(one)


class MuteError(RuntimeError):
    def __str__(self) -> str:
        raise ZeroDivisionError


def test_an_exception_without_a_text() -> None:
    assert not is_fatal(MuteError())
    assert is_fatal(caused(OutOfMemoryError()))


def test_a_text_of_many_megabytes() -> None:
    assert is_fatal(RuntimeError("CUDA out of memory. " + "x" * 10_000_000))


# -- in the dispatch ---------------------------------------------------------------------------


def two(fails: Callable[..., Any], **more: Any) -> OpManager:
    registry = OpRegistry()
    registry.register_many(
        OpImpl("silu_and_mul", f"vendor.{v}", BackendImplKind.VENDOR, fn, v, p, **kw)
        for v, fn, p, kw in (("a", fails, 2, more), ("b", lambda x: "b", 1, {}))
    )
    return OpManager(registry)


@pytest.mark.parametrize("wrap", [raised, *WRAPPERS])
@pytest.mark.parametrize("text", [DEAD[0], DEAD[4], "NPU function error: error code is 507035"])
def test_nothing_else_is_tried(text: str, wrap: Callable[[Any], Exception]) -> None:
    error = wrap(RuntimeError(text))

    def fails(x: Any) -> Any:
        raise error

    manager = two(fails)
    for _ in range(2):
        with pytest.raises(type(error)) as caught:
            manager.call("silu_and_mul", 1)
        assert caught.value is error
    assert manager.get_failed_impls() == {}


def test_nor_after_a_refusal_that_hides_it() -> None:
    def fails(x: Any) -> Any:
        try:
            raise OutOfMemoryError
        except OutOfMemoryError as error:
            raise NotImplementedError("not for these inputs") from error

    with pytest.raises(NotImplementedError):
        two(fails).call("silu_and_mul", 1)


def test_nor_after_a_predicate_that_met_it() -> None:
    def supports(x: Any) -> bool:
        raise RuntimeError(DEAD[4])

    with pytest.raises(RuntimeError):
        two(lambda x: "a", supports=supports).call("silu_and_mul", 1)


def test_the_kernels_of_another_chip_are_passed_over() -> None:
    def fails(x: Any) -> Any:
        raise AcceleratorError("CUDA error: no kernel image is available for execution on the device")

    manager = two(fails)
    assert manager.call("silu_and_mul", 1) == "b"
    assert manager.get_failed_impls() == {"silu_and_mul": {"vendor.a"}}

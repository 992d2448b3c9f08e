"""vLLM's compiled kernels: whether one is here, and how it is called.

A kernel is an operator of ``torch.ops._C`` or ``_moe_C`` that fills tensors it is
given. Between vLLM's versions schemas grow arguments (``topk_softmax`` has five to
seven), so that a kernel is called as the loaded schema says, found out once.

That an operator exists proves nothing: a CPU build of vLLM carries placeholders
with empty schemas, and other libraries define schemas without kernels. What is
asked is whether there is a kernel for the device's dispatch key.

Imports no torch and no vLLM until a kernel is asked for.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.dispatch import RefusedBeforeWriting

if TYPE_CHECKING:
    from collections.abc import Callable

#: The dispatch key of a type of device.
DISPATCH_KEYS = {"cuda": "CUDA", "cpu": "CPU"}


@functools.cache
def load() -> None:
    """Import vLLM's compiled operators, once.

    vLLM's platform knows which library that is: there are three for CPUs, and two of
    them in one process end it.

    Raises:
        ImportError: vLLM is not installed.
    """
    from vllm.platforms import current_platform

    current_platform.import_kernels()


class KernelMismatch(RuntimeError):  # noqa: N818 - the name says what is wrong
    """The loaded schema is one that this wheel does not know."""


class Kernel:
    """One compiled operator of vLLM, looked for when it is first needed.

    Attributes:
        namespace: ``_C`` or ``_moe_C``.
        name: its name in it.
        arguments: what it is called with, in order: ``Tensor!`` where it writes,
            ``Tensor?`` where None is passed too, ``int``, ``float``, ``bool``.
        call: calls it with exactly these arguments. What the loaded schema has
            beyond them gets its default, or None.
    """

    def __init__(self, namespace: str, name: str, arguments: str) -> None:
        self.namespace = namespace
        self.name = name
        self.arguments = tuple(arguments.split())
        self.call: Callable[..., Any] = self._first_call
        self._devices: dict[str, bool] = {}

    def __repr__(self) -> str:
        return f"{self.namespace}.{self.name}"

    def runs_on(self, device_type: str) -> bool:
        """Whether there is a kernel for tensors of a type of device, such as ``cuda``."""
        answer = self._devices.get(device_type)
        if answer is None:
            key = DISPATCH_KEYS.get(device_type)
            answer = key is not None and self.missing(key) is None
            self._devices[device_type] = answer
        return answer

    def missing(self, key: str) -> str | None:
        """Say in a sentence why it cannot run on a dispatch key; None if it can.

        Raises:
            ImportError: vLLM is not installed.
        """
        import torch

        load()
        overload = self._overload()
        if overload is None:
            return f"{vllm_version()} has no {self}"
        if not overload._schema.arguments:
            return f"{self} is an empty placeholder in {vllm_version()}"
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"{self.namespace}::{self.name}", key):
            return f"{self} of {vllm_version()} has no kernel for {key}"
        try:
            self.call = self._bound(overload)
        except KernelMismatch as error:
            return str(error)
        return None

    def _first_call(self, *args: Any) -> Any:
        load()
        overload = self._overload()
        if overload is None:
            raise RefusedBeforeWriting(f"{vllm_version()} has no {self}")
        self.call = self._bound(overload)
        return self.call(*args)

    def _overload(self) -> Any:
        import torch

        packet = getattr(getattr(torch.ops, self.namespace), self.name, None)
        return getattr(packet, "default", None)

    def _bound(self, overload: Any) -> Any:
        schema = overload._schema.arguments
        lacks = self.arguments[len(schema) :]
        refuses_none = []
        problem = None
        for place, (wanted, has) in enumerate(zip(self.arguments, map(_type_of, schema), strict=False)):
            if wanted == f"{has}?":
                refuses_none.append(place)
            elif wanted != has and wanted != has.rstrip("?"):
                problem = problem or f"takes {schema[place].name} as {has} where {wanted} is passed"
        fillers: dict[str, None] = {}
        for extra in schema[len(self.arguments) :]:
            if extra.has_default_value():
                continue
            if not _type_of(extra).endswith("?"):
                problem = f"requires {extra.name}, of which this wheel knows nothing"
            fillers[extra.name] = None
        if any(not wanted.endswith("?") for wanted in lacks):
            problem = "takes fewer arguments than are passed"
        if problem is not None:
            raise KernelMismatch(f"{self} of {vllm_version()} {problem}: {overload._schema}")
        if not lacks and not refuses_none:
            return _with_fillers(overload, fillers) if fillers else overload
        kept = len(self.arguments) - len(lacks)

        def narrowed(*args: Any) -> Any:
            for place in refuses_none:
                if args[place] is None:
                    raise RefusedBeforeWriting(f"{self} of this vLLM takes no None as {schema[place].name}")
            if any(value is not None for value in args[kept:]):
                raise RefusedBeforeWriting(f"{self} of this vLLM takes {kept} arguments")
            return overload(*args[:kept], **fillers)

        return narrowed


def _with_fillers(overload: Any, fillers: dict[str, None]) -> Callable[..., Any]:
    def filled(*args: Any) -> Any:
        return overload(*args, **fillers)

    return filled


def _type_of(argument: Any) -> str:
    """Return the type of a schema's argument as :attr:`Kernel.arguments` has it."""
    text = str(argument.type)
    optional = text.startswith("Optional[")
    if optional:
        text = text.removeprefix("Optional[").removesuffix("]")
    written = argument.alias_info is not None and argument.alias_info.is_write
    return f"{text}{'!' if written else ''}{'?' if optional else ''}"


def vllm_version() -> str:
    """Name the vLLM that is installed, for a sentence."""
    try:
        from vllm import __version__
    except Exception:  # noqa: BLE001 - only a name in a sentence
        return "vLLM"
    return f"vLLM {__version__}"


SILU_AND_MUL = Kernel("_C", "silu_and_mul", "Tensor! Tensor")
GELU_AND_MUL = Kernel("_C", "gelu_and_mul", "Tensor! Tensor")
GELU_TANH_AND_MUL = Kernel("_C", "gelu_tanh_and_mul", "Tensor! Tensor")
RMS_NORM = Kernel("_C", "rms_norm", "Tensor! Tensor Tensor? float")
FUSED_ADD_RMS_NORM = Kernel("_C", "fused_add_rms_norm", "Tensor! Tensor! Tensor? float")
ROTARY_EMBEDDING = Kernel("_C", "rotary_embedding", "Tensor Tensor! Tensor!? int Tensor bool")
INT8_QUANT = Kernel("_C", "dynamic_scaled_int8_quant", "Tensor! Tensor Tensor! Tensor!?")
FP8_QUANT = Kernel("_C", "dynamic_per_token_scaled_fp8_quant", "Tensor! Tensor Tensor! Tensor?")
TOPK_SOFTMAX = Kernel("_moe_C", "topk_softmax", "Tensor! Tensor! Tensor! Tensor bool")
GROUPED_TOPK = Kernel("_moe_C", "grouped_topk", "Tensor int int int bool float Tensor int")
MOE_ALIGN = Kernel("_moe_C", "moe_align_block_size", "Tensor int int Tensor! Tensor! Tensor! Tensor?")
MOE_SUM = Kernel("_moe_C", "moe_sum", "Tensor Tensor!")

#: The kernels that each operator needs.
OF_OPERATOR: dict[str, tuple[Kernel, ...]] = {
    "silu_and_mul": (SILU_AND_MUL,),
    "gelu_and_mul": (GELU_AND_MUL, GELU_TANH_AND_MUL),
    "rms_norm": (RMS_NORM, FUSED_ADD_RMS_NORM),
    "rotary_embedding": (ROTARY_EMBEDDING,),
    "topk_softmax": (TOPK_SOFTMAX,),
    "grouped_topk": (GROUPED_TOPK,),
    "moe_align_block_size": (MOE_ALIGN,),
    "moe_sum": (MOE_SUM,),
    "fused_experts": (MOE_ALIGN, MOE_SUM, SILU_AND_MUL, GELU_AND_MUL),
    "dynamic_per_token_quant_int8": (INT8_QUANT,),
    "dynamic_per_token_quant_fp8": (FP8_QUANT,),
}

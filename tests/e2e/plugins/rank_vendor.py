"""A vendor that is there for rank 0 alone, and whose other implementation fails at run time."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

    from torch import Tensor

VLLM_FL_PLUGIN_API = 1

_calls = 0


def _rank() -> int:
    from torch import distributed

    return distributed.get_rank() if distributed.is_initialized() else 0


def right(x: Tensor) -> Tensor:
    from vllm_fl_reference.impl import activation

    return activation.silu_and_mul(x)


def fails_late(x: Tensor) -> Tensor:
    """Is right nine times and then raises, in rank 0 alone: vLLM reads its answer first."""
    global _calls
    _calls += 1
    if _calls == 10 and _rank() == 0:
        raise RuntimeError("the tenth call fails")
    return right(x)


def fails_first(x: Tensor) -> Tensor:
    """Does not compile, in rank 1 alone."""
    if _rank() == 1:
        raise RuntimeError("no kernel for this device")
    return right(x)


def register_builtins(registry: Any) -> None:
    from vllm_fl.dispatch import BackendImplKind
    from vllm_fl.dispatch import OpImpl

    right._is_available = lambda: _rank() == 0  # type: ignore[attr-defined]
    for name, fn in (("right", right), ("late", fails_late), ("first", fails_first)):
        registry.register_impl(
            OpImpl("silu_and_mul", f"vendor.rank.{name}", BackendImplKind.VENDOR, fn, vendor="rank")
        )

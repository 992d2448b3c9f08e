"""The one operator of vLLM's compiled library that its own wrapper of graphs cannot do without."""

from __future__ import annotations

import torch

#: Kept for as long as the process: an operator ends with its library.
_libraries: list[torch.library.Library] = []


def define_weak_reference(dispatch_key: str) -> None:
    """Define ``_C::weak_ref_tensor`` for a device, where vLLM's library has not (0.26 to 0.33).

    A graph's outputs are kept without keeping their memory, which the graphs that are
    captured next use again.
    """
    if hasattr(torch.ops._C, "weak_ref_tensor"):
        return
    library = torch.library.Library("_C", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("weak_ref_tensor(Tensor(a) input) -> Tensor(a)")  # type: ignore[no-untyped-call]
    library.impl("weak_ref_tensor", weak_reference, dispatch_key)  # type: ignore[no-untyped-call]
    _libraries.append(library)


def weak_reference(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the same memory, which it does not keep."""
    whole = tensor.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(whole.data_ptr(), tensor.device, whole.nbytes())
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())

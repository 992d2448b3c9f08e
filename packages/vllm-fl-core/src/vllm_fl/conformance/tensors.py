"""Tensors for cases: seeded values, layouts, and copies that keep both.

A case's arguments are made on the CPU, from a seed, so that every device and every
run gets the same values. They are then moved storage by storage: views of one
buffer stay views of one buffer, and what no view covers travels too, so that a
write beside an argument is seen.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING
from typing import Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Iterable
    from collections.abc import Iterator
    from collections.abc import Mapping

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_WORTH_THREADS = 2**18

#: Which of many sets of values is made; 0 but inside :func:`other_values`.
_variation = 0


def named(dtype: torch.dtype) -> str:
    """Return a dtype's name without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def random(
    *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0, mean: float = 0.0
) -> Tensor:
    """Return normally distributed values, always the same for one shape and seed."""
    generator = seeded(1000 * seed + sum(shape))
    values = torch.randn(shape, generator=generator, dtype=torch.float32)
    return (values * scale + mean).to(dtype)


def seeded(seed: int) -> torch.Generator:
    """Return a generator of the values that a case makes from ``seed``."""
    return torch.Generator().manual_seed(seed + 7_919_000 * _variation)


def variation() -> int:
    """Return which set of values is made: for what is computed and not drawn."""
    return _variation


@contextmanager
def other_values() -> Iterator[None]:
    """Let a case make a second set of arguments: the same shapes and layouts, other values."""
    global _variation
    _variation += 1
    try:
        yield
    finally:
        _variation -= 1


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch compute on the CPU in so many threads."""
    before = torch.get_num_threads()
    if count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def threads_for(elements: int) -> int:
    """Return how many threads judge a case: those of a small one wait longer than they compute."""
    return torch.get_num_threads() if elements >= _WORTH_THREADS else 1


# -- layouts --------------------------------------------------------------------


def contiguous(x: Tensor) -> Tensor:
    """Return ``x``."""
    return x


def _sliced(x: Tensor, more: int, skip: int) -> Tensor:
    """Return the same values as rows of a wider tensor, which is NaN elsewhere."""
    fill = float("nan") if x.is_floating_point() else 99
    buffer = torch.full((*x.shape[:-1], x.shape[-1] + more), fill, dtype=x.dtype)
    view = buffer[..., skip : skip + x.shape[-1]]
    return view.copy_(x)


def wider(x: Tensor) -> Tensor:
    """Return the rows of a wider tensor, aligned, as a split of a fused projection gives."""
    return _sliced(x, 64, 0)


def odd_stride(x: Tensor) -> Tensor:
    """Return the rows of a tensor whose stride and offset no vector load likes."""
    return _sliced(x, 5, 1)


def transposed(x: Tensor) -> Tensor:
    """Return the same values where the last axis has the largest stride."""
    return x.movedim(-1, 0).contiguous().movedim(0, -1)


def every_other(x: Tensor) -> Tensor:
    """Return the same values where every second element in memory is NaN."""
    fill = float("nan") if x.is_floating_point() else 99
    return torch.stack([x, torch.full_like(x, fill)], dim=-1)[..., 0]


def unaligned(x: Tensor) -> Tensor:
    """Return the same values contiguous, but one element behind an aligned address."""
    buffer = torch.zeros(x.numel() + 1, dtype=x.dtype)
    return buffer[1:].view(x.shape).copy_(x)


#: Where the last dimension is dense: the kernel can read a row as it is.
DENSE_LAYOUTS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "rows of a wider tensor": wider,
    "rows of odd stride": odd_stride,
    "unaligned": unaligned,
}
#: Where it is not: right values are what is asked for, not the same bytes.
OTHER_LAYOUTS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "transposed": transposed,
    "every other element": every_other,
}
LAYOUTS: Mapping[str, Callable[[Tensor], Tensor]] = {**DENSE_LAYOUTS, **OTHER_LAYOUTS}


# -- copies -----------------------------------------------------------------------


def tensors_of(values: Iterable[Any]) -> list[Tensor]:
    """Return what is a tensor among ``values``."""
    return [value for value in values if isinstance(value, Tensor)]


def _storage_id(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def _whole(x: Tensor) -> Tensor:
    """Return a tensor's whole storage as bytes; a view, not a copy."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


def moved(arguments: Mapping[str, Any], device: torch.device | str) -> dict[str, Any]:
    """Return copies of the arguments on a device: layouts, shared buffers and identities kept."""
    storages: dict[int, Tensor] = {}
    copies: dict[int, Tensor] = {}
    result = {}
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            result[name] = value
            continue
        if id(value) not in copies:
            key = _storage_id(value)
            if key not in storages:
                storages[key] = _whole(value).to(device, copy=True)
            view = torch.empty(0, dtype=value.dtype, device=device)
            view.set_(storages[key].untyped_storage(), value.storage_offset(), value.shape, value.stride())
            copies[id(value)] = view
        result[name] = copies[id(value)]
    return result


def packed(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with contiguous copies of what is not; others as they are."""
    return {
        name: value.contiguous() if isinstance(value, Tensor) else value for name, value in arguments.items()
    }


def overwrite(arguments: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Put other values into the memory of the arguments, as an optimizer or a reload does.

    Neither an object, nor an address, nor a version counter tells that they have changed:
    so it is with ``parameter.data.copy_``, and with memory that was freed and is given out
    again.

    Args:
        arguments: made by :func:`moved`, of the same layouts as ``values``.
        values: what is put there.
    """
    done: set[int] = set()
    for name, value in arguments.items():
        if isinstance(value, Tensor) and _storage_id(value) not in done:
            done.add(_storage_id(value))
            _whole(value).copy_(_whole(values[name]))


def written(before: Mapping[str, Any], after: Mapping[str, Any], allowed: Iterable[str]) -> list[str]:
    """Name the arguments that were written and must not be; ``"the memory beside x"`` too.

    Args:
        before: the arguments as they were, on any device.
        after: the same arguments, made by :func:`moved`, after the call.
        allowed: the arguments that may be written.
    """
    allowed = [name for name in allowed if isinstance(after.get(name), Tensor)]
    found = []
    seen: set[int] = set()
    for name, value in after.items():
        if not isinstance(value, Tensor) or _storage_id(value) in seen:
            continue
        seen.add(_storage_id(value))
        was, now = _whole(before[name]).cpu(), _whole(value).cpu()
        changed = was != now
        if not changed.any():
            continue
        for other in allowed:
            if _storage_id(after[other]) == _storage_id(value):
                changed &= ~_bytes_of(after[other], now.numel())
        if not changed.any():
            continue
        sharing = [n for n, v in after.items() if isinstance(v, Tensor) and _storage_id(v) in seen]
        sharing = [n for n in sharing if _storage_id(after[n]) == _storage_id(value)]
        hit = [n for n in sharing if (changed & _bytes_of(after[n], now.numel())).any()]
        found += hit or [f"the memory beside {name}"]
    return found


def _bytes_of(x: Tensor, size: int) -> Tensor:
    """Return which bytes of a storage of ``size`` bytes a tensor's elements are."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    marks = torch.zeros(-(-size // 8) * 8, dtype=torch.uint8).view(integer)
    marks.as_strided(x.shape, x.stride(), x.storage_offset()).fill_(1 if integer is torch.uint8 else -1)
    return marks.view(torch.uint8)[:size] != 0


def same_bytes(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two results hold the same bits, NaN included."""
    if one is None or other is None:
        return one is other
    if one.shape != other.shape or one.dtype is not other.dtype:
        return False
    return torch.equal(_values_as_bytes(one), _values_as_bytes(other))


def _values_as_bytes(x: Tensor) -> Tensor:
    # A copy, because the strides of an axis of size 1 may be anything.
    return torch.empty(x.shape, dtype=x.dtype).copy_(x.detach()).flatten().view(torch.uint8)


def shares_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are of one storage."""
    return bool(one.numel() and other.numel()) and _storage_id(one) == _storage_id(other)

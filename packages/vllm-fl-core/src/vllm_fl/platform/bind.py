"""The names of ``torch.cuda`` and ``torch.accelerator`` that vLLM's worker and runner call.

vLLM's model runner is written for CUDA and calls parts of it by that name, whatever the
platform says. A description names what takes their place; this is the one table of
what vLLM calls. The tests read vLLM's source and fail where the table lacks a name.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_fl.dispatch.common.suggest import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm_fl.platform.choice import Installed


@dataclass(frozen=True, slots=True)
class Name:
    """A name of ``torch.cuda`` that vLLM calls.

    Attributes:
        use: what for.
        needs: the field of the description without which it is never called; empty
            where every model calls it.
        first: the oldest vLLM that calls it, of those that are supported.
        last: the newest one; None where the newest supported one does.
    """

    use: str
    needs: str = ""
    first: tuple[int, int] = (0, 26)
    last: tuple[int, int] | None = None

    def is_called_by(self, version: tuple[int, ...]) -> bool:
        """Whether a version of vLLM, such as ``(0, 32)``, calls it."""
        return self.first <= version[:2] and (self.last is None or version[:2] <= self.last)


#: By the name in ``torch.cuda``.
CUDA_NAMES: Mapping[str, Name] = {
    "Stream": Name("the stream on which results are copied to the host"),
    "Event": Name("waiting for those copies"),
    "current_stream": Name("the stream that those copies follow"),
    "stream": Name("running those copies on their stream"),
    "set_stream": Name("the stream of a worker"),
    "CUDAGraph": Name("vLLM's own wrapper of graphs", needs="graph_wrapper"),
    "graph": Name("vLLM's own wrapper of graphs", needs="graph_wrapper"),
}

#: Names in ``accelerator`` that stand for those of ``torch`` itself.
OF_TORCH = ("Stream", "Event")


def bind(description: Installed) -> None:
    """Put what a description names in the place of what vLLM calls, in this process.

    Raises:
        PlatformError: a name is none of torch's, or what takes its place cannot be loaded.
    """
    import torch

    from vllm_fl.platform.errors import PlatformError

    chip = description.chip
    assert chip is not None
    for field, names, owner in (
        ("cuda_names", chip.cuda_names, torch.cuda),
        ("accelerator", chip.accelerator, torch.accelerator),
    ):
        for name, reference in names.items():
            where = torch if owner is torch.accelerator and name in OF_TORCH else owner
            if not hasattr(where, name):
                known = did_you_mean(name, dir(where))
                raise PlatformError(f"{description}: field {field}: {where.__name__} has no {name}.{known}")
            value = description.load(f"{field}: {name}", reference)
            # Dynamo knows some of torch's functions by identity and would trace a plain one in their place.
            setattr(where, name, value if isinstance(value, type) else functools.partial(value))


def unbound(description: Installed, version: tuple[int, ...]) -> dict[str, str]:
    """Return what this vLLM calls and the description does not name, with what it is for."""
    chip = description.chip
    assert chip is not None
    return {
        name: entry.use
        for name, entry in CUDA_NAMES.items()
        if entry.is_called_by(version)
        and name not in chip.cuda_names
        and (not entry.needs or getattr(chip, entry.needs))
    }

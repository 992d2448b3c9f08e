"""What a vendor's wheel says of its chip: data, and names of what is loaded when the chip is used.

A wheel names its :class:`Chip` in an entry point of the group ``vllm_fl.platforms``; the
name of the entry point is the one that ``VLLM_FL_PLATFORM`` takes. A name is written as
in an entry point, ``"package.module:attribute"``, and nothing of it is imported before
the chip is used. What a description leaves out is vLLM's default. It names no version
of vLLM except in a :class:`Quirk`: what differs between versions is the core's affair.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
from dataclasses import fields
from types import MappingProxyType
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.platform.errors import DescriptionError

if TYPE_CHECKING:
    from collections.abc import Callable

_PART = r"[A-Za-z_][A-Za-z0-9_]*"
_MODULE = re.compile(rf"{_PART}(\.{_PART})*")
_REFERENCE = re.compile(rf"{_PART}(\.{_PART})*:{_PART}(\.{_PART})*")
_WORD = re.compile(_PART)
_DEVICE_TYPE = re.compile(r"[a-z][a-z0-9_]*")
_VERSION = re.compile(r"\d+\.\d+")

#: What PyTorch calls the data types that a description may list.
_DTYPES = ("bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quirk:
    """What some versions of vLLM need done for a chip, and why.

    Attributes:
        name: a word for it.
        first: the oldest vLLM that needs it, as ``"0.26"``.
        last: the newest one; None where no newer one is known to do without.
        reason: why it is needed, in a sentence.
        apply: ``"module:function"``; it is called with vLLM's ``VllmConfig`` when that
            is complete, and may change it.
    """

    name: str
    first: str
    last: str | None = None
    reason: str
    apply: str

    def __post_init__(self) -> None:
        for name, check in (("name", _sentence), ("reason", _sentence), ("apply", _reference)):
            _refuse(f"quirks: {name}", check(getattr(self, name)))
        for name in ("first", "last"):
            value = getattr(self, name)
            if not (name == "last" and value is None):
                _refuse(f"quirks: {name}", _match(_VERSION, "a version like '0.32'")(value))

    def applies_to(self, version: tuple[int, ...]) -> bool:
        """Whether a version of vLLM, such as ``(0, 32)``, needs it."""
        first, last = (tuple(map(int, v.split("."))) if v else None for v in (self.first, self.last))
        return (first is None or first <= version[:2]) and (last is None or version[:2] <= last)


def _optional_field(default: Any, missing: str = "") -> Any:
    """Return an optional field; ``missing`` says what it costs to leave it out."""
    if isinstance(default, dict):
        return field(default_factory=dict, metadata={"missing": missing})
    return field(default=default, metadata={"missing": missing})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chip:
    """One kind of chip.

    Attributes:
        name: for people: logs, ``vllm-fl doctor``, vLLM's name of the device.
        probe: ``"module:function"``; ``function()`` returns True where the chip is there,
            else False or the reason why not. It runs in every process, before vLLM may
            fork: it opens no device, imports no torch and takes no longer than two seconds.
        device_type: the word that PyTorch has for the device: ``torch.device(device_type)``.
        torch_module: the module with what ``torch.cuda`` has for CUDA: ``set_device``,
            ``device_count`` and ``manual_seed_all`` at least.
        imports: modules that make the device known to PyTorch when they are imported.
            That must not open the device.
        indexed: whether ``torch.device("type:0")`` may be written.
        dispatch_key: PyTorch's dispatch key, for which vLLM registers its operators.
        dist_backend: the backend of ``torch.distributed``.
        communicator: vLLM's device communicator, ``"module:Class"``.
        visible_devices: the environment variable that numbers the chips a process may see.
        ray_key: Ray's name of the resource.
        ray_noset: the environment variables that keep Ray from setting ``visible_devices``.
        dtypes: data types that models may have, vLLM's default first.
        fp8: whether vLLM may run its paths of eight bits.
        capability: what CUDA calls the compute capability. A number is a claim: vLLM then
            takes its paths for NVIDIA's cards of that number.
        pin_memory: whether PyTorch has pinned memory for the device.
        compile_backend: the backend of ``torch.compile``: ``"inductor"`` where Inductor
            knows the device, else ``"eager"``.
        graph_wrapper: the class that captures and replays device graphs, as vLLM's
            ``AbstractStaticGraphWrapper``: ``"module:Class"``.
        block_size: tokens in a block of the key-value cache.
        attention: vLLM's attention backend where the dispatch chooses none: ``"module:Class"``.
        cuda_names: names of ``torch.cuda`` that vLLM calls, each with what takes its place.
        accelerator: names of ``torch.accelerator``, the same; ``Stream`` and ``Event`` are
            ``torch.Stream`` and ``torch.Event``. Empty where PyTorch's own work.
        triton_kernels: vLLM's Triton kernels (``"module.kernel"``), each with a function
            that takes its place, for a chip without Triton.
        total_memory: ``"module:function"``; ``function(index)`` returns a chip's bytes
            without opening it.
        compute_units: ``"module:function"``; ``function(index)`` returns how many a chip has, as
            vLLM counts CUDA's multiprocessors. Not needed where ``get_device_properties`` of
            ``torch_module`` has ``multi_processor_count``.
        worker: a worker in the place of the core's: ``"module:Class"``.
        runner: a model runner in the place of vLLM's: ``"module:Class"``.
        quirks: what some versions of vLLM need beside all this.

    Raises:
        DescriptionError: a field is unknown, missing or wrong; every one is named.
    """

    name: str
    probe: str
    device_type: str
    torch_module: str
    imports: tuple[str, ...] = _optional_field(())
    indexed: bool = _optional_field(True)
    dispatch_key: str = _optional_field("PrivateUse1")
    dist_backend: str = _optional_field("gloo", "ranks talk over gloo, which takes tensors of the CPU alone")
    communicator: str | None = _optional_field(None, "collectives go through torch.distributed")
    visible_devices: str = _optional_field("", "no variable keeps a process from a chip")
    ray_key: str = _optional_field("", "Ray cannot place workers")
    ray_noset: tuple[str, ...] = _optional_field(())
    dtypes: tuple[str, ...] = _optional_field(("bfloat16", "float16", "float32"))
    fp8: bool = _optional_field(False, "vLLM's paths of eight bits stay shut")
    capability: tuple[int, int] | None = _optional_field(None)
    pin_memory: bool = _optional_field(False, "copies from the host block")
    compile_backend: str | None = _optional_field(None, "models are not compiled")
    graph_wrapper: str | None = _optional_field(
        None,
        "no device graphs: each step starts every kernel anew, which is most of its time in small batches",
    )
    block_size: int | None = _optional_field(None)
    attention: str | None = _optional_field(None)
    cuda_names: Mapping[str, str] = _optional_field({}, "what vLLM calls by torch.cuda's name fails")
    accelerator: Mapping[str, str] = _optional_field({})
    triton_kernels: Mapping[str, str] = _optional_field({})
    total_memory: str | None = _optional_field(None, "vLLM batches as on a small card")
    compute_units: str | None = _optional_field(None)
    worker: str | None = _optional_field(None)
    runner: str | None = _optional_field(None)
    quirks: tuple[Quirk, ...] = _optional_field(())

    def __new__(cls, **given: Any) -> Chip:
        """Refuse unknown and missing fields, by name."""
        # Before the generated __init__, whose TypeError suggests nothing.
        from vllm_fl.dispatch.common.suggest import suggest

        known = {one.name for one in fields(cls)}
        for name in given:
            if name not in known:
                raise DescriptionError(
                    f"there is no field {name!r}.{suggest(name, known)} A newer vllm-fl-core may have it."
                )
        missing = [name for name in _REQUIRED if name not in given]
        if missing:
            raise DescriptionError(f"these fields are missing: {', '.join(missing)}")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        problems = []
        for name, check in _CHECKS.items():
            problem = check(getattr(self, name))
            if problem:
                problems.append(f"field {name}: {problem}")
        if problems:
            raise DescriptionError("; ".join(problems))
        for name in ("cuda_names", "accelerator", "triton_kernels"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        found = {one.name: getattr(self, one.name) for one in fields(self)}
        found["quirks"] = [{f.name: getattr(q, f.name) for f in fields(q)} for q in self.quirks]
        return {name: _plain(value) for name, value in found.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, tuple) else value


def what_is_missing(name: str) -> str:
    """Return what it costs to leave a field of :class:`Chip` out; nothing where it costs nothing."""
    (found,) = [one for one in fields(Chip) if one.name == name]
    return str(found.metadata.get("missing", ""))


def _refuse(place: str, problem: str | None) -> None:
    if problem:
        raise DescriptionError(f"{place}: {problem}")


def _not(what: str, value: object) -> str:
    from vllm_fl.dispatch.common.suggest import shown  # only for an error message

    return f"must be {what}, not {shown(value)}"


def _match(pattern: re.Pattern[str], what: str) -> Callable[[object], str | None]:
    def check(value: object) -> str | None:
        return None if isinstance(value, str) and pattern.fullmatch(value) else _not(what, value)

    return check


def _sentence(value: object) -> str | None:
    return None if isinstance(value, str) and value.strip() else _not("a text", value)


def _boolean(value: object) -> str | None:
    return None if isinstance(value, bool) else _not("True or False", value)


def _positive(value: object) -> str | None:
    is_one = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return None if is_one else _not("a positive number", value)


def _pair(value: object) -> str | None:
    is_one = isinstance(value, tuple) and len(value) == 2 and all(type(one) is int for one in value)
    return None if is_one else _not("two numbers, as (9, 0)", value)


def _optional(
    check: Callable[[object], str | None], nothing: object = None
) -> Callable[[object], str | None]:
    return lambda value: None if value == nothing and type(value) is type(nothing) else check(value)


def _each(check: Callable[[object], str | None], what: str) -> Callable[[object], str | None]:
    def every(value: object) -> str | None:
        if not isinstance(value, tuple):
            return _not(f"a tuple of {what}", value)
        return next(filter(None, map(check, value)), None)

    return every


def _names(value: object) -> str | None:
    """Check a mapping of names to references."""
    if not isinstance(value, Mapping):
        return _not("a mapping of names to 'module:attribute'", value)
    for name, reference in value.items():
        if not (isinstance(name, str) and _MODULE.fullmatch(name)):
            return _not("a mapping whose keys are names", name)
        problem = _reference(reference)
        if problem:
            return f"{name} {problem}"
    return None


def _dtypes(value: object) -> str | None:
    if not isinstance(value, tuple) or not value:
        return _not(f"a tuple of some of {', '.join(_DTYPES)}", value)
    unknown = [one for one in value if one not in _DTYPES]
    return _not(f"some of {', '.join(_DTYPES)}", unknown[0]) if unknown else None


def _quirks(value: object) -> str | None:
    is_one = isinstance(value, tuple) and all(isinstance(one, Quirk) for one in value)
    return None if is_one else _not("a tuple of Quirk", value)


_reference = _match(_REFERENCE, "'package.module:attribute'")
_module = _match(_MODULE, "the name of a module")
_word = _match(_WORD, "a name")

_CHECKS: Mapping[str, Callable[[object], str | None]] = {
    "name": _sentence,
    "probe": _reference,
    "device_type": _match(_DEVICE_TYPE, "PyTorch's name of a device, without an index"),
    "torch_module": _module,
    "imports": _each(_module, "modules"),
    "indexed": _boolean,
    "dispatch_key": _word,
    "dist_backend": _word,
    "communicator": _optional(_reference),
    "visible_devices": _optional(_word, ""),
    "ray_key": _optional(_word, ""),
    "ray_noset": _each(_word, "names"),
    "dtypes": _dtypes,
    "fp8": _boolean,
    "capability": _optional(_pair),
    "pin_memory": _boolean,
    "compile_backend": _optional(_word),
    "graph_wrapper": _optional(_reference),
    "block_size": _optional(_positive),
    "attention": _optional(_reference),
    "cuda_names": _names,
    "accelerator": _names,
    "triton_kernels": _names,
    "total_memory": _optional(_reference),
    "compute_units": _optional(_reference),
    "worker": _optional(_reference),
    "runner": _optional(_reference),
    "quirks": _quirks,
}

_REQUIRED = ("name", "probe", "device_type", "torch_module")

"""What an implementation is: :class:`OpImpl` and the vocabulary around it."""

from __future__ import annotations

import enum
import importlib
import itertools
import re
from dataclasses import dataclass
from dataclasses import field
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.dispatch.availability import availability
from vllm_fl.dispatch.common.foreign import unfit
from vllm_fl.dispatch.common.suggest import shown
from vllm_fl.dispatch.errors import RegistrationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_fl.dispatch.availability import Library

#: The token of a layer's own vLLM path; see "Which one runs" in ``manager``.
NATIVE = "native"


class BackendImplKind(enum.StrEnum):
    """The three kinds of implementation; the value is the kind's token in a policy."""

    DEFAULT = "flagos"
    VENDOR = "vendor"
    REFERENCE = "reference"

    @property
    def prefix(self) -> str:
        """What an ``impl_id`` of this kind begins with."""
        return "default" if self is BackendImplKind.DEFAULT else self.value


class BackendPriority(enum.IntEnum):
    """Priority inside one token of an order; the higher one is tried first."""

    DEFAULT = 150
    VENDOR = 100
    REFERENCE = 50


_IMPL_ID = re.compile(r"(default|vendor|reference)(\.[a-z0-9][a-z0-9_-]*)+")
_OP_NAME = re.compile(r"[a-z][a-z0-9_]*")
_MOST_ARGUMENTS = 100
_REFERENCE_TO = re.compile(r"[\w.]+:[\w.]+")


@dataclass(frozen=True)
class Origin:
    """The installed distribution and the entry point that registered something."""

    distribution: str
    version: str
    entry_point: str

    @property
    def wheel(self) -> str:
        """The distribution with its version."""
        return f"{self.distribution} {self.version}".rstrip()

    def __str__(self) -> str:
        return f"{self.distribution} {self.version} (entry point {self.entry_point!r})"


@dataclass(frozen=True)
class OpImpl:
    """One implementation of one operator.

    Attributes:
        op_name: the operator, a name such as ``rms_norm``.
        impl_id: ``<kind>.<name>``: ``default.flagos``, ``reference.torch``,
            ``vendor.<vendor>`` or ``vendor.<vendor>.<more>``. Unique for the operator.
        kind: DEFAULT, VENDOR or REFERENCE.
        fn: a callable with the operator's signature, or ``"module:function"``,
            which is loaded once, when the implementation is first chosen.
        vendor: the vendor's name; required for kind VENDOR and for no other.
        priority: order inside one token; the kind's own priority if None.
        supports: takes the operator's arguments and returns True, or a sentence
            that says why not; or ``"module:function"``. It is asked at every call, and
            runs no kernel.
        supports_layer: likewise, of what never changes for a layer. A layer asks it
            once, any other caller at every call, before ``supports``.
        writes: the arguments that ``fn`` may write; None means all that the
            operator's declaration allows. ``()`` promises that none is written.
        traceable: Dynamo can trace ``fn`` with ``fullgraph=True``.
        graph_safe: ``fn`` can be captured in a device graph.
        backend: who is asked whether it is available; that of the class that
            implements it.
        origin: who registered it; set by the discovery.

    Raises:
        RegistrationError: an attribute is malformed or contradicts another.
    """

    op_name: str
    impl_id: str
    kind: BackendImplKind
    fn: Callable[..., Any] | str
    vendor: str | None = None
    priority: int | None = None
    supports: Callable[..., bool | str] | str | None = field(default=None, kw_only=True)
    supports_layer: Callable[..., bool | str] | str | None = field(default=None, kw_only=True)
    writes: tuple[str, ...] | None = field(default=None, kw_only=True)
    traceable: bool = field(default=False, kw_only=True)
    graph_safe: bool = field(default=False, kw_only=True)
    backend: Library | None = field(default=None, kw_only=True, compare=False, repr=False)
    origin: Origin | None = field(default=None, kw_only=True, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.op_name, str) or not _OP_NAME.fullmatch(self.op_name):
            self._refuse(f"op_name must be a name like 'rms_norm', not {shown(self.op_name)}")
        try:
            object.__setattr__(self, "kind", BackendImplKind(self.kind))
        except Exception:  # noqa: BLE001 - an object that compares may raise anything
            self._refuse(f"kind must be a BackendImplKind, not {shown(self.kind)}")
        if not isinstance(self.impl_id, str) or not _IMPL_ID.fullmatch(self.impl_id):
            self._refuse(
                f"impl_id must be '<kind>.<name>' in lower case, such as 'vendor.acme' or "
                f"'reference.torch', not {shown(self.impl_id)}"
            )
        parts = self.impl_id.split(".")
        if parts[0] != self.kind.prefix:
            self._refuse(f"an impl_id of kind {self.kind.name} begins with {self.kind.prefix!r}")
        if self.kind is BackendImplKind.VENDOR:
            if not self.vendor:
                self._refuse("an implementation of kind VENDOR needs vendor=")
            if parts[1] != self.vendor:
                self._refuse(f"impl_id of vendor {self.vendor!r} begins with 'vendor.{self.vendor}'")
        elif self.vendor is not None:
            self._refuse(f"vendor={self.vendor!r} belongs to kind VENDOR, not {self.kind.name}")
        for name in ("fn", "supports", "supports_layer"):
            self._check_function(name, getattr(self, name))
        if self.priority is None:
            object.__setattr__(self, "priority", int(BackendPriority[self.kind.name]))
        elif isinstance(self.priority, bool) or not isinstance(self.priority, int):
            self._refuse(f"priority must be an integer, not {shown(self.priority)}")
        if self.writes is not None:
            # It may be an iterator, even one without an end.
            is_text = isinstance(self.writes, str)
            writes = () if is_text else tuple(itertools.islice(self.writes, _MOST_ARGUMENTS + 1))
            is_names = all(isinstance(name, str) for name in writes)
            if is_text or not is_names or len(writes) > _MOST_ARGUMENTS:
                self._refuse(f"writes must be a tuple of argument names, not {shown(self.writes)}")
            object.__setattr__(self, "writes", writes)

    def _check_function(self, name: str, value: object) -> None:
        if value is None and name != "fn":
            return
        may_be = (
            "a callable or 'module:function'" if name == "fn" else "a callable, 'module:function' or None"
        )
        if isinstance(value, str):
            if not _REFERENCE_TO.fullmatch(value):
                self._refuse(f"{name} must be {may_be}, not {value!r}")
        elif not callable(value):
            self._refuse(f"{name} must be {may_be}, not {shown(value)}")
        elif problem := unfit(value):
            self._refuse(f"{name}: {problem}")

    def _refuse(self, reason: str) -> None:
        raise RegistrationError(f"OpImpl({shown(self.op_name)}, {shown(self.impl_id)}): {reason}.")

    def load(self) -> Callable[..., Any]:
        """Return ``fn``, imported the first time where it is ``"module:function"``.

        Raises:
            TypeError: what it names is no function.
            Exception: whatever the import raises.
        """
        return load(self.fn)

    def predicates(self) -> tuple[Callable[..., Any], ...]:
        """Return what is asked before a call, ``supports_layer`` first; imported as by :meth:`load`."""
        return tuple(load(one) for one in (self.supports_layer, self.supports) if one is not None)

    def unavailable_reason(self) -> str | None:
        """Say in a sentence why it cannot run in this process; None if it can.

        A bound method of a :class:`~vllm_fl.dispatch.backend.Backend` asks its
        backend, once per process. A function may carry ``_is_available``, a
        callable that returns a bool. Nothing raises here: an exception is the
        reason.
        """
        of_backend, of_operator = availability(self)
        return of_backend or of_operator

    def is_available(self) -> bool:
        """Whether it can run in this process."""
        return self.unavailable_reason() is None


# What ``load`` has found; who comes first decides for all.
_loaded: dict[str, Callable[..., Any]] = {}


def load(function: Callable[..., Any] | str) -> Callable[..., Any]:
    """Return a function, imported the first time where it is ``"module:function"``.

    Raises:
        TypeError: what it names is no function.
        Exception: whatever the import raises.
    """
    if not isinstance(function, str):
        return function
    loaded = _loaded.get(function)
    if loaded is None:
        # No lock of ours: an import has its own, and whoever waits for both may wait for ever.
        module, _, attribute = function.partition(":")
        found: Any = importlib.import_module(module)
        for name in attribute.split("."):
            found = getattr(found, name)
        if not callable(found):
            raise TypeError(f"{function} is {shown(found)}, not a function")
        if problem := unfit(found):
            raise TypeError(f"{function}: {problem}")
        loaded = _loaded.setdefault(function, found)
    return loaded


def may_be_vendor(name: str) -> bool:
    """Whether an implementation could be of a vendor of this name."""
    return "." not in name and _IMPL_ID.fullmatch(f"vendor.{name}") is not None


def match_token(impl: OpImpl, token: str) -> bool:
    """Whether a token of an order means ``impl``.

    ``flagos``, ``vendor`` and ``reference`` mean a kind, ``vendor:<name>`` one
    vendor and ``impl:<impl_id>`` one implementation. ``native`` means vLLM's own
    path, which is no :class:`OpImpl`.
    """
    if token.startswith("vendor:"):
        return impl.vendor == token.removeprefix("vendor:")
    if token.startswith("impl:"):
        return impl.impl_id == token.removeprefix("impl:")
    return impl.kind.value == token

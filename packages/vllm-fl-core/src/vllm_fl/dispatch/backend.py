"""The base class of a backend: one library on one kind of device."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING
from typing import Any
from typing import ClassVar
from typing import TypeVar
from typing import overload

from vllm_fl.dispatch.availability import Library
from vllm_fl.dispatch.availability import forget_availability
from vllm_fl.dispatch.declaration import declaration_of
from vllm_fl.dispatch.ops import OPERATORS
from vllm_fl.dispatch.ops import Operators
from vllm_fl.dispatch.types import BackendImplKind
from vllm_fl.dispatch.types import OpImpl
from vllm_fl.dispatch.types import load

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Mapping

    from vllm_fl.dispatch.declaration import Operator

__all__ = ["Backend", "forget_availability", "implementation"]

_ATTRIBUTE = "__implementation__"
_Method = TypeVar("_Method", bound="Callable[..., Any]")


class _Implementation:
    """What :func:`implementation` says, as a class's attribute or on a method."""

    def __init__(self, target: str | None, **options: Any) -> None:
        self.target = target
        self.options = options

    def __get__(self, instance: object, owner: type) -> Any:
        if instance is None or self.target is None:
            return self
        return load(self.target)

    def __call__(self, method: _Method) -> _Method:
        setattr(method, _ATTRIBUTE, self)
        return method


@overload
def implementation(
    target: str,
    /,
    *,
    supports: Callable[..., bool | str] | str | None = ...,
    supports_layer: Callable[..., bool | str] | str | None = ...,
    writes: tuple[str, ...] | None = ...,
    traceable: bool = ...,
    graph_safe: bool = ...,
    priority: int | None = ...,
) -> Any: ...


@overload
def implementation(
    target: None = None,
    /,
    *,
    supports: Callable[..., bool | str] | str | None = ...,
    supports_layer: Callable[..., bool | str] | str | None = ...,
    writes: tuple[str, ...] | None = ...,
    traceable: bool = ...,
    graph_safe: bool = ...,
    priority: int | None = ...,
) -> _Implementation: ...


def implementation(
    target: str | None = None,
    /,
    *,
    supports: Callable[..., bool | str] | str | None = None,
    supports_layer: Callable[..., bool | str] | str | None = None,
    writes: tuple[str, ...] | None = None,
    traceable: bool = False,
    graph_safe: bool = False,
    priority: int | None = None,
) -> Any:
    """Say which function implements a backend's operator, and what its signature cannot say.

    ::

        class Acme(Backend):
            rms_norm = implementation("acme_vllm.norm:rms_norm", writes=(), graph_safe=True)

            @implementation(supports=lambda x: x.shape[-1] % 16 == 0 or "no multiple of 16")
            def silu_and_mul(self, x): ...

    The name of the attribute, or of the method, is the operator's. An operator that the core
    does not know is declared where it is implemented: its method is the contract, decorated
    with ``@operator`` above ``@implementation``.

    Args:
        target: ``"module:function"``, which takes the operator's arguments. It is imported
            when it is first chosen. None: the decorated method is the implementation.
        supports: takes the operator's arguments, without ``self``, and returns True, or a
            sentence that says why not; or ``"module:function"``. It is asked at every call:
            the layout and the rows of tensors are its matter, and it runs no kernel. Free
            where it is absent.
        supports_layer: likewise, of what never changes for a layer: dtypes, devices, last
            dimensions, weights, flags. A layer of vLLM asks it once; any other caller at
            every call, before ``supports``. It must answer alike for any number of rows
            and any strides.
        writes: the arguments that it may write; all that the contract allows if None.
        traceable: Dynamo can trace it with ``fullgraph=True``.
        graph_safe: it can be captured in a device graph.
        priority: order inside one token; that of the backend's kind if None.
    """
    return _Implementation(
        target,
        supports=supports,
        supports_layer=supports_layer,
        writes=writes,
        traceable=traceable,
        graph_safe=graph_safe,
        priority=priority,
    )


class Backend(Library, Operators):
    """One library's implementations: override the operators that it offers.

    ``registry.register_backend(MyBackend())`` registers every overridden
    operator as ``vendor.<vendor>``, or, for another :attr:`kind`, as
    ``<kind>.<name>``, and declares those of its own.
    """

    #: DEFAULT and REFERENCE are for the backends that serve every vendor.
    kind: ClassVar[BackendImplKind] = BackendImplKind.VENDOR

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """A short lower-case name."""

    @property
    def vendor(self) -> str | None:
        """The vendor's name in policies; the backend's name unless overridden."""
        return self.name if self.kind is BackendImplKind.VENDOR else None

    @property
    def default_policy(self) -> Mapping[str, Any]:
        """Packaged defaults, with the keys of the YAML file but ``tuned`` and ``defaults``.

        They apply where this is the only available vendor, below whatever the user says
        and above the built-in defaults, key by key and operator by operator. An entry that
        cannot be used on some machine, such as a name that its core does not know, is left
        out there with one line.
        """
        return {}

    def implementations(self) -> list[OpImpl]:
        """Return an :class:`OpImpl` for every operator that the class implements."""
        names = dict.fromkeys([*OPERATORS, *self.marked()])
        return [impl for op_name in names if (impl := self.implementation_of(op_name))]

    @classmethod
    def marked(cls) -> dict[str, Operator | None]:
        """Return the names that are marked by :func:`implementation` and are no operator of the core.

        Returns:
            For each name its declaration; None where the class has none.
        """
        found = {
            name: declaration_of(value)
            for one in reversed(cls.__mro__)
            for name, value in vars(one).items()
            if isinstance(value, _Implementation) or isinstance(_mark_of(value), _Implementation)
        }
        return {name: declared for name, declared in found.items() if name not in OPERATORS}

    def implementation_of(self, op_name: str) -> OpImpl | None:
        """Return the :class:`OpImpl` of an operator, None where the class has none of its own."""
        its = getattr(type(self), op_name, None)
        if its is None or its is getattr(Operators, op_name, None):
            return None
        mark = its if isinstance(its, _Implementation) else _mark_of(its)
        options = dict(mark.options) if isinstance(mark, _Implementation) else {}
        target = mark.target if isinstance(mark, _Implementation) else None
        fn = target or getattr(self, op_name)
        priority = options.pop("priority", None)
        impl_id = f"{self.kind.prefix}.{self.vendor or self.name}"
        return OpImpl(op_name, impl_id, self.kind, fn, self.vendor, priority, backend=self, **options)


def _mark_of(method: object) -> object:
    # A static or class method keeps what its function has.
    return getattr(getattr(method, "__func__", method), _ATTRIBUTE, None)

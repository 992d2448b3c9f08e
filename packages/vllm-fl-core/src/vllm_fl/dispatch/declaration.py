"""How an operator is declared: what its signature cannot say, and what follows from both."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING
from typing import Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Iterable
    from collections.abc import Mapping
    from collections.abc import Sequence


_SCHEMA_TYPES = {
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "float": "float",
    "int": "int",
    "bool": "bool",
    "str": "str",
}


@dataclass(frozen=True)
class TorchForm:
    """One torch operator that an operator becomes where it must be opaque to a compiler.

    A torch schema has one kind of result and either writes arguments or returns
    new tensors, so that an operator may need two forms.

    Attributes:
        name: the torch operator's name, before the implementation's.
        returns: ``"Tensor"`` or ``"(Tensor, Tensor)"``, the schema's result.
        fixed: arguments that this form fixes, and is chosen by.
        present: optional tensors that are not None in this form.
        donated: arguments that an implementation may write in this form, although
            the schema is functional; it is given copies of them.
        in_place: arguments that it writes; it then returns nothing, and the
            caller gets ``result`` back.
        result: the arguments that the caller gets back from an in-place form.
    """

    name: str
    returns: str = "Tensor"
    fixed: Mapping[str, Any] | None = None
    present: tuple[str, ...] = ()
    donated: tuple[str, ...] = ()
    in_place: tuple[str, ...] = ()
    result: tuple[str, ...] = ()

    def schema(self, signature: inspect.Signature) -> str:
        """Return the torch schema without a name, ``(Tensor x) -> Tensor``."""
        arguments = []
        for parameter in self.parameters(signature):
            kind = _SCHEMA_TYPES[str(parameter.annotation)]
            if parameter.name in self.present:
                kind = kind.rstrip("?")
            if parameter.name in self.in_place:
                letter = "abcdefgh"[self.in_place.index(parameter.name)]
                kind = kind.replace("Tensor", f"Tensor({letter}!)")
            arguments.append(f"{kind} {parameter.name}")
        return f"({', '.join(arguments)}) -> {'()' if self.in_place else self.returns}"

    def parameters(self, signature: inspect.Signature) -> list[inspect.Parameter]:
        """Return the operator's parameters that this form takes, all positional."""
        fixed = self.fixed or {}
        return [p for p in signature.parameters.values() if p.name not in fixed]


@dataclass(frozen=True)
class Operator:
    """The declaration of one operator.

    Attributes:
        name: its name.
        signature: its parameters, without ``self``.
        doc: the contract.
        mutates: arguments that it may write. The registry's default for
            :attr:`~vllm_fl.dispatch.types.OpImpl.writes`.
        hints: optional parameters that only help: they are dropped for an
            implementation that does not take them. Another optional parameter
            that an implementation lacks makes it refuse any value but the default.
        fake: ``fake(torch, *arguments)`` returns empty tensors with the
            result's shapes and dtypes.
        forms: the torch operators that it becomes.
        selector: the tensor whose rows, last dimension and dtype may choose an
            implementation; the first argument where it is None.
        native_prepares: vLLM's own path needs what it prepares when a model is
            loaded, such as another layout of the weights. It is then chosen when a
            layer is built or never: it cannot take over at a later call.
    """

    name: str
    signature: inspect.Signature
    doc: str
    mutates: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    fake: Callable[..., Any] | None = None
    forms: tuple[TorchForm, ...] = ()
    selector: str | None = None
    native_prepares: bool = False

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call that fits the signature by name, in the contract's order."""
        values = {name: parameter.default for name, parameter in self.signature.parameters.items()}
        values.update(zip(values, args, strict=False))
        return {**values, **kwargs}

    def call_of(self, values: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return how the contract passes arguments: by position what it can, the rest by name.

        What is not given has its default by position, and is left out by name.
        """
        positional: list[Any] = []
        keywords: dict[str, Any] = {}
        for name, parameter in self.signature.parameters.items():
            if parameter.kind is not parameter.KEYWORD_ONLY:
                positional.append(values.get(name, parameter.default))
            elif name in values:
                keywords[name] = values[name]
        return positional, keywords

    def places(self, names: Iterable[str]) -> list[int]:
        """Return at which places of the contract some arguments stand; what it does not name is left out."""
        every = list(self.signature.parameters)
        return [every.index(name) for name in names if name in every]


_ATTRIBUTE = "__operator__"


def operator(
    *,
    mutates: tuple[str, ...] = (),
    hints: tuple[str, ...] = (),
    fake: Callable[..., Any] | None = None,
    forms: tuple[TorchForm, ...] | None = None,
    selector: str | None = None,
    native_prepares: bool = False,
) -> Callable[[Any], Any]:
    """Declare the decorated method as an operator; see :class:`Operator`.

    ``forms`` is one functional form where it is not given.
    """

    def declare(method: Any) -> Any:
        signature = inspect.signature(method)
        parameters = list(signature.parameters.values())[1:]
        if forms is not None:
            its_forms = forms
        else:
            returns = str(signature.return_annotation).removeprefix("tuple")
            its_forms = (TorchForm(method.__name__, returns.replace("[", "(").replace("]", ")")),)
        declaration = Operator(
            name=method.__name__,
            signature=signature.replace(parameters=parameters),
            doc=inspect.getdoc(method) or "",
            mutates=mutates,
            hints=hints,
            fake=fake,
            forms=its_forms,
            selector=selector or (parameters[0].name if parameters else None),
            native_prepares=native_prepares,
        )
        setattr(method, _ATTRIBUTE, declaration)
        return method

    return declare


def declaration_of(method: object) -> Operator | None:
    """Return what ``@operator`` recorded on a method, or None."""
    found = getattr(method, _ATTRIBUTE, None)
    return found if isinstance(found, Operator) else None

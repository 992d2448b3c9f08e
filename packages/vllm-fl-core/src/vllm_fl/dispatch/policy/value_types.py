"""What the values of a policy's keys may be: how each is read, checked and said."""

from __future__ import annotations

import abc
from typing import Any

from vllm_fl.dispatch.common.suggest import did_you_mean
from vllm_fl.dispatch.common.suggest import shown
from vllm_fl.dispatch.environment import boolean
from vllm_fl.dispatch.environment import names
from vllm_fl.dispatch.environment import told_as
from vllm_fl.dispatch.errors import PolicyError
from vllm_fl.dispatch.tuned import check_table
from vllm_fl.dispatch.tuned import to_plain
from vllm_fl.dispatch.types import NATIVE
from vllm_fl.dispatch.types import BackendImplKind

PREFER_DEFAULT = BackendImplKind.DEFAULT.value
PREFER_VENDOR = BackendImplKind.VENDOR.value
PREFER_REFERENCE = BackendImplKind.REFERENCE.value

#: The order of kinds without a preference; ``native`` exists inside vLLM only.
KINDS = (PREFER_DEFAULT, PREFER_VENDOR, PREFER_REFERENCE, NATIVE)


class ValueType(abc.ABC):
    """What a value may be: how it is read, checked, said and laid over another one.

    ``name`` is that of the key, for the errors. Every method that takes what somebody wrote
    raises PolicyError.

    Attributes:
        default: what holds where nothing is set.
        form: how a variable says it, for people; empty where that needs no word.
        holds_many: it is a collection; an empty one says nothing.
        by_operator: it maps operators to values, which are read and laid one by one.
        in_file: its value may be the name of a file of its own.
    """

    form = ""
    holds_many = False
    by_operator = False
    in_file = False

    def __init__(self, default: Any, form: str = "") -> None:
        self.default = default
        self.form = form or self.form

    def parse(self, name: str, text: str) -> Any:
        """Return what :meth:`check` takes of what a variable says."""
        return self.read(name, text)

    def read(self, name: str, value: object) -> Any:
        """Return what :meth:`check` takes of what the policy file says."""
        return self.check(name, value)

    @abc.abstractmethod
    def check(self, name: str, value: object) -> Any:
        """Return what the policy holds of what code says."""

    def is_given(self, value: object) -> bool:
        """Whether a value sets something; where None is every one, an empty set does."""
        return bool(value) if self.holds_many and self.default is not None else value is not None

    def adds(self, value: Any) -> bool:
        """Whether a checked value is added to the packaged one, which it otherwise replaces."""
        return False

    def plain(self, held: Any, *, adds: bool = False) -> Any:
        """Return what the policy holds as JSON's types; :meth:`check` takes it back."""
        return held

    def written(self, held: Any) -> str:
        """Return what the policy holds as a variable says it."""
        return str(held)

    def rows(self, held: Any, *, adds: bool = False) -> dict[str, tuple[Any, str]]:
        """Return what `vllm-fl policy show` says: plain values and their texts, by what follows the name."""
        plain = self.plain(held, adds=adds)
        return {"": (plain, str(plain))}


class Choice(ValueType):
    """One of some words; without regard to case."""

    def __init__(self, default: Any, form: str = "", options: tuple[str, ...] = ()) -> None:
        super().__init__(default, form)
        self.options = options

    def check(self, name: str, value: object) -> str:
        """Return the word in lower case."""
        word = value.strip().lower() if isinstance(value, str) else value
        if not isinstance(word, str) or word not in self.options:
            raise PolicyError(
                f"{name} must be one of {', '.join(self.options)}, not {shown(word)}."
                f"{did_you_mean(word, self.options)}"
            )
        return word


class Switch(ValueType):
    """True or False, and what :func:`boolean` reads of a file or a variable."""

    def read(self, name: str, value: object) -> bool:
        """Return the boolean of a word or a number."""
        with told_as(f"{name} "):
            return boolean(value)

    def check(self, name: str, value: object) -> bool:
        """Return a boolean as it is."""
        if not isinstance(value, bool):
            raise PolicyError(f"{name} must be True or False, not {shown(value)}.")
        return value

    def written(self, held: Any) -> str:
        """Return 1 or 0."""
        return str(int(held))

    def rows(self, held: Any, *, adds: bool = False) -> dict[str, tuple[Any, str]]:
        """Return one row, in which the boolean is a word of YAML."""
        return {"": (held, str(held).lower())}


class Vendors(ValueType):
    """A set of vendors; with a ``+`` before every name they are added to the packaged one.

    None, where it is the default, is every vendor.
    """

    form = "a,b, or +a,+b to add to the packaged ones"
    holds_many = True

    def read(self, name: str, value: object) -> list[str]:
        """Return the names of a list, or of a text with commas, each with its ``+``."""
        with told_as(f"{name} "):
            found = names(value)
        self.check(name, found)
        return found

    def check(self, name: str, value: object) -> frozenset[str]:
        """Return the names without their ``+``."""
        if isinstance(value, str) or not isinstance(value, (set, frozenset, list, tuple)):
            raise PolicyError(f"{name} must be a list of vendor names, not {shown(value)}.")
        for one in value:
            if not isinstance(one, str) or not one.removeprefix("+").strip():
                raise PolicyError(f"{name} must hold vendor names, not {shown(one)}.")
        if self.adds(value) and not all(one.startswith("+") for one in value):
            plain = ", ".join(sorted(one for one in value if not one.startswith("+")))
            raise PolicyError(
                f"{name} must have a + before every name (they are added to the packaged ones) or before "
                f"none (they replace them); {shown(plain)} has none."
            )
        return (
            frozenset(one.removeprefix("+").strip() for one in value)
            if self.adds(value)
            else frozenset(value)
        )

    def adds(self, value: Any) -> bool:
        """Whether a name has a ``+``."""
        return any(one.startswith("+") for one in value)

    def plain(self, held: Any, *, adds: bool = False) -> list[str] | None:
        """Return the sorted names, each with its ``+``."""
        return None if held is None else [f"{'+' if adds else ''}{name}" for name in sorted(held)]

    def written(self, held: Any) -> str:
        """Return the names with commas between."""
        return "all" if held is None else ",".join(sorted(held))

    def rows(self, held: Any, *, adds: bool = False) -> dict[str, tuple[Any, str]]:
        """Return one row with all of the names."""
        plain = self.plain(held, adds=adds)
        return {"": (plain, "all" if plain is None else ", ".join(plain) or "none")}


class Orders(ValueType):
    """Tokens in an order, by operator."""

    form = "op=a|b;op2=x"
    holds_many = True
    by_operator = True

    def parse(self, name: str, text: str) -> dict[str, tuple[str, ...]]:
        """Return the orders of ``op=a|b;op2=x``."""
        orders: dict[str, tuple[str, ...]] = {}
        for part in filter(None, (part.strip() for part in text.split(";"))):
            op_name, equals, order = part.partition("=")
            op_name = op_name.strip()
            if not equals or not op_name or not order.strip():
                raise PolicyError(f"{shown(part)} is not of the form '{self.form}'.")
            if op_name in orders:
                raise PolicyError(f"gives {shown(op_name)} two orders.")
            orders.update(self.read(name, {op_name: order}))
        if not orders:
            raise PolicyError(f"{shown(text)} is not of the form '{self.form}'.")
        return orders

    def read(self, name: str, value: object) -> dict[str, tuple[str, ...]]:
        """Return the orders of a mapping; an order may be a text with ``|`` between."""
        if not isinstance(value, dict):
            raise PolicyError(f"{name} must map operators to orders, not {shown(value)}.")
        return {op_name: check_order(op_name, tokens_of(order)) for op_name, order in value.items()}

    def check(self, name: str, value: object) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Return the orders of a mapping, or of pairs, as sorted pairs."""
        pairs = list(value.items()) if isinstance(value, dict) else value
        if not isinstance(pairs, (list, tuple)) or not all(
            isinstance(pair, tuple) and len(pair) == 2 for pair in pairs
        ):
            raise PolicyError(f"{name} must map operators to orders, not {shown(value)}.")
        return tuple(sorted([(op_name, check_order(op_name, tokens)) for op_name, tokens in pairs]))

    def plain(self, held: Any, *, adds: bool = False) -> dict[str, list[str]]:
        """Return a mapping of lists."""
        return {op_name: list(order) for op_name, order in held}

    def written(self, held: Any) -> str:
        """Return ``op=a|b;op2=x``."""
        return ";".join(f"{op_name}={'|'.join(order)}" for op_name, order in held)

    def rows(self, held: Any, *, adds: bool = False) -> dict[str, tuple[Any, str]]:
        """Return a row for each operator."""
        return {f".{op_name}": (list(order), " | ".join(order)) for op_name, order in held}


class Tuned(ValueType):
    """A tuned table; see :mod:`vllm_fl.dispatch.tuned`."""

    holds_many = True
    in_file = True

    def check(self, name: str, value: object) -> Any:
        """Return the table as sorted pairs."""
        return check_table(value)

    def plain(self, held: Any, *, adds: bool = False) -> dict[str, list[dict[str, Any]]]:
        """Return a mapping of lists of entries."""
        return to_plain(held)

    def rows(self, held: Any, *, adds: bool = False) -> dict[str, tuple[Any, str]]:
        """Return one row with a line for each entry."""
        lines = [f"{op_name}, {one}: {'|'.join(one.order)}" for op_name, its in held for one in its]
        return {"": (lines, ", ".join(lines) or "none")}


def tokens_of(order: object) -> object:
    """Return the tokens of a text with ``|`` between, and anything else as it is."""
    return [token.strip() for token in order.split("|")] if isinstance(order, str) else order


def check_order(op_name: object, tokens: object) -> tuple[str, ...]:
    """Return an operator's order as a tuple of tokens.

    Raises:
        PolicyError: it is empty, or holds something that is no token, or one twice.
    """
    if not isinstance(op_name, str):
        raise PolicyError(f"an operator's name must be a string, not {shown(op_name)}.")
    if isinstance(tokens, str) or not isinstance(tokens, (list, tuple)):
        raise PolicyError(f"the order of {shown(op_name)} must be a list of tokens, not {shown(tokens)}.")
    if not tokens:
        raise PolicyError(f"the order of {shown(op_name)} is empty.")
    for token in tokens:
        head, colon, rest = token.partition(":") if isinstance(token, str) else ("", "", "")
        if head in ("vendor", "impl") and colon:
            if rest.strip() != rest or not rest:
                raise PolicyError(f"token {shown(token)} of {shown(op_name)} names nothing after the colon.")
        elif token not in KINDS:
            known = (*KINDS, "vendor:<name>", "impl:<impl_id>")
            raise PolicyError(
                f"{shown(token)} in the order of {shown(op_name)} is no token; tokens are {', '.join(known)}."
                f"{did_you_mean(token, KINDS)}"
            )
    if len(set(tokens)) != len(tokens):
        raise PolicyError(f"the order of {shown(op_name)} names a token twice: {'|'.join(tokens)}.")
    return tuple(tokens)

"""Reading a policy: environment variables and the YAML file.

Every wrong value is a :class:`PolicyError` that begins with its place: the
variable, or ``file:line``. Nothing is guessed and nothing is ignored.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.dispatch._files import read_text
from vllm_fl.dispatch._log import get_logger
from vllm_fl.dispatch._suggest import did_you_mean
from vllm_fl.dispatch._suggest import shown
from vllm_fl.dispatch.errors import PolicyError
from vllm_fl.dispatch.policy import SelectionPolicy
from vllm_fl.dispatch.policy import check_defaults
from vllm_fl.dispatch.policy import check_order
from vllm_fl.dispatch.policy import check_prefer
from vllm_fl.dispatch.policy import check_vendors
from vllm_fl.dispatch.tuned import check_entry
from vllm_fl.dispatch.tuned import check_table

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Iterator
    from collections.abc import Mapping

logger = get_logger(__name__)

#: The variables that ``VLLM_FL_CONFIG`` does not replace and that are on or off.
_SWITCHES = ("VLLM_FL_PREFER_ENABLED", "VLLM_FL_OOT_ENABLED")

#: The variables that ``VLLM_FL_CONFIG`` replaces, and the keys that they set.
_POLICY_VARIABLES = {
    "VLLM_FL_PREFER": "prefer",
    "VLLM_FL_STRICT": "strict",
    "VLLM_FL_PER_OP": "op_backends",
    "VLLM_FL_ALLOW_VENDORS": "allow_vendors",
    "VLLM_FL_DENY_VENDORS": "deny_vendors",
    "VLLM_FL_DEFAULTS": "defaults",
}

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


@contextmanager
def _at(place: str) -> Iterator[None]:
    try:
        yield
    except PolicyError as error:
        raise PolicyError(f"{place}: {error}") from None


def variable(name: str) -> str | None:
    """Return an environment variable, None where it is unset or blank."""
    return os.environ.get(name, "").strip() or None


def boolean(value: object) -> bool:
    """Return what 1/0, true/false, yes/no or on/off means.

    Raises:
        PolicyError: anything else.
    """
    text = value.strip().lower() if isinstance(value, str) else shown(value).lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise PolicyError(f"must be one of 1/0, true/false, yes/no, on/off, not {shown(value)}.")


def boolean_variable(name: str, default: bool) -> bool:
    """Return a boolean variable, or ``default`` where it is unset."""
    text = variable(name)
    if text is None:
        return default
    with _at(name):
        return boolean(text)


def seconds_variable(name: str, default: float) -> float:
    """Return a number of seconds, or ``default`` where the variable is unset.

    Raises:
        PolicyError: it is no positive number.
    """
    text = variable(name)
    if text is None:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise PolicyError(f"{name}: must be a positive number of seconds, not {shown(text)}.")
    return seconds


def names_variable(name: str) -> list[str] | None:
    """Return a list with commas between, None where it is unset.

    Raises:
        PolicyError: an empty name, or one twice.
    """
    text = variable(name)
    if text is None:
        return None
    with _at(name):
        return _names(text.split(","))


def _names(values: object) -> list[str]:
    if isinstance(values, str):
        values = values.split(",")
    if not isinstance(values, list):
        raise PolicyError(f"must be a list of names, not {shown(values)}.")
    names: list[str] = []
    for value in values:
        if not isinstance(value, str) or not value.strip():
            raise PolicyError(f"must hold names, not {shown(value)}.")
        names.append(value.strip())
    if not names:
        raise PolicyError("names nothing; leave it out.")
    twice = sorted(name for name, times in Counter(names).items() if times > 1)
    if twice:
        raise PolicyError(f"names {', '.join(map(shown, twice))} twice.")
    return names


def _order(op_name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [token.strip() for token in value.split("|")]
    return check_order(op_name, value)


def _per_op(text: str) -> dict[str, tuple[str, ...]]:
    orders: dict[str, tuple[str, ...]] = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        op_name, equals, order = part.partition("=")
        op_name = op_name.strip()
        if not equals or not op_name or not order.strip():
            raise PolicyError(f"{shown(part)} is not of the form 'op=a|b;op2=x'.")
        if op_name in orders:
            raise PolicyError(f"gives {shown(op_name)} two orders.")
        orders[op_name] = _order(op_name, order)
    if not orders:
        raise PolicyError(f"{shown(text)} is not of the form 'op=a|b;op2=x'.")
    return orders


def _lower(value: object) -> object:
    return value.strip().lower() if isinstance(value, str) else value


def _vendors(key: str, value: object) -> frozenset[str]:
    names = _names(value)
    check_vendors(key, names)
    return frozenset(names)


#: The keys of a policy file but ``op_backends``; each returns what SelectionPolicy takes.
_READERS: Mapping[str, Callable[[Any], Any]] = {
    "prefer": lambda value: check_prefer(_lower(value)),
    "strict": boolean,
    "allow_vendors": functools.partial(_vendors, "allow_vendors"),
    "deny_vendors": functools.partial(_vendors, "deny_vendors"),
    "tuned": check_table,
    "defaults": lambda value: check_defaults(_lower(value)),
}


def policy_of(values: Mapping[str, Any], sources: Mapping[str, str]) -> SelectionPolicy:
    """Make a policy of keys and values that have been read; each of them is explicit.

    Raises:
        PolicyError: a vendor is allowed and denied.
    """
    policy = SelectionPolicy(
        prefer=values.get("prefer"),  # type: ignore[arg-type]
        strict=values.get("strict"),  # type: ignore[arg-type]
        per_op_order=tuple(values.get("op_backends", {}).items()),
        deny_vendors=values.get("deny_vendors", frozenset()),
        allow_vendors=values.get("allow_vendors"),
        tuned=values.get("tuned", ()),
        explicit=frozenset(values),
        defaults=values.get("defaults"),  # type: ignore[arg-type]
        sources=sources,
    )
    both = sorted(policy.deny_vendors & (policy.allow_vendors or frozenset()))
    if both:
        with _at(sources["deny_vendors"]):
            raise PolicyError(
                f"{', '.join(map(repr, both))} is denied here and allowed by {sources['allow_vendors']}."
            )
    return policy


def policy_from_environment() -> SelectionPolicy:
    """Read ``VLLM_FL_CONFIG``, or where it is unset the variables of a policy.

    Raises:
        PolicyError: a value is wrong; the message begins with the variable or
            ``file:line``.
    """
    for name in _SWITCHES:
        boolean_variable(name, True)
    path = variable("VLLM_FL_CONFIG")
    given = {name: text for name in _POLICY_VARIABLES if (text := variable(name)) is not None}
    if path is not None:
        if given:
            logger.warning("VLLM_FL_CONFIG=%s replaces %s, which is set too.", path, ", ".join(given))
        return policy_from_file(path, asked_by="VLLM_FL_CONFIG")
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name, text in given.items():
        key = _POLICY_VARIABLES[name]
        with _at(name):
            values[key] = _per_op(text) if key == "op_backends" else _READERS[key](text)
        sources[key] = name
    return policy_of(values, sources)


def read(key: object, value: object) -> Any:
    """Return what a key of the policy file says.

    Raises:
        PolicyError: an unknown key, or a wrong value.
    """
    if key == "op_backends":
        if not isinstance(value, dict):
            raise PolicyError(f"op_backends must map operators to orders, not {shown(value)}.")
        return {op_name: _order(op_name, order) for op_name, order in value.items()}
    if not isinstance(key, str) or key not in _READERS:
        known = (*_READERS, "op_backends")
        raise PolicyError(f"unknown key {shown(key)}; keys are {', '.join(known)}.{did_you_mean(key, known)}")
    try:
        return _READERS[key](value)
    except PolicyError as error:
        text = str(error)
        raise PolicyError(text if text.startswith(key) else f"{key} {text}") from None


def policy_from_file(path: str, asked_by: str | None = None) -> SelectionPolicy:
    """Read a policy from a YAML file.

    Raises:
        PolicyError: it cannot be read, is no YAML, or a value is wrong; the
            message begins with ``file:line`` where there is a line.
    """
    prefix = f"{asked_by}={path}" if asked_by else path
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    with _yaml(path, prefix) as (loader, entries):
        # The two levels that are read one by one, so that an error has its line.
        for key, node, place in entries:
            if key == "op_backends" and _is_mapping(node):
                orders = {}
                for op_name, order, its_place in _entries(loader, node, path):
                    tokens = _value(loader, order, path)
                    with _at(its_place):
                        orders.update(read("op_backends", {op_name: tokens}))
                    sources[f"op_backends.{op_name}"] = its_place
                values["op_backends"] = orders
            else:
                value = _value(loader, node, path)
                if key == "tuned" and isinstance(value, str):
                    value = _table(os.path.join(os.path.dirname(path), value), place)
                with _at(place):
                    values[key] = read(key, value)
            sources[key] = place
    return policy_of(values, sources)


def _table(path: str, asked_by: str) -> Any:
    """Return the tuned table of a file; an error has the file and the line."""
    found: dict[str, Any] = {}
    with _yaml(path, f"{asked_by}: tuned: {path}") as (loader, entries):
        for op_name, node, place in entries:
            rows = _rows(loader, node, path, op_name)
            with _at(place):
                found.update(check_table({op_name: rows}))
    return found


def _rows(loader: Any, node: Any, path: str, op_name: str) -> Any:
    import yaml

    if not isinstance(node, yaml.SequenceNode):
        return _value(loader, node, path)
    rows = []
    for row in node.value:
        values = {key: _value(loader, value, path) for key, value, _ in _entries(loader, row, path)}
        with _at(f"{path}:{row.start_mark.line + 1}"):
            rows.append(check_entry(op_name, values))
    return rows


def _is_mapping(node: Any) -> bool:
    import yaml

    return isinstance(node, yaml.MappingNode)


@contextmanager
def _yaml(path: str, prefix: str) -> Iterator[tuple[Any, list[tuple[Any, Any, str]]]]:
    """Give the loader and the entries of a YAML file, and every fault of it a place."""
    import yaml

    from vllm_fl.dispatch._yaml import Loader
    from vllm_fl.dispatch._yaml import check_size

    try:
        text = read_text(path)
    except (OSError, UnicodeError, ValueError) as error:
        raise PolicyError(f"{prefix}: cannot be read: {error}") from None
    try:
        loader = Loader(text)
        root = loader.get_single_node()
        check_size(root)
        yield loader, [] if root is None else _entries(loader, root, path)
    except PolicyError:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{path}:{mark.line + 1}" if mark else path
        problem = ", ".join(filter(None, (error.context, error.problem)))
        raise PolicyError(f"{place}: is no YAML: {problem}.") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise PolicyError(f"{path}:{line}: is no YAML: it holds {chr(error.character)!r}.") from None
    except RecursionError:
        raise PolicyError(f"{path}:{loader.line + 1}: is no YAML: it is nested too deeply.") from None


def _entries(loader: Any, node: Any, path: str) -> list[tuple[Any, Any, str]]:
    """Return (key, value node, "file:line") of a mapping; a key may stand once."""
    import yaml

    # A tag makes something else of it, which nobody would see.
    if not isinstance(node, yaml.MappingNode) or node.tag != loader.DEFAULT_MAPPING_TAG:
        raise PolicyError(f"{path}:{node.start_mark.line + 1}: must be a mapping of keys to values.")
    found: list[tuple[Any, Any, str]] = []
    seen: dict[Any, str] = {}
    for key_node, value_node in node.value:
        place = f"{path}:{key_node.start_mark.line + 1}"
        key = _value(loader, key_node, path)
        if not isinstance(key, str):
            raise PolicyError(f"{place}: a key must be a name, not {shown(key)}.")
        if key in seen:
            raise PolicyError(f"{place}: {shown(key)} stands twice, first at {seen[key]}.")
        seen[key] = place
        found.append((key, value_node, place))
    return found


def _value(loader: Any, node: Any, path: str) -> Any:
    """Return what a node of the YAML file means."""
    import yaml

    try:
        return loader.construct_object(node, deep=True)
    except (yaml.YAMLError, RecursionError):
        raise
    except Exception as error:  # noqa: BLE001 - of "!!bool maybe" PyYAML raises what happens to be raised
        raise PolicyError(
            f"{path}:{node.start_mark.line + 1}: is no YAML: {shown(getattr(node, 'value', None))} is no "
            f"{node.tag.rpartition(':')[2]}: {type(error).__name__}: {error}."
        ) from None

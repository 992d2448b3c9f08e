"""Reading a policy: environment variables and the YAML file.

Every wrong value is a :class:`PolicyError` that begins with its place: the
variable, or ``file:line``. Nothing is guessed and nothing is ignored.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.dispatch.common.files import read_text
from vllm_fl.dispatch.common.log import get_logger
from vllm_fl.dispatch.common.suggest import shown
from vllm_fl.dispatch.environment import boolean_variable
from vllm_fl.dispatch.environment import told_as
from vllm_fl.dispatch.environment import variable
from vllm_fl.dispatch.errors import PolicyError
from vllm_fl.dispatch.policy.keys import KEYS
from vllm_fl.dispatch.policy.keys import key_of
from vllm_fl.dispatch.policy.value import SelectionPolicy
from vllm_fl.dispatch.tuned import ABOUT
from vllm_fl.dispatch.tuned import check_about
from vllm_fl.dispatch.tuned import check_entry
from vllm_fl.dispatch.tuned import check_table

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Mapping

logger = get_logger(__name__)

#: The variables that ``VLLM_FL_CONFIG`` does not replace and that are on or off.
_SWITCHES = ("VLLM_FL_PREFER_ENABLED", "VLLM_FL_OOT_ENABLED")


def policy_of(values: Mapping[str, Any], sources: Mapping[str, str]) -> SelectionPolicy:
    """Make a policy of keys and values that have been read; each of them is explicit.

    Raises:
        PolicyError: a vendor is allowed and denied.
    """
    policy = SelectionPolicy(**values, explicit=frozenset(values), sources=sources)
    both = sorted(policy.deny_vendors & (policy.allow_vendors or frozenset()))
    if both:
        names = ", ".join(map(repr, both))
        raise PolicyError(
            f"{sources['deny_vendors']}: {names} is denied here and allowed by {sources['allow_vendors']}."
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
    by_variable = {key.variable: key for key in KEYS.values() if key.variable}
    given = {name: text for name in by_variable if (text := variable(name)) is not None}
    if path is not None:
        if given:
            logger.warning("VLLM_FL_CONFIG=%s replaces %s, which is set too.", path, ", ".join(given))
        return _policy_from_file(path, f"VLLM_FL_CONFIG={path}")
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name, text in given.items():
        key = by_variable[name]
        with told_as(f"{name}: "):
            values[key.name] = key.type.parse(key.name, text)
        sources[key.name] = name
    return policy_of(values, sources)


def policy_from_config(config_path: str) -> SelectionPolicy:
    """Read a policy from a YAML file; see the configuration reference for its keys.

    Raises:
        PolicyError: it cannot be read, is no YAML, or a value is wrong; the
            message begins with ``file:line`` where there is a line.
    """
    return _policy_from_file(str(config_path), str(config_path))


def _policy_from_file(path: str, asked_by: str) -> SelectionPolicy:
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    with _yaml(path, asked_by) as (loader, entries):
        # The two levels that are read one by one, so that an error has its line.
        for name, node, place in entries:
            with told_as(f"{place}: "):
                key = key_of(name)
                if key.name in values:
                    spellings = " and ".join((key.name, *key.older))
                    raise PolicyError(f"{spellings} are one key, which is set at {sources[key.name]}.")
            sources[key.name] = place
            if key.type.by_operator and _is_mapping(node):
                values[key.name] = {}
                for op_name, inner, its_place in _entries(loader, node, path):
                    value = _value(loader, inner, path)
                    with told_as(f"{its_place}: "):
                        values[key.name].update(key.type.read(key.name, {op_name: value}))
                    sources[f"{key.name}.{op_name}"] = its_place
                continue
            value = _value(loader, node, path)
            if key.type.in_file and isinstance(value, str):
                value = _table(os.path.join(os.path.dirname(path), value), f"{place}: {key.name}")
            with told_as(f"{place}: "):
                values[key.name] = key.type.read(key.name, value)
    return policy_of(values, sources)


def _table(path: str, asked_by: str) -> Any:
    """Return the tuned table of a file; an error has the file and the line."""
    found: dict[str, Any] = {}
    with _yaml(path, f"{asked_by}: {path}") as (loader, entries):
        for op_name, node, place in entries:
            if op_name == ABOUT:
                for key, value, its_place in _entries(loader, node, path):
                    with told_as(f"{its_place}: "):
                        check_about(key, _value(loader, value, path))
                continue
            rows = _rows(loader, node, path, op_name)
            with told_as(f"{place}: "):
                found.update(check_table({op_name: rows}))
    return found


def _rows(loader: Any, node: Any, path: str, op_name: str) -> Any:
    import yaml

    if not isinstance(node, yaml.SequenceNode):
        return _value(loader, node, path)
    rows = []
    for row in node.value:
        values = {key: _value(loader, value, path) for key, value, _ in _entries(loader, row, path)}
        with told_as(f"{path}:{row.start_mark.line + 1}: "):
            rows.append(check_entry(op_name, values))
    return rows


def _is_mapping(node: Any) -> bool:
    import yaml

    return isinstance(node, yaml.MappingNode)


@contextmanager
def _yaml(path: str, asked_by: str) -> Iterator[tuple[Any, list[tuple[Any, Any, str]]]]:
    """Give the loader and the entries of a YAML file, and every fault of it a place."""
    import yaml

    from vllm_fl.dispatch.common.bounded_yaml import Loader
    from vllm_fl.dispatch.common.bounded_yaml import check_size

    try:
        text = read_text(path)
    except (OSError, UnicodeError, ValueError) as error:
        raise PolicyError(f"{asked_by}: cannot be read: {error}") from None
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

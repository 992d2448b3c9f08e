"""YAML that is read in bounded time: with a depth, and with a size that aliases count in."""

from __future__ import annotations

from typing import Any

import yaml

#: A policy has four levels.
_DEEPEST = 50
#: Of what a file means, each alias as what it stands for.
_MOST_VALUES = 100_000
#: Of one value. Python reads a number of many digits in a time that grows with their square.
_LONGEST_VALUE = 4_000


class Loader(yaml.SafeLoader):
    """A loader that refuses what is nested too deeply before it looks for the end of it."""

    def fetch_flow_collection_start(self, token_class: Any) -> None:
        """Begin ``[`` or ``{``."""
        self._check_depth()
        super().fetch_flow_collection_start(token_class)

    def add_indent(self, column: int) -> bool:
        """Begin an indented block."""
        self._check_depth()
        return bool(super().add_indent(column))

    def _check_depth(self) -> None:
        if self.flow_level + len(self.indents) >= _DEEPEST:
            mark = self.get_mark()
            raise yaml.scanner.ScannerError(None, None, "it is nested too deeply", mark)


def check_size(root: yaml.Node | None) -> None:
    """Check how much a document means before anything is made of it.

    Raises:
        yaml.MarkedYAMLError: too much.
    """
    sizes: dict[int, int] = {}
    pending = [] if root is None else [root]
    while pending:
        node = pending[-1]
        children = _children(node)
        if id(node) not in sizes:
            sizes[id(node)] = 1  # what is met again before its end holds itself, which the loader refuses
            _check_length(node)
            pending += [child for child in children if id(child) not in sizes]
            if children:
                continue
        pending.pop()
        sizes[id(node)] = 1 + sum(sizes[id(child)] for child in children)
        if sizes[id(node)] > _MOST_VALUES:
            raise yaml.MarkedYAMLError(
                problem=f"it means more than {_MOST_VALUES:,} values", problem_mark=node.start_mark
            )


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def _check_length(node: yaml.Node) -> None:
    if isinstance(node, yaml.ScalarNode) and len(node.value) > _LONGEST_VALUE:
        raise yaml.MarkedYAMLError(
            problem=f"a value has more than {_LONGEST_VALUE:,} characters", problem_mark=node.start_mark
        )

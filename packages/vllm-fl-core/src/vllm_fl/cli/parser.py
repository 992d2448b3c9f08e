"""The parser of the command line, which names the nearest word where one is mistyped."""

from __future__ import annotations

import argparse
from typing import Any

from vllm_fl.dispatch.common.suggest import did_you_mean
from vllm_fl.dispatch.common.suggest import shown


class Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` whose errors name the nearest word; its sub-commands' parsers are the same."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices = action.choices
        if choices is None or value in choices:
            return
        nearest = did_you_mean(value, map(str, choices))
        raise argparse.ArgumentError(
            action, f"invalid choice: {shown(value)} (choose from {', '.join(map(str, choices))}).{nearest}"
        )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the arguments; what is unknown is an error of the sub-command that it was given to."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = [option for action in self._actions for option in action.option_strings]
            nearest = did_you_mean(unknown[0].partition("=")[0], options)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{'.' if nearest else ''}{nearest}")
        return found, unknown

"""``vllm-fl completion``: a completion script for a shell, made of the command's own parser."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.dispatch import OPERATORS

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Iterator

    from vllm_fl.cli.output import Output

_BASH = """\
# vllm-fl's completion for bash: source it, or put it where bash-completion looks.
_vllm_fl() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}}
  local path="" i
  for ((i = 1; i < COMP_CWORD; i++)); do
    case "$path ${{COMP_WORDS[i]}}" in
      {paths}) path="$path ${{COMP_WORDS[i]}}" ;;
    esac
  done
  local words=""
  case "$path $previous" in
{values}
    *)
      case "$path" in
{words}
      esac ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _vllm_fl vllm-fl
"""

_ZSH = """\
# vllm-fl's completion for zsh, which reads the one for bash: source it in ~/.zshrc.
autoload -U +X compinit && compinit
autoload -U +X bashcompinit && bashcompinit
"""


#: What a metavar of the parser stands for, where it is known.
_KNOWN = {"OP": tuple(OPERATORS)}


@dataclass(frozen=True)
class _Command:
    """One command of the parser.

    Attributes:
        path: the words that lead to it, none for the program itself.
        commands: its own commands, each with its help.
        options: its options, each with its help.
        values: an option, or "" for what stands alone, and what it may be.
    """

    path: tuple[str, ...]
    commands: dict[str, str]
    options: dict[str, str]
    values: dict[str, list[str]]


def add_commands(commands: Any, parser: argparse.ArgumentParser) -> None:
    """Add ``completion``, of ``parser``."""
    own = commands.add_parser(
        "completion",
        help="print a completion script for a shell",
        description="Print a completion script: source it in the shell's start-up file.",
        epilog='example: eval "$(vllm-fl completion bash)"',
    )
    own.add_argument("shell", choices=sorted(_SCRIPTS), help="the shell")

    def run(arguments: argparse.Namespace, output: Output) -> int:
        output.text(_SCRIPTS[arguments.shell](list(_walk(parser, ()))))
        return 0

    own.set_defaults(run=run)


def _walk(parser: argparse.ArgumentParser, path: tuple[str, ...]) -> Iterator[_Command]:
    command = _Command(path, {}, {}, {})
    yield command
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, subparser in action.choices.items():
                command.commands[name] = helps.get(name, "")
                yield from _walk(subparser, (*path, name))
            continue
        choices = list(action.choices or _KNOWN.get(str(action.metavar), ()))
        if not action.option_strings:
            command.values.setdefault("", []).extend(map(str, choices))
        for option in action.option_strings:
            command.options[option] = action.help or ""
            if choices:
                command.values[option] = list(map(str, choices))


def _bash(commands: list[_Command]) -> str:
    paths = [" " + " ".join(command.path) for command in commands if command.path]
    values, words = [], []
    for command in commands:
        path = "".join(f" {word}" for word in command.path)
        for option, choices in command.values.items():
            if option:
                values.append(
                    f"    {shlex.quote(f'{path} {option}')}) words={shlex.quote(' '.join(choices))} ;;"
                )
        offered = [*command.commands, *command.values.get("", ()), *command.options]
        words.append(f"        {shlex.quote(path)}) words={shlex.quote(' '.join(offered))} ;;")
    return _BASH.format(
        paths="|".join(map(shlex.quote, paths)), values="\n".join(values), words="\n".join(words)
    )


def _zsh(commands: list[_Command]) -> str:
    return _ZSH + _bash(commands)


def _fish(commands: list[_Command]) -> str:
    lines = ["# vllm-fl's completion for fish: ~/.config/fish/completions/vllm-fl.fish"]
    for command in commands:
        seen = [f"__fish_seen_subcommand_from {word}" for word in command.path]
        if command.commands:
            seen.append(f"not __fish_seen_subcommand_from {' '.join(command.commands)}")
        start = f"complete -c vllm-fl -n {shlex.quote('; and '.join(seen) or 'true')}"
        lines += [f"{start} -f -a {n} -d {shlex.quote(text)}" for n, text in command.commands.items()]
        if command.values.get(""):
            lines.append(f"{start} -f -a {shlex.quote(' '.join(command.values['']))}")
        for option, text in command.options.items():
            flag = f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}"
            choices = command.values.get(option)
            takes = f" -x -a {shlex.quote(' '.join(choices))}" if choices else ""
            lines.append(f"{start} {flag}{takes} -d {shlex.quote(text)}")
    return "\n".join(lines) + "\n"


_SCRIPTS: dict[str, Callable[[list[_Command]], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}

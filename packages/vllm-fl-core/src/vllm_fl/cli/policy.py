"""``vllm-fl policy``: the policy in force and where each value came from; a file's check."""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.cli.list_and_explain import left_to_vllm
from vllm_fl.cli.list_and_explain import warn_of_unread
from vllm_fl.cli.output import Problem
from vllm_fl.dispatch import DispatchError
from vllm_fl.dispatch import PolicyError
from vllm_fl.dispatch import get_default_manager
from vllm_fl.dispatch import get_policy
from vllm_fl.dispatch import match_token
from vllm_fl.dispatch import policy_from_config
from vllm_fl.dispatch.common.text import printable
from vllm_fl.dispatch.policy.keys import KEYS
from vllm_fl.dispatch.policy.packaged import effective
from vllm_fl.dispatch.policy.packaged import lies_below
from vllm_fl.dispatch.types import NATIVE

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from vllm_fl.cli.output import Output
    from vllm_fl.dispatch import OpRegistrySnapshot
    from vllm_fl.dispatch import SelectionPolicy

_COLUMNS = ("key", "value", "from")


def add_commands(commands: Any) -> None:
    """Add ``policy show`` and ``policy check``."""
    group = commands.add_parser(
        "policy",
        help="the policy in force, or whether a policy file is right",
        description="Show the policy in force, or check a policy file.",
        epilog="example: VLLM_FL_PREFER=reference vllm-fl policy show",
    )
    subcommands = group.add_subparsers(metavar="COMMAND", required=True)

    parser = subcommands.add_parser(
        "show",
        help="each value, and where it came from",
        description="Show each value of the policy in force and where it came from: a default, a wheel's "
        "packaged defaults, a variable, or a line of a file. A vendor's defaults depend on which vendors are "
        "available, so that this asks the backends (it imports their libraries).",
        epilog="example: VLLM_FL_STRICT=1 vllm-fl policy show",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_show)

    parser = subcommands.add_parser(
        "check",
        help="whether a policy file is right",
        description="Check a policy file as VLLM_FL_CONFIG would read it, and every name in it against what "
        "is installed. Exit code 1 where it is wrong.",
        epilog="example: vllm-fl policy check policy.yaml",
    )
    parser.add_argument("file", metavar="FILE", help="a YAML file")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_check)


def _show(arguments: argparse.Namespace, output: Output) -> int:
    manager = get_default_manager()
    try:
        manager.ensure_initialized()
        policy = get_policy()
        left = left_to_vllm()
    except DispatchError as error:
        raise Problem(str(error)) from None
    in_force = effective(policy, manager.snapshot())
    below = lies_below(policy, manager.snapshot())
    notes = [*manager.check_policy(policy), *below.faults, *filter(None, [below.note]), *left]
    if arguments.json:
        values = values_of(in_force)
        output.json_object({"fingerprint": policy.fingerprint(), "values": values, "notes": notes})
    else:
        output.table(f"Policy {policy.fingerprint()}", _COLUMNS, _table(in_force))
        for note in notes:
            output.text(printable(f"note: {note}"))
    warn_of_unread(manager, output)
    return 0


def _check(arguments: argparse.Namespace, output: Output) -> int:
    manager = get_default_manager()
    try:
        policy = policy_from_config(arguments.file)
        notes = manager.check_policy(policy)
    except PolicyError as error:
        if not arguments.json:
            raise Problem(str(error)) from None
        output.error(str(error))
        output.json_object({"file": arguments.file, "problem": str(error), "values": [], "notes": []})
        return 1
    except DispatchError as error:
        raise Problem(str(error)) from None
    notes = [*notes, *_means_nothing_here(policy, manager.snapshot())]
    if arguments.json:
        values = values_of(policy)
        output.json_object({"file": arguments.file, "problem": None, "values": values, "notes": notes})
        return 0
    output.table(f"{arguments.file} is right", _COLUMNS, _table(policy))
    for note in notes:
        output.text(printable(f"note: {note}"))
    return 0


def values_of(policy: SelectionPolicy) -> list[dict[str, Any]]:
    """Return every value of a policy with the place that it came from.

    Returns:
        ``{"key", "value", "source"}``: the keys of the policy file, an operator's own
        order as ``per_op_order.<operator>``. ``source`` is ``default``, ``code``, a
        variable, ``file:line`` or a vendor's packaged defaults.
    """
    return [{"key": name, "value": value, "source": source} for name, value, _, source in _rows(policy)]


def _rows(policy: SelectionPolicy) -> Iterator[tuple[str, Any, str, str]]:
    """Yield the key, the value, its text and its source."""
    for name, key in KEYS.items():
        rows = key.type.rows(getattr(policy, name), adds=name in policy.extends)
        for inner, (value, text) in rows.items():
            yield f"{name}{inner}", value, text, _source(policy, f"{name}{inner}")


def _table(policy: SelectionPolicy) -> list[list[str]]:
    return [[name, text, source] for name, _, text, source in _rows(policy)]


def _source(policy: SelectionPolicy, name: str) -> str:
    is_set = name.partition(".")[0] in policy.explicit
    return policy.source(name) or ("code" if is_set else "default")


def _means_nothing_here(policy: SelectionPolicy, snapshot: OpRegistrySnapshot) -> list[str]:
    """Say which tokens of the operators' own orders match nothing that is installed."""
    notes = []
    for op_name, order in policy.per_op_order:
        impls = snapshot.impls_by_op.get(op_name, ())
        for token in order:
            if token != NATIVE and not any(match_token(impl, token) for impl in impls):
                place = _source(policy, f"per_op_order.{op_name}")
                notes.append(f"{place}: nothing that is installed here is {token!r} of {op_name}")
    return notes

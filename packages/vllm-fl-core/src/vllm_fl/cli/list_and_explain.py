"""``vllm-fl list`` and ``vllm-fl explain``."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.cli.output import Problem
from vllm_fl.dispatch import DispatchError
from vllm_fl.dispatch import PolicyError
from vllm_fl.dispatch import get_default_manager
from vllm_fl.dispatch import get_policy
from vllm_fl.dispatch.common.foreign import describe
from vllm_fl.dispatch.common.foreign import raise_if_from_a_signal
from vllm_fl.dispatch.common.text import printable
from vllm_fl.dispatch.types import NATIVE
from vllm_fl.dispatch.variables import unread_variables
from vllm_fl.dispatch.wheels import install_hint
from vllm_fl.integration import settings

if TYPE_CHECKING:
    import argparse

    from vllm_fl.cli.output import Output
    from vllm_fl.dispatch import OpImpl
    from vllm_fl.dispatch import OpManager
    from vllm_fl.dispatch.decision import Decision

_WHAT = ("ops", "backends", "plugins")


def add_commands(commands: Any) -> None:
    """Add ``list`` and ``explain``."""
    parser = commands.add_parser(
        "list",
        help="what is installed",
        description="List the plugins, the backends and the operators. Imports no vendor library.",
        epilog="example: vllm-fl list ops --json",
    )
    parser.add_argument("what", nargs="?", choices=_WHAT, help="only these; all three if left out")
    parser.add_argument(
        "--probe", action="store_true", help="ask each backend whether it is available (imports its library)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_list)

    parser = commands.add_parser(
        "explain",
        help="what runs for an operator, and why",
        description="Show the decision that the policy in force makes for each operator.",
        epilog="example: VLLM_FL_PREFER=reference vllm-fl explain rms_norm",
    )
    parser.add_argument("op", nargs="*", metavar="OP", help="operators, such as rms_norm")
    parser.add_argument("--all", action="store_true", help="every operator")
    parser.add_argument(
        "--native", action="store_true", help="with vLLM's own path, as a layer of vLLM decides"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_explain, usage=parser.error)


def _list(arguments: argparse.Namespace, output: Output) -> int:
    manager = get_default_manager()
    try:
        manager.discover()
    except DispatchError as error:
        raise Problem(str(error)) from None
    wanted = [arguments.what] if arguments.what else list(_WHAT)
    makers = {
        "plugins": lambda: plugin_rows(manager),
        "backends": lambda: _backends(manager, arguments.probe),
        "ops": lambda: _operators(manager),
    }
    found = {what: makers[what]() for what in wanted}
    try:
        notes = left_to_vllm()
    except PolicyError as error:  # what is installed can be listed all the same
        notes = [str(error)]
    if arguments.json:
        values: dict[str, Any] = {"operators" if what == "ops" else what: r for what, r in found.items()}
        output.json_object({**values, "notes": notes} if "ops" in found else values)
        return 0
    if "plugins" in found:
        rows = [
            [r["name"], r["distribution"], r["version"], r["state"], r["reason"]] for r in found["plugins"]
        ]
        output.table("Plugins", ("plugin", "distribution", "version", "state", "why"), rows)
        if not rows:
            output.text(
                "No plugin is installed: pip install vllm-fl-reference, and the wheel of your chip "
                "(vllm-fl explain OP names those that implement it).\n"
            )
    if "backends" in found:
        rows = [
            [r["impl_id"], r["kind"], r["distribution"], len(r["operators"]), _availability(r)]
            for r in found["backends"]
        ]
        output.table("Backends", ("implementation", "kind", "wheel", "operators", "available"), rows)
    if "ops" in found:
        rows = [[r["name"], ", ".join(r["impl_ids"]) or "-", r["contract"]] for r in found["ops"]]
        output.table("Operators", ("operator", "implementations", "contract"), rows)
        for line in notes:
            output.text(printable(line))
    return 0


def _availability(row: dict[str, Any]) -> str:
    if row["available"] is None:
        return "not asked (--probe asks)"
    return "yes" if row["available"] else f"no: {row['reason']}"


def plugin_rows(manager: OpManager) -> list[dict[str, Any]]:
    """Return what became of every plugin, as plain values."""
    return [
        {
            "name": record.name,
            "distribution": record.distribution,
            "version": record.version,
            "source": record.source,
            "api_version": record.api_version,
            "state": record.state,
            "reason": record.reason,
            "operators": list(record.operators),
        }
        for record in manager.registry.plugins.values()
    ]


def _backends(manager: OpManager, probe: bool) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for op_name, impls in sorted(manager.registry.snapshot().impls_by_op.items()):
        for impl in impls:
            row = found.setdefault(
                impl.impl_id,
                {
                    "impl_id": impl.impl_id,
                    "kind": impl.kind.value,
                    "vendor": impl.vendor,
                    "distribution": impl.origin.distribution if impl.origin else None,
                    "version": impl.origin.version if impl.origin else None,
                    "operators": [],
                    "available": None,
                    "reason": None,
                },
            )
            row["operators"].append(op_name)
            if probe and row["available"] is not True:
                row["reason"] = _why_not(impl)
                row["available"] = row["reason"] is None
    return [found[impl_id] for impl_id in sorted(found)]


def _why_not(impl: OpImpl) -> str | None:
    """Say why an implementation cannot run here; its module is a part of that."""
    reason = impl.unavailable_reason()
    if reason is None:
        try:
            impl.load()
        except BaseException as error:  # noqa: BLE001 - the reason that people read
            raise_if_from_a_signal(error)
            return f"cannot be loaded: {describe(error)}"
    return reason


def _operators(manager: OpManager) -> list[dict[str, Any]]:
    snapshot = manager.registry.snapshot()
    rows = []
    for name in sorted({*snapshot.operators, *snapshot.impls_by_op}):
        operator = snapshot.operators.get(name)
        rows.append(
            {
                "name": name,
                "contract": operator.doc.partition("\n")[0] if operator else "(not declared)",
                "impl_ids": [impl.impl_id for impl in snapshot.impls_by_op.get(name, ())],
            }
        )
    return rows


def _explain(arguments: argparse.Namespace, output: Output) -> int:
    if bool(arguments.op) == arguments.all:
        output.error("explain takes operators, or --all (see vllm-fl explain --help)")
        return 2
    manager = get_default_manager()
    try:
        manager.ensure_initialized()
        snapshot = manager.snapshot()
        every = sorted({*snapshot.operators, *snapshot.impls_by_op})
        names = every if arguments.all else list(dict.fromkeys(arguments.op))
        decisions = [manager.explain(name, native=arguments.native) for name in names]
        layers = [settings.expected(manager.explain(name, native=True)) for name in names]
    except DispatchError as error:
        raise Problem(str(error)) from None
    plugins = [r for r in manager.registry.plugins.values() if not r.success]
    if arguments.json:
        output.json_object(
            {
                "decisions": [
                    {**decision.to_dict(), "layers": [layer._asdict() for layer in of_it]}
                    for decision, of_it in zip(decisions, layers, strict=True)
                ]
            }
        )
    elif arguments.all:
        rows = [[d.op_name, d.impl_id or "-", d.form if d.impl_id else "-", _why(d)] for d in decisions]
        output.table(
            f"Operators, order {' > '.join(decisions[0].order)}, policy {decisions[0].policy}",
            ("operator", "runs", "form", "why"),
            rows,
        )
        for line in left_to_vllm():
            output.text(printable(line))
    else:
        for number, (decision, of_it) in enumerate(zip(decisions, layers, strict=True)):
            if number:
                output.text()
            _print_decision(decision, of_it, output)
        if any(layer.impl_id not in (None, NATIVE) for of_it in layers for layer in of_it):
            _print_what_the_compiler_keeps(names, output)
    warn_of_unread(manager, output)
    for record in plugins:
        output.note(f"plugin {record.name!r} ({record.distribution} {record.version}): {record.reason}")
    return 1 if arguments.op and any(d.impl_id is None for d in decisions) else 0


def _print_decision(decision: Decision, layers: list[settings.Expected], output: Output) -> None:
    output.text(str(decision))
    if not decision.candidates:
        output.text(install_hint(decision.op_name))
    own = {layer.name: layer.reason for layer in layers if layer.reason is not None}
    runs = {
        layer.name: f"{layer.impl_id} ({layer.form})" if layer.impl_id else "nothing, and vLLM does not start"
        for layer in layers
        if layer.reason is None
    }
    for line in [*_inside("runs", " ", runs), *_inside("stays", " vLLM's own: ", own)]:
        output.text(printable(line))


def _inside(verb: str, then: str, fates: dict[str, str]) -> list[str]:
    """Say what becomes of vLLM's layers, a sentence for all of which the same is true."""
    lines = []
    for fate in dict.fromkeys(fates.values()):
        names = [name for name, its in fates.items() if its == fate]
        one_or_many = verb if len(names) == 1 else verb.removesuffix("s")
        lines.append(f"inside vLLM: {', '.join(names)} {one_or_many}{then}{fate}")
    return lines


def _print_what_the_compiler_keeps(names: list[str], output: Output) -> None:
    policy = get_policy()
    left = [name for name in names if not policy.is_explicit_for(name)]
    if left and find_spec("vllm"):
        output.text(
            "Inside vLLM, a layer that is left to its compiler (the default mode) stays native unless you "
            "ask for another, as with VLLM_FL_PREFER or VLLM_FL_PER_OP."
        )


def left_to_vllm() -> list[str]:
    """Say in sentences what VLLM_FL_OOT_* and VLLM_FL_PREFER_ENABLED leave to vLLM.

    Raises:
        PolicyError: a variable is wrong.
    """
    off = settings.off_by()
    if off is not None:
        return [f"inside vLLM: every layer stays vLLM's own: {off} is off"]
    return _inside("stays", " vLLM's own: ", settings.left_to_vllm())


def warn_of_unread(manager: OpManager, output: Output) -> None:
    """Note on stderr each VLLM_FL_* variable that is set and that nobody reads."""
    for name, hint in unread_variables(manager.registry.plugins.values()).items():
        output.note(f"vllm-fl: the environment variable {name} is read by nobody.{hint}")


def _why(decision: Any) -> str:
    if decision.impl_id is None:
        return "nothing is installed" if not decision.candidates else decision.candidates[0].reason
    passed_over = [c for c in decision.candidates if c.status not in ("chosen", "next")]
    reasons = [decision.candidates[0].reason, *(f"{c.impl_id} {c.reason}" for c in passed_over)]
    return "; ".join(reasons)

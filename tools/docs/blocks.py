"""The generated blocks: what each says, made of the code."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl import cli
from vllm_fl.dispatch import OPERATORS
from vllm_fl.dispatch.policy.keys import KEYS
from vllm_fl.dispatch.variables import VARIABLES
from vllm_fl.dispatch.wheels import known_wheels

if TYPE_CHECKING:
    import inspect
    from collections.abc import Callable
    from collections.abc import Iterable
    from collections.abc import Mapping

    from tools.docs.language import Language
    from vllm_fl.dispatch import Operator
    from vllm_fl.dispatch.wheels import Wheel

_ROOT = Path(__file__).parents[2]
_REPOSITORY = "https://github.com/vllm-fl/vllm-fl/tree/main"


def _table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(columns), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def variables(language: Language, page: Path) -> str:
    """Return the table of the core's environment variables."""
    columns = map(language, ("variable", "what it says", "default"))
    rows = (
        [f"`{one.name}`", language(one.meaning), f"`{one.default}`" if one.default else ""]
        for one in VARIABLES.values()
    )
    return _table(columns, rows)


def policy_keys(language: Language, page: Path) -> str:
    """Return the table of the policy file's keys."""
    columns = map(language, ("key", "what it says", "default"))
    rows = (
        [f"`{key.name}`", language(key.meaning), f"`{json.dumps(key.type.plain(key.type.default))}`"]
        for key in KEYS.values()
    )
    return _table(columns, rows)


def _wheels() -> list[Wheel]:
    return [wheel for wheel in known_wheels() if not wheel.sample]


def packages(language: Language, page: Path) -> str:
    """Return the table of the wheels."""
    rows = [
        [
            "vllm-fl-core",
            "",
            language("none: it chooses, explains and plugs into vLLM"),
            language("every machine"),
        ]
    ]
    rows += [[w.distribution, f"`{w.impl_id}`", "", language(w.purpose)] for w in known_wheels()]
    for row in rows:
        row[0] = f"[{row[0]}]({_REPOSITORY}/packages/{row[0]})"
        row[1:3] = [" ".join(filter(None, row[1:3]))]
    return _table(map(language, ("package", "implementations", "for")), rows)


def verified() -> dict[str, dict[str, list[str]]]:
    """Return the pages of runs on real hardware, by implementation and operator.

    ``CARD-vllm-VERSION-IMPL.json`` is the kit's report, ``CARD-vllm-VERSION.md`` the page.
    An operator is verified where cases of it passed and none failed.
    """
    found: dict[str, dict[str, list[str]]] = {}
    for path in sorted((_ROOT / "docs" / "verified").glob("*.json")):
        states: dict[tuple[str, str], set[str]] = {}
        for result in json.loads(path.read_text("utf-8"))["results"]:
            if result["is_case"]:
                states.setdefault((result["impl_id"], result["op"]), set()).add(result["status"])
        for (impl_id, op_name), of_op in states.items():
            if "passed" in of_op and "failed" not in of_op:
                page = path.stem.removesuffix(f"-{impl_id}")
                found.setdefault(impl_id, {}).setdefault(op_name, []).append(page)
    return found


def operators(language: Language, page: Path) -> str:
    """Return the table of the operators and who implements them."""
    wheels, reports = _wheels(), verified()
    rows = []
    for name in OPERATORS:
        cells = []
        for wheel in wheels:
            ran = reports.get(wheel.impl_id, {}).get(name, [])
            links = (f"[{_card(stem)}]({_to_report(stem, page)})" for stem in ran)
            cells.append(" ".join(["✓", *links]) if name in wheel.operators else "")
        rows.append([f"`{name}`", *cells])
    return _table([language("operator"), *(f"`{wheel.impl_id}`" for wheel in wheels)], rows)


def _card(stem: str) -> str:
    return stem.partition("-")[0].upper()


def _to_report(stem: str, page: Path) -> str:
    return f"{'' if page.parent == _ROOT / 'docs' else 'docs/'}verified/{stem}.md"


def contracts(language: Language, page: Path) -> str:
    """Return a section for every operator: its contract and what is known of it."""
    return "\n\n".join(_contract(operator, language) for operator in OPERATORS.values())


def _contract(operator: Operator, language: Language) -> str:
    summary = operator.doc.partition("\n")[0]
    offered = [f"`{wheel.impl_id}`" for wheel in _wheels() if operator.name in wheel.operators]
    facts = {
        "may write": [f"`{name}`" for name in operator.mutates],
        "only helps, and is left out for who does not take it": [f"`{name}`" for name in operator.hints],
        "implemented by": offered,
    }
    lines = [f"## {operator.name}", "", language(summary), ""]
    lines += [f"- {language.listed(title, what)}" for title, what in facts.items() if what]
    lines += ["", "```text", f"{operator.name}{_bare(operator.signature)}", "", operator.doc, "```"]
    return "\n".join(lines)


@dataclass(frozen=True)
class _Bare:
    """An annotation as it stands in the source, without quotes."""

    text: str

    def __repr__(self) -> str:
        return self.text


def _bare(signature: inspect.Signature) -> inspect.Signature:
    parameters = [p.replace(annotation=_Bare(p.annotation)) for p in signature.parameters.values()]
    return signature.replace(parameters=parameters, return_annotation=_Bare(signature.return_annotation))


def schema(language: Language, page: Path) -> str:
    """Return a section for every command with ``--json``: its keys and what they say."""
    definitions = json.loads(Path(cli.__file__).with_name("schema.json").read_text("utf-8"))["$defs"]
    sections = []
    for name, definition in definitions.items():
        if "allOf" not in definition:
            continue
        rows = _keys(definition, definitions, language, "")
        sections.append(f"### {name}\n\n" + _table(map(language, ("key", "type", "what it says")), rows))
    return "\n\n".join(sections)


def _keys(
    definition: Mapping[str, Any], definitions: Mapping[str, Any], language: Language, before: str
) -> list[list[str]]:
    rows = []
    for key, value in definition.get("properties", {}).items():
        rows.append([f"`{before}{key}`", _type(value), language(value["description"])])
        inner = value.get("items", {})
        if "$ref" in inner:
            inner = definitions[inner["$ref"].rpartition("/")[2]]
        rows += _keys(inner, definitions, language, f"{before}{key}[].")
    return rows


def _type(value: Mapping[str, Any]) -> str:
    if "enum" in value:
        return ", ".join(f"`{one}`" for one in value["enum"])
    if "const" in value:
        return f"`{value['const']}`"
    kinds = value.get("type", "any")
    return kinds if isinstance(kinds, str) else " / ".join(kinds)


BLOCKS: dict[str, Callable[[Language, Path], str]] = {
    "variables": variables,
    "policy keys": policy_keys,
    "packages": packages,
    "operators": operators,
    "contracts": contracts,
    "schema": schema,
}

"""Functions with an operator's own signature, made as dataclasses make theirs.

A function that takes ``x`` and passes ``x`` costs a third of one that takes
``*args`` and passes ``*args``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import Any

if TYPE_CHECKING:
    import inspect
    from collections.abc import Callable

#: What a generated function may be.
GUARD, ADAPTER = "guard", "adapter"


def file_of(what: str) -> str:
    """Return what the file name of a generated function begins with."""
    return f"<vllm-fl {what}"


def generated(
    what: str,
    operator_name: str,
    signature: inspect.Signature | None,
    body: str,
    names: dict[str, Any],
) -> tuple[Callable[..., Any], Callable[[Callable[..., Any]], None]]:
    """Compile a function with the operator's signature.

    Args:
        what: ``GUARD`` or ``ADAPTER``; see :func:`file_of`.
        operator_name: its name.
        signature: the operator's; None for one that nobody declared.
        body: its lines. ``{call}`` passes every argument on, ``{packed}`` is the pair
            of a tuple and a dict of them.
        names: what its lines use. Each begins with an underscore, so that an operator
            may call a parameter ``first``.

    Returns:
        The function, and a setter of the ``_first`` that its lines may call.
    """
    # By identity: a signature takes long to hash. The entry keeps it alive.
    key = (what, operator_name, id(signature), body, *names)
    found = _compiled.get(key)
    if found is None:
        found = _compiled[key] = (signature, *_make(what, operator_name, signature, body, names))
    _, make, defaults = found
    made: tuple[Callable[..., Any], Any] = make(_first=None, **names, **defaults)
    return made


#: What has been compiled, with the signature that it was compiled for and its defaults.
_compiled: dict[tuple[Any, ...], tuple[Any, Callable[..., Any], dict[str, Any]]] = {}


def _make(
    what: str, operator_name: str, signature: inspect.Signature | None, body: str, names: dict[str, Any]
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Compile what makes the function of ``names`` and the defaults that are returned with it."""
    defaults: dict[str, Any] = {}
    if signature is None:
        head, call, packed = "*args, **kwargs", "*args, **kwargs", "args, kwargs"
    else:
        heads: list[str] = []
        calls: list[str] = []
        positional: list[str] = []
        keywords: list[str] = []
        for parameter in signature.parameters.values():
            name = parameter.name
            keyword_only = parameter.kind is parameter.KEYWORD_ONLY
            if keyword_only and "*" not in heads:
                heads.append("*")
            if parameter.default is parameter.empty:
                heads.append(name)
            else:
                defaults[f"_default_of_{name}"] = parameter.default
                heads.append(f"{name}=_default_of_{name}")
            calls.append(f"{name}={name}" if keyword_only else name)
            (keywords if keyword_only else positional).append(name)
        head, call = ", ".join(heads), ", ".join(calls)
        items = ", ".join(f"{name!r}: {name}" for name in keywords)
        packed = f"({''.join(name + ', ' for name in positional)}), {{{items}}}"
    lines = body.format(call=call, packed=packed).splitlines()
    source = "\n".join(
        [
            f"def make({', '.join({'_first': None, **names, **defaults})}):",
            f"    def {operator_name}({head}):",
            *("        " + line for line in lines),
            "    def _set_first(new):",
            "        nonlocal _first",
            "        _first = new",
            f"    return {operator_name}, _set_first",
        ]
    )
    namespace: dict[str, Any] = {"__name__": __name__}
    exec(compile(source, f"{file_of(what)} of {operator_name}>", "exec"), namespace)  # noqa: S102
    return namespace["make"], defaults

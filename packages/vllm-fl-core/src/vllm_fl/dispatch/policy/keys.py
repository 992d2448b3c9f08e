"""The table of a policy's keys.

:data:`KEYS` is where a key is declared. The policy file, the variables, ``from_dict`` and
``to_dict``, the laying over packaged defaults, ``vllm-fl policy show``, the pages' tables
and every error about a key or a value are made of it. Beside its row a key has an
attribute of the same name in :class:`~vllm_fl.dispatch.policy.value.SelectionPolicy`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_fl.dispatch.common.suggest import did_you_mean
from vllm_fl.dispatch.common.suggest import shown
from vllm_fl.dispatch.errors import PolicyError
from vllm_fl.dispatch.policy.value_types import KINDS
from vllm_fl.dispatch.policy.value_types import PREFER_DEFAULT
from vllm_fl.dispatch.policy.value_types import Choice
from vllm_fl.dispatch.policy.value_types import Orders
from vllm_fl.dispatch.policy.value_types import Switch
from vllm_fl.dispatch.policy.value_types import Tuned
from vllm_fl.dispatch.policy.value_types import Vendors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm_fl.dispatch.policy.value_types import ValueType

#: What ``defaults`` says: those of the available vendor's wheel lie below, or they do not.
PACKAGED, NO_DEFAULTS = "packaged", "none"


@dataclass(frozen=True)
class Key:
    """One key of a policy.

    Attributes:
        name: its name: in the file, in code, in what is shipped and shown.
        type: what its value may be, with the default and how it is laid over another one.
        meaning: what it says, in a line.
        variable: the environment variable that sets it; empty where there is none.
        packaged: whether a vendor's wheel may set it.
        older: other names that are read too.
    """

    name: str
    type: ValueType
    meaning: str
    variable: str = ""
    packaged: bool = True
    older: tuple[str, ...] = ()

    @property
    def meaning_of_variable(self) -> str:
        """What the variable says, in a line, with the form of it."""
        return f"{self.meaning}: {self.type.form}" if self.type.form else self.meaning


_ALL = (
    Key(
        "prefer",
        Choice(PREFER_DEFAULT, options=KINDS),
        "the kind that is tried first: flagos, vendor, reference or native",
        "VLLM_FL_PREFER",
    ),
    Key(
        "strict",
        Switch(default=False),
        "raise an implementation's first failure instead of running the next one",
        "VLLM_FL_STRICT",
    ),
    Key(
        "per_op_order",
        Orders(()),
        "operators' own orders; what an order does not list is not tried",
        "VLLM_FL_PER_OP",
        older=("op_backends",),
    ),
    Key("allow_vendors", Vendors(None), "the only vendors that may be chosen", "VLLM_FL_ALLOW_VENDORS"),
    Key("deny_vendors", Vendors(frozenset()), "vendors that are never chosen", "VLLM_FL_DENY_VENDORS"),
    Key(
        "tuned",
        Tuned(()),
        "a tuned table's file, named from the policy file's folder",
        packaged=False,
    ),
    Key(
        "defaults",
        Choice(PACKAGED, options=(PACKAGED, NO_DEFAULTS)),
        "packaged, or none: leave out the defaults that the available vendor's wheel brings",
        "VLLM_FL_DEFAULTS",
        packaged=False,
    ),
)

#: Every key of a policy, by name.
KEYS: Mapping[str, Key] = {key.name: key for key in _ALL}


def key_of(name: object) -> Key:
    """Return a key by its name, or by an older one.

    Raises:
        PolicyError: there is none; the message has the nearest name.
    """
    for key in KEYS.values():
        if name == key.name or name in key.older:
            return key
    raise PolicyError(f"unknown key {shown(name)}; keys are {', '.join(KEYS)}.{did_you_mean(name, KEYS)}")

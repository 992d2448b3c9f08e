"""What error messages are made of."""

from __future__ import annotations

import sys

import pytest

from vllm_fl.dispatch.common.suggest import did_you_mean
from vllm_fl.dispatch.common.suggest import shown
from vllm_fl.dispatch.common.suggest import suggest


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("refrence", " Did you mean 'Reference'?"),
        ("REFERENCE", " Did you mean 'Reference'?"),
        # Both are near; the nearer one, and only that.
        ("referenced", " Did you mean 'Reference'?"),
        ("zzz", ""),
        (7, ""),
        (None, ""),
    ],
)
def test_the_nearest_name(name: object, said: str) -> None:
    assert did_you_mean(name, ["preferences", "Reference", "native"]) == said


def test_what_is_known_where_nothing_is_near() -> None:
    assert suggest("zzz", ["b", "a"]) == " Known: a, b."
    assert suggest("nativ", ["vendor", "native"]) == " Did you mean 'native'?"
    assert suggest("zzz", []) == ""


def test_a_short_value_is_whole() -> None:
    assert shown("a" * 298) == repr("a" * 298)


def test_a_long_value_is_shortened() -> None:
    # With its quotes it is one too long; what is long inside of a container is shortened, too.
    assert len(shown("a" * 299)) == 300
    many = shown({f"key{n}": "a" * 290 for n in range(4)})
    assert len(many) == 303
    assert many.endswith("...")
    assert shown(["b" * 297]) == f"{['b' * 297]!r}"[:300] + "..."


def test_a_number_that_python_does_not_write() -> None:
    digits = sys.get_int_max_str_digits()
    assert shown(10**digits) == "a number that is too long to show (int)"


def test_a_value_that_ends_the_process_where_it_is_shown() -> None:
    class Leaves:
        def __repr__(self) -> str:
            sys.exit(1)

    assert shown(Leaves()) == "an object of Leaves that cannot be shown"

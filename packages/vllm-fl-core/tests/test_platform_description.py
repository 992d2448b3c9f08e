"""A description of a chip is checked when it is made, and every error names its field."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING
from typing import Any

import pytest

from vllm_fl.platform.description import Chip
from vllm_fl.platform.description import Quirk
from vllm_fl.platform.description import what_is_missing
from vllm_fl.platform.errors import DescriptionError

if TYPE_CHECKING:
    from collections.abc import Callable

NEEDED = {"name": "Acme", "probe": "acme:probe", "device_type": "acme", "torch_module": "torch.acme"}
QUIRK = {"name": "late", "first": "0.26", "reason": "it is late", "apply": "acme:late"}

#: Values that no field takes, and some that only this field refuses.
WRONG: dict[str, list[Any]] = {
    "name": ["", " ", None, 1],
    "probe": ["acme", "acme.probe", "acme:", ":probe", "acme:probe()", "acme :probe", lambda: True],
    "device_type": ["acme:0", "", "Acme", "acme 1", None],
    "torch_module": ["torch:acme", "torch.", "", None],
    "imports": ["torch_acme", ["torch_acme"], ("torch_acme", ""), ("a:b",), None],
    "indexed": [1, "yes", None],
    "dispatch_key": ["", "Private Use", None],
    "dist_backend": ["", None, "a b"],
    "communicator": ["", "a.B", False],
    "visible_devices": [None, "A=1", "A B"],
    "ray_key": [None, 1],
    "ray_noset": ["A", ("A B",), None],
    "dtypes": [(), "float16", ("half",), ["float16"], (16,)],
    "fp8": [None, 0],
    "capability": [9, (9,), [9, 0], (9, "0"), (9, True), "9.0"],
    "pin_memory": [None, "no"],
    "compile_backend": ["", 1, False],
    "graph_wrapper": ["a.B", 1],
    "block_size": [0, -1, True, "16", 1.5],
    "attention": ["a.B", ""],
    "cuda_names": [None, [], {"Stream": "a.Stream"}, {"": "a:b"}, {1: "a:b"}, {"Stream": None}],
    "accelerator": [None, {"synchronize": print}],
    "triton_kernels": [("a", "b"), {"a.b": "c"}],
    "total_memory": [1 << 30, ""],
    "compute_units": [8, ""],
    "worker": ["a.B", object()],
    "runner": ["a.B", True],
    "quirks": [[Quirk(**QUIRK)], (QUIRK,), Quirk(**QUIRK), None],
}


def test_every_field_is_tried() -> None:
    assert set(WRONG) == {field.name for field in dataclasses.fields(Chip)}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in WRONG.items() for value in values]
)
def test_a_wrong_value_is_named(field: str, value: Any) -> None:
    with pytest.raises(DescriptionError, match=f"^field {field}: .*must be"):
        Chip(**{**NEEDED, field: value})


def test_every_wrong_field_is_named_at_once() -> None:
    with pytest.raises(DescriptionError) as caught:
        Chip(**{**NEEDED, "device_type": "acme:0", "block_size": 0})
    assert "field device_type: " in str(caught.value)
    assert "field block_size: must be a positive number, not 0" in str(caught.value)


def test_an_unknown_field_is_named_with_the_nearest_one() -> None:
    with pytest.raises(DescriptionError, match=r"no field 'dispatch_keys'\. Did you mean 'dispatch_key'\?"):
        Chip(**NEEDED, dispatch_keys="CPU")


@pytest.mark.parametrize("field", NEEDED)
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(DescriptionError, match=f"these fields are missing: {field}$"):
        Chip(**{name: value for name, value in NEEDED.items() if name != field})


def test_the_least_that_a_description_says() -> None:
    chip = Chip(**NEEDED)
    # What costs something where it is left out says so.
    assert what_is_missing("graph_wrapper").startswith("no device graphs")
    assert {field.name for field in dataclasses.fields(Chip)} == set(chip.to_dict())
    with pytest.raises(dataclasses.FrozenInstanceError):
        chip.name = "other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        chip.cuda_names["Stream"] = "a:b"  # type: ignore[index]


def test_a_mapping_is_the_descriptions_own() -> None:
    names = {"Stream": "acme:Stream"}
    chip = Chip(**NEEDED, cuda_names=names)
    names["Stream"] = "other:Stream"
    assert chip.to_dict()["cuda_names"] == {"Stream": "acme:Stream"}


@pytest.mark.parametrize(
    ("field", "value"),
    [("name", ""), ("first", "0"), ("first", None), ("last", "new"), ("reason", ""), ("apply", "acme.late")],
)
def test_a_wrong_quirk_is_named(field: str, value: Any) -> None:
    with pytest.raises(DescriptionError, match=f"^quirks: {field}: must be"):
        Quirk(**{**QUIRK, field: value})


@pytest.mark.parametrize(
    ("last", "version", "applies"),
    [
        (None, (0, 25), False),
        (None, (0, 26), True),
        (None, (1, 0), True),
        ("0.32", (0, 32), True),
        ("0.32", (0, 32, 1), True),
        ("0.32", (0, 33), False),
        ("0.9", (0, 26), False),
    ],
)
def test_a_quirk_has_a_range_of_versions(last: str | None, version: tuple[int, ...], applies: bool) -> None:
    assert Quirk(**{**QUIRK, "last": last}).applies_to(version) is applies


def test_it_imports_neither_torch_nor_vllm(python: Callable[..., Any]) -> None:
    done = python(
        "import sys\n"
        "from vllm_fl.platform.description import Chip\n"
        f"Chip(**{NEEDED!r})\n"
        "from vllm_fl.platform import platform\n"
        "from vllm_fl.platform.choice import chosen\n"
        "chosen(), platform()\n"
        "print({'torch', 'vllm', 'numpy', 'yaml'} & {*sys.modules}, 'vllm_fl.platform.build' in sys.modules)"
    )
    assert done.stdout == "set() False\n", done.stderr

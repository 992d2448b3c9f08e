"""A configuration that is a pipe or a device, has no end, or means more than it says: an error, soon."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING
from typing import Any

import pytest

from vllm_fl.conformance.waivers import WaiverError
from vllm_fl.conformance.waivers import read
from vllm_fl.dispatch import PolicyError
from vllm_fl.dispatch import call_op
from vllm_fl.dispatch import policy_from_config
from vllm_fl.dispatch.common.distributions import text_of
from vllm_fl.dispatch.common.files import read_text
from vllm_fl.dispatch.discovery import _name_and_version

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def in_time(function: Callable[..., Any], *args: Any) -> Any:
    """Return what a function returns or raises; fail where it does not come back."""
    done: list[Any] = []

    def run() -> None:
        try:
            done.append(function(*args))
        except BaseException as error:
            done.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(300)
    assert not thread.is_alive(), "it does not come back"
    return done[0]


NAMES: dict[str, Callable[[Path], str]] = {
    "a pipe": lambda folder: os.mkfifo(folder / "pipe") or str(folder / "pipe"),  # type: ignore[func-returns-value]
    "a device": lambda folder: "/dev/zero",
    "a link to a device": lambda folder: (folder / "link").symlink_to("/dev/zero") or str(folder / "link"),  # type: ignore[func-returns-value]
}


@pytest.mark.parametrize("make", NAMES.values(), ids=NAMES)
def test_no_regular_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], str]
) -> None:
    path = make(tmp_path)
    error = in_time(policy_from_config, path)
    assert isinstance(error, PolicyError)
    assert str(error) == f"{path}: cannot be read: it is not a regular file"
    table = tmp_path / "policy.yaml"
    table.write_text(f"tuned: {path}\n")
    assert "cannot be read: it is not a regular file" in str(in_time(policy_from_config, str(table)))
    monkeypatch.setenv("VLLM_FL_CONFIG", path)
    assert str(in_time(call_op, "silu_and_mul", 1)).startswith(f"VLLM_FL_CONFIG={path}: cannot be read")
    assert isinstance(in_time(read, tmp_path / path), WaiverError)


def test_the_size_of_a_file_has_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "four bytes"
    path.write_text("中x", "utf-8")
    assert read_text(path, 4) == "中x"
    with pytest.raises(OSError, match="it is larger than 3 bytes"):
        read_text(path, 3)


def test_a_folder_is_named_and_closed(tmp_path: Path) -> None:
    def next_descriptor() -> int:
        os.close(descriptor := os.open(os.devnull, os.O_RDONLY))
        return descriptor

    before = next_descriptor()
    with pytest.raises(IsADirectoryError) as raised:
        read_text(tmp_path)
    assert raised.value.filename == str(tmp_path)
    assert next_descriptor() == before


def bomb(first: str, each: str) -> str:
    """Return a list in which each entry is twice the one before."""
    return "per_op_order:\n  silu_and_mul:\n" + "".join(
        f"  - &a{n} {first if n == 0 else each.replace('*', f'*a{n - 1}')}\n" for n in range(40)
    )


TEXTS = {
    "flow sequences": ("[" * 2**19, "nested too deeply"),
    "flow mappings": ("{" * 2**19, "nested too deeply"),
    "flow in flow": ("prefer: " + "[{a: " * 2**16, "nested too deeply"),
    "block sequences": ("- " * 2**18, "nested too deeply"),
    "complex keys": ("? " * 2**18, "nested too deeply"),
    "indentation": ("".join(" " * n + "a:\n" for n in range(1000)), "nested too deeply"),
    "aliases": (bomb("[x, x]", "[*, *]"), "it means more than 100,000 values"),
    "merge keys": (bomb("{x: 1}", "{<<: [*, *]}"), "it means more than 100,000 values"),
    "a value in itself": ("per_op_order: &a [*a]\n", "recursive"),
    "a number of many digits": ("prefer: " + "1" * 2**19, "more than 4,000 characters"),
    "a number to the base of 60": ("prefer: " + "1" + ":1" * 2**18, "more than 4,000 characters"),
    "a large file": ("#" * (2**20 + 1), "cannot be read: it is larger than 1,048,576 bytes"),
}


@pytest.mark.parametrize(("text", "said"), TEXTS.values(), ids=TEXTS)
def test_a_policy_that_has_no_end(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    error = in_time(policy_from_config, str(path))
    assert isinstance(error, PolicyError)
    assert said in str(error)
    assert str(error).startswith(str(path))
    assert len(str(error)) < 1000


def test_waivers_that_are_nested_too_deeply(tmp_path: Path) -> None:
    path = tmp_path / "waivers.toml"
    path.write_text("x = " + "[" * 10**5)
    error = in_time(read, path)
    assert isinstance(error, WaiverError)
    assert str(error).endswith("it is nested too deeply")


@pytest.mark.parametrize(
    "text",
    [
        "Name:" + " " * 2**20 + "\n",
        ("Name:" + " " * 1000) * 1000,
        "Name: a" + " " * 2**20 + "b",
        "\n" * 2**20,
        "Version:\n" * 2**17 + "Name: acme",
    ],
    ids=["spaces", "many", "inside", "lines", "headers"],
)
def test_metadata_is_read_in_a_time_that_grows_with_its_size(text: str) -> None:
    class Distribution:
        def read_text(self, name: str) -> str:
            return text

    assert text_of(Distribution(), "METADATA") == text  # type: ignore[arg-type]
    name, version = in_time(_name_and_version, Distribution())
    assert len(name) < 3000
    assert version == "?"

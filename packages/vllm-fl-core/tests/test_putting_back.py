"""Arguments that are put back after a failure; of those that cannot be, the kernel's exception is raised."""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import Any

import pytest

from vllm_fl.dispatch import BackendImplKind
from vllm_fl.dispatch import OpImpl
from vllm_fl.dispatch import OpManager
from vllm_fl.dispatch import OpRegistry

if TYPE_CHECKING:
    from collections.abc import Callable

torch = pytest.importorskip("torch")


class KernelError(RuntimeError):
    """What the kernel raises, and nothing else may be raised in its place."""


def manager_of(
    write: Callable[[Any], Any], seen: list[Any], error: type[Exception] = KernelError
) -> OpManager:
    """`moe_sum` by one that writes and raises, and one that looks at what it gets."""

    def fails(inp: Any, out: Any) -> Any:
        with torch.no_grad():
            write(out)
        raise error("of the kernel")

    def looks(inp: Any, out: Any) -> str:
        seen.append(out.detach().clone())
        return "the next one"

    registry = OpRegistry()
    registry.register_many(
        OpImpl("moe_sum", f"vendor.{v}", BackendImplKind.VENDOR, fn, v, p)
        for v, fn, p in (("a", fails, 2), ("b", looks, 1))
    )
    return OpManager(registry)


def leaf() -> Any:
    return torch.ones(2, 3, requires_grad=True)


def not_a_leaf() -> Any:
    return leaf() * 1


def parameter() -> Any:
    return torch.nn.Parameter(torch.ones(2, 3))


def empty() -> Any:
    return torch.ones(0, 3)


def scalar() -> Any:
    return torch.tensor(1.0)


def window() -> Any:
    return torch.ones(8).unfold(0, 4, 2)


@pytest.mark.parametrize(
    "make", [leaf, not_a_leaf, parameter, empty, scalar, window], ids=lambda make: make.__name__
)
@pytest.mark.parametrize("error", [KernelError, NotImplementedError])
def test_what_can_be_put_back(make: Callable[[], Any], error: type[Exception]) -> None:
    """Autograd would not let it be written in place, or other memory lies under several elements."""
    out, seen = make(), list[Any]()
    manager = manager_of(lambda out: out.fill_(9), seen, error)
    assert manager.call("moe_sum", 0, out) == "the next one"
    assert torch.equal(seen[0], torch.ones_like(out))
    if out.requires_grad:
        assert out.is_leaf == (make is not not_a_leaf)
        out.sum().backward()


def test_in_inference_mode() -> None:
    seen: list[Any] = []
    manager = manager_of(lambda out: out.fill_(9), seen)
    with torch.inference_mode():
        out = torch.ones(3)
        assert manager.call("moe_sum", 0, out) == "the next one"
    assert seen[0].tolist() == [1.0] * 3


def from_inference() -> Any:
    with torch.inference_mode():
        return torch.ones(3)


def test_from_inference_mode() -> None:
    seen: list[Any] = []
    assert manager_of(lambda out: None, seen).call("moe_sum", 0, from_inference()) == "the next one"
    assert seen[0].tolist() == [1.0] * 3


def test_a_tensor_without_memory() -> None:
    assert manager_of(lambda out: out.fill_(9), []).call("moe_sum", 0, torch.ones(3, device="meta"))


class Refusing(torch.Tensor):  # type: ignore[misc]
    """A subclass that refuses to be copied, or to be written."""

    refuses = "clone"

    @classmethod
    def __torch_function__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ == cls.refuses:
            raise ZeroDivisionError("of the subclass")
        return super().__torch_function__(func, kinds, args, kwargs or {})


@pytest.mark.parametrize("error", [KernelError, NotImplementedError])
def test_what_cannot_be_put_back(error: type[Exception]) -> None:
    """torch's own exception for it is a part of the note."""
    seen: list[Any] = []
    manager = manager_of(lambda out: None, seen, error)
    with pytest.raises(error, match="of the kernel") as caught:
        manager.call("moe_sum", 0, torch.ones(1, 3).expand(4, 3))
    assert type(caught.value) is error
    notes = "\n".join(caught.value.__notes__)
    assert "moe_sum: the arguments cannot be put back: RuntimeError: " in notes
    assert "more than one element of the written-to tensor refers to a single memory location" in notes
    assert "so no other implementation is tried" in notes
    assert caught.value.__cause__ is caught.value.__context__ is None
    assert (seen, manager.get_failed_impls()) == ([], {})


@pytest.mark.parametrize("refuses", ["clone", "copy_"])
def test_a_subclass_that_refuses(refuses: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    manager = manager_of(lambda out: None, seen)
    out = torch.ones(3).as_subclass(Refusing)
    monkeypatch.setattr(Refusing, "refuses", refuses)
    with pytest.raises(KernelError, match="of the kernel") as caught:
        manager.call("moe_sum", 0, out)
    assert "may have written out" in "\n".join(caught.value.__notes__)
    assert seen == []


def test_no_memory_for_a_copy_does_not_keep_the_kernel_from_running(monkeypatch: pytest.MonkeyPatch) -> None:
    class Big:
        def clone(self) -> Any:
            raise torch.OutOfMemoryError

        def copy_(self, other: Any) -> None: ...

    registry = OpRegistry()
    registry.register_many(
        OpImpl("moe_sum", f"vendor.{v}", BackendImplKind.VENDOR, lambda inp, out: "ran", v) for v in "ab"
    )
    assert OpManager(registry).call("moe_sum", 0, Big()) == "ran"

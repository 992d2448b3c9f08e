"""What registration accepts gets the right values: by hand, and thousands of signatures by chance."""

from __future__ import annotations

import functools
import inspect
import random
from typing import TYPE_CHECKING
from typing import Any

import pytest

from vllm_fl.dispatch import OPERATORS
from vllm_fl.dispatch import BackendImplKind
from vllm_fl.dispatch import OpImpl
from vllm_fl.dispatch import OpManager
from vllm_fl.dispatch import OpRegistry
from vllm_fl.dispatch import RefusedBeforeWriting
from vllm_fl.dispatch import RegistrationError
from vllm_fl.dispatch import operator

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Iterator

    from vllm_fl.dispatch import Operator

pytestmark = pytest.mark.usefixtures("no_plugins")

NORM = "rms_norm"
VALUES = {"x": 1, "residual": 2, "weight": 3, "epsilon": 4}


def implementation(op_name: str, vendor: str, fn: Callable[..., Any], **more: Any) -> OpImpl:
    priority = 400 - ord(vendor)
    return OpImpl(op_name, f"vendor.{vendor}", BackendImplKind.VENDOR, fn, vendor, priority, **more)


def manager_of(op_name: str, *fns: Callable[..., Any]) -> OpManager:
    """With one it is called by itself, with two from a guard."""
    registry = OpRegistry()
    registry.register_many(implementation(op_name, v, fn) for v, fn in zip("ab", fns, strict=False))
    return OpManager(registry)


def calls_of(op_name: str, fn: Callable[..., Any], values: dict[str, Any]) -> Iterator[Any]:
    """Call it by position and by name, alone and in a guard."""
    parameters = OPERATORS[op_name].signature.parameters
    places = [name for name, p in parameters.items() if p.kind is not p.KEYWORD_ONLY and name in values]
    for fns in ((fn,), (fn, lambda *args, **kwargs: "the next one")):
        manager = manager_of(op_name, *fns)
        for count in range(len(places) + 1):
            if all(name in values for name in list(parameters)[:count]):
                args = [values[name] for name in places[:count]]
                yield manager.call(
                    op_name, *args, **{n: values[n] for n in values if n not in places[:count]}
                )


# -- by hand ---------------------------------------------------------------------------------


def got(**named: Any) -> dict[str, Any]:
    return named


GOOD: list[tuple[Callable[..., Any], Any]] = [
    (
        lambda x, weight, epsilon, *args, **kwargs: (x, weight, epsilon, args, kwargs),
        (1, 3, 4, (), {"residual": 2}),
    ),
    (lambda x, *args, **kwargs: (x, sorted([*args, *kwargs.values()])), (1, [2, 3, 4])),
    (
        lambda x, weight, *args, residual, **kwargs: (x, weight, args, residual, kwargs),
        (1, 3, (), 2, {"epsilon": 4}),
    ),
    (
        lambda x, fast=True, *args, **kwargs: (x, fast, args, sorted(kwargs.values())),
        (1, True, (), [2, 3, 4]),
    ),
    (lambda x, residual, weight, epsilon, *args: (x, residual, weight, epsilon, args), (1, 2, 3, 4, ())),
    (lambda x, /, residual, weight, epsilon: (x, residual, weight, epsilon), (1, 2, 3, 4)),
    (lambda x, residual, weight, epsilon, /: (x, residual, weight, epsilon), (1, 2, 3, 4)),
    (lambda x, residual, /, *, weight, epsilon: (x, residual, weight, epsilon), (1, 2, 3, 4)),
    (
        lambda x, residual, /, fast=True, *, weight, epsilon: (x, residual, fast, weight, epsilon),
        (1, 2, True, 3, 4),
    ),
    (lambda *, epsilon, weight, residual, x: (x, residual, weight, epsilon), (1, 2, 3, 4)),
    (lambda x, residual, weight, eps=7, epsilon=8: (x, residual, weight, eps, epsilon), (1, 2, 3, 7, 4)),
]


@pytest.mark.parametrize(("fn", "wanted"), GOOD)
def test_parameters_of_the_contract_get_its_arguments(fn: Callable[..., Any], wanted: Any) -> None:
    assert list(calls_of(NORM, fn, VALUES)) == [wanted] * 10


BAD: list[tuple[str, Callable[..., Any], str]] = [
    (NORM, lambda x, weight, residual, epsilon, *args, **kwargs: 0, "its arguments stand in another order"),
    (NORM, lambda weight, x, /, *args, **kwargs: 0, "its arguments stand in another order"),
    (NORM, lambda x, eps, *args, **kwargs: 0, "it requires 'eps', which nobody passes"),
    (NORM, lambda fast=1, x=2, /, *args, **kwargs: 0, "'x' by position alone, after a parameter that nobody"),
    (
        "fused_experts",
        lambda hidden_states, w1, w2, topk_weights, topk_ids, activation="silu", /: 0,
        "it takes 'activation' by position alone, which the contract passes by name",
    ),
]


@pytest.mark.parametrize(("op_name", "fn", "reason"), BAD)
def test_what_cannot_be_bound_is_refused(op_name: str, fn: Callable[..., Any], reason: str) -> None:
    with pytest.raises(RegistrationError) as caught:
        manager_of(op_name, fn)
    assert reason in str(caught.value)
    assert f"the contract is {op_name}(" in str(caught.value)
    assert f"defined in {__file__}:{fn.__code__.co_firstlineno} as (" in str(caught.value)


def test_the_contracts_defaults_hold_for_what_a_function_does_not_name() -> None:
    """Also where nothing stands around it that passes them."""

    def gelu(x: Any, approximate: str = "tanh") -> Any:
        return approximate

    @functools.wraps(gelu)
    def passes_on(*args: Any, **kwargs: Any) -> Any:
        return gelu(*args, **kwargs)

    def unnamed(*args: Any, **kwargs: Any) -> Any:
        return gelu(*args, **kwargs)

    for fn in (gelu, passes_on, unnamed, lambda x, **more: more["approximate"], lambda x, *more: more[0]):
        assert set(calls_of("gelu_and_mul", fn, {"x": 1})) == {"none"}
        assert set(calls_of("gelu_and_mul", fn, {"x": 1, "approximate": "tanh"})) == {"tanh"}


def test_true_is_not_the_default_one() -> None:
    def rotate(
        query: Any, key: Any, cos: Any, sin: Any, position_ids: Any, rotary_interleaved: Any = 0
    ) -> Any:
        return rotary_interleaved

    values = dict.fromkeys(("query", "key", "cos", "sin", "position_ids"), 1)
    assert all(answer is False for answer in calls_of("rotary_embedding", rotate, values))


# -- what `inspect.signature` says of wrappers ---------------------------------------------------


def norm(x: Any, residual: Any, weight: Any, epsilon: float) -> Any:
    return x, residual, weight, epsilon


def telling(signature: Callable[..., Any]) -> Callable[[Any], Any]:
    """Make a function tell the signature of another one, as `functools.wraps` does."""

    def tell(fn: Any) -> Any:
        fn.__wrapped__ = signature
        return fn

    return tell


def test_a_wrapper_that_passes_everything_on() -> None:
    wrapper = telling(norm)(lambda *args, **kwargs: norm(*args, **kwargs))
    assert list(calls_of(NORM, wrapper, VALUES)) == [(1, 2, 3, 4)] * 10


@pytest.mark.parametrize(
    "wrapper",
    [
        lambda x, weight, epsilon: 0,
        lambda x, weight, residual, epsilon: 0,
        lambda first, *args: 0,
        lambda x, residual, weight: 0,
        lambda **kwargs: 0,
    ],
)
def test_a_wrapper_that_tells_what_it_does_not_take(wrapper: Callable[..., Any]) -> None:
    with pytest.raises(RegistrationError, match="it is a wrapper that takes"):
        manager_of(NORM, telling(norm)(wrapper))


def test_a_wrapper_that_takes_it_in_another_way() -> None:
    wrapper = telling(norm)(lambda x, residual, *args, **kwargs: (x, residual, *args, *kwargs.values()))
    assert list(calls_of(NORM, wrapper, VALUES)) == [(1, 2, 3, 4)] * 10


def test_a_signature_of_its_own() -> None:
    def fn(x: Any, weight: Any, epsilon: float) -> Any:
        return x

    fn.__signature__ = inspect.signature(norm)  # type: ignore[attr-defined]
    with pytest.raises(RegistrationError, match="it is a wrapper that takes"):
        manager_of(NORM, fn)


def test_a_wrapper_of_itself() -> None:
    def fn(x: Any, residual: Any, weight: Any, epsilon: float) -> Any:
        return x, residual, weight, epsilon

    def wrong(x: Any, weight: Any) -> Any: ...

    fn.__wrapped__, wrong.__wrapped__ = fn, wrong  # type: ignore[attr-defined]
    assert isinstance(OpRegistry().commit(impls=(implementation(NORM, "a", fn),)), type(None))
    with pytest.raises(RegistrationError, match="it does not take 'residual'"):
        OpRegistry().register_impl(implementation(NORM, "a", wrong))


class Hostile:
    @property
    def __signature__(self) -> Any:
        raise ZeroDivisionError

    def __call__(self, x: Any, residual: Any, weight: Any, epsilon: float) -> Any:
        return x, residual, weight, epsilon


class Kernels:
    def method(self, x: Any, weight: Any, epsilon: Any, *args: Any, **kwargs: Any) -> Any:
        return x, kwargs["residual"], weight, epsilon

    def __call__(self, x: Any, weight: Any, epsilon: Any, *args: Any, **kwargs: Any) -> Any:
        return x, kwargs["residual"], weight, epsilon


def scaled(scale: int, x: Any, residual: Any, weight: Any, epsilon: float) -> Any:
    return x, residual, weight, epsilon


@pytest.mark.parametrize(
    "fn",
    [
        Kernels().method,
        Kernels(),
        functools.partial(scaled, 9),
        functools.partial(norm, epsilon=9),
        functools.lru_cache(norm),
        Hostile(),
        staticmethod(norm),
    ],
    ids=lambda fn: type(fn).__name__,
)
def test_every_kind_of_callable(fn: Callable[..., Any]) -> None:
    assert list(calls_of(NORM, fn, VALUES)) == [(1, 2, 3, 4)] * 10


def test_a_builtin_that_tells_nothing_gets_the_contracts_places() -> None:
    with pytest.raises((TypeError, ValueError)):
        inspect.signature(max)
    assert list(calls_of(NORM, max, VALUES)) == [4] * 10


# -- declarations ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        (lambda self, x, *args: 0, "'args' is variadic positional; a contract names each"),
        (lambda self, x, **kwargs: 0, "'kwargs' is variadic keyword; a contract names each"),
        (lambda self, x, /: 0, "'x' is positional-only; a contract names each"),
        (lambda self, _first: 0, "the name of a parameter begins with a letter, not '_first'"),
    ],
)
def test_a_contract_that_nothing_could_be_generated_from(method: Any, reason: str) -> None:
    method.__name__ = "mine"
    with pytest.raises(RegistrationError) as caught:
        OpRegistry().declare(operator()(method))
    assert reason in str(caught.value)


# -- by chance -----------------------------------------------------------------------------------------

_POSITIONAL, _EITHER, _NAMED = "positional", "either", "named"


def random_signature(rng: random.Random, names: list[str], *, mutated: bool) -> str:
    """Return the parameters of a function: those of a contract, more or less."""
    names = list(names)
    if mutated:
        for _ in range(rng.choice((0, 0, 1, 1, 2))):
            how = rng.choice(("drop", "swap", "own", "own", "rename"))
            place = rng.randrange(len(names)) if names else 0
            if how == "drop" and names:
                names.pop(place)
            elif how == "swap" and len(names) > 1:
                other = rng.randrange(len(names))
                names[place], names[other] = names[other], names[place]
            elif how == "own":
                names.insert(place, f"own{len(names)}")
            elif how == "rename" and names:
                names[place] = f"other{place}"
    cuts = sorted(rng.choice((0, rng.randint(0, len(names)))) for _ in range(2))
    first = cuts[0] if rng.random() < 0.3 else 0
    last = rng.randint(first, len(names)) if rng.random() < 0.4 else len(names)
    has_default = False
    parts: list[str] = []
    for place, name in enumerate(names):
        if place == last:
            parts.append("*args" if rng.random() < 0.5 else "*")
            has_default = False
        has_default = (has_default and place < last) or rng.random() < (0.7 if "own" in name else 0.2)
        parts.append(f"{name}='its own'" if has_default else name)
        if place + 1 == first:
            parts.append("/")
    if last == len(names) and rng.random() < 0.4:
        parts.append("*args")
    if rng.random() < 0.4:
        parts.append("**kwargs")
    return ", ".join(parts)


def made(parameters: str) -> Callable[..., Any]:
    names = [
        part.strip("*").partition("=")[0] for part in parameters.split(", ") if part not in ("*", "/", "")
    ]
    record = ", ".join(f"{name!r}: {name}" for name in names)
    namespace: dict[str, Any] = {}
    exec(f"def fn({parameters}): return {{{record}}}", namespace)
    return namespace["fn"]  # type: ignore[no-any-return]


def problem_with(
    result: dict[str, Any], given: dict[str, Any], operator: Operator, *, is_predicate: bool = False
) -> str | None:
    """Say which value is not the contract's."""
    unnamed = [name for name, p in operator.signature.parameters.items() if p.kind is not p.KEYWORD_ONLY]
    renamed = is_predicate and any(
        name.startswith(("other", "own")) and v != "its own" for name, v in result.items()
    )
    for place, (name, value) in enumerate(result.items()):
        if name in ("args", "kwargs"):
            continue
        if name in given:
            if value != given[name]:
                return f"{name} is {value!r}, not {given[name]!r}"
        elif is_predicate:
            if value != "its own" and value != given[unnamed[place]]:
                return f"{name} is {value!r}, not {given[unnamed[place]]!r}"
        elif value != "its own":
            return f"{name} got {value!r}, which is nobody's"
    for name, value in result.get("kwargs", {}).items():
        if given.get(name) != value:
            return f"kwargs[{name!r}] is {value!r}"
    if result.get("args"):
        # In the contract's order, after all that has a name.
        count = sum(name in unnamed for name in result) if not renamed else len(unnamed) - len(result["args"])
        if list(result["args"]) != [given[name] for name in unnamed[count:]]:
            return f"args are {result['args']!r}"
    return None


def missing(result: dict[str, Any], given: dict[str, Any], operator: Operator) -> list[str]:
    """Return the arguments that did not arrive anywhere and are not the default."""
    arrived = {*result, *result.get("kwargs", {})}
    unnamed = [name for name, p in operator.signature.parameters.items() if p.kind is not p.KEYWORD_ONLY]
    arrived |= set(unnamed[len(unnamed) - len(result.get("args", ())) :])
    defaults = {name: p.default for name, p in operator.signature.parameters.items()}
    return [n for n, v in given.items() if n not in arrived and v != defaults[n] and n not in operator.hints]


FUZZED = ("silu_and_mul", "gelu_and_mul", "rms_norm", "rotary_embedding", "topk_softmax", "fused_experts")


@pytest.mark.parametrize("op_name", FUZZED)
def test_signatures_by_chance(op_name: str) -> None:
    """Each is refused in words, or gets the right values, by position and by name, alone and in a guard."""
    declared = OPERATORS[op_name]
    parameters = declared.signature.parameters
    rng = random.Random(f"binding of {op_name}")
    accepted, refusals = 0, list[str]()
    for _ in range(400):
        text = random_signature(rng, list(parameters), mutated=True)
        try:
            fn = made(text)
        except SyntaxError:
            continue
        try:
            manager_of(op_name, fn)
        except RegistrationError as error:
            refusals.append(str(error))
            continue
        accepted += 1
        given: dict[str, Any] = {}
        for number, (name, parameter) in enumerate(parameters.items()):
            is_default = parameter.default is not parameter.empty and rng.random() < 0.5
            given[name] = parameter.default if is_default else f"value {number}"
        try:
            results = list(calls_of(op_name, fn, given))
        except RefusedBeforeWriting as error:
            lacked = str(error).split("does not take '")[1].split("'")[0]
            assert given[lacked] != parameters[lacked].default, text
            assert lacked not in inspect.signature(fn).parameters, text
            continue
        for result in results:
            if result == "the next one":
                continue
            assert problem_with(result, given, declared) is None, text
            assert missing(result, given, declared) == [], text
    assert accepted > 40
    assert len(refusals) > 40
    assert all(f"the contract is {op_name}(" in refusal for refusal in refusals)


@pytest.mark.parametrize("op_name", FUZZED)
def test_predicates_by_chance(op_name: str) -> None:
    declared = OPERATORS[op_name]
    parameters = declared.signature.parameters
    given = {name: f"value {number}" for number, name in enumerate(parameters)}
    rng = random.Random(f"predicates of {op_name}")
    accepted, refusals = 0, list[str]()
    for _ in range(400):
        names = list(parameters)[: rng.randint(0, len(parameters))]
        text = random_signature(rng, names, mutated=True)
        try:
            predicate = made(text)
        except SyntaxError:
            continue
        results: list[Any] = []

        def supports(*args: Any, **kwargs: Any) -> Any:
            results.append(predicate(*args, **kwargs))  # noqa: B023 - called in this turn of the loop
            return True

        registry = OpRegistry()
        telling(predicate)(supports)
        one = implementation(op_name, "a", lambda *args, **kwargs: "ran", supports=supports)
        try:
            registry.register_impl(one)
        except RegistrationError as error:
            refusals.append(str(error))
            continue
        accepted += 1
        assert OpManager(registry).call(op_name, **given) == "ran", text
        (result,) = results
        assert problem_with(result, given, declared, is_predicate=True) is None, text
    assert accepted > 40
    assert len(refusals) > 10
    assert all("its predicate cannot be called: " in refusal for refusal in refusals)

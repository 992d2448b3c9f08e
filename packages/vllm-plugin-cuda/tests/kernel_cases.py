"""Calls of every operator, over shapes, dtypes and layouts, each with its judge.

One table for the CPU's kernels and the GPU's: ``cases(device)`` leaves out, on a
CPU, what takes long there.
"""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import field
from typing import TYPE_CHECKING
from typing import Any

import kernel_truth as truth
import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Iterator

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass
class Case:
    """A call and its judge.

    Attributes:
        op: the operator.
        label: what is special about it.
        make: returns the arguments, new each time.
        judge: takes the result, the arguments after the call and as they were before.
        keywords: keyword-only arguments.
        writes: which arguments may be changed; the others must not be.
    """

    op: str
    label: str
    make: Callable[[], tuple[Any, ...]]
    judge: Callable[[Any, tuple[Any, ...], tuple[Any, ...]], truth.Verdict]
    keywords: Callable[[], dict[str, Any]] = field(default=dict)
    writes: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.op}: {self.label}"

    def run(self, function: Callable[..., Any]) -> truth.Verdict:
        """Call ``function`` and judge what it did."""
        arguments, keywords = self.make(), self.keywords()
        before = tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in arguments)
        result = function(*arguments, **keywords)
        for place, (argument, was) in enumerate(zip(arguments, before, strict=True)):
            if place in self.writes or not isinstance(argument, torch.Tensor):
                continue
            if not torch.equal(argument.contiguous().view(torch.uint8), was.contiguous().view(torch.uint8)):
                return truth.wrong(f"argument {place} was written")
        return self.judge(result, arguments, before)


def random(*shape: int, device: str, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator) * scale).to(dtype).to(device)


def same(x: torch.Tensor) -> torch.Tensor:
    return x


def sliced(x: torch.Tensor, more: int = 8, skip: int = 0) -> torch.Tensor:
    """Return the same values as rows of a wider tensor, of NaN elsewhere."""
    buffer = torch.full((*x.shape[:-1], x.shape[-1] + more), float("nan"), dtype=x.dtype, device=x.device)
    view = buffer[..., skip : skip + x.shape[-1]]
    view.copy_(x)
    return view


def transposed(x: torch.Tensor) -> torch.Tensor:
    return x.movedim(-1, 0).contiguous().movedim(0, -1)


def shifted(x: torch.Tensor) -> torch.Tensor:
    """Return the same values contiguous, but one element behind an aligned address."""
    buffer = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    return buffer[1:].view(x.shape).copy_(x)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": same,
    "rows of a wider tensor": sliced,
    "rows of odd stride": lambda x: sliced(x, 5, 1),
    "transposed": transposed,
    "unaligned": shifted,
}


def named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def cases(device: str) -> Iterator[Case]:
    """Return every case for a type of device."""
    is_gpu = device != "cpu"
    yield from _activations(device, is_gpu)
    yield from _norms(device, is_gpu)
    yield from _rotaries(device, is_gpu)
    yield from _quantizations(device, is_gpu)
    if is_gpu:
        yield from experts_cases(device)


def experts_cases(device: str) -> Iterator[Case]:
    """Return the cases of mixtures of experts, for which a CPU build of vLLM has no kernel."""
    yield from _routing(device)
    yield from _aligning(device)
    yield from _experts(device)


def _new(result: torch.Tensor, arguments: tuple[Any, ...]) -> truth.Verdict:
    if not result.is_contiguous():
        return truth.wrong("not contiguous")
    if any(isinstance(a, torch.Tensor) and torch._C._is_alias_of(result, a) for a in arguments):
        return truth.wrong("shares memory with an argument")
    return truth.Verdict(0.0, 0.0)


def _activations(device: str, is_gpu: bool) -> Iterator[Case]:
    gates = (("silu_and_mul", "silu", ()), ("gelu_and_mul", "none", ("none",)))
    for op, name, more in (*gates, ("gelu_and_mul", "tanh", ("tanh",))):

        def case(label, dtype, shape, layout=same, scale=2.0, special=(), op=op, name=name, more=more):
            def make():
                x = random(*shape, device=device, dtype=dtype, scale=scale)
                for place, value in enumerate(special):
                    x[..., place] = value
                return (layout(x), *more)

            def judge(result, arguments, before):
                return _new(result, arguments) + truth.compare(result, truth.gated(before[0], name), dtype)

            return Case(op, f"{name} {named(dtype)} {label}", make, judge)

        for dtype in DTYPES:
            widths = (1, 7, 512, 13824) if is_gpu else (8, 96, 512)
            for width in widths:
                for tokens in (1, 7, 83):
                    yield case(f"{tokens}x{2 * width}", dtype, (tokens, 2 * width))
            yield case("no tokens", dtype, (0, 128))
            yield case("three dimensions", dtype, (2, 19, 2 * 64))
            yield case("one dimension", dtype, (2 * 64,))
            yield case("tails", dtype, (7, 2 * 64), scale=10.0)
            if is_gpu:
                yield case("2048x27648", dtype, (2048, 27648))
            # Of -inf the gate's product is NaN with a formula and 0 with another.
            yield case("inf and nan", dtype, (3, 2 * 32), special=(float("inf"), float("nan"), -0.0))
            for layout, change in LAYOUTS.items():
                yield case(layout, dtype, (19, 2 * 64), change)


def _norms(device: str, is_gpu: bool) -> Iterator[Case]:
    def case(
        label,
        dtype,
        shape,
        layout=same,
        *,
        weight=True,
        add=False,
        epsilon=1e-6,
        scale=1.0,
        zero=False,
    ):
        def make():
            x = random(*shape, device=device, dtype=dtype, scale=scale)
            residual = random(*shape, device=device, dtype=dtype, seed=1, scale=scale) if add else None
            if zero:
                x[0] = 0
                if add:
                    residual[0] = 0
            gain = random(shape[-1], device=device, dtype=dtype, seed=2) if weight else None
            return layout(x), residual, gain, epsilon

        def judge(result, arguments, before):
            normed, total = truth.rms_norm(before[0], before[1], before[2], epsilon)
            loose = {"absolute": 1e-2, "relative": 1e-2} if dtype is not torch.float32 else {}
            if not add:
                return _new(result, arguments) + truth.compare(result, normed, dtype, **loose)
            if not all(t.is_contiguous() for t in result):
                return truth.wrong("not contiguous")
            rounded = truth.compare(result[1], total, dtype, 1e-12, torch.finfo(dtype).eps / 2 * 1.01)
            return truth.compare(result[0], normed, dtype, **loose) + rounded

        kind = "with a residual" if add else "alone"
        return Case("rms_norm", f"{kind} {named(dtype)} {label}", make, judge, writes=(0, 1) if add else ())

    for dtype in DTYPES:
        for add in (False, True):
            hidden = (8, 16, 768, 769, 5120, 5125, 8192) if is_gpu else (8, 16, 768)
            for width in hidden:
                yield case(f"7x{width}", dtype, (7, width), add=add)
            for tokens in (0, 1, 83):
                yield case(f"{tokens}x1024", dtype, (tokens, 1024), add=add)
            if is_gpu:
                yield case("4096x4096", dtype, (4096, 4096), add=add)
            yield case("no weight", dtype, (7, 64), weight=False, add=add)
            yield case("a row of zeros", dtype, (7, 64), zero=True, add=add, epsilon=1e-5)
            yield case("large", dtype, (7, 64), scale=6e3, add=add)
            for shape in ((64,), (3, 5, 64), (2, 3, 4, 64), (2, 1, 3, 2, 64)):
                yield case(f"{len(shape)} dimensions", dtype, shape, add=add)
            for layout, change in LAYOUTS.items():
                yield case(layout, dtype, (7, 64), change, add=add)
                yield case(f"heads, {layout}", dtype, (7, 3, 64), change, add=add)


@dataclass
class Rotary:
    """The options of a rotary case."""

    tokens: int = 33
    heads: tuple[int, int | None] = (8, 2)
    head: int = 128
    rot: int = 128
    interleaved: bool = False
    positions: torch.dtype | None = torch.int64
    inplace: bool = True
    table: torch.dtype | None = None
    cache: bool = True
    fused: bool = True


def _rotaries(device: str, is_gpu: bool) -> Iterator[Case]:
    def case(label, dtype, **options):
        o = Rotary(**options)
        query_heads, key_heads = o.heads
        rows = o.tokens if o.positions is None else 512

        def make():
            widths = [query_heads * o.head, (key_heads or 0) * o.head, 64]
            qkv = random(o.tokens, sum(widths), device=device, dtype=dtype)
            query, key, _ = qkv.split(widths, -1)
            query = query.unflatten(-1, (query_heads, o.head))
            key = key.unflatten(-1, (key_heads, o.head)) if key_heads else None
            if not o.fused:
                query, key = query.contiguous(), None if key is None else key.contiguous()
            angles = torch.outer(
                torch.arange(float(rows)), 10000.0 ** (-torch.arange(o.rot // 2) / o.rot * 2)
            )
            cache = torch.cat([angles.cos(), angles.sin()], -1).to(o.table or dtype).to(device)
            cos, sin = cache.chunk(2, -1)
            positions = None
            if o.positions is not None:
                generator = torch.Generator().manual_seed(o.tokens)
                positions = (
                    torch.randint(0, rows, (o.tokens,), generator=generator).to(o.positions).to(device)
                )
                positions[: min(1, o.tokens)] = rows - 1
            return query, key, cos, sin, positions, o.interleaved, o.inplace, cache if o.cache else None

        def judge(result, arguments, before):
            absolute, relative = {torch.float32: (1e-5, 1.3e-6), torch.float16: (1e-3, 1e-3)}.get(
                dtype, (1e-2, 1.6e-2)
            )
            verdict = truth.Verdict(0.0, 0.0)
            for out, argument, was in zip(result, arguments[:2], before[:2], strict=True):
                if argument is None:
                    verdict += truth.Verdict(0.0, 0.0) if out is None else truth.wrong("a key from nowhere")
                    continue
                if o.inplace and out is not argument:
                    return truth.wrong("not the argument itself")
                if not o.inplace:
                    verdict += _new(out, arguments)
                    if not torch.equal(argument, was):
                        return truth.wrong("written, though not inplace")
                if not torch.equal(out[..., o.rot :], was[..., o.rot :]):
                    return truth.wrong("the tail is not what it was")
                expected = truth.rotary(was, before[2], before[3], before[4], o.interleaved)
                verdict += truth.compare(out, expected, dtype, absolute, relative)
            return verdict

        return Case("rotary_embedding", f"{named(dtype)} {label}", make, judge, writes=(0, 1))

    for dtype in DTYPES:
        for interleaved in (False, True):
            style = "interleaved" if interleaved else "halves"
            for head in (64, 80, 96, 120, 128, 256):
                for rot in sorted({head, 32, head // 2}):
                    yield case(f"{style} {rot} of {head}", dtype, head=head, rot=rot, interleaved=interleaved)
            for options in (
                {"positions": torch.int32},
                {"positions": None},
                {"cache": False},
                {"cache": False, "positions": None},
                {"inplace": False},
                {"fused": False},
                {"heads": (8, None)},
                {"heads": (17, 1)},
                {"heads": (32, 8)},
                {"table": torch.float32},
                {"tokens": 0},
                {"tokens": 1},
            ):
                label = " ".join(f"{name}={value}" for name, value in options.items())
                yield case(f"{style} {label}", dtype, interleaved=interleaved, **options)
        if is_gpu:
            yield case("4096 tokens", dtype, tokens=4096, heads=(32, 8))


def _quantizations(device: str, is_gpu: bool) -> Iterator[Case]:
    for op, judged in (
        ("dynamic_per_token_quant_int8", truth.int8),
        ("dynamic_per_token_quant_fp8", truth.fp8),
    ):

        def case(label, dtype, shape, layout=same, special=None, op=op, judged=judged):
            def make():
                x = random(*shape, device=device, dtype=dtype)
                if special is not None:
                    special(x)
                return (layout(x),)

            def judge(result, arguments, before):
                return _new(result[0], arguments) + _new(result[1], arguments) + judged(*result, before[0])

            return Case(op, f"{named(dtype)} {label}", make, judge)

        for dtype in DTYPES:
            hidden = (17, 1024, 1025, 1026, 5137, 8193) if is_gpu else (16, 1024)
            for width in hidden:
                for tokens in (1, 7):
                    yield case(f"{tokens}x{width}", dtype, (tokens, width))
            yield case("no tokens", dtype, (0, 64))
            yield case("a row of zeros", dtype, (3, 64), special=lambda x: x[1].zero_())
            yield case("one outlier", dtype, (3, 64), special=lambda x: x[1, :1].fill_(3e4))
            yield case("tiny", dtype, (3, 64), special=lambda x: x.mul_(1e-5))
            if is_gpu:
                yield case("4096x4096", dtype, (4096, 4096))
            for layout, change in LAYOUTS.items():
                yield case(layout, dtype, (19, 64), change)


def _routing(device: str) -> Iterator[Case]:
    def softmax(label, dtype, tokens, experts, k, *, renormalize=False, ids=torch.int32, change=same):
        def make():
            gating = change(random(tokens, experts, device=device, dtype=dtype))
            weights = torch.full((tokens, k), 9.0, device=device)
            indices = torch.full((tokens, k), 9, device=device).to(ids)
            source = torch.full((tokens, k), -9, dtype=torch.int32, device=device)
            return weights, indices, source, gating, renormalize

        def judge(result, arguments, before):
            if result[0] is not arguments[0] or result[1] is not arguments[1]:
                return truth.wrong("not the arguments themselves")
            return truth.topk_softmax(*arguments[:3], before[3], renormalize)

        return Case("topk_softmax", f"{named(dtype)} {label}", make, judge, writes=(0, 1, 2))

    for dtype in DTYPES:
        for experts in (1, 6, 8, 16, 64, 128, 160, 256, 257, 384, 512):
            for k in sorted({1, min(2, experts), min(8, experts)}):
                yield softmax(f"33 of {experts}, {k}", dtype, 33, experts, k, renormalize=k == 8)
        for tokens in (0, 1, 4096):
            yield softmax(f"{tokens} of 64, 6", dtype, tokens, 64, 6)
        for ids in (torch.int64, torch.uint32):
            yield softmax(f"{named(ids)} indices", dtype, 33, 64, 4, ids=ids)
        yield softmax("every expert", dtype, 5, 16, 16)
        yield softmax("all equal", dtype, 5, 64, 4, change=torch.zeros_like)
        yield softmax("very negative", dtype, 5, 64, 4, change=lambda x: x * 50 - 3e4)
        for layout, change in LAYOUTS.items():
            yield softmax(layout, dtype, 33, 64, 4, change=change)

    def grouped(label, dtype, size, groups, kept, k, *, func=1, renormalize=True, bias=torch.float32):
        tokens, experts = size

        def make():
            scores = random(tokens, experts, device=device, dtype=dtype)
            scores = scores if func else scores.sigmoid()
            shift = random(experts, device=device, dtype=bias, seed=6, scale=0.3)
            return scores, groups, kept, k, renormalize, 2.5, shift, func

        def judge(result, arguments, before):
            return truth.grouped_topk(*result, *before)

        return Case("grouped_topk", f"{named(dtype)} {label}", make, judge)

    for dtype in DTYPES:
        for tokens, experts, groups, kept, k in (
            (33, 256, 8, 4, 8),
            (1, 128, 8, 3, 6),
            (77, 64, 4, 2, 4),
            (5, 16, 2, 1, 3),
            (33, 384, 1, 1, 8),
            (33, 512, 16, 4, 8),
            (33, 96, 32, 5, 7),
            (4096, 256, 8, 4, 8),
            (0, 256, 8, 4, 8),
        ):
            shape = f"{tokens}x{experts}, {kept} of {groups}, {k}"
            yield grouped(shape, dtype, (tokens, experts), groups, kept, k)
        yield grouped("final scores", dtype, (33, 256), 8, 4, 8, func=0)
        yield grouped("not renormalized", dtype, (33, 256), 8, 4, 8, renormalize=False)
        yield grouped("bfloat16 bias", dtype, (33, 256), 8, 4, 8, bias=torch.bfloat16)


def _aligning(device: str) -> Iterator[Case]:
    def case(label, tokens, k, experts, block, *, mapped=False, pad=False, ignore=False, one=False):
        def make():
            scores = random(tokens, experts, device="cpu", dtype=torch.float32)
            ids = scores.argsort(-1)[:, :k].int() if not one else torch.full((tokens, k), 1).int()
            table = None
            if mapped:
                table = torch.full((experts,), -1, dtype=torch.int32)
                table[::2] = torch.arange((experts + 1) // 2, dtype=torch.int32)
                table = table.to(device)
            return ids.to(device), block, experts, table, pad, ignore

        def judge(result, arguments, before):
            return truth.aligned(result, *before)

        return Case("moe_align_block_size", label, make, judge)

    for tokens in (0, 1, 33, 222, 1024):
        for k, experts in ((2, 8), (8, 64), (6, 160), (8, 257), (8, 512)):
            for block in (16, 64, 128):
                yield case(f"{tokens}x{k} of {experts}, blocks of {block}", tokens, k, experts, block)
    for mapped, pad, ignore in ((True, False, False), (True, True, True), (False, True, False)):
        for experts in (8, 160):
            label = f"expert_map={mapped} pad={pad} ignore={ignore} of {experts}"
            yield case(label, 333, 2, experts, 32, mapped=mapped, pad=pad, ignore=ignore)
    yield case("one expert takes all", 333, 1, 64, 64, one=True)


def _experts(device: str) -> Iterator[Case]:
    def summed(label, dtype, tokens, k, hidden, layout=same):
        def make():
            inp = random(tokens, k, hidden, device=device, dtype=dtype)
            return layout(inp), torch.full((tokens, hidden), 9.0, dtype=dtype, device=device)

        def judge(result, arguments, before):
            if result is not arguments[1]:
                return truth.wrong("not the argument itself")
            return truth.compare(result, truth.wide(before[0]).sum(1), dtype)

        return Case("moe_sum", f"{named(dtype)} {label}", make, judge, writes=(1,))

    for dtype in DTYPES:
        for tokens, k, hidden in (
            (0, 2, 64),
            (1, 2, 128),
            (33, 6, 511),
            (7, 1, 64),
            (222, 9, 1024),
            (1024, 8, 2048),
        ):
            yield summed(f"{tokens}x{k}x{hidden}", dtype, tokens, k, hidden)
        for layout, change in LAYOUTS.items():
            yield summed(layout, dtype, 33, 4, 64, change)

    def fused(label, dtype, tokens, hidden, inner, experts, k, *, mapped=False, change=same, **keywords):
        def make():
            x = change(random(tokens, hidden, device=device, dtype=dtype))
            w1 = random(experts, 2 * inner, hidden, device=device, dtype=dtype, scale=hidden**-0.5, seed=1)
            w2 = random(experts, hidden, inner, device=device, dtype=dtype, scale=inner**-0.5, seed=2)
            named_experts = 2 * experts if mapped else experts
            scores = random(tokens, named_experts, device="cpu", dtype=torch.float32, seed=3)
            weights, ids = scores.softmax(-1).topk(k, -1)
            return x, w1, w2, weights.to(device), ids.int().to(device)

        def options():
            table = None
            if mapped:
                table = torch.full((2 * experts,), -1, dtype=torch.int32, device=device)
                table[::2] = torch.arange(experts, dtype=torch.int32, device=device)
                return keywords | {"global_num_experts": 2 * experts, "expert_map": table}
            return dict(keywords)

        def judge(result, arguments, before):
            given = options()
            expected = truth.fused_experts(
                *before,
                {"silu": "silu", "gelu": "none"}[given.get("activation", "silu")],
                given.get("apply_router_weight_on_input", False),
                given.get("expert_map"),
            )
            return _new(result, arguments) + truth.relative_to_rms(result, expected, dtype)

        return Case("fused_experts", f"{named(dtype)} {label}", make, judge, options)

    for dtype in DTYPES:
        for tokens, hidden, inner, experts, k in (
            (1, 128, 128, 8, 2),
            (33, 1024, 128, 8, 2),
            (64, 511, 128, 8, 6),
            (222, 1024, 512, 64, 6),
            (1024, 1024, 256, 8, 2),
        ):
            shape = f"{tokens} tokens, {hidden}x{inner}, {k} of {experts}"
            yield fused(shape, dtype, tokens, hidden, inner, experts, k)
        yield fused("no tokens", dtype, 0, 128, 128, 8, 2)
        yield fused("gelu", dtype, 33, 256, 128, 8, 2, activation="gelu")
        yield fused("weights on the input", dtype, 33, 256, 128, 8, 1, apply_router_weight_on_input=True)
        yield fused("half of the experts elsewhere", dtype, 33, 256, 128, 8, 2, mapped=True)
        yield fused("rows of a wider tensor", dtype, 33, 256, 128, 8, 2, change=sliced)

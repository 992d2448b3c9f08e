"""What a layer would ask once, and gets another answer to later."""

from __future__ import annotations

from planted import faults

_OPS = ("silu_and_mul", "rms_norm", "rotary_embedding", "moe_sum", "fused_experts", "topk_softmax")


def _first(args, kwargs):
    return next(iter((*args, *kwargs.values())))


def few_rows(*args, **kwargs):
    return _first(args, kwargs).shape[0] <= 4096 or "many rows"


def few_elements(*args, **kwargs):
    return _first(args, kwargs).numel() < 2**31 or "more than 32 bits count"


def some_rows(*args, **kwargs):
    return _first(args, kwargs).shape[0] > 0 or "no rows"


def contiguous(*args, **kwargs):
    return _first(args, kwargs).is_contiguous() or "not contiguous"


def dense_rows(*args, **kwargs):
    x = _first(args, kwargs)
    return x.stride(-1) == 1 or "rows with gaps"


def aligned(*args, **kwargs):
    return _first(args, kwargs).storage_offset() % 8 == 0 or "not aligned"


def finite(*args, **kwargs):
    return bool(_first(args, kwargs).abs().float().sum() >= 0) or "a NaN"


for _ask, _says in (
    (few_rows, "with 8192 rows"),
    (few_elements, "with 2147483648 rows"),
    (some_rows, "with 0 rows"),
    (contiguous, "other strides"),
    (dense_rows, "other strides"),
    (aligned, "other strides"),
    (finite, "may not read values"),
):

    def _right(function):
        return function

    _right.__name__ = f"asks_a_layer_for_{_ask.__name__}"
    faults(_OPS, says=_says, supports_layer=_ask)(_right)

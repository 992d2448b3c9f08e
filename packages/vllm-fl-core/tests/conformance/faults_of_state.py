"""Implementations that keep something from one call to the next, or leave something behind."""

from __future__ import annotations

import functools
import random
import threading
import time

import torch
from planted import fault
from planted import faults

NEW = ("silu_and_mul", "gelu_and_mul", "grouped_topk", "fused_experts", "dynamic_per_token_quant_int8")
STALE = "right for one set of values, and wrong for a second one in the same tensors"


def parts_of(result):
    return result if isinstance(result, tuple) else (result,)


# -- results ---------------------------------------------------------------------------------


@faults(NEW, says="is memory that an earlier call returned")
def a_static_buffer_returned(right):
    buffers = {}

    def faulty(*args, **kwargs):
        result = right(*args, **kwargs)
        key = tuple((part.shape, part.dtype) for part in parts_of(result))
        if key not in buffers:
            buffers[key] = result
        for buffer, part in zip(parts_of(buffers[key]), parts_of(result), strict=True):
            buffer.copy_(part)
        return buffers[key]

    return faulty


@faults(("silu_and_mul",), says="is memory that an earlier call returned")
def two_buffers_in_turn(right):
    buffers, calls = {}, [0]

    def faulty(x):
        result = right(x)
        calls[0] += 1
        return buffers.setdefault((result.shape, x.dtype, calls[0] % 2), result).copy_(result)

    return faulty


@faults(("rms_norm",), says="is memory that an earlier call returned")
def the_second_result_in_a_static_buffer(right):
    buffers = {}

    def faulty(x, residual, weight, epsilon):
        result = right(x, residual, weight, epsilon)
        if residual is None:
            return result
        return result[0], buffers.setdefault((x.shape, x.dtype), result[1]).copy_(result[1])

    return faulty


@faults(("silu_and_mul",), says="of an earlier call was changed by a later one")
def a_buffer_of_the_library_behind_every_result(right):
    import numpy

    buffers = {}

    def faulty(x):
        result = right(x)
        if x.dtype is not torch.float32:
            return result
        # A tensor of its own each time, over memory that torch does not know to be the same.
        memory = buffers.setdefault(result.shape, numpy.empty(result.shape, numpy.float32))
        return torch.from_numpy(memory).copy_(result)

    return faulty


@faults(("silu_and_mul", "dynamic_per_token_quant_fp8"), says="it returns the first call's results")
def the_first_result_returned_for_ever(right):
    results = {}

    def faulty(x):
        key = (x.shape, x.dtype, x.stride())
        if key not in results:
            results[key] = right(x)
        found = tuple(part.clone() for part in parts_of(results[key]))
        return found if len(found) > 1 else found[0]

    return faulty


# -- arguments that are kept -------------------------------------------------------------------

#: What a library might prepare once: the operator, and the places of its arguments.
PREPARED = {
    "rms_norm": (2,),
    "rotary_embedding": (2, 3),
    "fused_experts": (1, 2),
    "grouped_topk": (6,),
    "topk_softmax": (3,),
    "moe_align_block_size": (0,),
    "moe_sum": (0,),
}


def keeping(key_of, right, places):
    """Take the arguments at these places from the first call of the same key."""
    kept = {}

    @functools.wraps(right)
    def faulty(*args, **kwargs):
        args = list(args)
        for place in places:
            value = args[place]
            if isinstance(value, torch.Tensor):
                args[place] = kept.setdefault((place, *key_of(value)), value.clone())
        return right(*args, **kwargs)

    return faulty


def by_shape(value):
    return value.shape, value.dtype


def by_address(value):
    return value.data_ptr(), value.shape, value.stride(), value.dtype


def by_object_and_version(value):
    return id(value), value.shape, value._version if not value.is_inference() else 0


for by in (by_shape, by_address, by_object_and_version):
    for op, places in PREPARED.items():

        def make(right, by=by, places=places):
            return keeping(by, right, places)

        make.__name__ = f"arguments_kept_{by.__name__}"
        says = "" if op == "moe_align_block_size" or by is by_shape else STALE
        faults((op,), says=says)(make)


@faults(("rotary_embedding",), says=STALE)
def the_rows_of_the_table_kept_by_the_number_of_tokens(right):
    kept = {}

    def faulty(
        query, key, cos, sin, position_ids, rotary_interleaved=False, inplace=True, cos_sin_cache=None
    ):
        if position_ids is not None:
            rows = cos.index_select(0, position_ids), sin.index_select(0, position_ids)
            cos, sin = kept.setdefault((query.shape, cos.shape, cos.dtype, position_ids.dtype), rows)
        return right(query, key, cos, sin, None, rotary_interleaved, inplace)

    return faulty


@faults(("rms_norm",), says="")
def epsilon_kept_by_shape(right):
    kept = {}

    def faulty(x, residual, weight, epsilon):
        return right(x, residual, weight, kept.setdefault((x.shape, x.dtype), epsilon))

    return faulty


@faults(("moe_sum",), says="")
def a_workspace_that_is_not_cleared(right):
    kept = {}

    def faulty(inp, out):
        space = kept.setdefault((out.shape, inp.dtype), torch.zeros(out.shape))
        return out.copy_(space.add_(inp.float().sum(1)))

    return faulty


# -- the process --------------------------------------------------------------------------------


def changing(says, change):
    def make(right):
        def faulty(x):
            change()
            return right(x)

        return faulty

    make.__name__ = f"changes_{says.replace(' ', '_')}"
    faults(("silu_and_mul",), says=f"changed {says}")(make)


changing("the default dtype", lambda: torch.set_default_dtype(torch.float16))
changing("the default device", lambda: torch.set_default_device("meta"))
changing("the number of threads", lambda: torch.set_num_threads(torch.get_num_threads() + 1))
changing("the deterministic algorithms", lambda: torch.use_deterministic_algorithms(True))
changing("the precision of float32 products", lambda: torch.set_float32_matmul_precision("medium"))
changing("the state of torch's random numbers", lambda: torch.rand(1))
changing("the state of Python's random numbers", random.random)


@fault("silu_and_mul", says="requires a gradient")
def autograd_left_on(x):
    with torch.inference_mode(False), torch.enable_grad():
        first, second = x.clone().requires_grad_().float().chunk(2, -1)
        return (torch.nn.functional.silu(first) * second).to(x.dtype).contiguous()


@fault("silu_and_mul")
def returns_before_it_has_written(x):
    first, second = x.float().chunk(2, -1)
    result = (torch.nn.functional.silu(first) * second).to(x.dtype).contiguous()
    out = torch.zeros(result.shape, dtype=x.dtype)

    def later():
        time.sleep(0.2)
        with torch.inference_mode():
            out.copy_(result)

    threading.Thread(target=later).start()
    return out


@faults(("silu_and_mul", "fused_experts"), says="")
def a_value_that_depends_on_the_run(right):
    calls = [0]

    def faulty(*args, **kwargs):
        calls[0] += 1
        return right(*args, **kwargs) * (1.0 if calls[0] % 3 else 1.5)

    return faulty

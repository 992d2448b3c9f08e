"""A short soak: the long one is ``hatch run soak``."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from engine import serve
from soak import is_leak
from soak import soak

if TYPE_CHECKING:
    from checkpoints import Checkpoint
    from evidence import Evidence


def test_three_hundred_requests_at_once(qwen3: Checkpoint, evidence: Evidence) -> None:
    options = {"max_num_seqs": 16}
    with serve(qwen3, env=evidence.env(VLLM_FL_PREFER="reference"), engine_args=options) as server:
        found = soak(server, qwen3, requests=300, at_once=16, tokens=4)
    assert found.answered == 300
    assert found.wrong == found.failed == []
    assert {impl_id for _, impl_id in evidence.calls()} == {"reference.torch"}


def _memory(*, a_request: int, noise: int = 1 << 20, requests: int = 10_000) -> list[tuple[int, int]]:
    """A process whose caches are full after a tenth of the requests, and which then grows or does not."""
    some = random.Random(0)
    sizes = ((done, 2700 << 20, min(done, requests // 10) * 50_000) for done in range(0, requests + 1, 100))
    return [
        (done, size + cache + done * a_request + some.randint(-noise, noise)) for done, size, cache in sizes
    ]


def test_what_a_leak_is() -> None:
    assert not is_leak(_memory(a_request=0))
    assert not is_leak(_memory(a_request=0, noise=4 << 20))
    assert is_leak(_memory(a_request=4096))
    assert is_leak(_memory(a_request=4096, noise=4 << 20))

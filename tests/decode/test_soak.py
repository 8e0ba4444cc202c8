"""A long run of the trained tiny pair: nothing leaks, every answer is right."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

import trt_eagle3
from tests.decode.heldout import PROMPTS, heldout, plain_answers, request_of, served
from tests.tiny import build_tiny


@pytest.mark.slow
def test_soak_of_mixed_requests_leaks_nothing_and_every_output_is_right(
    tmp_path: Path,
) -> None:
    """2,000 requests, 8 at once: chains and plain ones, some cancelled midway."""
    expected = plain_answers(tmp_path / "plain")
    engine = trt_eagle3.load(
        build_tiny(tmp_path / "soak", limits={"max_batch_size": 8, "max_kv_tokens": 2048})
    )
    count, memory = 2000, []
    requests = (request_of(heldout()[i % PROMPTS], speculation=i % 7 != 0) for i in range(count))
    for i, answer in enumerate(served(engine, requests, 8)):
        assert answer.generation.token_ids == expected[i % PROMPTS]
        if i % 50 == 0:
            wasted = engine.submit(request_of(heldout()[i % PROMPTS]))
            wasted.cancel()
            wasted.wait()
        if i % 400 == 399:
            memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    now = engine.metrics()
    engine.close()
    assert sum(now.requests.values()) == count + count // 50
    assert now.kv_pages_used == 0
    assert memory[-1] < 1.02 * memory[1], f"peak memory in KiB at every 400 requests: {memory}"

"""Many requests to the trained tiny pair: nothing leaks, every answer is right."""

from __future__ import annotations

import gc
import resource
import sys
from pathlib import Path

import pytest

import trt_eagle3
from tests.decode.heldout import heldout, plain_answers, request_of, served
from tests.tiny import build_tiny

PROMPTS = 12
REQUESTS = 60
CANCELLED_EACH = 10
SAMPLED_EACH = 20
BLOCKS_A_REQUEST = 10  # of Python's allocator: an Answer that is kept holds sixty


@pytest.mark.slow
def test_soak_of_mixed_requests_leaks_nothing_and_every_output_is_right(
    tmp_path: Path,
) -> None:
    """8 at once: chains and plain ones, some cancelled midway."""
    expected = plain_answers(tmp_path / "plain", PROMPTS)
    engine = trt_eagle3.load(
        build_tiny(tmp_path / "soak", limits={"max_batch_size": 8, "max_kv_tokens": 2048})
    )
    peaks, blocks = [], []
    requests = (request_of(heldout()[i % PROMPTS], speculation=i % 7 != 0) for i in range(REQUESTS))
    for i, answer in enumerate(served(engine, requests, 8)):
        assert answer.generation.token_ids == expected[i % PROMPTS]
        if i % CANCELLED_EACH == 0:
            wasted = engine.submit(request_of(heldout()[i % PROMPTS]))
            wasted.cancel()
            wasted.wait()
        if (i + 1) % SAMPLED_EACH == 0:
            gc.collect()
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
            blocks.append(sys.getallocatedblocks())
    now = engine.metrics()
    engine.close()
    assert sum(now.requests.values()) == REQUESTS + REQUESTS // CANCELLED_EACH
    assert now.kv_pages_used == 0
    told = (
        f"peak memory in KiB: {peaks}, Python's blocks: {blocks}, at every {SAMPLED_EACH} requests"
    )
    assert peaks[-1] < 1.02 * peaks[1], told
    assert blocks[-1] - blocks[1] < BLOCKS_A_REQUEST * (REQUESTS - 2 * SAMPLED_EACH), told

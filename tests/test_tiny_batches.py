"""The trained tiny pair in batches: whatever runs beside a request, its answer is that of plain decoding alone."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from tasks import Example, examples

import trt_eagle3
from tests.tiny import build_tiny
from trt_eagle3 import Engine, Request
from trt_eagle3.decode.answer import Answer

PROMPTS = 200
SEED = 19
MAX_TOKENS = 48
MODES: dict[str, dict[str, Any]] = {
    "chain": {"mode": "chain", "steps": 5},
    "tree": {"mode": "tree", "steps": 4, "topk": 3, "num_draft_tokens": 12},
    "dynamic": {"mode": "dynamic", "steps": 4, "topk": 4, "num_draft_tokens": 10},
}


@cache
def heldout() -> tuple[Example, ...]:
    return tuple(examples("heldout", SEED, PROMPTS))


def request(example: Example, **options: Any) -> Request:
    videos = [list(example.frames)] if example.frames else []
    return Request(example.prompt, list(example.images), videos, max_tokens=MAX_TOKENS, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[tuple[int, ...]]:
    """Plain decoding, one request at a time, nothing reused."""
    engine = trt_eagle3.load(build_tiny(folder / "plain", limits={"max_batch_size": 1, "prefix_cache": False}))
    found = [engine.submit(request(e, speculation=False)).finish().token_ids for e in heldout()]
    engine.close()
    return found


def served(engine: Engine, requests: Iterator[Request], concurrency: int) -> Iterator[Answer]:
    """Finished answers in order; a new request comes as soon as the oldest one is through."""
    flying = [engine.submit(r) for r in islice(requests, concurrency)]
    while flying:
        answer = flying.pop(0)
        answer.finish()
        flying += [engine.submit(r) for r in islice(requests, 1)]
        yield answer


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_at_every_batch_size_says_what_plain_decoding_says(
    mode: str, folder: Path, expected: list[tuple[int, ...]]
) -> None:
    for batch_size in (1, 2, 3, 4):
        limits = {"max_batch_size": batch_size, "max_kv_tokens": 1024 * ((batch_size + 1) // 2)}
        engine = trt_eagle3.load(build_tiny(folder / mode, limits=limits, speculation=MODES[mode]))
        requests = (request(e) for e in heldout())
        found = [a.generation.token_ids for a in served(engine, requests, batch_size + 1)]
        now = engine.metrics()
        engine.close()
        assert [e.prompt for e, a, b in zip(heldout(), found, expected, strict=True) if a != b] == []
        assert (now.acceptance_length or 0) > 3
        assert now.kv_pages_used == now.kv_pages_cached


@pytest.mark.slow
def test_soak_of_mixed_requests_leaks_nothing_and_every_output_is_right(
    folder: Path, expected: list[tuple[int, ...]]
) -> None:
    """2,000 requests, 8 at once: chains and plain ones, some cancelled midway."""
    engine = trt_eagle3.load(build_tiny(folder / "soak", limits={"max_batch_size": 8, "max_kv_tokens": 2048}))
    count, memory = 2000, []
    requests = (request(heldout()[i % PROMPTS], speculation=i % 7 != 0) for i in range(count))
    for i, answer in enumerate(served(engine, requests, 8)):
        assert answer.generation.token_ids == expected[i % PROMPTS]
        if i % 50 == 0:
            wasted = engine.submit(request(heldout()[i % PROMPTS]))
            wasted.cancel()
            wasted.wait()
        if i % 400 == 399:
            memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    now = engine.metrics()
    engine.close()
    assert sum(now.requests.values()) == count + count // 50
    assert now.kv_pages_used == now.kv_pages_cached
    assert memory[-1] < 1.02 * memory[1], f"peak memory in KiB at every 400 requests: {memory}"

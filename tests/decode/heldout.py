"""Held-out questions of the trained tiny pair, asked many at a time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from tasks import Example, examples

import trt_eagle3
from tests.tiny import build_tiny
from trt_eagle3 import LLM, Request, SamplingParams
from trt_eagle3.decode.request.answer import Answer
from trt_eagle3.decode.sampling.sampling_params import GREEDY

__all__ = ["PROMPTS", "heldout", "plain_answers", "request_of", "served"]

PROMPTS = 24
SEED = 19
MAX_TOKENS = 48


@cache
def heldout() -> tuple[Example, ...]:
    """The questions: text, one and two images, frames."""
    return tuple(examples("heldout", SEED, PROMPTS))


def request_of(example: Example, sampling: SamplingParams = GREEDY, **options: Any) -> Request:
    """The request that asks it."""
    videos = [list(example.frames)] if example.frames else []
    return Request(
        example.prompt,
        list(example.images),
        videos,
        sampling.updated(max_tokens=MAX_TOKENS),
        **options,
    )


def plain_answers(folder: Path, count: int = PROMPTS) -> list[tuple[int, ...]]:
    """Tokens of the first ``count`` by plain decoding, one request at a time, nothing reused."""
    engine = trt_eagle3.load(
        build_tiny(folder, limits={"max_batch_size": 1, "prefix_cache": False})
    )
    found = [
        engine.submit(request_of(e, speculation=False)).finish().token_ids
        for e in heldout()[:count]
    ]
    engine.close()
    return found


def served(engine: LLM, requests: Iterator[Request], concurrency: int) -> Iterator[Answer]:
    """Finished answers in order; a new request comes as soon as the oldest one is through."""
    flying = [engine.submit(r) for r in islice(requests, concurrency)]
    while flying:
        answer = flying.pop(0)
        answer.finish()
        flying += [engine.submit(r) for r in islice(requests, 1)]
        yield answer

"""Loads: closed loops and Poisson arrivals on one engine, timed at the readers."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import Any

from trt_eagle3.decode.llm import LLM
from trt_eagle3.decode.loaded_bundle import LoadedBundle
from trt_eagle3.decode.metrics import EngineMetrics
from trt_eagle3.decode.policy.protocol import Policy
from trt_eagle3.decode.request.request import Request
from trt_eagle3.decode.sampling.sampling_params import SamplingParams
from trt_eagle3.errors import OverloadedError, UserError
from trt_eagle3.prompts.prompt_file import Question

__all__ = [
    "Load",
    "Progress",
    "TimedReply",
    "Run",
    "batch_sizes",
    "drive",
    "make_requests",
    "open_engine",
    "pauses",
]

_SIZES = (1, 2, 4, 8)

Progress = Callable[[str, int, int], object]
"""Called with a stage, the number of finished parts, and the total."""


@dataclass(frozen=True)
class Load:
    """Arrival of requests: closed loop or Poisson.

    Attributes:
        concurrency: clients of the closed loop; each sends its next request after an answer.
        rate: Poisson arrivals per second, in place of the closed loop.
        pause_s: mean of the random pause of a client before each request.
    """

    concurrency: int = 1
    rate: float | None = None
    pause_s: float = 0.0

    @property
    def name(self) -> str:
        """The name in tables and plots."""
        return str(self.concurrency) if self.rate is None else f"{self.rate:g}/s"


@dataclass(frozen=True)
class TimedReply:
    """One answer, timed at its reader.

    Attributes:
        first_token_seconds: from the arrival of the request (Poisson: its due time) to its first
            token.
        passes: of every later target forward, seconds since the previous one, and tokens.
    """

    token_ids: tuple[int, ...]
    first_token_seconds: float
    passes: tuple[tuple[float, int], ...]


@dataclass(frozen=True)
class Run:
    """One run of all requests.

    Attributes:
        replies: in the order of the requests.
        seconds: from the first request to the last token.
        cycles: verify forwards of sequences that drafted.
        accepted: by position, how many of them accepted it.
    """

    replies: tuple[TimedReply, ...]
    seconds: float
    cycles: int
    accepted: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(len(reply.token_ids) for reply in self.replies)

    @property
    def first(self) -> list[float]:
        """Seconds to the first token of each answer."""
        return [reply.first_token_seconds for reply in self.replies]

    @property
    def gaps(self) -> list[float]:
        """Seconds between the steps of each answer."""
        return [seconds for reply in self.replies for seconds, _ in reply.passes]

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all answers per second, prompts and waiting included."""
        return self.num_tokens / self.seconds


def open_engine(
    bundle: Path,
    *,
    prefix_cache: bool = False,
    policy: Policy | None = None,
    tensor_parallel: int | None = None,
) -> LLM:
    """Open the bundle's engine; without ``prefix_cache`` repeated questions are computed again.

    ``policy``: in place of the bundle's. ``tensor_parallel``: as for ``LLM``.
    """
    opened = LoadedBundle.open(bundle, policy=policy, tensor_parallel=tensor_parallel)
    return LLM(opened, prefix_cache=None if prefix_cache else False)


def batch_sizes(engine: LLM, wanted: Sequence[int]) -> list[int]:
    """Return the requests in flight to measure: ``wanted``, or the usual sizes within the limits.

    Raises:
        UserError: a size exceeds ``limits.max_batch_size``.
    """
    most = engine.bundle.limits.max_batch_size
    if wanted and max(wanted) > most:
        raise UserError(
            f"--batch {max(wanted)}: this bundle decodes {most} at once. "
            "Lower it, or rebuild with a larger limits.max_batch_size."
        )
    return sorted(set(wanted)) or [size for size in _SIZES if size <= most]


def make_requests(
    questions: Sequence[Question], count: int, *, speculation: bool = True, **options: Any
) -> list[Request]:
    """Make ``count`` requests that cycle through the questions.

    ``options``: fields of ``SamplingParams``.
    """
    asked = islice(cycle(questions), count)
    sampling = SamplingParams(**options)
    return [Request(q.prompt, q.images, q.videos, sampling, speculation) for q in asked]


def drive(engine: LLM, requests: Sequence[Request], load: Load, *, seed: int = 0) -> Run:
    """Send ``requests`` and read all answers.

    ``seed``: of the arrivals of a ``rate``, and of pauses.

    Raises:
        TrtEagle3Error: a prompt is invalid, or more requests wait than the engine queues.
    """
    before = engine.metrics()
    start = time.perf_counter()
    if load.rate is None:
        replies = asyncio.run(_closed(engine, requests, load, seed))
    else:
        replies = asyncio.run(_poisson(engine, requests, load.rate, seed))
    seconds = time.perf_counter() - start
    cycles, accepted = _drafted(before, engine.metrics())
    return Run(tuple(replies), seconds, cycles, accepted)


async def _closed(
    engine: LLM, requests: Sequence[Request], load: Load, seed: int
) -> list[TimedReply]:
    """Run readers that each send the next question after an answer."""
    replies: dict[int, TimedReply] = {}
    queue, breaks = iter(enumerate(requests)), pauses(seed, load.pause_s)

    async def read() -> None:
        for index, request in queue:
            if load.pause_s:
                await asyncio.sleep(next(breaks))
            replies[index] = await _reply(engine, request, time.perf_counter())

    await asyncio.gather(*(read() for _ in range(load.concurrency)))
    return [replies[index] for index in range(len(requests))]


async def _poisson(
    engine: LLM, requests: Sequence[Request], rate: float, seed: int
) -> list[TimedReply]:
    """Start a reader per request at its due time, however many are waiting."""
    chance, due = random.Random(seed), time.perf_counter()
    tasks = []
    for request in requests:
        await asyncio.sleep(max(due - time.perf_counter(), 0.0))
        tasks.append(asyncio.create_task(_reply(engine, request, due)))
        due += chance.expovariate(rate)
    try:
        return list(await asyncio.gather(*tasks))
    except OverloadedError as error:
        for task in tasks:
            task.cancel()
        raise UserError(
            f"--rate {rate:g}: requests come faster than they are answered. Lower it. ({error})"
        ) from error


async def _reply(engine: LLM, request: Request, came: float) -> TimedReply:
    times, tokens = [came], list[tuple[int, ...]]()
    async for chunk in engine.submit(request):
        if chunk.token_ids:
            times.append(time.perf_counter())
            tokens.append(chunk.token_ids)
    gaps = [after - before for before, after in pairwise(times)]
    return TimedReply(
        token_ids=tuple(token for chunk in tokens for token in chunk),
        first_token_seconds=gaps[0],
        passes=tuple((gap, len(chunk)) for gap, chunk in zip(gaps[1:], tokens[1:], strict=True)),
    )


def _drafted(before: EngineMetrics, after: EngineMetrics) -> tuple[int, tuple[int, ...]]:
    """Return drafting cycles between two moments, and how many of them accepted each position."""
    none = (0,) * (len(after.proposed) - len(before.proposed))
    cycles = after.proposed[0] - (*before.proposed, *none)[0] if after.proposed else 0
    accepted = (a - b for a, b in zip(after.accepted, (*before.accepted, *none), strict=True))
    return cycles, tuple(accepted)


def pauses(seed: int, mean_seconds: float) -> Iterator[float]:
    """Yield exponentially distributed pauses: random arrivals."""
    draw = random.Random(seed)
    while True:
        yield draw.expovariate(1 / mean_seconds) if mean_seconds > 0 else 0.0

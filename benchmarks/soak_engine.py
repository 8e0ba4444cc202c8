"""An engine under mixed load: ``python -m benchmarks.soak_engine BUNDLE --prompts FILE``.

Thousands of requests at a fixed concurrency: short and long answers, with and without images,
greedy and sampled, with and without speculation; readers that pause, and readers that leave. An
equal number of requests is a warm-up, in which a GPU captures every new shape of a step. Afterwards
no page of the KV cache may be held, no request may have failed, memory of host and device must be
flat, and every answer must have the tokens of the same request alone. Exits with status 1 if one of
these fails.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from benchmarks.memory_trace import MemoryTrace
from trt_eagle3.bench.workload import open_engine
from trt_eagle3.decode.llm import LLM
from trt_eagle3.decode.request.request import Request
from trt_eagle3.decode.sampling.sampling_params import SamplingParams
from trt_eagle3.errors import CheckFailedError, UserError
from trt_eagle3.io.run_command import run_command
from trt_eagle3.prompts.bundled import bundled_questions
from trt_eagle3.prompts.prompt_file import Question, read_questions

__all__ = ["EngineCase", "SoakReport", "cases_of", "main", "soak_engine"]

_SAMPLES = 20  # samples of the memory
_LEAVING = 0.15  # share of the requests whose readers leave before the end
_PAUSING = 0.05  # share of the requests whose readers pause
_PAUSE_S = 0.3
_SETTLE_S = 10.0
_SHORT, _LONG = 24, 160
# The position of a random number among probabilities selects a sampled token. Other batches round
# the last bits of probabilities differently, so this share of sampled answers may differ.
_SAMPLED_SHARE = 0.01


@dataclass(frozen=True)
class EngineCase:
    """A kind of request, and its tokens when it runs alone."""

    kind: str
    request: Request
    tokens: tuple[int, ...] = ()


@dataclass
class SoakReport:
    """Results including the warm-up; ``seconds``: without it; ``faults``: failed conditions."""

    num_requests: int
    seconds: float
    outcomes: dict[str, int]
    different: dict[str, int]
    memory: dict[str, Any]
    pages: dict[str, int]
    faults: list[str] = field(default_factory=list)


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--prompts",
    "file",
    type=click.Path(path_type=Path),
    help="Prompts, a JSON list or one per line.",
)
@click.option("--requests", "count", default=2000, show_default=True, type=click.IntRange(100))
@click.option("--in-flight", default=64, show_default=True, type=click.IntRange(1))
@click.option("--seed", default=0, show_default=True)
def main(bundle: Path, file: Path | None, count: int, in_flight: int, seed: int) -> None:
    """Soak an engine on BUNDLE, and print the results as JSON."""
    questions = read_questions(file) if file else bundled_questions()
    report = soak_engine(bundle, questions, count=count, in_flight=in_flight, seed=seed)
    click.echo(json.dumps(report.__dict__, indent=2))
    if report.faults:
        raise CheckFailedError(f"soak: {len(report.faults)} faults: {report.faults[0]}")


def soak_engine(
    bundle: Path,
    questions: Sequence[Question],
    *,
    count: int = 2000,
    in_flight: int = 64,
    seed: int = 0,
) -> SoakReport:
    """Run ``count`` requests made from ``questions``.

    Raises:
        UserError: the bundle is invalid, or decodes fewer than ``in_flight`` sequences at once.
    """
    engine = open_engine(bundle, prefix_cache=True)
    try:
        if engine.bundle.limits.max_batch_size < in_flight:
            raise UserError(
                f"--in-flight {in_flight}: this bundle decodes "
                f"{engine.bundle.limits.max_batch_size} at once"
            )
        cases = _alone(bundle, cases_of(questions))
        return asyncio.run(_Soak(engine, cases, seed).run(count, in_flight))
    finally:
        engine.close()


def cases_of(questions: Sequence[Question]) -> list[EngineCase]:
    """Return cases of each question: short, long, one token, without speculation, and sampled."""
    short, long = (SamplingParams(max_tokens=n) for n in (_SHORT, _LONG))
    sampled = SamplingParams(max_tokens=_SHORT, temperature=0.8, top_k=40, seed=7)
    ways = (
        ("greedy", short, True),
        ("long", long.updated(ignore_eos=True), True),
        ("one token", short.updated(max_tokens=1), True),
        ("plain", short, False),
        ("sampled", sampled, True),
        ("sampled plain", sampled, False),
    )
    return [
        EngineCase(kind, Request(q.prompt, q.images, q.videos, sampling, speculation))
        for q in questions
        for kind, sampling, speculation in ways
    ]


def _alone(bundle: Path, cases: Sequence[EngineCase]) -> list[EngineCase]:
    """Return the cases with the tokens of an engine that runs one at a time and reuses nothing."""
    engine = open_engine(bundle)
    try:
        return [
            EngineCase(case.kind, case.request, engine.submit(case.request).finish().token_ids)
            for case in cases
        ]
    finally:
        engine.close()


class _Soak:
    """The load, and the results at its readers."""

    def __init__(self, engine: LLM, cases: Sequence[EngineCase], seed: int) -> None:
        self._engine = engine
        self._cases = cases
        self._draw = random.Random(seed)
        config = engine.bundle.record.config
        self._exact = config.engine.dtype == "float32"
        # another tree uses other random numbers: equal distribution, different tokens
        self._unlike = {"sampled"} if config.speculation.adaptive else set[str]()
        self._asked: Counter[str] = Counter()
        self._different: Counter[str] = Counter()
        self._faults: list[str] = []
        self._memory = MemoryTrace(engine.bundle.device)

    async def run(self, count: int, in_flight: int) -> SoakReport:
        """Run all requests; the report has the failed conditions."""
        await asyncio.to_thread(self._engine.start)
        await self._read_all(iter(range(-count, 0)), count, in_flight)
        start = time.perf_counter()
        await self._read_all(iter(range(count)), count, in_flight)
        seconds = time.perf_counter() - start
        await self._settle()
        return self._report(count, seconds)

    async def _read_all(self, jobs: Iterator[int], count: int, in_flight: int) -> None:
        await asyncio.gather(*(self._read(jobs, count) for _ in range(in_flight)))

    async def _read(self, jobs: Iterator[int], count: int) -> None:
        """Run one reader, which sends the next request when an answer ends."""
        for number in jobs:
            if number >= 0 and number % max(count // _SAMPLES, 1) == 0:
                gc.collect()
                self._memory.sample()
            case = self._draw.choice(self._cases)
            leaves = self._draw.randrange(0, 6) if self._draw.random() < _LEAVING else None
            pauses = self._draw.random() < _PAUSING
            try:
                await self._one(case, leaves, pauses)
            except Exception as error:
                self._faults.append(f"{case.kind}: {type(error).__name__}: {error!s:.200}")

    async def _one(self, case: EngineCase, leaves: int | None, pauses: bool) -> None:
        answer = self._engine.submit(case.request)
        if leaves == 0:
            answer.cancel()
        tokens: list[int] = []
        chunks = 0
        async for chunk in answer:
            tokens += chunk.token_ids
            chunks += 1
            if chunks == leaves:
                answer.cancel()
            if pauses and chunks == 1:
                await asyncio.sleep(_PAUSE_S)
        self._compare(case, tuple(tokens), whole=leaves is None)

    def _compare(self, case: EngineCase, tokens: tuple[int, ...], *, whole: bool) -> None:
        """Compare an answer with its expected tokens; only its start if the reader left."""
        if whole:
            self._asked[case.kind] += 1
        expected = case.tokens if whole else case.tokens[: len(tokens)]
        if tokens != expected:
            self._different[case.kind] += 1

    async def _settle(self) -> None:
        """Wait until no page is held, up to a deadline."""
        deadline = time.monotonic() + _SETTLE_S
        while self._engine.metrics().kv_pages_used and time.monotonic() < deadline:
            await asyncio.sleep(0.05)

    def _report(self, count: int, seconds: float) -> SoakReport:
        now = self._engine.metrics()
        self._check(now.kv_pages_used == 0, f"{now.kv_pages_used} pages of the KV cache are held")
        self._check(not now.running and not now.waiting, "sequences are left")
        total = sum(now.requests.values())
        self._check(total == 2 * count, f"{total} of {2 * count} requests have ended")
        for kind, number in self._different.items():
            most = _SAMPLED_SHARE * self._asked[kind] if "sampled" in kind else 0
            self._check(
                not self._exact or kind in self._unlike or number <= most,
                f"{kind}: {number} of {self._asked[kind]} answers have other tokens than alone",
            )
        self._faults += self._memory.faults()
        return SoakReport(
            num_requests=2 * count,
            seconds=round(seconds, 2),
            outcomes=dict(now.requests),
            different={kind: self._different[kind] for kind in sorted(self._asked)},
            memory=self._memory.to_dict(),
            pages={
                "held": now.kv_pages_used,
                "cached": now.kv_pages_cached,
                "total": now.kv_pages_total,
                "preempted": now.preempted,
                "reused_tokens": now.reused_tokens,
            },
            faults=self._faults,
        )

    def _check(self, holds: bool, fault: str) -> None:
        if not holds:
            self._faults.append(fault)


if __name__ == "__main__":
    run_command(main)

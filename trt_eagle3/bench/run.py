"""bench: compare a bundle's decoding with and without speculation, load by load, in one process."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from trt_eagle3.bench import MAX_TOKENS, ROUNDS
from trt_eagle3.bench.result import BenchReport, BenchRow, Side, differing_prompts
from trt_eagle3.bench.workload import (
    Load,
    Progress,
    Run,
    batch_sizes,
    drive,
    make_requests,
    open_engine,
)
from trt_eagle3.decode.llm import LLM
from trt_eagle3.engine.runtime.machine import machine_name
from trt_eagle3.errors import CheckFailedError, UserError
from trt_eagle3.prompts.kept import origin_of, questions_for

__all__ = ["bench", "request_counts"]

_PER_PLACE = 4
"""Requests per sequence of the batch: then the requests at the end of a round, which leave the
batch partly empty, are few.
"""


def bench(
    bundle: Path,
    *,
    prompts: Path | None = None,
    batches: Sequence[int] = (),
    rates: Sequence[float] = (),
    requests: Sequence[int] = (),
    rounds: int = ROUNDS,
    max_tokens: int = MAX_TOKENS,
    ignore_eos: bool = False,
    prefix_cache: bool = False,
    tensor_parallel: int | None = None,
    progress: Progress = lambda *_: None,
) -> BenchReport:
    """Measure a bundle.

    A round runs every load with and without speculation, one after the other. The order alternates
    between rounds. The first round is not counted.

    Args:
        prompts: a prompt file in place of the bundled prompts.
        batches: requests in flight; by default 1, 2, 4, 8 within the bundle's limits.
        rates: Poisson arrivals per second, in place of ``batches``.
        requests: per round, of all loads or of each; by default every prompt at least once, and
            four per sequence of the batch.
        ignore_eos: every answer has ``max_tokens`` tokens.
        prefix_cache: reuse the pages of earlier prompts, if the bundle's limits enable it.
        tensor_parallel: devices that share the target; None: as the bundle was built.
    Raises:
        UserError: bundle or prompts are invalid, a batch exceeds the bundle's limits, or both kinds
            of load are given.
        CheckFailedError: in float32, tokens with and without speculation differ.
    """
    if batches and rates:
        raise UserError("--batch and --rate: they exclude each other. Give one of them.")
    engine = open_engine(bundle, prefix_cache=prefix_cache, tensor_parallel=tensor_parallel)
    questions = questions_for(bundle, prompts, vision=engine.bundle.spec.vision is not None)
    loads = [Load(rate=rate) for rate in rates] or [
        Load(size) for size in batch_sizes(engine, batches)
    ]
    sides = (False, True) if engine.bundle.manifest else (False,)
    counts = request_counts(loads, requests, len(questions))
    found: dict[tuple[Load, bool], list[Run]] = {
        (load, side): [] for load in loads for side in sides
    }
    try:
        for number in range(rounds + 1):
            for index, load in enumerate(loads):
                progress("rounds", number * len(loads) + index, (rounds + 1) * len(loads))
                for side in sides if number % 2 else sides[::-1]:
                    asked = make_requests(
                        questions,
                        counts[load],
                        max_tokens=max_tokens,
                        ignore_eos=ignore_eos,
                        speculation=side,
                    )
                    run = drive(engine, asked, load, seed=number)
                    if number:
                        found[load, side].append(run)
        progress("rounds", 1, 1)
    finally:
        engine.close()
    facts = {
        "bundle": str(bundle),
        "version": version("trt-eagle3"),
        "machine": machine_name(engine.bundle.device),
        "backend": engine.bundle.record.engine.backend,
        "dtype": engine.bundle.record.config.engine.dtype,
        "tensor_parallel": engine.bundle.tensor_parallel,
        "speculation": engine.bundle.record.config.speculation.model_dump(mode="json"),
        "prompts": origin_of(bundle, prompts),
        "num_prompts": len(questions),
        "max_tokens": max_tokens,
        "ignore_eos": ignore_eos,
        "prefix_cache": prefix_cache and engine.bundle.limits.prefix_cache,
        "rounds": rounds,
    }
    return BenchReport(facts, tuple(_row(engine, load, found, len(questions)) for load in loads))


def request_counts(
    loads: Sequence[Load], given: Sequence[int], num_prompts: int
) -> dict[Load, int]:
    """Return requests of a round by load: ``given`` for all loads, or for each.

    By default whole cycles through the prompts, so that every load has the same mix.

    Raises:
        UserError: ``given`` has neither one number nor one for each load.
    """
    if given and len(given) not in {1, len(loads)}:
        raise UserError(
            f"--requests: expected one number, or one for each of {len(loads)} loads, got "
            f"{len(given)}"
        )
    turns = (max(1, -(-_PER_PLACE * load.concurrency // num_prompts)) for load in loads)
    counts = list(given) * (len(loads) // len(given)) if given else [num_prompts * t for t in turns]
    return dict(zip(loads, counts, strict=True))


def _row(
    engine: LLM, load: Load, found: dict[tuple[Load, bool], list[Run]], num_prompts: int
) -> BenchRow:
    plain = Side(tuple(found[load, False]))
    if (load, True) not in found:
        return BenchRow(load, plain, None, 0)
    speculative = Side(tuple(found[load, True]))
    differing = differing_prompts(plain, speculative, num_prompts)
    if differing and engine.bundle.record.config.engine.dtype == "float32":
        prompt, token = min(differing.items())
        raise CheckFailedError(
            f"{load.name} in flight: speculative and plain tokens differ for {len(differing)} of "
            f"{num_prompts} prompts, first at token {token} of prompt {prompt}. In float32 they "
            "must be equal, so no ratio is given. Find the cause: trt-eagle3 validate "
            f"{engine.bundle.path}"
        )
    return BenchRow(load, plain, speculative, len(differing))

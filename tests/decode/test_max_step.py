"""Chunks of prompts that fit into a target for the time between tokens, on a simulated clock."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from tests.decode.scheduling import MAX_TOKENS, make_scheduler, pair, prompts, solo
from trt_eagle3.decode.forward import chunks
from trt_eagle3.decode.forward.chunks import MAX_STEP_MS, chunk_rows, prefill_budget
from trt_eagle3.decode.memory.kv_cache import PagePool
from trt_eagle3.decode.policy.protocol import BatchState, FixedPolicy, StepStats
from trt_eagle3.decode.schedule.scheduler import Scheduler
from trt_eagle3.errors import UserError

H200_STEPS = {1: 4.0e-3, 32: 5.9e-3, 64: 7.2e-3, 128: 10.0e-3}
"""Seconds of a step of an 8B target in bfloat16 (docs/measurements.md)."""
H200_ROW = 21e-6
"""Seconds of a prompt row."""


def h200() -> FixedPolicy:
    policy = FixedPolicy(None)
    for size, seconds in H200_STEPS.items():
        policy.prime(None, size, seconds)
    policy.prime_prompts(4096, 4096 * H200_ROW)
    return policy


@dataclass
class _Request:
    sent: float
    rows: int
    tokens: int
    last: float = 0.0


@dataclass
class _Times:
    gaps: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    tokens_per_second: float = 0.0


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


def crowd(max_step_ms: float, *, chunk: int = 4096, clients: int = 128) -> _Times:
    """Clients in a closed loop, whose steps take as long as the policy expects: 20 s of it."""
    draw, policy, times = random.Random(0), h200(), _Times()
    now, tokens = 0.0, 0
    waiting: deque[_Request] = deque()
    decoding: list[_Request] = []

    def send() -> None:
        waiting.append(_Request(now, draw.randint(200, 1400), draw.randint(16, 256)))

    for _ in range(clients):
        send()
    while now < 20.0:
        batch = BatchState(len(decoding), 0, len(decoding))
        in_time = policy.prompt_rows(batch, 1e-3 * max_step_ms) if decoding else None
        rows = chunk_rows([r.rows for r in waiting], prefill_budget(chunk, in_time))
        now += H200_ROW * sum(rows.values())
        now += policy._cost.seconds(1, len(decoding), len(decoding)) if decoding else 4e-3
        for i, count in rows.items():
            waiting[i].rows -= count
        over = []
        for r in decoding:
            times.gaps.append(now - r.last)
            r.last, r.tokens, tokens = now, r.tokens - 1, tokens + 1
            over += [r] if not r.tokens else []
        begun = [r for r in waiting if not r.rows]
        for r in begun:
            waiting.remove(r)
            times.firsts.append(now - r.sent)
            r.last = now
        decoding = [r for r in decoding if r not in over] + begun
        for _ in over:
            send()
    times.tokens_per_second = tokens / now
    return times


def test_default_target_bounds_the_time_between_tokens_of_a_crowd_and_costs_no_throughput() -> None:
    bounded, whole = crowd(MAX_STEP_MS), crowd(1e9, chunk=16384)
    assert max(bounded.gaps) <= 1e-3 * MAX_STEP_MS
    assert max(whole.gaps) > 3e-3 * MAX_STEP_MS
    assert bounded.tokens_per_second > 0.99 * whole.tokens_per_second
    assert quantile(bounded.gaps, 0.99) < 0.098
    assert quantile(bounded.firsts, 0.95) < 1.05 * quantile(whole.firsts, 0.95)


def test_smaller_target_gives_more_even_tokens_and_later_first_ones() -> None:
    even, default = crowd(25.0), crowd(MAX_STEP_MS)
    assert max(even.gaps) <= 0.025
    assert quantile(even.firsts, 0.95) > quantile(default.firsts, 0.95)
    assert even.tokens_per_second > 0.9 * default.tokens_per_second


def test_prompt_rows_are_the_time_left_by_the_step_over_the_time_of_a_row() -> None:
    policy = h200()
    assert policy.prompt_rows(BatchState(128, 0, 128), 0.1) == int((0.1 - 0.01) / H200_ROW)
    assert policy.prompt_rows(BatchState(128, 0, 128), 0.005) == 0
    assert FixedPolicy(None).prompt_rows(BatchState(128, 0, 128), 0.1) is None


class _Recording(FixedPolicy):
    """Steps of 10 ms and rows of 5 ms."""

    def __init__(self) -> None:
        super().__init__(None)
        self.prime(None, 1, 0.010)
        self.prime_prompts(10, 0.050)
        self.rows: list[int] = []

    def record(self, stats: StepStats) -> None:
        self.rows.append(stats.prompt_rows)


@pytest.mark.parametrize(("max_step_ms", "most"), [(32.0, 4), (62.0, 10), (1e6, 16)])
def test_scheduler_prefills_as_many_rows_beside_a_step_as_fit(
    max_step_ms: float, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "_WEIGHT_ROWS", 1)
    policy, pool = _Recording(), PagePool(64, 4)
    scheduler: Scheduler = make_scheduler(
        pool, None, None, 16, policy=policy, max_step_ms=max_step_ms
    )
    asked = {i: pair().sequence(prompts()[i], pool) for i in (0, 3, 6)}
    scheduler.add(asked[0])
    scheduler.step()
    for i in (3, 6):
        scheduler.add(asked[i])
    while any(len(s.tokens) < MAX_TOKENS for s in asked.values()):
        for emission in scheduler.step():
            if len(emission.sequence.tokens) >= MAX_TOKENS:
                scheduler.remove(emission.sequence)
    assert max(policy.rows) == most
    assert {i: s.tokens[:MAX_TOKENS] for i, s in asked.items()} == {i: solo(i) for i in asked}


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan"), True])
def test_target_must_be_above_zero(value: float) -> None:
    from trt_eagle3 import LLM

    with pytest.raises(UserError, match="max_step_ms: expected milliseconds above 0"):
        LLM("absent", max_step_ms=value)

"""Prompts that run in one forward with sequences that decode change nothing that is said."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.decode.overwriting import ask_together, overwriting_llm
from tests.decode.pair import NUM_PAGES, RecordingTarget
from tests.decode.scheduling import (
    CHAIN,
    LAYOUTS,
    MAX_TOKENS,
    finish,
    make_scheduler,
    solo,
)
from tests.decode.test_stepper import Turns, count_calls, fixed_pool, sequence
from tests.tiny import build_tiny
from trt_eagle3 import Request, load
from trt_eagle3.decode.forward.runner import DraftRunner, TargetRunner
from trt_eagle3.decode.memory.prefix_cache import PrefixCache
from trt_eagle3.decode.policy.protocol import BatchState
from trt_eagle3.decode.sampling.grammar import Grammar
from trt_eagle3.decode.sampling.sampling_params import SamplingParams
from trt_eagle3.decode.speculation.tree import AnyTree
from trt_eagle3.decode.step.stepper import Stepper


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("drafting", [False, True])
@pytest.mark.parametrize("num_pages", [NUM_PAGES, 15], ids=["roomy", "tight"])
def test_sequences_that_come_at_any_time_say_what_each_says_alone(
    seed: int, drafting: bool, num_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that a draft follows too, while nothing is drafted, and now and then something."""
    mixed = count_calls(monkeypatch, RecordingTarget, "forward_mixed")
    chance, pool = random.Random(seed), fixed_pool(num_pages)

    def tree_for(_: BatchState) -> AnyTree | None:
        return CHAIN if drafting and chance.random() < 0.2 else None

    scheduler = make_scheduler(pool, PrefixCache(pool), tree_for)
    coming = [sequence(i, pool, drafting=drafting) for i in range(len(LAYOUTS))]
    asked = dict(enumerate(coming))
    chance.shuffle(coming)
    while coming or scheduler.running or scheduler.waiting:
        if coming and chance.random() < 0.4:
            scheduler.add(coming.pop())
        for emission in scheduler.step():
            assert emission.error is None
            if len(emission.sequence.tokens) >= MAX_TOKENS or emission.full:
                scheduler.remove(emission.sequence)
    expected = {i: solo(i) for i in range(len(LAYOUTS))}
    assert {i: s.tokens[:MAX_TOKENS] for i, s in asked.items()} == expected
    assert len(mixed) > 3
    assert pool.num_used == pool.num_idle, "pages leaked"


def test_steps_with_prompts_are_no_forwards_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of several chunks beside a sequence that decodes: a forward a step."""
    forwards = count_calls(monkeypatch, TargetRunner, "forward")
    mixed = count_calls(monkeypatch, RecordingTarget, "forward_mixed")
    pool = fixed_pool()
    scheduler = make_scheduler(pool, None, lambda _: None)
    scheduler.add(first := sequence(0, pool, drafting=False))
    while not first.tokens:
        scheduler.step()
    scheduler.step()
    forwards.clear()
    scheduler.add(second := sequence(6, pool, drafting=False))
    while not second.prefilled:
        scheduler.step()
    num_tokens = len(first.tokens)
    assert len(mixed) >= 7, "33 tokens in chunks of 5, one of which the other takes"
    # this runner's mixed forwards are two; besides there is the step that follows the last chunk
    assert len(forwards) <= 2 * len(mixed) + 1
    finish(scheduler)
    assert num_tokens > 7
    assert first.tokens[:MAX_TOKENS] == solo(0)
    assert second.tokens[:MAX_TOKENS] == solo(6)


def test_forward_for_which_memory_is_lacking_is_run_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []

    def no_memory(*_: Any) -> None:
        calls.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(RecordingTarget, "forward_mixed", no_memory)
    pool = fixed_pool()
    scheduler = make_scheduler(pool, None, lambda _: None)
    asked = {i: sequence(i, pool, drafting=False) for i in (0, 3, 5)}
    for s in asked.values():
        scheduler.add(s)
        scheduler.step()
    finish(scheduler)
    assert calls
    assert {i: s.tokens[:MAX_TOKENS] for i, s in asked.items()} == {i: solo(i) for i in asked}


def test_step_beside_a_prompt_is_dropped_where_a_tree_comes_instead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The plan is asked twice; it says something else the second time."""
    beside = count_calls(monkeypatch, Stepper, "launch_mixed")
    pool, answers = fixed_pool(), [None, CHAIN]
    turn = iter(range(10_000))
    scheduler = make_scheduler(pool, None, lambda _: answers[next(turn) % 2])
    asked = {i: sequence(i, pool) for i in (0, 3, 5)}
    for s in asked.values():
        scheduler.add(s)
    finish(scheduler)
    assert beside
    assert {i: s.tokens[:MAX_TOKENS] for i, s in asked.items()} == {i: solo(i) for i in asked}


def test_stale_step_is_not_taken_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a sequence that was preempted meanwhile."""
    mixed = count_calls(monkeypatch, RecordingTarget, "forward_mixed")
    pool = fixed_pool()
    scheduler = make_scheduler(pool, None, lambda _: None)
    asked = {i: sequence(i, pool, drafting=False) for i in (0, 6)}
    for s in asked.values():
        scheduler.add(s)
    while scheduler.running or scheduler.waiting:
        seen = len(mixed)
        for emission in scheduler.step():
            if len(emission.sequence.tokens) >= MAX_TOKENS:
                scheduler.remove(emission.sequence)
        if len(mixed) > seen and asked[0] in scheduler.running:
            scheduler._preempt(asked[0])
    assert mixed
    assert {i: s.tokens[:MAX_TOKENS] for i, s in asked.items()} == {i: solo(i) for i in asked}


def test_draft_runs_over_widths_that_come_again_beside_any_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else each number of others were a shape of its own, captured and run for the first time."""
    mixed = count_calls(monkeypatch, RecordingTarget, "forward_mixed")
    drafted = count_calls(monkeypatch, DraftRunner, "forward")
    pool = fixed_pool()
    scheduler = make_scheduler(pool, None, lambda _: None, chunk=64)
    asked = {i: sequence(i, pool) for i in (0, 3)}
    scheduler.add(asked[0])
    while not asked[0].tokens:
        scheduler.step()
    drafted.clear()
    scheduler.add(asked[3])
    while not asked[3].prefilled:
        scheduler.step()
    ((prompts, steps, _),) = mixed
    assert (prompts.embeds.shape[1], len(steps.embeds)) == (31, 1)
    assert [embeds.shape[:2] for embeds, *_ in drafted] == [(1, 32)]
    finish(scheduler)
    assert {i: s.tokens[:MAX_TOKENS] for i, s in asked.items()} == {i: solo(i) for i in asked}


def test_rows_of_a_prompt_and_of_those_beside_it_are_no_more_than_a_chunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the padding of a prompt that runs alone."""
    mixed = count_calls(monkeypatch, RecordingTarget, "forward_mixed")
    pool = fixed_pool()
    scheduler = make_scheduler(pool, None, lambda _: None, chunk=20)
    asked = {i: sequence(i, pool, drafting=False) for i in (0, 6)}
    for s in asked.values():
        scheduler.add(s)
        while not s.tokens:
            scheduler.step()
    assert mixed
    rows = [p.embeds.shape[:2].numel() + len(s.embeds) for p, s, _ in mixed]
    assert max(rows) <= 20
    finish(scheduler)
    assert {i: s.tokens[:MAX_TOKENS] for i, s in asked.items()} == {i: solo(i) for i in asked}


@pytest.mark.parametrize("tree", [None, CHAIN], ids=["plain", "chain"])
@pytest.mark.parametrize("mixes", [True, False])
def test_stats_of_steps_beside_a_prompt_count_its_rows_and_all_that_run(
    mixes: bool, tree: AnyTree | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of 33 tokens in chunks of 12, of which a mixed step takes one."""
    monkeypatch.setattr(RecordingTarget, "mixes", mixes)
    pool, policy = fixed_pool(), Turns()
    policy.trees = (tree,)
    scheduler = make_scheduler(pool, None, policy=policy, chunk=12)
    scheduler.add(first := sequence(0, pool))
    while len(first.tokens) < 2:
        scheduler.step()
    policy.seen.clear()
    scheduler.add(sequence(6, pool))
    for _ in range(4):
        scheduler.step()
    rows = [stats.prompt_rows for stats in policy.seen]
    assert sum(rows) == 33
    assert rows[0] == (11 if mixes and tree is None else 12)
    assert [s.batch.num_running for s in policy.seen] == [2, 2, 2, 2]
    assert [s.batch.size for s in policy.seen][:3] == [1, 1, 1]
    assert all(stats.seconds is not None and stats.seconds > 0 for stats in policy.seen)


def test_stats_leave_out_the_time_in_which_nothing_was_to_be_done() -> None:
    pool, policy = fixed_pool(), Turns()
    scheduler = make_scheduler(pool, None, policy=policy)
    now = 0.0
    scheduler.clock = lambda: now
    for index in (0, 3):
        scheduler.add(one := sequence(index, pool))
        while len(one.tokens) < 4:
            now += 0.01
            scheduler.step()
        scheduler.remove(one)
        now += 100.0
    timed = [stats.seconds for stats in policy.seen if stats.seconds is not None]
    assert len(timed) > 4
    assert timed == pytest.approx([0.01] * len(timed))


OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "seed": 3},
    {"grammar": Grammar.regex("[a-f]{2,5}(, [a-f]{2,5}){1,3}")},
    {"logprobs": 3},
    {"frequency_penalty": 0.6},
    {"temperature": 1.0, "top_k": 5, "seed": 4},
)


def test_answers_with_every_option_are_those_of_an_engine_that_does_not_mix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real pair in float32, prompts in chunks, and graphs that overwrite their outputs."""
    engine = {"backend": "torch", "prefill_chunk": 64}
    limits = {"max_batch_size": 4, "max_seq_len": 512}
    bundle = build_tiny(tmp_path, engine=engine, limits=limits)
    questions = ["What is 12 plus 30?", "Count to nine. " * 9]
    requests = [
        Request(q, sampling=SamplingParams(max_tokens=24, **options), speculation=False)
        for options in OPTIONS
        for q in questions
    ]
    with load(bundle) as alone:
        expected = [alone.generate(r.prompt, **_sampling(r), speculation=False) for r in requests]
    mixed = count_calls(monkeypatch, TargetRunner, "forward_mixed")
    with overwriting_llm(bundle) as engine_that_mixes:
        found = ask_together(engine_that_mixes, requests)
    assert [tuple(x.token_ids) for x in expected] == found
    assert len(mixed) > 5


def _sampling(request: Request) -> dict[str, Any]:
    return {"max_tokens": request.sampling.max_tokens} | {
        name: getattr(request.sampling, name)
        for name in ("temperature", "seed", "grammar", "logprobs", "frequency_penalty", "top_k")
    }

"""Steps that run ahead of the host: sequences emit what each emits alone."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.decode.overwriting import overwriting_llm
from tests.decode.pair import NUM_PAGES, PAGE_SIZE
from tests.decode.scheduling import (
    CHAIN,
    LAYOUTS,
    MAX_SEQ_LEN,
    MAX_TOKENS,
    TREES,
    TreeFor,
    finish,
    make_scheduler,
    pair,
    prompts,
    solo,
)
from tests.tiny import build_tiny
from trt_eagle3 import load
from trt_eagle3.decode.forward.runner import AttentionMetadata, DraftRunner, TargetRunner
from trt_eagle3.decode.memory.kv_cache import PagePool
from trt_eagle3.decode.memory.prefix_cache import PrefixCache
from trt_eagle3.decode.memory.sequence import SequenceState
from trt_eagle3.decode.policy.protocol import BatchState, FixedPolicy, StepStats
from trt_eagle3.decode.policy.speculation import SpeculationPolicy
from trt_eagle3.decode.sampling.sampling_params import GREEDY, SamplingParams
from trt_eagle3.decode.schedule.scheduler import Scheduler
from trt_eagle3.decode.speculation import backfill
from trt_eagle3.decode.speculation.eagle import EagleDrafter
from trt_eagle3.decode.speculation.grow import TreeGrower
from trt_eagle3.decode.speculation.tree import AnyTree, Tree
from trt_eagle3.decode.step import stepper
from trt_eagle3.decode.step.prefill import Prefiller
from trt_eagle3.decode.step.stepper import Stepper
from trt_eagle3.engine.runtime.buckets import CAPTURED_AT_RUN, PROMPT_WIDTHS
from trt_eagle3.errors import ClosedError
from trt_eagle3.host_copy import Readback

ANY_STEPS = {None, *range(8)}
VOCAB = 12  # of the pair


class Turns(FixedPolicy):
    """A policy that changes its mind every fifth time that it is asked."""

    speculates = True
    trees: tuple[AnyTree | None, ...] = (None, CHAIN, TREES["bushy"], TREES["dynamic"])

    def __init__(self) -> None:
        super().__init__(None)
        self.seen: list[StepStats] = []
        self._turn = 0

    def choose(self, _batch: BatchState) -> AnyTree | None:
        self._turn += 1
        return self.trees[self._turn // 5 % len(self.trees)]

    def record(self, stats: StepStats) -> None:
        self.seen.append(stats)


def fixed_pool(num_pages: int = NUM_PAGES) -> PagePool:
    return PagePool(num_pages, PAGE_SIZE, table_len=MAX_SEQ_LEN // PAGE_SIZE)


def sequence(index: int, pool: PagePool, **options: Any) -> SequenceState:
    options = {"drafting": True} | options
    return pair().sequence(prompts()[index], pool, **options)


def count_calls(patch: pytest.MonkeyPatch, owner: type, name: str) -> list[Any]:
    """What ``owner.name`` is called with from now on."""
    calls: list[Any] = []
    original = getattr(owner, name)

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(args[1:])
        return original(*args, **options)

    patch.setattr(owner, name, counted)
    return calls


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("num_pages", [NUM_PAGES, 15], ids=["roomy", "tight"])
@pytest.mark.parametrize("many", [1, 8])
def test_staggered_sequences_say_what_each_says_alone(
    tree: str, num_pages: int, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They join and leave at any time, are preempted, and begin with pages of others."""
    expected = {i: solo(i) for i in range(len(LAYOUTS))}
    monkeypatch.setattr(stepper, "_LAUNCHED_AHEAD", many)
    pool = fixed_pool(num_pages)
    scheduler = make_scheduler(pool, PrefixCache(pool), lambda _: TREES[tree])
    coming = [sequence(i, pool, drafting=TREES[tree] is not None) for i in range(len(LAYOUTS))]
    asked, chance = dict(enumerate(coming)), random.Random(num_pages)
    while coming or scheduler.running or scheduler.waiting:
        if coming and chance.random() < 0.3:
            scheduler.add(coming.pop())
        for emission in scheduler.step():
            assert emission.error is None
            if len(emission.sequence.tokens) >= MAX_TOKENS or emission.full:
                scheduler.remove(emission.sequence)
    assert {i: s.tokens[:MAX_TOKENS] for i, s in asked.items()} == expected
    assert scheduler.num_preempted or num_pages == NUM_PAGES
    assert pool.num_used == pool.num_idle, "pages leaked"


@pytest.mark.parametrize("many", [1, 8])
def test_tree_that_changes_with_the_batch_changes_nothing_that_is_said(
    many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stepper, "_LAUNCHED_AHEAD", many)
    expected = {i: solo(i) for i in (0, 3, 5)}
    pool, policy = fixed_pool(), Turns()
    scheduler = make_scheduler(pool, None, policy=policy)
    asked = {i: sequence(i, pool) for i in expected}
    for s in asked.values():
        scheduler.add(s)
    finish(scheduler)
    assert {i: s.tokens[:MAX_TOKENS] for i, s in asked.items()} == expected
    for cycle in policy.seen:
        assert all((n is None) == (cycle.tree is None) for n in cycle.accepted)
        assert len(cycle.accepted) == cycle.batch.size
    emitted = sum((n or 0) + 1 for cycle in policy.seen for n in cycle.accepted)
    assert emitted == sum(len(s.tokens) - 1 for s in asked.values()), "each token is observed once"
    assert {id(cycle.tree) for cycle in policy.seen} == {id(tree) for tree in policy.trees}


def test_sampled_sequence_that_joins_and_leaves_changes_nothing_for_greedy_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stepper, "_LAUNCHED_AHEAD", 1)
    expected = {i: solo(i) for i in (0, 3)}
    for tree in (None, CHAIN):
        pool = fixed_pool()
        scheduler = make_scheduler(pool, None, lambda _, tree=tree: tree)
        asked = {i: sequence(i, pool) for i in expected}
        for s in asked.values():
            scheduler.add(s)
        while min(len(s.tokens) for s in asked.values()) < 3:
            scheduler.step()
        sampled = SequenceState(prompts()[1], pool, 12, SamplingParams(1.0, seed=1), drafting=True)
        scheduler.add(sampled)
        while len(sampled.tokens) < 4:
            scheduler.step()
        scheduler.remove(sampled)
        finish(scheduler)
        assert {i: s.tokens[:MAX_TOKENS] for i, s in asked.items()} == expected


class Order(list[str]):
    """What happens, in order, from ``watch`` on."""

    def watch(self, patch: pytest.MonkeyPatch, *named: tuple[type, str]) -> None:
        for owner, name in named:
            patch.setattr(owner, name, self._noted(getattr(owner, name), name))

    def _noted(self, original: Any, name: str) -> Any:
        def noted(*args: Any, **options: Any) -> Any:
            self.append(name)
            return original(*args, **options)

        return noted


def decoding(
    tree: Any, patch: pytest.MonkeyPatch, count: int = 2, sampling: SamplingParams = GREEDY
) -> tuple[Scheduler, list[SequenceState], Order]:
    """A scheduler whose sequences decode, and what it does from now on, in order."""
    pool = fixed_pool()
    scheduler = make_scheduler(pool, None, lambda _: tree)
    drafting = tree is not None
    asked = [SequenceState(prompts()[i], pool, VOCAB, sampling, drafting) for i in range(count)]
    for s in asked:
        scheduler.add(s)
    while min(len(s.tokens) for s in asked) < 3:
        scheduler.step()
    done = Order()
    done.watch(patch, (TargetRunner, "forward"), (TreeGrower, "grow"), (Readback, "wait"))
    return scheduler, asked, done


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("tree", "order"),
    [(None, ["forward", "wait"]), (CHAIN, ["forward", "grow", "wait"])],
    ids=["plain", "chain"],
)
def test_device_has_its_next_work_before_the_host_waits(
    tree: Any, order: list[str], temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One wait in a step; a plain forward is launched before it, and so are the next trees."""
    sampling = SamplingParams(temperature)
    scheduler, asked, done = decoding(tree, monkeypatch, sampling=sampling)
    for _ in range(3):
        assert len(scheduler.step()) == 2
    assert done == order * 3
    assert all(len(s.tokens) >= 6 for s in asked)


def test_drafts_of_sequences_without_a_tree_are_backfilled_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All at once would delay all answers; what is kept for them stays bounded."""
    monkeypatch.setattr(backfill, "MAX_DEFERRED", 8)
    monkeypatch.setattr(backfill, "_WINDOW", 2)
    pool = fixed_pool()
    scheduler = make_scheduler(pool, None, lambda _: None, chunk=64)
    asked = [sequence(i, pool) for i in (0, 2, 5)]
    for s in asked:
        scheduler.add(s)
    num_backfilled = 0
    while len(asked[0].tokens) < 24:
        before = [s.num_draft_computed_tokens for s in asked]
        scheduler.step()
        grown = [s.num_draft_computed_tokens > n for s, n in zip(asked, before, strict=True)]
        num_backfilled += sum(grown) if all(before) else 0
        assert sum(grown) <= 1 or not all(before)
        assert all(len(s.deferred) <= 8 for s in asked)
    assert num_backfilled >= 6
    assert all(
        s.num_draft_computed_tokens + len(s.deferred) == s.num_computed_tokens for s in asked
    )


@pytest.mark.parametrize("tree", [name for name in TREES if TREES[name]])
@pytest.mark.parametrize("many", [1, 8])
def test_sequences_without_a_draft_share_steps_with_those_that_draft(
    tree: str, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every second one asked for no draft: its steps count as plain."""
    monkeypatch.setattr(stepper, "_LAUNCHED_AHEAD", many)
    expected = {i: solo(i) for i in range(len(LAYOUTS))}
    pool = fixed_pool()
    scheduler = make_scheduler(pool, PrefixCache(pool), lambda _: TREES[tree])
    asked = {i: sequence(i, pool, drafting=i % 2 == 0) for i in range(len(LAYOUTS))}
    for s in asked.values():
        scheduler.add(s)
    while scheduler.running or scheduler.waiting:
        for emission in scheduler.step():
            assert emission.error is None
            assert emission.tree_depth in (
                (None, 0) if not emission.sequence.drafting else ANY_STEPS
            )
            if len(emission.sequence.tokens) >= MAX_TOKENS or emission.full:
                scheduler.remove(emission.sequence)
    assert {i: s.tokens[:MAX_TOKENS] for i, s in asked.items()} == expected
    assert all(s.draft is None for i, s in asked.items() if i % 2)
    assert pool.num_used == pool.num_idle, "pages leaked"


def test_sequence_without_draft_goes_on_where_those_that_draft_are_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step is in flight for both, after which the next trees were to be proposed."""
    monkeypatch.setattr(stepper, "_LAUNCHED_AHEAD", 1)
    monkeypatch.setattr(EagleDrafter, "waits_for_host", lambda *_: True)
    scheduler, asked = shared_steps(0)
    while min(len(s.tokens) for s in asked) < 3:
        scheduler.step()
    scheduler.remove(asked[0])
    finish(scheduler)
    assert asked[1].tokens[:MAX_TOKENS] == solo(1)


@pytest.mark.parametrize("limit", range(4, 12))
def test_sequence_without_draft_goes_on_where_those_that_draft_end(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be so long by then that no trees were proposed ahead."""
    monkeypatch.setattr(stepper, "_LAUNCHED_AHEAD", 1)
    scheduler, asked = shared_steps(6)
    asked[0].sampling = SamplingParams(max_tokens=limit)
    while scheduler.running or scheduler.waiting:
        for emission in scheduler.step():
            assert emission.error is None
            s = emission.sequence
            if len(s.tokens) >= (limit if s is asked[0] else MAX_TOKENS) or emission.full:
                scheduler.remove(s)
    assert asked[0].tokens[:limit] == solo(6)[:limit]
    assert asked[1].tokens[:MAX_TOKENS] == solo(1)


def shared_steps(index: int) -> tuple[Scheduler, list[SequenceState]]:
    """A scheduler with chains, where the prompt ``index`` drafts and that of 1 does not."""
    pool = fixed_pool()
    scheduler = make_scheduler(pool, None, lambda _: CHAIN)
    asked = [sequence(index, pool), sequence(1, pool, drafting=False)]
    for s in asked:
        scheduler.add(s)
    return scheduler, asked


@pytest.mark.parametrize("many", [1, 8])
def test_tokens_are_on_their_way_before_the_draft_works(
    many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host has them while the device extends and proposes, and launches the next step then."""
    monkeypatch.setattr(stepper, "_LAUNCHED_AHEAD", many)
    scheduler, _, done = decoding(CHAIN, monkeypatch)
    done.watch(monkeypatch, (Readback, "__init__"), (EagleDrafter, "extend"))
    for _ in range(3):
        scheduler.step()
    assert [n for n in done if n in ("__init__", "extend")] == ["__init__", "extend"] * 3


def test_shorter_chain_takes_what_was_proposed_for_a_longer_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler, asked, done = decoding(CHAIN, monkeypatch)
    scheduler.policy = TreeFor(lambda _: shorter)
    shorter = Tree.from_paths([(0,) * depth for depth in range(1, CHAIN.num_nodes - 1)])
    scheduler.step()
    assert done == ["forward", "grow", "wait"], "what was prepared is cut, not drafted again"
    assert scheduler.num_draft_tokens == CHAIN.num_nodes - 2
    finish(scheduler)
    assert [s.tokens[:MAX_TOKENS] for s in asked] == [solo(0), solo(1)]


def test_step_of_a_large_batch_is_launched_before_the_last_tokens_are_delivered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stepper, "_LAUNCHED_AHEAD", 2)
    scheduler, asked, done = decoding(CHAIN, monkeypatch)
    for _ in range(3):
        assert len(scheduler.step()) == 2
    assert done == ["wait", "forward", "grow"] * 3
    scheduler.remove(asked[1])
    done.clear()
    assert [e.sequence for e in scheduler.step()] == asked[:1]
    assert done == ["wait"], "one alone would take part for nothing where it ends"


def test_nothing_is_launched_for_a_sequence_that_has_its_last_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler, (s, other), done = decoding(None, monkeypatch)
    scheduler.remove(other)
    scheduler.step()
    s.sampling = SamplingParams(max_tokens=len(s.tokens) + 1)
    done.clear()
    assert [e.sequence for e in scheduler.step()] == [s]
    assert done == ["wait"], "what ran already was its last"


def test_step_of_a_sequence_that_began_again_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has other pages now, in which that step wrote nothing."""
    scheduler, (s, other), done = decoding(None, monkeypatch)
    expected = solo(0)
    scheduler.remove(other)
    scheduler.step()
    scheduler._preempt(s)
    taken = scheduler._decoder.states
    blocker = sequence(6, s.pool)
    taken.reserve(blocker, 3 * PAGE_SIZE)  # the pages that it had are another's
    done.clear()
    while len(s.tokens) < MAX_TOKENS:
        scheduler.step()
    assert s.tokens[:MAX_TOKENS] == expected


def test_step_in_flight_keeps_no_sequence_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import gc
    import weakref

    scheduler, asked, _ = decoding(None, monkeypatch)
    held = weakref.ref(asked[0])
    for s in asked:
        scheduler.remove(s)
    asked.clear()
    del s
    gc.collect()
    assert held() is None


@pytest.mark.parametrize("tree", [None, CHAIN], ids=["plain", "chain"])
def test_sequence_whose_logits_are_no_numbers_fails_alone(
    tree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, (good, bad), _ = decoding(tree, monkeypatch)
    expected = solo(0)

    forward = TargetRunner.forward

    def overflow(self: TargetRunner, *args: Any, reduce: Any = None) -> Any:
        logits, aux = forward(self, *args)
        if len(logits) > 1:
            logits[1, ..., 1] = torch.nan
        return reduce(logits) if reduce else logits, aux

    with monkeypatch.context() as patch:
        patch.setattr(TargetRunner, "forward", overflow)
        errors = [e for _ in range(3) for e in scheduler.step() if e.error is not None]
    assert [e.sequence for e in errors] == [bad]
    finish(scheduler)
    assert good.tokens[:MAX_TOKENS] == expected


SAMPLED = SamplingParams(0.9, top_k=6, max_tokens=MAX_TOKENS)


def by_host(index: int, tree: AnyTree | None, sampling: SamplingParams) -> list[int]:
    """What a sequence emits alone, by steps that are collected at once."""
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    scheduler = make_scheduler(pool, None, lambda _: tree)
    alone = SequenceState(prompts()[index], pool, VOCAB, sampling, tree is not None)
    scheduler.add(alone)
    finish(scheduler)
    return alone.tokens[:MAX_TOKENS]


KINDS = (
    SAMPLED.updated(seed=5),
    SamplingParams(max_tokens=MAX_TOKENS),
    SAMPLED.updated(seed=6, repetition_penalty=1.3),
    SAMPLED.updated(seed=7, temperature=1.4),
)
KIND_OF = tuple(KINDS[i % len(KINDS)] for i in range(len(LAYOUTS)))


@cache
def all_by_host(tree: str) -> list[list[int]]:
    return [by_host(i, TREES[tree], kind) for i, kind in enumerate(KIND_OF)]


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("num_pages", [NUM_PAGES, 15], ids=["roomy", "tight"])
def test_sampled_sequences_say_what_each_says_alone(
    tree: str, num_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With greedy and penalised ones among them; a pass that is forgotten uses no random number."""
    monkeypatch.setattr(stepper, "_LAUNCHED_AHEAD", 2)
    expected = all_by_host(tree)
    pool, chance = fixed_pool(num_pages), random.Random(num_pages)
    scheduler = make_scheduler(pool, PrefixCache(pool), lambda _: TREES[tree])
    asked = [
        SequenceState(prompts()[i], pool, VOCAB, kind, TREES[tree] is not None)
        for i, kind in enumerate(KIND_OF)
    ]
    coming = [*asked]
    while coming or scheduler.running or scheduler.waiting:
        if coming and chance.random() < 0.3:
            scheduler.add(coming.pop())
        for emission in scheduler.step():
            assert emission.error is None
            if len(emission.sequence.tokens) >= MAX_TOKENS or emission.full:
                scheduler.remove(emission.sequence)
    assert [s.tokens[:MAX_TOKENS] for s in asked] == expected
    assert scheduler.num_preempted or num_pages == NUM_PAGES
    assert len({tuple(tokens) for tokens in expected}) > 4


@pytest.mark.parametrize("tree", ["chain", "bushy", "dynamic"])
@pytest.mark.parametrize("index", [0, 3])
def test_trees_that_are_proposed_ahead_are_those_of_the_rows_with_true_features(
    tree: str, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    grow, proposed = TreeGrower.grow, list[list[int]]()

    def watched(self: TreeGrower, *args: Any) -> Any:
        proposal = grow(self, *args)
        proposed.append(proposal.tokens[0].tolist())
        return proposal

    monkeypatch.setattr(TreeGrower, "grow", watched)

    def run_alone(table_len: int | None) -> list[list[int]]:
        proposed.clear()
        pool = PagePool(NUM_PAGES, PAGE_SIZE, table_len)
        scheduler = make_scheduler(pool, None, lambda _: TREES[tree])
        scheduler.add(sequence(index, pool))
        finish(scheduler)
        return list(proposed)

    ahead, by_host = run_alone(MAX_SEQ_LEN // PAGE_SIZE), run_alone(None)
    assert ahead[: len(by_host)] == by_host
    assert len(by_host) > 5
    assert len(ahead) == len(by_host) + 1, "one past the last token"


@pytest.mark.parametrize("chunk", [20, 40, 64])
def test_prompts_alone_are_padded_to_widths_that_come_again_and_say_the_same(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to what chunk and length limit hold; the draft's rows too."""
    expected = [solo(index) for index in range(len(LAYOUTS))]
    widths: dict[str, list[int]] = {}

    def watch(runner: type) -> None:
        forward = runner.forward

        def watched(self: Any, embeds: Any, *args: Any, **options: Any) -> Any:
            metadata = next(a for a in args if isinstance(a, AttentionMetadata))
            if metadata.is_prompt:
                widths.setdefault(runner.__name__, []).append(embeds.shape[1])
            return forward(self, embeds, *args, **options)

        monkeypatch.setattr(runner, "forward", watched)

    watch(TargetRunner)
    watch(DraftRunner)
    pool = fixed_pool()
    scheduler = make_scheduler(pool, PrefixCache(pool), lambda _: CHAIN, chunk=chunk)
    for index in range(len(LAYOUTS)):
        scheduler.add(s := sequence(index, pool))
        assert finish(scheduler)[id(s)][:MAX_TOKENS] == expected[index]
    possible = {min(32, chunk)} if chunk < MAX_SEQ_LEN else {32, MAX_SEQ_LEN}
    near_the_limit = {MAX_SEQ_LEN - start for start in range(0, MAX_SEQ_LEN, PAGE_SIZE)}
    assert set(widths["TargetRunner"]) <= possible | near_the_limit
    assert set(widths["TargetRunner"]) & possible
    assert widths["DraftRunner"][: len(widths["TargetRunner"])] == widths["TargetRunner"]


def test_graphs_are_captured_for_every_size_and_change_nothing_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"max_batch_size": 5, "max_seq_len": 512, "max_visual_tokens": 64}
    bundle = build_tiny(tmp_path, limits=limits, speculation={"adaptive": True})
    ran = count_calls(monkeypatch, Stepper, "run_dummy")
    primed = count_calls(monkeypatch, SpeculationPolicy, "prime")
    prompts = count_calls(monkeypatch, SpeculationPolicy, "prime_prompts")
    prefilled = count_calls(monkeypatch, Prefiller, "run")
    with overwriting_llm(bundle) as engine, load(bundle) as lazy:
        expected = lazy.generate("What is 12 plus 30?", max_tokens=12).token_ids
        assert lazy.capture_graphs() == 0
        prefilled.clear()
        assert engine.capture_graphs(seconds=300.0) == 5
        rows = [rows for ((_, rows),) in (chunks for chunks, *_ in prefilled)]
        widths = [n for n in reversed(PROMPT_WIDTHS) for _ in range(CAPTURED_AT_RUN)]
        assert rows == [512, 448, 384, 320, *widths, 512], "the widest once more, timed"
        assert engine.metrics().kv_pages_used == 0
        captured = [args[:2] for args in ran if args[-1] == CAPTURED_AT_RUN]
        assert [size for size, tree in captured if tree is None] == [5, 4, 3, 2, 1]
        shapes = sum(len({None, *engine.bundle.policy.trees_at(n)}) for n in range(1, 6))
        assert len(captured) == len(primed) == shapes
        assert sorted(captured, key=str) == sorted(((n, tree) for tree, n, _ in primed), key=str)
        assert all(seconds > 0 for *_, seconds in (*primed, *prompts))
        assert [num_rows for num_rows, _ in prompts] == [512]
        for speculation in (True, False):
            said = engine.generate("What is 12 plus 30?", max_tokens=12, speculation=speculation)
            assert said.token_ids == expected
        assert engine.capture_graphs(seconds=0.0) == 0
        assert engine.metrics().kv_pages_used == 0
    with pytest.raises(ClosedError):
        engine.capture_graphs()


def test_answer_that_ends_with_its_first_token_ends_beside_others(tmp_path: Path) -> None:
    """It takes part in the cycle of the step in which its first token is read, for nothing."""
    limits = {"max_batch_size": 4, "max_seq_len": 256, "max_visual_tokens": 64}
    with overwriting_llm(build_tiny(tmp_path, limits=limits)) as engine:
        asked: dict[str, Any] = {"ignore_eos": True, "max_tokens": 20}
        alone, found = engine.generate("Say nothing.", **asked), list[int]()
        for chunk in engine.stream("Say nothing.", **asked):
            found += chunk.token_ids
            short = engine.generate("What is 12 plus 30?", max_tokens=1)
            assert len(short.token_ids) == 1
        assert tuple(found) == alone.token_ids
        assert engine.metrics().kv_pages_used == 0

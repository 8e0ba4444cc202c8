"""Asynchronous cycles: what the device is given ahead says what each sequence says alone."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.decode.overwriting import overwriting_llm
from tests.decode.pair import NUM_PAGES, PAGE_SIZE
from tests.decode.random_tree import random_tree
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
from trt_eagle3.decode.speculation import catch_up, tree_outcome
from trt_eagle3.decode.speculation.accept import accept
from trt_eagle3.decode.speculation.catch_up import CatchUp
from trt_eagle3.decode.speculation.draft_ahead import DraftAhead
from trt_eagle3.decode.speculation.outcome import (
    Outcome,
    accept_drawn,
    accept_greedy,
    greedy_tokens,
    is_chain,
)
from trt_eagle3.decode.speculation.propose import Proposer, tree_proposal
from trt_eagle3.decode.speculation.tree import AnyTree, Tree
from trt_eagle3.decode.step import async_cycle
from trt_eagle3.decode.step.async_cycle import AsyncCycles
from trt_eagle3.decode.step.decoder import Decoder
from trt_eagle3.engine.buckets import CAPTURED_AT_RUN, PROMPT_WIDTHS
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
    monkeypatch.setattr(async_cycle, "LAUNCHED_AHEAD", many)
    ran = count_calls(monkeypatch, AsyncCycles, "_launch_trees" if TREES[tree] else "_launch")
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
    assert len(ran) > 10
    assert scheduler.num_preempted or num_pages == NUM_PAGES
    assert pool.num_used == pool.num_idle, "pages leaked"


@pytest.mark.parametrize("many", [1, 8])
def test_tree_that_changes_with_the_batch_changes_nothing_that_is_said(
    many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_cycle, "LAUNCHED_AHEAD", many)
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
    monkeypatch.setattr(async_cycle, "LAUNCHED_AHEAD", 1)
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


def decoding(
    tree: Any, patch: pytest.MonkeyPatch, count: int = 2, sampling: SamplingParams = GREEDY
) -> tuple[Scheduler, list[SequenceState], list[str]]:
    """A scheduler whose sequences decode, and what it does from now on, in order."""
    pool = fixed_pool()
    scheduler = make_scheduler(pool, None, lambda _: tree)
    drafting = tree is not None
    asked = [SequenceState(prompts()[i], pool, VOCAB, sampling, drafting) for i in range(count)]
    for s in asked:
        scheduler.add(s)
    while min(len(s.tokens) for s in asked) < 3:
        scheduler.step()
    done: list[str] = []
    named = ((TargetRunner, "forward"), (Proposer, "propose"), (Readback, "wait"))
    for owner, name in named:
        original = getattr(owner, name)

        def watched(*args: Any, name: str = name, original: Any = original, **options: Any) -> Any:
            done.append(name)
            return original(*args, **options)

        patch.setattr(owner, name, watched)
    return scheduler, asked, done


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_plain_pass_is_launched_before_the_host_waits_for_the_one_before(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = SamplingParams(temperature)
    scheduler, asked, done = decoding(None, monkeypatch, sampling=sampling)
    before = [len(s.tokens) for s in asked]
    for _ in range(3):
        assert len(scheduler.step()) == 2
    assert done == ["forward", "wait"] * 3
    assert [len(s.tokens) for s in asked] == [n + 3 for n in before]
    running = scheduler._decoder._async._in_flight  # type: ignore[union-attr]
    assert running is not None, "the pass for the next step runs already"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_trees_are_proposed_before_the_host_waits(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = SamplingParams(temperature)
    scheduler, _, done = decoding(CHAIN, monkeypatch, sampling=sampling)
    for _ in range(3):
        scheduler.step()
    assert done == ["forward", "propose", "wait"] * 3


def test_drafts_of_plain_sequences_catch_up_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All at once would be a pause for everybody; what is kept for them stays bounded."""
    monkeypatch.setattr(catch_up, "MAX_DEFERRED", 8)
    monkeypatch.setattr(catch_up, "_WINDOW", 2)
    pool = fixed_pool()
    scheduler = make_scheduler(pool, None, lambda _: None, chunk=64)
    asked = [sequence(i, pool) for i in (0, 2, 5)]
    for s in asked:
        scheduler.add(s)
    caught_up = count_calls(monkeypatch, CatchUp, "_run")
    together = list[int]()
    while len(asked[0].tokens) < 24:
        before = len(caught_up)
        scheduler.step()
        together.append(sum(len(sequences) for sequences, _ in caught_up[before:]))
        assert all(len(s.deferred) <= 8 for s in asked)
    assert max(together) == 1
    assert sum(together) >= 6
    assert all(s.draft_length + len(s.deferred) == s.length for s in asked)


@pytest.mark.parametrize("tree", [name for name in TREES if TREES[name]])
@pytest.mark.parametrize("many", [1, 8])
def test_sequences_that_do_not_speculate_are_taken_along(
    tree: str, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every second one asked for no draft: it says the same, and its cycles count as plain."""
    monkeypatch.setattr(async_cycle, "LAUNCHED_AHEAD", many)
    expected = {i: solo(i) for i in range(len(LAYOUTS))}
    by_host = count_calls(monkeypatch, Decoder, "_cycle")
    pool = fixed_pool()
    scheduler = make_scheduler(pool, PrefixCache(pool), lambda _: TREES[tree])
    asked = {i: sequence(i, pool, drafting=i % 2 == 0) for i in range(len(LAYOUTS))}
    for s in asked.values():
        scheduler.add(s)
    while scheduler.running or scheduler.waiting:
        for emission in scheduler.step():
            assert emission.error is None
            assert emission.steps in ((None, 0) if not emission.sequence.drafting else ANY_STEPS)
            if len(emission.sequence.tokens) >= MAX_TOKENS or emission.full:
                scheduler.remove(emission.sequence)
    assert {i: s.tokens[:MAX_TOKENS] for i, s in asked.items()} == expected
    assert all(s.draft is None for i, s in asked.items() if i % 2)
    assert by_host == [], "asynchronous cycles, all of them"
    assert pool.num_used == pool.num_idle, "pages leaked"


def test_sequence_without_draft_goes_on_where_those_that_draft_are_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pass runs for both whose next trees were to be kept to grammars."""
    monkeypatch.setattr(async_cycle, "LAUNCHED_AHEAD", 1)
    monkeypatch.setattr(DraftAhead, "filters", lambda *_: True)
    scheduler, asked = taken_along(0)
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
    monkeypatch.setattr(async_cycle, "LAUNCHED_AHEAD", 1)
    scheduler, asked = taken_along(6)
    asked[0].sampling = SamplingParams(max_tokens=limit)
    while scheduler.running or scheduler.waiting:
        for emission in scheduler.step():
            assert emission.error is None
            s = emission.sequence
            if len(s.tokens) >= (limit if s is asked[0] else MAX_TOKENS) or emission.full:
                scheduler.remove(s)
    assert asked[0].tokens[:limit] == solo(6)[:limit]
    assert asked[1].tokens[:MAX_TOKENS] == solo(1)


def taken_along(index: int) -> tuple[Scheduler, list[SequenceState]]:
    """A scheduler with chains, where the prompt ``index`` drafts and that of 1 does not."""
    pool = fixed_pool()
    scheduler = make_scheduler(pool, None, lambda _: CHAIN)
    asked = [sequence(index, pool), sequence(1, pool, drafting=False)]
    for s in asked:
        scheduler.add(s)
    return scheduler, asked


@pytest.mark.parametrize("many", [1, 8])
def test_outcome_is_on_its_way_before_the_draft_works(
    many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host has it while the device extends and proposes, and launches the next cycle then."""
    monkeypatch.setattr(async_cycle, "LAUNCHED_AHEAD", many)
    scheduler, _, done = decoding(CHAIN, monkeypatch)
    for owner, name in ((Readback, "__init__"), (DraftAhead, "extend")):
        original = getattr(owner, name)

        def watched(*args: Any, name: str = name, original: Any = original, **options: Any) -> Any:
            done.append(name)
            return original(*args, **options)

        monkeypatch.setattr(owner, name, watched)
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
    assert done == ["forward", "propose", "wait"], "what was prepared is cut, not drafted again"
    assert scheduler.num_draft_tokens == CHAIN.num_nodes - 2
    finish(scheduler)
    assert [s.tokens[:MAX_TOKENS] for s in asked] == [solo(0), solo(1)]


def test_cycle_of_a_crowd_is_launched_before_the_last_one_is_handed_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(async_cycle, "LAUNCHED_AHEAD", 2)
    scheduler, asked, done = decoding(CHAIN, monkeypatch)
    for _ in range(3):
        assert len(scheduler.step()) == 2
    assert done == ["wait", "forward", "propose"] * 3
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


def test_pass_of_a_sequence_that_began_again_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has other pages now, in which that pass wrote nothing."""
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


def test_pass_that_nobody_waits_for_keeps_no_sequence_alive(
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

    def overflow(logits: torch.Tensor) -> torch.Tensor:
        logits = logits.clone()
        if len(logits) > 1:
            logits[1, ..., 1] = torch.nan
        return greedy_tokens(logits)

    monkeypatch.setattr(tree_outcome, "greedy_tokens", overflow)
    errors = [e for _ in range(3) for e in scheduler.step() if e.error is not None]
    assert [e.sequence for e in errors] == [bad]
    monkeypatch.setattr(tree_outcome, "greedy_tokens", greedy_tokens)
    finish(scheduler)
    assert good.tokens[:MAX_TOKENS] == expected


def test_device_accepts_what_the_host_would() -> None:
    """Random trees whose siblings differ, and targets that agree with them now and then."""
    chance, accepted = random.Random(0), 0
    for _ in range(300):
        tree = random_tree(chance)
        tokens = [[7, *(3 * (rank + 1) for rank in tree.ranks[1:])] for _ in range(3)]
        target = [[chance.choice((3, 6, 9, 1)) for _ in tree.parents] for _ in range(3)]
        proposal = tree_proposal(tree, torch.tensor(tokens))
        outcome = accept_greedy(proposal, torch.tensor(target), chain=is_chain(tree))
        found = Outcome.unpacked(outcome.packed().tolist())
        for row in range(3):
            probs = [
                float(target[row][max(p, 0)] == t)
                for t, p in zip(tokens[row], tree.parents, strict=True)
            ]
            wanted = accept(tokens[row], tree.parents, probs, target[row], lambda: 0.5)
            assert found[row] == wanted
            assert int(outcome.last[row]) == wanted.tokens[-1]
            accepted += len(wanted.path) - 1
    assert accepted > 200


def drawn_chances(chance: random.Random, tree: Tree) -> list[float]:
    """The target's probabilities of the nodes after their parents: siblings share at most 1, some
    have all that is left, some nothing.
    """
    left: dict[int, float] = {}
    found = [0.0]
    for parent in tree.parents[1:]:
        rest = left.get(parent, 1.0)
        found.append(rest * chance.choice((0.0, 1.0, chance.random())))
        left[parent] = rest - found[-1]
    return found


def test_device_draws_what_the_host_would() -> None:
    """Over the same random numbers, of which it uses as many."""
    chance, accepted, used = random.Random(1), 0, 0
    for _ in range(300):
        tree, rows = random_tree(chance), range(3)
        tokens = [[7, *(3 * (rank + 1) for rank in tree.ranks[1:])] for _ in rows]
        chances = [drawn_chances(chance, tree) for _ in rows]
        bonus = [[chance.randrange(50) for _ in tree.parents] for _ in rows]
        uniform = [[chance.random() for _ in tree.parents] for _ in rows]
        outcome = accept_drawn(
            tree_proposal(tree, torch.tensor(tokens)),
            torch.tensor(chances, dtype=torch.float64),
            torch.tensor(bonus),
            torch.tensor(uniform, dtype=torch.float64),
        )
        found = Outcome.unpacked(outcome.packed().tolist())
        for row in rows:
            numbers = iter(uniform[row])
            wanted = accept(
                tokens[row], tree.parents, chances[row], bonus[row], lambda n=numbers: next(n)
            )
            assert found[row] == wanted
            assert int(outcome.last[row]) == wanted.tokens[-1]
            assert found[row].draws == len(uniform[row]) - len([*numbers])
            accepted += len(wanted.path) - 1
            used += found[row].draws
    assert accepted > 200
    assert used > 400


SAMPLED = SamplingParams(0.9, top_k=6, max_tokens=MAX_TOKENS)


def by_host(index: int, tree: AnyTree | None, sampling: SamplingParams) -> list[int]:
    """What a sequence says alone, to a decoder that waits for every outcome."""
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
    monkeypatch.setattr(async_cycle, "LAUNCHED_AHEAD", 2)
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


def test_logits_that_are_no_numbers_say_nothing() -> None:
    logits = torch.eye(5)[None, :3].repeat(3, 1, 1)
    logits[1, 2, 0], logits[2, 0, 4] = torch.nan, torch.inf
    chain = tree_proposal(Tree.from_paths([(0,), (0, 0)]), torch.tensor([[9, 0, 1]] * 3))
    outcome = accept_greedy(chain, greedy_tokens(logits), chain=True)
    found = Outcome.unpacked(outcome.packed().tolist())
    assert [a.tokens for a in found] == [(0, 1, 2), (), ()]
    assert {a.path for a in found[1:]} == {(0,)}


@pytest.mark.parametrize("tree", ["chain", "bushy", "dynamic"])
@pytest.mark.parametrize("index", [0, 3])
def test_trees_that_are_proposed_ahead_are_those_of_the_rows_with_true_features(
    tree: str, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    propose, proposed = Proposer.propose, list[list[int]]()

    def watched(self: Proposer, *args: Any) -> Any:
        proposal = propose(self, *args)
        proposed.append(proposal.tokens[0].tolist())
        return proposal

    monkeypatch.setattr(Proposer, "propose", watched)

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
    assert len(ahead) == len(by_host) + 1, "one that nobody wants any more"


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
    ran = count_calls(monkeypatch, AsyncCycles, "run_nobody")
    primed = count_calls(monkeypatch, SpeculationPolicy, "prime")
    prompts = count_calls(monkeypatch, SpeculationPolicy, "prime_prompts")
    prefilled = count_calls(monkeypatch, Decoder, "prefill")
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

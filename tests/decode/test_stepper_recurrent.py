"""Steps that run ahead over states that every token changes: the device commits what it accepted,
and sequences emit what each emits alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from tests.decode import hybrid as hybrid_module
from tests.decode.hybrid import LAYOUTS, ROOM, Hybrid, all_free, hybrid
from tests.decode.pair import NUM_PAGES, PAGE_SIZE, VOCAB
from tests.decode.scheduling import MAX_BATCH, MAX_SEQ_LEN, MAX_TOKENS, TREES, TreeFor, finish
from trt_eagle3.config import SpeculationConfig
from trt_eagle3.decode.forward.prompt_rows import PromptRows
from trt_eagle3.decode.memory import recurrent
from trt_eagle3.decode.memory.kv_cache import PagePool
from trt_eagle3.decode.memory.prefix_cache import PrefixCache
from trt_eagle3.decode.memory.recurrent import RecurrentStates
from trt_eagle3.decode.memory.sequence import SequenceState
from trt_eagle3.decode.policy.candidate import candidates_of
from trt_eagle3.decode.policy.speculation import SpeculationPolicy
from trt_eagle3.decode.sampling.sampling_params import GREEDY, SamplingParams
from trt_eagle3.decode.schedule.scheduler import Scheduler
from trt_eagle3.decode.step import stepper
from trt_eagle3.decode.step.stepper import Stepper
from trt_eagle3.engine.runtime import buckets

SAMPLED = SamplingParams(0.9, top_k=6, max_tokens=MAX_TOKENS)
KINDS = (GREEDY, SAMPLED.updated(seed=5), SAMPLED.updated(seed=6, repetition_penalty=1.3))


MTP = "dense+mtp"


@pytest.fixture
def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Hybrid:
    """Batches of its cycles have padding, but those of four; its draft is an EAGLE-3 one, or that
    of the kind that a test names.
    """
    monkeypatch.setattr(buckets, "BATCHES", buckets.Buckets(((8, 4),)))
    return hybrid(getattr(request, "param", "dense"))


class FakeClock:
    """Time that passes by what a step did."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make_scheduler(
    pair: Hybrid,
    states: RecurrentStates,
    tree: str,
    prefixes: PrefixCache | None = None,
    backend: str = "onnxruntime",
    *,
    ahead: bool = True,
    max_batch_size: int = MAX_BATCH,
) -> Scheduler:
    return Scheduler(
        pair.make_decoder(states, backend, fixed_shapes=ahead),
        max_batch_size=max_batch_size,
        policy=TreeFor(lambda _: TREES[tree]),
        prefix_cache=prefixes,
    )


def fixed_pool(num_pages: int = NUM_PAGES) -> PagePool:
    return PagePool(num_pages, PAGE_SIZE, table_len=MAX_SEQ_LEN // PAGE_SIZE)


def staggered(
    pair: Hybrid,
    scheduler: Scheduler,
    pool: PagePool,
    tree: str,
    sampling: Callable[[int], SamplingParams] = lambda _: GREEDY,
) -> list[list[int]]:
    """What prompts say that come and leave at any time; readers of some lag behind for a while."""
    drafting = TREES[tree] is not None
    asked = [
        SequenceState(pair.prompts[i % len(LAYOUTS)], pool, VOCAB, sampling(i), drafting)
        for i in range(2 * len(LAYOUTS))
    ]
    coming, chance = [*asked], random.Random(pool.num_pages)
    while coming or scheduler.running or scheduler.waiting:
        if coming and chance.random() < 0.4:
            scheduler.add(coming.pop())
        for s in scheduler.running:
            s.backpressured = chance.random() < 0.1
        for s in scheduler.waiting:
            s.backpressured = False
        for emission in scheduler.step():
            assert emission.error is None
            if len(emission.sequence.tokens) >= MAX_TOKENS or emission.full:
                scheduler.remove(emission.sequence)
    return [s.tokens[:MAX_TOKENS] for s in asked]


@pytest.mark.parametrize(
    ("pair", "tree", "num_pages", "many", "backend"),
    [
        *(("dense", tree, NUM_PAGES, 1, "torch") for tree in TREES),
        ("dense", "plain", 16, 2, "onnxruntime"),
        ("dense", "bushy", 16, 2, "onnxruntime"),
        (MTP, "chain", NUM_PAGES, 1, "torch"),
        (MTP, "dynamic", 16, 2, "onnxruntime"),
    ],
    indirect=["pair"],
)
def test_staggered_sequences_say_what_each_says_alone(
    pair: Hybrid,
    tree: str,
    num_pages: int,
    many: int,
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are preempted, pause, and begin with pages and snapshots of others."""
    expected = [pair.alone(i) for i in range(len(LAYOUTS))] * 2
    monkeypatch.setattr(stepper, "_LAUNCHED_AHEAD", many)
    pool, states = fixed_pool(num_pages), pair.make_states(ROOM)
    prefixes = PrefixCache(pool)
    scheduler = make_scheduler(pair, states, tree, prefixes, backend)
    assert staggered(pair, scheduler, pool, tree) == expected
    assert scheduler.num_reused_rows > 0
    assert scheduler.num_preempted > 0 or num_pages == NUM_PAGES
    prefixes.clear()
    assert all_free(states)


@pytest.mark.parametrize(("pair", "tree"), [("dense", "chain"), (MTP, "plain")], indirect=["pair"])
def test_prompts_that_run_alone_are_padded_and_their_states_know_nothing_of_it(
    pair: Hybrid, tree: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [pair.alone(i) for i in range(len(LAYOUTS))] * 2
    monkeypatch.setattr(hybrid_module, "PREFILL_CHUNK", 64)
    widths = list[tuple[int, int]]()
    of = PromptRows.of

    def counted(segments: Any, width: int, device: Any) -> Any:
        widths.append((max(s.count for s in segments), width))
        return of(segments, width, device)

    monkeypatch.setattr(PromptRows, "of", counted)
    pool, states = fixed_pool(), pair.make_states(ROOM)
    prefixes = PrefixCache(pool)
    scheduler = make_scheduler(pair, states, tree, prefixes)
    assert staggered(pair, scheduler, pool, tree) == expected
    assert sum(count < width for count, width in widths) > 5
    prefixes.clear()
    assert all_free(states)


@pytest.mark.parametrize(
    ("pair", "tree"),
    [*(("dense", tree) for tree in TREES), (MTP, "bushy")],
    indirect=["pair"],
)
def test_sampled_sequences_say_what_each_says_to_the_host(
    pair: Hybrid, tree: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stepper, "_LAUNCHED_AHEAD", 2)
    for i in range(len(LAYOUTS)):
        pair.alone(i)  # so that its greedy tokens are guessed
    found = []
    for ahead in (False, True):
        pool, states = fixed_pool() if ahead else PagePool(NUM_PAGES, PAGE_SIZE), pair.make_states()
        scheduler = make_scheduler(pair, states, tree, ahead=ahead)
        asked = [
            SequenceState(pair.prompts[i % 4], pool, VOCAB, KINDS[i % 3], TREES[tree] is not None)
            for i in range(6)
        ]
        for s in asked:
            scheduler.add(s)
        finish(scheduler)
        found.append([s.tokens[:MAX_TOKENS] for s in asked])
    assert found[0] == found[1]
    assert len({tuple(tokens) for tokens in found[0]}) > 3


@pytest.mark.parametrize("pair", ["dense", MTP], indirect=True)
def test_batches_of_padding_change_nothing_that_is_said(
    pair: Hybrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs are captured between the steps of sequences that run."""
    expected = [pair.alone(i) for i in range(len(LAYOUTS))]
    original, sizes = Stepper.step, iter(range(1, 100))

    def step(self: Stepper, *args: Any) -> Any:
        for tree in (None, TREES["bushy"]):
            self.run_dummy(1 + next(sizes) % 5, tree, MAX_SEQ_LEN // PAGE_SIZE, 1)
        return original(self, *args)

    monkeypatch.setattr(Stepper, "step", step)
    states = pair.make_states()
    assert answers(pair, states) == expected
    assert next(sizes) > 10
    assert all_free(states)


@pytest.mark.parametrize(("pair", "cheap"), [("dense", 2), (MTP, 0), (MTP, 5)], indirect=["pair"])
def test_widths_that_change_by_live_cost_change_nothing_that_is_said(
    pair: Hybrid, cheap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains of ``cheap`` tokens are what pays by the clock, next to longer and shorter ones."""
    monkeypatch.setattr(stepper, "_LAUNCHED_AHEAD", 2)
    expected = [pair.alone(i) for i in range(len(LAYOUTS))] * 2
    policy = SpeculationPolicy(candidates_of(SpeculationConfig()))
    pool, states = fixed_pool(), pair.make_states()
    scheduler = make_scheduler(pair, states, "chain")
    scheduler.policy = policy
    clock, drafted = FakeClock(), list[int]()
    scheduler.clock = clock
    step = scheduler._decoder.step

    def timed(*args: Any) -> Any:
        done = step(*args)
        drafted.append(done.tree.depth if done.tree else 0)
        clock.now += 0.01 + 0.02 * abs(drafted[-1] - cheap)
        return done

    monkeypatch.setattr(scheduler._decoder, "step", timed)
    for _ in range(3):
        assert staggered(pair, scheduler, pool, "chain") == expected
    assert len(set(drafted)) > 1
    assert all_free(states)


def answers(pair: Hybrid, states: RecurrentStates) -> list[list[int]]:
    """What prompts say, two at a time."""
    scheduler = make_scheduler(pair, states, "bushy", backend="torch", max_batch_size=2)
    pool = fixed_pool()
    asked = [pair.pair.sequence(p, pool, drafting=True) for p in pair.prompts]
    for s in asked:
        scheduler.add(s)
    finish(scheduler)
    return [s.tokens[:MAX_TOKENS] for s in asked]


# Planted faults

_replay, _swap = RecurrentStates.to_replay, RecurrentStates.swap_entries


def _replay_by(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Callable[..., Any]:
    def wrong(self: RecurrentStates, inputs: Any, path: Tensor, counts: Tensor) -> Any:
        return _replay(self, inputs, *change(path, counts))

    return wrong


def _swap_but_the_first(self: RecurrentStates, sequences: Any) -> None:
    _swap(self, sequences[1:])


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a node short": lambda m: m.setattr(
        RecurrentStates, "to_replay", _replay_by(lambda path, n: (path, (n - 1).clamp(min=1)))
    ),
    "a node long": lambda m: m.setattr(
        RecurrentStates,
        "to_replay",
        _replay_by(lambda path, n: (path, (n + 1).clamp(max=path.shape[1]))),
    ),
    "another sequence's path": lambda m: m.setattr(
        RecurrentStates, "to_replay", _replay_by(lambda path, n: (path.roll(1, 0), n.roll(1, 0)))
    ),
    "the first nodes instead of the path": lambda m: m.setattr(
        RecurrentStates, "to_replay", _replay_by(lambda path, n: (path.sort(1).values, n))
    ),
    "entry not swapped": lambda m: m.setattr(RecurrentStates, "swap_entries", _swap_but_the_first),
    "padding writes the entry of no token": lambda m: m.setattr(recurrent, "_PADDING", 0),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_changes_answers(pair: Hybrid, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [pair.alone(i) for i in range(len(LAYOUTS))]
    FAULTS[fault](monkeypatch)
    assert answers(pair, pair.make_states()) != expected

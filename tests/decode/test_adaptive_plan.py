"""A width chosen by live cost: on simulated servers of recorded cycle times, and on a tiny pair."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.decode.pair import NUM_PAGES, PAGE_SIZE
from tests.decode.scheduling import MAX_TOKENS, finish, make_scheduler, pair, prompts, solo
from tests.decode.simulated_load import (
    CycleMs,
    Load,
    Sequence,
    chain_length,
    dear_ms,
    h200_ms,
    moe_ms,
    rate_of,
)
from tests.decode.simulated_plan import CHAIN, DEPTHS, adaptive, best_over_plain, primed
from tests.tiny import build_tiny
from trt_eagle3 import LLM
from trt_eagle3.bench.tune import choose
from trt_eagle3.config import SpeculationConfig
from trt_eagle3.decode.adaptive_plan import AdaptivePlan
from trt_eagle3.decode.kv_cache import PagePool
from trt_eagle3.decode.plan import Cycle, Plan, shrunk, widths
from trt_eagle3.decode.prefix_cache import PrefixCache
from trt_eagle3.decode.sampling_params import SamplingParams
from trt_eagle3.decode.tree import configured_tree
from trt_eagle3.decode.tuning import TuningEntry, TuningTable

LEARNING, CYCLES = 40, 800


def over_plain(plan: Any, size: int, rate: float, cycle_ms: CycleMs) -> float:
    """Tokens per second over those of a server that never drafts, after the first cycles."""
    served, plain = (Load(p, size, rate, cycle_ms).run(LEARNING) for p in (plan, Plan({1: None})))
    served.tokens = plain.tokens = 0
    served.seconds = plain.seconds = 0.0
    served.run(CYCLES)
    plain.run(CYCLES)
    return served.tokens / served.seconds / (plain.tokens / plain.seconds)


@pytest.mark.parametrize("cycle_ms", [h200_ms, dear_ms])
@pytest.mark.parametrize("length", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("size", [1, 32, 128])
def test_no_load_is_served_slower_than_plainly_and_most_near_the_best(
    size: int, length: float, cycle_ms: CycleMs
) -> None:
    rate = rate_of(length)
    found = over_plain(adaptive(), size, rate, cycle_ms)
    assert found >= 0.98
    assert found >= 0.96 * best_over_plain(size, rate, cycle_ms)


def tuned_mixture(cycle_ms: CycleMs) -> TuningTable:
    """What ``bench --tune`` measures of a server of ``cycle_ms``."""
    entries = [
        choose(size, {d + 1: cycle_ms(size, d) for d in DEPTHS}, {d + 1: 1.0 for d in DEPTHS})
        for size in (1, 2, 4, 8, 16, 32)
    ]
    return TuningTable(
        measured_at="", machine="", speculation=CHAIN, acceptance={}, entries=tuple(entries)
    )


def first_cycles(
    plan: AdaptivePlan, size: int, length: float, seed: int, cycles: int = 120
) -> float:
    """Tokens per second of the first cycles over plain ones."""
    served, plain = (
        Load(p, size, rate_of(length), moe_ms, hiccups=0.0, seed=seed).run(cycles)
        for p in (plan, Plan({1: None}))
    )
    return served.tokens / served.seconds / (plain.tokens / plain.seconds)


@pytest.mark.parametrize("length", [1.0, 2.0, 2.5])
@pytest.mark.parametrize("size", [1, 2, 8, 32])
def test_first_cycles_of_a_mixture_follow_what_tune_measured(size: int, length: float) -> None:
    for seed in range(3):
        plan = adaptive(table=tuned_mixture(moe_ms))
        assert first_cycles(plan, size, length, seed, cycles=400) >= 0.98


def test_mixture_gains_at_batch_1_where_its_draft_is_right() -> None:
    assert over_plain(primed(moe_ms), 1, rate_of(3.8), moe_ms) > 1.2


def test_fixed_chain_of_a_mixture_of_experts_loses_at_batch_1_and_gains_at_32() -> None:
    fixed = Plan({1: configured_tree(CHAIN)})
    assert over_plain(fixed, 1, rate_of(2.5), moe_ms) < 0.8
    assert over_plain(adaptive(), 32, rate_of(2.5), moe_ms) > 1.6


def test_crowd_of_32_with_acceptance_length_3_gains_a_third() -> None:
    assert over_plain(adaptive(), 32, rate_of(3.0), h200_ms) >= 1.3


def test_fixed_chain_loses_where_the_adaptive_plan_does_not() -> None:
    """The simulation can fail: a chain of 5 that never pays costs more than half."""
    fixed = Plan({1: configured_tree(CHAIN)})
    assert over_plain(fixed, 64, rate_of(1.0), h200_ms) < 0.6


def test_width_of_a_crowd_is_narrower_than_that_of_one() -> None:
    rate = rate_of(3.0)
    depths = {
        size: Counter(Load(adaptive(), size, rate, h200_ms).run(CYCLES).depths[-400:])
        for size in (1, 128)
    }
    assert depths[1].most_common(1)[0][0] == 5
    assert depths[128].most_common(1)[0][0] <= 3


@pytest.mark.parametrize("length", [1.0, 2.0])
def test_trials_lose_no_more_than_their_share(length: float) -> None:
    """What cycles of other widths than the last chosen one lose of the time, in a long run."""
    rate = rate_of(length)
    load = Load(adaptive(), 8, rate, h200_ms, noise=0.0).run(2000)
    usual = Counter(load.depths).most_common(1)[0][0]
    best = chain_length(rate, usual) / h200_ms(8, usual)
    lost = sum(
        count * (h200_ms(8, depth) - chain_length(rate, depth) / best)
        for depth, count in Counter(load.depths).items()
    )
    assert lost <= 0.02 * 1000 * load.seconds


def test_acceptance_that_changes_is_followed() -> None:
    plan = adaptive()
    load = Load(plan, 8, rate_of(3.9), h200_ms).run(400)
    assert load.depths[-1] == 5
    load.rate = rate_of(1.0)
    for sequence in load.sequences:
        sequence.rate = load.rate
    assert Counter(load.run(600).depths[-100:]).most_common(1)[0][0] == 0
    load.rate = rate_of(3.9)
    for sequence in load.sequences:
        sequence.rate = load.rate
    assert Counter(load.run(1500).depths[-100:]).most_common(1)[0][0] >= 3


def test_crowd_that_leaves_has_left_what_one_needs_known() -> None:
    """Costs of other loads are guessed from those that were served."""
    plan, rate = adaptive(), rate_of(3.0)
    Load(plan, 128, rate, h200_ms).run(300)
    alone = Load(plan, 1, rate, h200_ms, seed=1).run(100)
    assert Counter(alone.depths).most_common(1)[0][0] >= 3


def test_prompts_that_never_end_leave_cycles_to_be_timed() -> None:
    """Every step has a prefill beside it: the plan asks for quiet now and then, and seldom."""
    plan = adaptive()
    load = Load(plan, 64, rate_of(1.0), h200_ms, answer=8)
    quiet = 0
    for _ in range(600):
        quiet += plan.wants_quiet
        load.run(1)
    assert Counter(load.depths[-200:]).most_common(1)[0][0] == 0
    assert 0 < quiet <= 600 / 8 + 1


def settled(size: int, length: float, cycles: int = 200) -> Load:
    """A load that has shown what its draft is worth."""
    return Load(primed(h200_ms), size, rate_of(length), h200_ms, answer=100).run(cycles)


@pytest.mark.parametrize(
    ("size", "length", "expected"), [(32, 1.0, False), (32, 3.0, True), (128, 1.0, False)]
)
def test_draft_follows_those_that_come_where_it_pays(
    size: int, length: float, expected: bool
) -> None:
    load = settled(size, length)
    new = Sequence(100, load.rate)
    assert load.plan.follows(new, load.sequences) is expected
    assert adaptive().follows(new, load.sequences), "of a draft that nobody has seen"
    assert Plan({1: None}).follows(new, load.sequences)


def test_draft_follows_one_that_comes_when_the_crowd_has_gone() -> None:
    """A draft that does not pay among 128 does for one alone."""
    load = settled(128, 1.25)
    new = Sequence(100, load.rate)
    assert not load.plan.follows(new, load.sequences)
    assert load.plan.follows(new, [])


def test_draft_follows_seeded_sampling_always() -> None:
    load = settled(32, 1.0)
    new = Sequence(100, load.rate, sampling=SamplingParams(temperature=1.0, seed=1))
    assert load.plan.follows(new, load.sequences)


def test_draft_that_none_needed_for_long_is_tried_again() -> None:
    """Of a crowd whose draft begins to be right each one is followed at last."""
    load = settled(32, 1.0, 400)
    followed = load.followed
    load.rate = rate_of(3.0)
    load.run(2500)
    assert load.followed > followed
    assert min(load.depths[-10:]) > 0
    assert all(s.drafting for s in load.sequences)


def test_trial_for_which_nobody_is_left_keeps_no_prompt_waiting() -> None:
    """Those whom the draft followed have left."""
    plan = primed(h200_ms)
    load = Load(plan, 4, rate_of(3.0), h200_ms)
    while not plan.wants_quiet:
        load.run(1)
    others = [Sequence(100, 0.5, drafting=False) for _ in range(4)]
    assert plan.tree_for(others) is None
    plan.observe(Cycle(others, None, [None] * 4, 0, 0.005))
    assert not plan.wants_quiet


def test_trees_to_prepare_are_all_widths_the_likeliest_first() -> None:
    nodes = [tree.num_nodes if tree else 1 for tree in adaptive().trees_at(1)]
    assert sorted(nodes) == [1, 2, 3, 4, 6]
    assert nodes[0] >= 4
    plan = adaptive()
    Load(plan, 64, 0.0, h200_ms).run(100)
    assert plan.trees_at(64)[0] is None
    whole = configured_tree(CHAIN)
    assert list(Plan({1: whole, 8: None}).trees_at(1)) == [whole, None]
    assert list(Plan({1: whole, 8: None}).trees_at(8)) == [None]


def tuned(cycle_ms: dict[int, float]) -> TuningTable:
    entries = [
        TuningEntry(
            batch_size=size,
            num_draft_tokens=1,
            tokens_per_second=dict.fromkeys(cycle_ms, 1.0),
            cycle_ms={n: ms * size**0.5 for n, ms in cycle_ms.items()},
        )
        for size in (1, 8)
    ]
    return TuningTable(
        measured_at="2026-11-22T00:00:00+00:00",
        machine="here",
        speculation=CHAIN,
        acceptance={1: (), 6: (0.8, 0.6, 0.5, 0.4, 0.3)},
        entries=tuple(entries),
    )


@pytest.mark.parametrize(
    ("cycle_ms", "expected"),
    [
        ({1: 10.0, 2: 11.0, 3: 12.0, 4: 13.0, 6: 14.0}, 6),
        ({1: 10.0, 2: 11.0, 3: 17.0, 4: 24.0, 6: 34.0}, 2),
        ({1: 10.0, 2: 30.0, 3: 40.0, 4: 50.0, 6: 70.0}, 1),
    ],
)
def test_table_of_tune_is_what_it_begins_with(cycle_ms: dict[int, float], expected: int) -> None:
    for size in (1, 4, 8):
        tree = adaptive(table=tuned(cycle_ms)).tree_for([Sequence(10, 0.5)] * size)
        assert (tree.num_nodes if tree else 1) == expected


def test_seeded_sampling_has_the_fixed_plan_trees() -> None:
    """Which random numbers decide depends on the tree: the same seed says the same again."""
    plan, whole = adaptive(), configured_tree(CHAIN)
    seeded = Sequence(10, 0.5, sampling=SamplingParams(temperature=1.0, seed=1))
    for _ in range(100):
        tree = plan.tree_for([seeded])
        assert tree == whole
        plan.observe(Cycle([seeded], tree, [0], 0, 1.0))
    greedy = Sequence(10, 0.5, sampling=SamplingParams(seed=1))
    load = Load(plan, 4, rate_of(1.0), h200_ms).run(100)
    assert Counter(load.depths[-50:]).most_common(1)[0][0] == 0
    assert plan.tree_for([greedy] * 4) != whole


def test_trial_of_a_tree_that_nobody_can_take_ends() -> None:
    """Near the length limit every sequence decodes plainly, whatever the plan says."""
    plan = adaptive()
    sequences = Load(plan, 2, 0.0, h200_ms).run(100).sequences
    wanted = []
    for _ in range(1000):
        wanted.append(plan.tree_for(sequences) is not None)
        plan.observe(Cycle(sequences, None, [None, None], 0, 0.0048))
    begun = wanted.index(True)
    assert False in wanted[begun : begun + 9]


def test_requests_without_speculation_get_no_tree() -> None:
    assert adaptive().tree_for([Sequence(10, 0.5, drafting=False)]) is None


@pytest.mark.parametrize(
    "config",
    [
        SpeculationConfig(mode="tree", steps=3, topk=3, num_draft_tokens=8),
        SpeculationConfig(mode="dynamic", steps=3, topk=3, num_draft_tokens=8),
    ],
)
def test_trees_narrow_too(config: SpeculationConfig) -> None:
    """Here every node costs: some trees are tried, plain decoding is served in the end."""
    plan = adaptive(config)
    sequences = [Sequence(10**6, 0.0)] * 4
    nodes = []
    for _ in range(300):
        tree = plan.tree_for(sequences)
        count = tree.num_nodes if tree else 1
        nodes.append(count)
        plan.observe(Cycle(sequences, tree, [0 if tree else None] * 4, 0, 0.01 * count))
    assert max(nodes) > 1
    assert set(nodes) <= set(widths(8))
    assert shrunk(config, nodes[-1]) is None


class FakeClock:
    """Time that passes by what a cycle did: the device of the test is as noisy as the machine."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("cheap", [0, 1, 5])
def test_tokens_of_the_adaptive_plan_are_those_of_each_sequence_alone(
    cheap: int, cached: bool
) -> None:
    """Whatever is cheap by the clock, widths change while sequences come and go, and the answers
    are the same.
    """
    clock, pool, plan = FakeClock(), PagePool(NUM_PAGES, PAGE_SIZE), adaptive()
    prefixes = PrefixCache(pool) if cached else None
    scheduler = make_scheduler(pool, prefixes, plan.tree_for, observer=plan)
    scheduler.clock = clock
    cycle, drafted = scheduler._decoder.cycle, set[int]()

    def timed(sequences: Any, tree: Any) -> Any:
        depth = tree.steps if tree else 0
        drafted.add(depth)
        clock.now += 0.01 + 0.02 * abs(depth - cheap)
        return cycle(sequences, tree)

    scheduler._decoder.cycle = timed  # type: ignore[method-assign]
    for _ in range(3):
        asked = {i: pair().sequence(p, pool, drafting=True) for i, p in enumerate(prompts())}
        for sequence in asked.values():
            scheduler.add(sequence)
        output_ids = finish(scheduler)
        found = {i: output_ids[id(s)][:MAX_TOKENS] for i, s in asked.items()}
        assert found == {i: solo(i) for i in asked}
    assert len(drafted) > 1


def test_cycle_beside_a_prefill_is_not_timed() -> None:
    clock, pool, plan = FakeClock(), PagePool(NUM_PAGES, PAGE_SIZE), adaptive()
    seen = list[Cycle]()
    plan.observe = seen.append  # type: ignore[method-assign]
    scheduler = make_scheduler(pool, None, plan.tree_for, observer=plan)
    scheduler.clock = clock
    first, second = (pair().sequence(prompts()[i], pool, drafting=True) for i in (0, 3))
    scheduler.add(first)
    while not seen:
        scheduler.step()
    clock.now += 1.0
    scheduler.step()
    scheduler.add(second)
    while not second.prefilled:
        scheduler.step()
    count = len(seen)
    clock.now += 2.0
    scheduler.step()
    assert [c.seconds for c in seen[:2]] == [None, 1.0]
    assert {c.seconds for c in seen[2:count]} == {None}
    assert seen[count].seconds == 2.0


QUESTIONS = [f"What is {a} plus {b}?" for a in (7, 12) for b in (3, 30, 41)]


@pytest.mark.parametrize(("ms", "drafts"), [(dear_ms, False), (h200_ms, True)])
def test_engine_drafts_where_its_clock_says_that_it_pays_and_says_the_same(
    tmp_path: Path, ms: CycleMs, drafts: bool
) -> None:
    """The trained tiny pair, asked again and again by its own readers."""
    with LLM(build_tiny(tmp_path, speculation={"adaptive": True})) as engine:
        options: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}
        plain = engine.generate(QUESTIONS, speculation=False, **options)
        engine.start()
        core, clock = engine._started(), FakeClock()
        core.scheduler.clock = clock
        decoder = engine.bundle.decoder
        cycle = decoder.cycle

        def timed(sequences: Any, tree: Any) -> Any:
            depth = tree.steps if tree else 0
            wide = 100 * depth if ms is dear_ms else 0
            clock.now += (ms(len(sequences), depth) + wide) / 1000
            return cycle(sequences, tree)

        decoder.cycle = timed  # type: ignore[method-assign]
        for _ in range(4):
            found = engine.generate(QUESTIONS, **options)
            assert [g.token_ids for g in found] == [g.token_ids for g in plain]
        engine.restart_metrics()
        for _ in range(3):
            engine.generate(QUESTIONS, **options)
        now = engine.metrics()
        share = now.plain_cycles / now.draft_tokens_per_cycle.count
        assert share < 0.4 if drafts else share > 0.6

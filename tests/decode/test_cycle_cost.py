"""Cycle times as they are learnt: robust, by bucket, and guessed from what is alike."""

from __future__ import annotations

import random

import pytest

from tests.tiny import MIXTURE, TARGET
from trt_eagle3.config import SpeculationConfig
from trt_eagle3.decode.cycle_cost import (
    BATCHES,
    CycleCosts,
    ExpertReads,
    Shape,
    batch_bucket,
    expert_reads,
    prior_of,
)
from trt_eagle3.decode.tuning import TuningEntry, TuningTable
from trt_eagle3.families.registry import read_target


def shape(nodes: int = 1, batch: int = 1, context: float = 100.0) -> Shape:
    return Shape(nodes, nodes - 1, batch, context)


def costs() -> CycleCosts:
    return CycleCosts(prior_of(None, 0.0))


@pytest.mark.parametrize(
    ("size", "bucket"), [(1, 1), (2, 2), (5, 6), (9, 12), (33, 48), (64, 64), (1000, 256)]
)
def test_bucket_is_the_next_larger_end(size: int, bucket: int) -> None:
    assert batch_bucket(size) == bucket
    assert list(BATCHES) == sorted(set(BATCHES))


def test_cost_is_the_median_of_noisy_cycles() -> None:
    found, chance = costs(), random.Random(0)
    for _ in range(40):
        found.observe(shape(), 0.01 * chance.uniform(0.9, 1.1))
    assert found.seconds(shape()) == pytest.approx(0.01, rel=0.05)
    assert found.is_known(shape())


@pytest.mark.parametrize("num_captures", [1, 2])
def test_captures_and_hiccups_do_not_count(num_captures: int) -> None:
    """The first runs of new shapes, and any one later."""
    found = costs()
    for seconds in [*[0.5] * num_captures, 0.01, 0.01, 0.01]:
        found.observe(shape(), seconds)
    assert found.seconds(shape()) == pytest.approx(0.01)
    found.observe(shape(), 3.0)
    assert found.seconds(shape()) == pytest.approx(0.01)


def test_cost_that_has_changed_for_good_is_believed() -> None:
    found = costs()
    for seconds in [0.01] * 20 + [0.2] * 3:
        found.observe(shape(), seconds)
    assert found.seconds(shape()) == pytest.approx(0.2)


def test_unknown_cost_is_the_prior_times_what_others_are_off_by() -> None:
    found = costs()
    prior = prior_of(None, 0.0)
    assert found.seconds(shape(4)) == prior(shape(4))
    for _ in range(4):
        found.observe(shape(1), 7.0 * prior(shape(1)))
    assert not found.is_known(shape(4))
    assert found.seconds(shape(4, batch=8)) == pytest.approx(7.0 * prior(shape(4, batch=8)))


def test_nearer_costs_say_more() -> None:
    found, prior = costs(), prior_of(None, 0.0)
    for _ in range(4):
        found.observe(shape(4, batch=1), prior(shape(4, batch=1)))
        found.observe(shape(4, batch=64), 10.0 * prior(shape(4, batch=64)))
    assert found.seconds(shape(4, batch=2)) < 2.0 * prior(shape(4, batch=2))
    assert found.seconds(shape(4, batch=48)) > 5.0 * prior(shape(4, batch=48))


def test_long_contexts_have_costs_of_their_own() -> None:
    found = costs()
    for _ in range(4):
        found.observe(shape(context=500.0), 0.01)
        found.observe(shape(context=20_000.0), 0.05)
    assert found.seconds(shape(context=800.0)) == pytest.approx(0.01)
    assert found.seconds(shape(context=17_000.0)) == pytest.approx(0.05)


def test_prior_grows_with_context_by_the_kv_share() -> None:
    short, long = (prior_of(None, 1e-5)(shape(batch=8, context=c)) for c in (0.0, 10_000.0))
    unit = prior_of(None, 0.0)(Shape(1, 0, 1, 0.0))
    assert long - short == pytest.approx(unit * 1e-5 * 8 * 10_000)


def test_doubt_falls_with_samples_and_grows_with_age() -> None:
    found = costs()
    doubts = []
    for _ in range(4):
        doubts.append(found.doubt(shape(4)))
        found.observe(shape(4), 0.01)
    assert doubts == sorted(doubts, reverse=True)
    assert doubts[0] == 1.5
    fresh = found.doubt(shape(4))
    for _ in range(400):
        found.observe(shape(1), 0.01)
    assert fresh < found.doubt(shape(4)) < doubts[2]


def test_costs_are_measured_by_cycles_or_by_tune() -> None:
    found = costs()
    assert not found.is_measured
    assert not found.is_timed
    found.observe(shape(), 0.01)
    assert found.is_measured
    assert found.is_timed


def test_table_gives_the_prior_between_and_beyond_what_it_measured() -> None:
    entries = [
        TuningEntry(
            batch_size=size,
            num_draft_tokens=1,
            tokens_per_second={1: 1.0},
            cycle_ms={1: 10.0 * size, 5: 30.0 * size},
        )
        for size in (1, 3)
    ]
    table = TuningTable(
        measured_at="now",
        machine="here",
        speculation=SpeculationConfig(),
        acceptance={},
        entries=tuple(entries),
    )
    prior = prior_of(table, 0.0)
    assert prior(shape(1, 1)) == pytest.approx(10.0)
    assert prior(shape(3, 2)) == pytest.approx(40.0)
    assert prior(shape(5, 5)) == pytest.approx(150.0)
    tuned = CycleCosts(prior)
    assert tuned.is_measured
    assert tuned.is_known(shape(5, 5))
    assert not tuned.is_timed  # in milliseconds of some machine until one cycle was timed here


def test_primed_costs_are_the_prior_between_their_sizes() -> None:
    """As a server's captures measure them: by batch size and tree, over short contexts."""
    found = CycleCosts(prior_of(None, 1e-5))
    found.observe(shape(), 7.0)
    for batch, plain, drafted in ((64, 0.008, 0.012), (1, 0.004, 0.005)):
        found.prime(1, batch, plain)
        found.prime(4, batch, drafted)
    assert found.is_known(shape(4, batch=30))
    assert found.seconds(shape(1, batch=1, context=0.0)) == pytest.approx(0.004)
    assert found.seconds(shape(4, batch=64, context=0.0)) == pytest.approx(0.012)
    middle = 0.005 + 0.007 * 31 / 63
    assert found.seconds(shape(4, batch=32, context=0.0)) == pytest.approx(middle)
    read = 0.004 * 1e-5 * 64 * 1000
    assert found.seconds(shape(1, batch=64, context=1000.0)) == pytest.approx(0.008 + read)


def test_one_slow_cycle_moves_no_primed_cost() -> None:
    found = CycleCosts(prior_of(None, 0.0))
    found.prime(1, 8, 0.005)
    for seconds in (0.006, 0.0051, 0.0050):
        found.observe(shape(batch=8), seconds)
    assert found.seconds(shape(batch=8)) == pytest.approx(0.005, rel=0.01)
    for _ in range(8):
        found.observe(shape(batch=8), 0.006)
    assert found.seconds(shape(batch=8)) == pytest.approx(0.006, rel=0.01)


def primed_costs() -> CycleCosts:
    """Plain cycles and a chain of 5, of 1 to 64 sequences."""
    found = CycleCosts(prior_of(None, 0.0))
    for batch in (1, 64):
        found.prime(1, batch, 0.005)
        found.prime(6, batch, 0.010)
    return found


@pytest.mark.parametrize(
    ("times", "known"), [(1.2, True), (0.85, True), (2.9, False), (0.5, False)]
)
def test_primed_cost_is_known_while_served_cycles_take_what_they_were_primed_to(
    times: float, known: bool
) -> None:
    found = primed_costs()
    for _ in range(8):
        found.observe(shape(6, batch=8), times * 0.010)
    plain = shape(1, batch=8)
    assert found.is_known(shape(6, batch=8))
    assert found.is_known(plain) == known
    assert (found.doubt(plain) > 1.3) != known
    assert found.seconds(plain) == pytest.approx(times * 0.005)


def test_doubted_cost_is_what_serving_it_shows_at_once() -> None:
    """The chain took three times what it was primed to, plain decoding twice."""
    found = primed_costs()
    for _ in range(8):
        found.observe(shape(6, batch=8), 0.030)
    for count in range(3):
        assert not found.is_known(shape(1, batch=8)), count
        found.observe(shape(1, batch=8), 0.010)
    assert found.is_known(shape(1, batch=8))
    assert found.seconds(shape(1, batch=8)) == pytest.approx(0.010)
    assert found.is_known(shape(1, batch=12)), "of about that size"
    assert found.seconds(shape(1, batch=12)) == pytest.approx(0.010, rel=0.05)
    assert not found.is_known(shape(1, batch=64))


def test_cost_that_was_not_timed_for_long_is_what_is_served_now() -> None:
    """The machine has become faster meanwhile."""
    found = primed_costs()
    for _ in range(8):
        found.observe(shape(1, batch=8), 0.020)
    assert found.seconds(shape(1, batch=8)) == pytest.approx(0.020)
    for _ in range(1000):
        found.observe(shape(6, batch=8), 0.010)
    assert found.is_known(shape(1, batch=8))
    assert found.seconds(shape(1, batch=8)) == pytest.approx(0.005, rel=0.02)


def test_expert_reads_are_those_of_the_target() -> None:
    assert expert_reads(read_target(TARGET)) is None
    found = expert_reads(read_target(MIXTURE / "target"))
    assert found is not None
    assert found.touched == 2 / 8
    assert 0 < found.share < 1
    assert found.times_one_row(1) == 1.0
    assert found.times_one_row(1000) == pytest.approx(1 / (1 - found.share * (1 - found.touched)))


def test_mixtures_rows_cost_more_until_all_experts_are_read() -> None:
    experts = ExpertReads(share=0.95, touched=1 / 16)
    dense, mixture = prior_of(None, 0.0), prior_of(None, 0.0, experts)
    one, six = (mixture(Shape(n, 0, 1, 0.0)) - dense(Shape(n, 0, 1, 0.0)) for n in (1, 6))
    assert one == pytest.approx(0.0)
    assert six == pytest.approx(experts.times_one_row(6) - 1)
    crowd = [mixture(Shape(n, 0, 256, 0.0)) - dense(Shape(n, 0, 256, 0.0)) for n in (1, 6)]
    assert crowd[1] == pytest.approx(crowd[0], rel=1e-3)

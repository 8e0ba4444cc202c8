"""Costs of a step: the table measured at start, and the overhead of the present load."""

from __future__ import annotations

import pytest

from trt_eagle3.decode.policy.cost import StepCost


def primed() -> StepCost:
    """Steps of 4 and 5 ms at one sequence, 8 and 16 ms at 64; prompts of 20 us a row."""
    cost = StepCost()
    for nodes, batch, ms in ((1, 1, 4.0), (4, 1, 5.0), (1, 64, 8.0), (4, 64, 16.0)):
        cost.prime(nodes, batch, 1e-3 * ms)
    cost.prime_prompts(1000, 0.02)
    return cost


def test_table_is_interpolated_by_batch_and_tree_size() -> None:
    cost = primed()
    assert cost.seconds(1, 1, 1) == pytest.approx(0.004)
    assert cost.seconds(4, 64, 64) == pytest.approx(0.016)
    assert cost.seconds(2, 1, 1) == pytest.approx(0.004 + 0.001 / 3)
    assert cost.seconds(1, 127, 127) == pytest.approx(0.012), "the last slope goes on"


def test_size_measured_at_one_batch_only_leaves_the_others_sound() -> None:
    cost = primed()
    cost.prime(2, 32, 0.009)
    assert cost.seconds(1, 32, 32) == pytest.approx(0.004 + 0.004 * 31 / 63)


def test_overhead_of_what_is_served_is_expected_of_every_tree() -> None:
    cost = primed()
    for _ in range(2000):
        cost.observe(4, 64, 64, 0, 0.019)
    assert cost.seconds(4, 64, 64) == pytest.approx(0.019, rel=0.01)
    assert cost.seconds(1, 64, 64) == pytest.approx(0.011, rel=0.02)
    assert cost.seconds(1, 1, 1) == pytest.approx(0.004), "another load"


def test_prompt_rows_of_a_step_are_no_cost_of_its_tree() -> None:
    cost = primed()
    for i in range(2000):
        rows = 1500 if i % 2 else 300
        cost.observe(1, 64, 64, rows, 0.008 + 20e-6 * rows)
    assert cost.seconds(1, 64, 64) == pytest.approx(0.008, rel=0.01)


def test_pause_counts_as_a_few_steps_at_most() -> None:
    cost = primed()
    for _ in range(100):
        cost.observe(1, 1, 1, 0, 0.004)
    cost.observe(1, 1, 1, 0, 5.0)
    assert cost.seconds(1, 1, 1) < 0.0042


def test_unmeasured_engine_learns_its_unit_from_the_first_step() -> None:
    cost = StepCost()
    assert not cost.is_known
    cost.observe(4, 1, 1, 0, 0.5)
    assert cost.is_known
    assert cost.seconds(4, 1, 1) == pytest.approx(0.5)
    assert 0.2 < cost.seconds(1, 1, 1) < 0.5

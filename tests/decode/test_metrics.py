"""Counters of an engine, and the monitor of acceptance."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trt_eagle3.decode.metrics import FAST_SECONDS, SLOW_SECONDS, EngineMetrics, Meter

NOW = {
    "running": 1,
    "waiting": 2,
    "preempted": 3,
    "reused_tokens": 4,
    "kv_pages_used": 5,
    "kv_pages_cached": 6,
    "kv_pages_total": 7,
}


def snapshot(meter: Meter) -> EngineMetrics:
    return meter.snapshot(**NOW)


def test_new_meter_has_counted_nothing() -> None:
    found = snapshot(Meter(0.25))
    assert (found.requests, found.cycles, found.accepted, found.proposed) == ({}, 0, (), ())
    assert found.acceptance_length is None
    assert found.acceptance_by_position == ()
    assert (found.queue_seconds.count, found.queue_seconds.total) == (0, 0.0)
    assert not found.speculation_on
    assert {name: getattr(found, name) for name in NOW} == NOW


def test_requests_and_tokens_are_counted() -> None:
    meter = Meter(0.0)
    for tokens in (5, 7):
        meter.begun(tokens)
    meter.first_token(0.004, 0.3)
    meter.cycle(2, 3, 3, 0.06)
    meter.cycle(0, 0, 1, 0.02)
    for outcome in ("stop", "stop", "length", "cancelled", "error"):
        meter.finished(outcome)
    found = snapshot(meter)
    assert found.requests == {"stop": 2, "length": 1, "cancelled": 1, "error": 1}
    assert (found.prompt_tokens, found.generated_tokens, found.cycles) == (12, 5, 2)
    assert (found.queue_seconds.total, found.first_token_seconds.total) == (0.004, 0.3)
    assert found.token_seconds.count == 4
    assert found.token_seconds.total == pytest.approx(0.08)


def test_restarted_meter_has_forgotten_requests_and_knows_whether_cycles_draft() -> None:
    meter = Meter(0.0)
    meter.begun(5)
    meter.first_token(0.004, 0.3)
    meter.cycle(2, 3, 3, 0.06)
    meter.batch_cycle(3)
    meter.finished("stop")
    meter.restart()
    fresh = Meter(0.0)
    assert not snapshot(fresh).speculation_on
    assert snapshot(meter) == replace(snapshot(fresh), draft_tokens=3)


CYCLES = st.lists(
    st.integers(0, 4).flatmap(lambda steps: st.tuples(st.integers(0, steps), st.just(steps))),
    max_size=30,
)


@given(cycles=CYCLES)
def test_acceptance_by_position_of_any_cycles_of_any_depth(cycles: list[tuple[int, int]]) -> None:
    meter = Meter(0.0)
    for accepted, steps in cycles:
        meter.cycle(accepted, steps, accepted + 1, 0.01)
    found = snapshot(meter)
    deepest = max((steps for _, steps in cycles), default=0)
    assert found.proposed == tuple(sum(steps > i for _, steps in cycles) for i in range(deepest))
    assert found.accepted == tuple(
        sum(accepted > i for accepted, _ in cycles) for i in range(deepest)
    )
    drafted = [accepted + 1 for accepted, steps in cycles if steps]
    assert found.acceptance_length == (
        pytest.approx(sum(drafted) / len(drafted)) if drafted else None
    )
    assert all(0 <= share <= 1 for share in found.acceptance_by_position)


@given(
    values=st.lists(
        st.one_of(st.floats(0, 100), st.sampled_from(SLOW_SECONDS + FAST_SECONDS)), max_size=30
    )
)
def test_histogram_of_any_times_has_each_in_the_bucket_whose_bound_it_does_not_pass(
    values: list[float],
) -> None:
    meter = Meter(0.0)
    for value in values:
        meter.first_token(value, value)
    found = snapshot(meter).first_token_seconds
    assert (found.bounds, found.count) == (SLOW_SECONDS, len(values))
    assert found.total == pytest.approx(sum(values))
    for i, bound in enumerate(found.bounds):  # cumulative, as Prometheus reads them
        assert sum(found.counts[: i + 1]) == sum(value <= bound for value in values)


def test_time_between_tokens_is_shared_by_the_tokens_of_a_cycle() -> None:
    meter = Meter(0.0)
    meter.cycle(3, 4, 4, 0.008)
    found = snapshot(meter).token_seconds
    assert found.counts[FAST_SECONDS.index(0.0025)] == 4
    assert found.total == pytest.approx(0.008)


def test_cycle_whose_tokens_came_after_the_end_counts_no_time() -> None:
    meter = Meter(0.0)
    meter.cycle(0, 3, 0, 0.5)
    assert (snapshot(meter).token_seconds.count, snapshot(meter).generated_tokens) == (0, 0)


def warnings(caplog: Any) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_monitor_warns_once_of_low_acceptance_and_names_probe(caplog: Any) -> None:
    meter = Meter(0.25)
    for i in range(1000):
        meter.cycle(int(i % 10 == 0), 3, 1, 0.01)
        assert len(warnings(caplog)) == (i >= 199)
    (message,) = warnings(caplog)
    assert "10% of 200 cycles" in message
    assert "25%" in message
    assert "trt-eagle3 probe" in message
    assert "\n" not in message


def test_monitor_goes_by_the_first_token_however_deep_trees_are(caplog: Any) -> None:
    """Deep nodes are seldom asked for, and seldom right: neither says anything of how the draft
    is read.
    """
    silent, loud = Meter(0.5), Meter(0.5)
    for _ in range(200):
        silent.cycle(1, 3, 2, 0.01)
    assert warnings(caplog) == []
    loud.cycle(0, 5, 1, 0.01)
    for _ in range(199):
        loud.cycle(0, 1, 1, 0.01)
    (message,) = warnings(caplog)
    assert "0% of 200 cycles" in message


@pytest.mark.parametrize(
    ("floor", "cycles"),
    [
        (0.25, [(1, 3), (0, 3), (0, 3), (1, 3)] * 200),  # above the floor
        (0.25, [(0, 3)] * 199),  # too few to say
        (0.25, [(0, 0)] * 1000),  # nothing was drafted
        (0.25, [(1, 1), (0, 1), (0, 1), (0, 1)] * 200),  # at the floor
        (0.0, [(0, 3)] * 1000),  # told not to mind
    ],
)
def test_monitor_keeps_silent_without_a_reason(
    floor: float, cycles: list[tuple[int, int]], caplog: Any
) -> None:
    meter = Meter(floor)
    for accepted, steps in cycles:
        meter.cycle(accepted, steps, accepted + 1, 0.01)
    assert warnings(caplog) == []


def test_meter_counts_right_and_warns_once_from_many_threads(caplog: Any) -> None:
    meter = Meter(0.5)

    def work() -> None:
        for _ in range(500):
            meter.begun(2)
            meter.cycle(0, 2, 1, 0.01)
            meter.finished("stop")

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = snapshot(meter)
    assert (found.cycles, found.prompt_tokens, found.requests) == (4000, 8000, {"stop": 4000})
    assert found.proposed == (4000, 4000)
    assert len(warnings(caplog)) == 1

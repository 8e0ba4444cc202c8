"""What a check makes of the errors of many rows, and which failure a report names first."""

from __future__ import annotations

import math

import pytest
import torch

from trt_eagle3.parity.checks.check_recorder import CheckRecorder
from trt_eagle3.parity.checks.registry import CHECKS
from trt_eagle3.parity.checks.thresholds import WORST_ROW, Thresholds
from trt_eagle3.parity.metrics import Compared, RowErrors


@pytest.fixture
def recorder() -> CheckRecorder:
    return CheckRecorder(CHECKS.values(), Thresholds("float32"))


def test_rows_are_held_by_their_p95_and_a_single_row_by_a_share_of_itself(
    recorder: CheckRecorder,
) -> None:
    errors = torch.arange(1.0, 101.0)  # of 100 rows, the one that 95 are below is 96
    recorder["target.layers"].add_rows(RowErrors("a", "x", errors, 7))
    recorder["target.layers"].add_rows(RowErrors("a", "y", torch.tensor([*[1.0] * 99, 1000.0])))
    recorder["target.layers"].add_rows(RowErrors("a", "z", torch.tensor([3.0])))
    recorder["target.layers"].add_rows(RowErrors("a", "w", torch.tensor([*[1.0] * 99, math.inf])))
    found = recorder["target.layers"].taken
    assert [m.value for m in found] == [96.0, 1000.0 / WORST_ROW, 3.0, math.inf]
    assert [(m.row, m.tensor) for m in found] == [(106, "x"), (99, "y"), (0, "z"), (99, "w")]


def test_check_of_the_worst_row_has_the_worst_and_no_rows_are_no_measurement(
    recorder: CheckRecorder,
) -> None:
    recorder["target.layer_steps"].add_rows(RowErrors("a", "x", torch.tensor([1.0, 5.0, 2.0]), 3))
    recorder["target.layer_steps"].add_rows(RowErrors("a", "y", torch.empty(0)))
    (found,) = recorder["target.layer_steps"].taken
    assert (found.value, found.row) == (5.0, 4)


def test_exact_check_has_the_largest_difference_its_row_and_how_many_differ(
    recorder: CheckRecorder,
) -> None:
    expected = torch.zeros(4, 2, 3)
    actual = expected.clone()
    recorder["target.inputs_embeds"].add_exact(Compared("a", "equal", actual, expected))
    actual[1, 0, 2], actual[3, 1, 0] = 0.5, -2.0
    recorder["target.inputs_embeds"].add_exact(Compared("a", "other", actual, expected, 10))
    recorder["target.inputs_embeds"].add_exact(
        Compared("a", "nothing", torch.empty(0, 3), torch.empty(0, 3))
    )
    recorder["target.inputs_embeds"].add_exact(
        Compared("a", "shape", torch.empty(0, 3), torch.empty(1, 3))
    )
    equal, other, shape = recorder["target.inputs_embeds"].taken
    assert (equal.value, equal.row, equal.detail) == (0.0, 0, "")
    assert (other.value, other.row, other.detail) == (2.0, 13, "2 of 4 rows differ")
    assert (shape.value, shape.detail) == (math.inf, "expected shape [1, 3], got [0, 3]")
    assert recorder["target.inputs_embeds"].failures == [other, shape]


def test_worst_is_the_furthest_on_the_wrong_side(recorder: CheckRecorder) -> None:
    for value in (0.999, 0.5, 1.0):
        recorder["target.logits_cosine"].add(value, "a", "x", compared=1)
        recorder["target.logits_l2"].add(value, "a", "x", compared=1)
    worst = [
        recorder[check].worst
        for check in ("target.logits_cosine", "target.logits_l2", "target.aux")
    ]
    assert [m.value if m else None for m in worst] == [0.5, 1.0, None]
    assert [m.value for m in recorder["target.logits_cosine"].failures] == [0.999, 0.5]


def test_first_failure_is_the_first_on_the_way_through_the_engine(recorder: CheckRecorder) -> None:
    assert recorder.first_failure() is None
    recorder["tokens.plain"].add(1, "a", "late", compared=1)
    recorder["vision.embeds"].add(0.0, "a", "holds", compared=1)
    recorder["target.layers"].add(1.0, "a", "first", compared=1)
    recorder["target.layers"].add(2.0, "b", "second", compared=1)
    first = recorder.first_failure()
    assert first is not None
    assert first.tensor == "first"
    assert list(CHECKS).index("target.layers") < list(CHECKS).index("tokens.plain")


def test_counts_add_up_over_prompts(recorder: CheckRecorder) -> None:
    recorder["tokens.plain"].count(tokens_compared=3, ties=1)
    recorder["tokens.plain"].count(tokens_compared=4, ties=0)
    assert recorder["tokens.plain"].counts == {"tokens compared": 7, "ties": 1}


@pytest.mark.parametrize("name", CHECKS)
def test_check_that_compared_nothing_does_not_pass(name: str, recorder: CheckRecorder) -> None:
    m = recorder[name]
    perfect = {"low": 0.0, "high": 1.0}[m.limit.better]
    m.add(perfect, "a", "x", compared=0)
    m.add_rows(RowErrors("a", "x", torch.empty(0)))
    m.add_exact(Compared("a", "x", torch.empty(0, 3), torch.empty(0, 3)))
    assert (m.status, m.compared, m.worst) == ("skipped", 0, None)
    assert m.reason == "nothing of its kind in these prompts"
    m.not_applicable("a bundle without it")
    assert (m.status, m.reason) == ("not_applicable", "a bundle without it")
    m.add(perfect, "a", "x", compared=2)
    m.add(perfect, "b", "x", compared=3)
    assert (m.status, m.compared, m.reason) == ("passed", 5, "")


def test_what_is_missing_fails_though_nothing_was_compared(recorder: CheckRecorder) -> None:
    m = recorder["draft.aux"]
    m.skip("no time")
    m.add(math.inf, "a", "aux_hidden_states", compared=0)
    assert (m.status, m.compared, m.reason) == ("failed", 0, "")


@pytest.mark.parametrize(
    ("threshold", "value", "used"),
    [
        ("layer_step", 5e-6, 0.25),
        ("layer_step", 4e-5, 2.0),
        ("logits_cosine", 0.99999995, 0.5),
        ("sampling_frequencies", 1.0, 0.0),
        ("sampling_frequencies", 1e-3, 0.5),
        ("sampling_frequencies", 0.0078, 0.3513),
        ("sampling_frequencies", 1e-6, 1.0),
        ("sampling_frequencies", 1e-9, 1.5),
        ("sampling_frequencies", 0.0, math.inf),
        ("exact", 0.0, None),
        ("top1", 1.0, None),
    ],
)
def test_used_is_the_way_from_perfect_to_failure(
    threshold: str, value: float, used: float | None
) -> None:
    limit = Thresholds("float32")[threshold]
    assert limit.used(value) == (used if used is None else pytest.approx(used, abs=1e-4))
    assert limit.holds(value) == (used is None or used <= 1)


def test_p_value_that_the_user_lets_be_anything_uses_nothing() -> None:
    assert (
        Thresholds("float32", {"sampling_frequencies": 0.0})["sampling_frequencies"].used(0.5)
        is None
    )

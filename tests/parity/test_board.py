"""What a gate makes of the errors of many rows, and which failure a report names first."""

from __future__ import annotations

import math

import pytest
import torch

from trt_eagle3.parity.board import GATES, Board
from trt_eagle3.parity.thresholds import WORST_ROW, Thresholds


@pytest.fixture
def board() -> Board:
    return Board(Thresholds("float32"))


def test_rows_are_judged_by_their_p95_and_a_single_row_by_a_share_of_itself(board: Board) -> None:
    errors = torch.arange(1.0, 101.0)  # of 100 rows, the one that 95 are below is 96
    board.add_rows("target.layers", errors, "a", "x", first=7)
    board.add_rows("target.layers", torch.tensor([*[1.0] * 99, 1000.0]), "a", "y")
    board.add_rows("target.layers", torch.tensor([3.0]), "a", "z")
    board.add_rows("target.layers", torch.tensor([*[1.0] * 99, math.inf]), "a", "w")
    found = board.measurements["target.layers"]
    assert [m.value for m in found] == [96.0, 1000.0 / WORST_ROW, 3.0, math.inf]
    assert [(m.row, m.tensor) for m in found] == [(106, "x"), (99, "y"), (0, "z"), (99, "w")]


def test_gate_of_the_worst_row_has_the_worst_and_no_rows_are_no_measurement(board: Board) -> None:
    board.add_rows("target.layer_steps", torch.tensor([1.0, 5.0, 2.0]), "a", "x", first=3)
    board.add_rows("target.layer_steps", torch.empty(0), "a", "y")
    (found,) = board.measurements["target.layer_steps"]
    assert (found.value, found.row) == (5.0, 4)


def test_exact_gate_has_the_largest_difference_its_row_and_how_many_differ(board: Board) -> None:
    expected = torch.zeros(4, 2, 3)
    actual = expected.clone()
    board.add_exact("target.inputs_embeds", actual, expected, "a", "equal")
    actual[1, 0, 2], actual[3, 1, 0] = 0.5, -2.0
    board.add_exact("target.inputs_embeds", actual, expected, "a", "other", first=10)
    board.add_exact("target.inputs_embeds", torch.empty(0, 3), torch.empty(0, 3), "a", "nothing")
    board.add_exact("target.inputs_embeds", torch.empty(0, 3), torch.empty(1, 3), "a", "shape")
    equal, other, shape = board.measurements["target.inputs_embeds"]
    assert (equal.value, equal.row, equal.detail) == (0.0, 0, "")
    assert (other.value, other.row, other.detail) == (2.0, 13, "2 of 4 rows differ")
    assert (shape.value, shape.detail) == (math.inf, "expected shape [1, 3], got [0, 3]")
    assert board.failures("target.inputs_embeds") == [other, shape]


def test_worst_is_the_furthest_on_the_wrong_side(board: Board) -> None:
    for value in (0.999, 0.5, 1.0):
        board.add("target.logits_cosine", value, "a", "x")
        board.add("target.logits_l2", value, "a", "x")
    worst = [
        board.worst(gate) for gate in ("target.logits_cosine", "target.logits_l2", "target.aux")
    ]
    assert [m.value if m else None for m in worst] == [0.5, 1.0, None]
    assert [m.value for m in board.failures("target.logits_cosine")] == [0.999, 0.5]


def test_first_failure_is_the_first_on_the_way_through_the_engine(board: Board) -> None:
    assert board.first_failure() is None
    board.add("tokens.plain", 1, "a", "late")
    board.add("vision.embeds", 0.0, "a", "holds")
    board.add("target.layers", 1.0, "a", "first")
    board.add("target.layers", 2.0, "b", "second")
    first = board.first_failure()
    assert first is not None
    assert first.tensor == "first"
    assert list(GATES).index("target.layers") < list(GATES).index("tokens.plain")


def test_counts_add_up_over_prompts_and_the_reason_of_a_skip_is_kept(board: Board) -> None:
    board.count("tokens.plain", tokens_compared=3, ties=1)
    board.count("tokens.plain", tokens_compared=4, ties=0)
    board.skip(("draft.aux", "draft.fuse"), "no draft")
    assert board.counts["tokens.plain"] == {"tokens compared": 7, "ties": 1}
    assert board.skipped == {"draft.aux": "no draft", "draft.fuse": "no draft"}

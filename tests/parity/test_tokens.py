"""Ties and bugs: which mismatch of tokens is which."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from trt_eagle3.multimodal import ModelInputs
from trt_eagle3.parity.answers import Answer
from trt_eagle3.parity.board import Board
from trt_eagle3.parity.target_check import CheckedTarget, compare_logits
from trt_eagle3.parity.thresholds import Thresholds
from trt_eagle3.parity.token_check import Mismatch, check_tokens, parents_of
from trt_eagle3.parity.workload import Case
from trt_eagle3.prompts.prompt_file import Question

LOGITS = torch.tensor([[8.0, 1.0, -3.0, 0.0], [2.0, 8.0, 0.5, 1.0], [8.0, 7.9, 0.0, 1.0]])
"""Best tokens 0, 1, 0; the last row's first two are 0.1 apart, and its root mean square is 5.6."""


_TYPES = ("float32", "float16", "bfloat16")


def checked(plain: tuple[int, ...], speculative: tuple[int, ...] = ()) -> CheckedTarget:
    ids = torch.arange(5)
    inputs = ModelInputs(ids, ids.expand(3, -1).int(), 0, (), torch.empty(0, 3), ids < 0)
    answer = Answer(Case("a", "text", Question("a")), inputs, plain, speculative, None, [], [], ())
    nothing = torch.empty(0)
    return CheckedTarget(answer, {}, nothing, nothing, torch.empty(0, 3), logits=LOGITS)


def mismatches(t: CheckedTarget, **overrides: float) -> tuple[Board, list[Mismatch]]:
    board = Board(Thresholds("bfloat16", overrides))
    return board, check_tokens(board, t, lambda ids: f"<{ids[0]}>")


def test_equal_tokens_are_no_mismatch() -> None:
    board, found = mismatches(checked((0, 1, 0), (0, 1, 0)))
    assert found == []
    assert board.first_failure() is None
    assert (
        board.counts["tokens.plain"]["tokens compared"]
        == board.counts["tokens.speculative"]["tokens compared"]
        == 3
    )


def test_close_second_is_a_tie_of_a_coarse_type_only() -> None:
    for bound, verdict in ((0.3, "tie"), (0.01, "failure")):
        board, (found,) = mismatches(checked((0, 1, 1)), tie_margin=bound)
        assert found.verdict == verdict
        assert (found.gate, found.step, found.expected, found.got) == ("tokens.plain", 2, 0, 1)
        assert (found.expected_text, found.got_text) == ("<0>", "<1>")
        assert found.margin == pytest.approx(0.1, abs=1e-5)
        assert (found.expected_margin, found.got_margin) == (0.0, pytest.approx(0.1, abs=1e-5))
        assert found.bound == pytest.approx(bound * float(LOGITS[2].square().mean().sqrt()))
        assert bool(board.failures("tokens.plain")) == (verdict == "failure")


def test_far_token_beside_a_close_second_is_a_failure() -> None:
    board, (found,) = mismatches(checked((0, 1, 3)))
    assert (found.verdict, found.got_margin) == ("failure", 7.0)
    (failure,) = board.failures("tokens.plain")
    assert (failure.value, failure.row, failure.detail) == (
        1,
        5 + 2,
        "1 of 3 tokens, first at step 2",
    )


def test_speculative_answer_is_held_against_the_plain_one() -> None:
    board, found = mismatches(checked((0, 1, 0), (0, 1, 1)))
    assert [(m.gate, m.verdict) for m in found] == [("tokens.speculative", "tie")]
    assert board.first_failure() is None
    _, found = mismatches(checked((0, 1, 0), (0, 3, 0)))
    assert [(m.gate, m.step, m.verdict) for m in found] == [("tokens.speculative", 1, "failure")]


def test_tokens_after_the_first_difference_are_not_held_against_another_prefix() -> None:
    _, found = mismatches(checked((0, 1, 0), (2, 2, 2)))
    assert [m.step for m in found] == [0]


def test_speculative_answer_that_stops_short_is_a_failure() -> None:
    board, found = mismatches(checked((0, 1, 0), (0, 1)))
    assert found == []
    (failure,) = board.failures("tokens.speculative")
    assert failure.detail == "3 tokens plain, 2 speculative"


def test_parents_follow_from_masks() -> None:
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]).bool()
    assert parents_of(mask) == [-1, 0, 0, 2]


def test_nan_is_never_within_a_tolerance() -> None:
    board = Board(Thresholds("float32"))
    for gate in ("target.layers", "target.logits_cosine"):
        assert not board.limit(gate).holds(float("nan"))
    board.add_exact(
        "target.inputs_embeds", torch.tensor([[float("nan")]]), torch.zeros(1, 1), "a", "x"
    )
    board.add_exact("target.position_ids", torch.zeros(2, 3), torch.zeros(3, 3), "a", "y")
    assert [
        board.failures(gate)[0].value for gate in ("target.inputs_embeds", "target.position_ids")
    ] == [
        float("inf"),
        float("inf"),
    ]


def test_answers_know_how_far_they_agree() -> None:
    def agreed(plain: Any, speculative: Any) -> int:
        return dataclasses.replace(checked(plain).answer, speculative=speculative).agreed

    assert [agreed((1, 2, 3), s) for s in ((1, 2, 3), (1, 2, 4), (0,), (1, 2))] == [3, 2, 0, 2]


def test_best_token_of_a_sure_row_must_be_the_references_unless_it_is_a_tie() -> None:
    """Rows 0 and 1 are sure by 6 logits, row 2 by 0.5: 0.24 in probability, 0.09 of the size of
    the row.
    """
    theirs = torch.tensor([[8.0, 1.0, -3.0, 0.0], [2.0, 8.0, 0.5, 1.0], [8.0, 7.5, 0.0, 1.0]])
    for turned, failures in (
        (2, {"float32": 1, "float16": 1, "bfloat16": 0}),
        (1, dict.fromkeys(_TYPES, 1)),
    ):
        ours = theirs.clone()
        ours[turned, [0, 1]] = theirs[turned, [1, 0]]
        for dtype in _TYPES:
            board = Board(Thresholds(dtype, {}))
            compare_logits(board, "a", ours, theirs, 0)
            assert len(board.failures("target.top1")) == failures[dtype], (turned, dtype)
            assert not board.failures("target.top5")

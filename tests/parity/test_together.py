"""All prompts at once: what counts as the same, and what is counted at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tests.parity.test_tokens import checked
from trt_eagle3.decode.request import Generation
from trt_eagle3.parity.board import Board
from trt_eagle3.parity.thresholds import Thresholds
from trt_eagle3.parity.together import Together, check_together


def reply(tokens: tuple[int, ...], lengths: tuple[int, ...]) -> Generation:
    return Generation("", tokens, 5, "length", None, lengths, None, None)


def checked_board(
    dtype: str,
    *rounds: Sequence[Generation],
    alike: Sequence[bool] = (True, True),
    steps: Sequence[int] = (),
) -> Board:
    """Of one answer 0, 1, 0, said alone in one cycle of two drafted tokens after the first.

    ``steps``: of the mismatches that are to be found.
    """
    board = Board(Thresholds(dtype))
    alone = checked((0, 1, 0), (0, 1, 0))
    t = dataclasses.replace(alone, answer=dataclasses.replace(alone.answer, accepted_lengths=(2,)))
    together = Together(rounds, [], None, alike, 0, 0)
    found = check_together(
        board, together, [t], lambda ids: ids[:, None].float(), lambda ids: f"<{ids[0]}>"
    )
    assert [(m.gate, m.step) for m in found] == [("batch.tokens", step) for step in steps]
    return board


def test_same_answer_in_as_many_cycles_holds() -> None:
    board = checked_board("float32", [reply((0, 1, 0), (2,))], [reply((0, 1, 0), (2,))])
    assert not board.failures("batch.tokens")
    assert not board.failures("batch.acceptance")
    assert (
        board.measurements["batch.acceptance"][0].detail == "2 of 2 cycles alone, 2 of 2 together"
    )
    assert board.failures("batch.logits"), "no pass over any answer was recorded"


def test_same_answer_in_more_cycles_is_a_draft_at_fault() -> None:
    board = checked_board("float32", [reply((0, 1, 0), (1, 1))], [reply((0, 1, 0), (2,))])
    assert board.failures("batch.acceptance")


def test_answers_that_part_at_a_tie_say_nothing_of_acceptance() -> None:
    other = reply((0, 1, 1), (1, 1))
    board = checked_board("bfloat16", [other], [other], steps=[2, 2])
    assert board.counts["batch.tokens"]["ties"] == 2
    assert not board.failures("batch.tokens")
    assert board.skipped["batch.acceptance"] == "no answer is the same together and alone"


def test_round_that_speculates_by_another_plan_counts_for_tokens_alone() -> None:
    board = checked_board(
        "float32",
        [reply((0, 1, 0), (2,))],
        [reply((0, 3, 0), (1, 1))],
        alike=(True, False),
        steps=[1],
    )
    assert board.failures("batch.tokens")
    assert not board.failures("batch.acceptance")


def test_answer_that_stops_short_is_a_failure() -> None:
    board = checked_board("float32", [reply((0, 1), (1,))], [reply((0, 1, 0), (2,))])
    assert board.failures("batch.tokens")[0].detail == "3 tokens alone, 2 together"

"""All prompts at once: what counts as the same, and what is counted at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch

from tests.parity.evidence import LOGITS, evidence, expected_answer, measured, recorder_of
from trt_eagle3.decode.request.request import Generation
from trt_eagle3.parity.checks.check_recorder import CheckRecorder
from trt_eagle3.parity.record.batching import BatchedAnswers
from trt_eagle3.parity.record.engine import RecordedForward
from trt_eagle3.parity.reference.expected import ExpectedAnswer


def reply(tokens: tuple[int, ...], lengths: tuple[int, ...]) -> Generation:
    return Generation("", tokens, 5, "length", None, lengths, None, None)


def recorded(
    dtype: str,
    *rounds: Sequence[Generation],
    steps: Sequence[int] = (),
) -> CheckRecorder:
    """Of one answer 0, 1, 0, given alone in one cycle of two drafted tokens after the first.

    ``steps``: of the mismatches that are to be found.
    """
    alone = expected_answer((0, 1, 0), (0, 1, 0), (2,))
    batched = BatchedAnswers(rounds, [[] for _ in rounds], None, 0, 0)
    recorder = recorder_of(dtype)
    for name, found in recorder.items():
        if name.startswith("batch."):
            found.check.function(evidence([alone], batched=batched), found)
    differ = recorder["batch.tokens"].mismatches
    assert [(m.check, m.step) for m in differ] == [("batch.tokens", step) for step in steps]
    return recorder


def test_same_answer_in_as_many_cycles_holds() -> None:
    recorder = recorded("float32", [reply((0, 1, 0), (2,))], [reply((0, 1, 0), (2,))])
    assert not recorder["batch.tokens"].failures
    assert not recorder["batch.acceptance"].failures
    assert recorder["batch.acceptance"].taken[0].detail == "2 of 2 cycles alone, 2 of 2 batched"
    assert recorder["batch.logits"].failures, "no forward over any answer was recorded"


def test_same_answer_in_more_cycles_is_a_draft_at_fault() -> None:
    recorder = recorded("float32", [reply((0, 1, 0), (1, 1))], [reply((0, 1, 0), (2,))])
    assert recorder["batch.acceptance"].failures


def test_same_answer_without_a_draft_when_batched_is_a_draft_at_fault() -> None:
    recorder = recorded("float32", [reply((0, 1, 0), ())], [reply((0, 1, 0), ())])
    assert recorder["batch.acceptance"].failures[0].detail == "2 of 2 cycles alone, 0 of 0 batched"


def test_answers_that_part_at_a_tie_say_nothing_of_acceptance() -> None:
    other = reply((0, 1, 1), (1, 1))
    recorder = recorded("bfloat16", [other], [other], steps=[2, 2])
    assert recorder["batch.tokens"].counts["ties"] == 2
    assert not recorder["batch.tokens"].failures
    assert recorder["batch.acceptance"].status == "skipped"
    assert recorder["batch.acceptance"].reason == "no answer is the same batched and alone"


def test_answer_that_stops_short_is_a_failure() -> None:
    recorder = recorded("float32", [reply((0, 1), (1,))], [reply((0, 1, 0), (2,))])
    assert recorder["batch.tokens"].failures[0].detail == "3 tokens alone, 2 batched"


def decoded(token: int, row: int, logits: torch.Tensor) -> RecordedForward:
    """A forward over one sequence: ``token`` at ``row``, and the logits [V] that it gave."""
    inputs = {
        "query_lengths": torch.tensor([1]),
        "past_lengths": torch.tensor([row]),
        "tree_mask": torch.ones(1, 1, 1, dtype=torch.bool),
        "inputs_embeds": torch.tensor([[[float(token)]]]),
        "logit_rows": torch.tensor([[0]]),
        "page_table": torch.tensor([[1]]),
    }
    return RecordedForward("target", inputs, {"logits": logits[None, None]})


def named(name: str) -> ExpectedAnswer:
    expected = expected_answer((0, 1, 0), (0, 1, 0), (2,))
    case = dataclasses.replace(expected.answer.case, name=name)
    return dataclasses.replace(expected, answer=dataclasses.replace(expected.answer, case=case))


@pytest.mark.parametrize(("first", "wrong"), [(2, False), (0, True)])
def test_rows_of_a_sequence_that_went_on_otherwise_are_no_other_answers_rows(
    first: int, wrong: bool
) -> None:
    """Two answers of the same tokens; the one that began with another token has the other's token
    again where its logits were looked at.
    """
    other, right = decoded(1, 6, LOGITS[2].flip(0)), decoded(0, 5, LOGITS[1])
    replies = [reply((first, 1, 0), (2,)), reply((0, 1, 0), (2,))]
    batched = BatchedAnswers([replies], [[other, right]], None, 0, 0)
    found = measured("batch.logits", evidence([named("a"), named("b")], batched=batched))
    assert bool(found.failures) is wrong
    assert found.worst is not None
    assert found.worst.row == (6 if wrong else 5)

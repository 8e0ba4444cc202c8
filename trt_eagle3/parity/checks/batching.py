"""Checks of batching: answers of all prompts at once must equal the answers of each alone.

Shapes: m rows of a sequence, H hidden, V vocab.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trt_eagle3.decode.request.request import Generation
from trt_eagle3.parity.checks.check_recorder import Measurements
from trt_eagle3.parity.checks.evidence import Evidence
from trt_eagle3.parity.checks.mismatch import first_difference
from trt_eagle3.parity.checks.own_rounding import own_logits
from trt_eagle3.parity.checks.tokens import compare_answers
from trt_eagle3.parity.metrics import RowErrors, row_errors
from trt_eagle3.parity.record.batching import BatchedAnswers
from trt_eagle3.parity.record.engine import RecordedForward
from trt_eagle3.parity.record.trace import ForwardRows, all_rows_of
from trt_eagle3.parity.record.trees import node_logits, path_rows
from trt_eagle3.parity.reference.expected import ExpectedAnswer

__all__ = ["check_acceptance", "check_logits", "check_tokens"]


def _batched(e: Evidence) -> BatchedAnswers:
    assert e.record.batched is not None, "batches were not recorded"
    return e.record.batched


def check_tokens(e: Evidence, m: Measurements) -> None:
    """Compare the tokens of all prompts at once with those of each alone."""
    batched = _batched(e)
    for replies in batched.replies:
        for expected, reply in zip(e.expected, replies, strict=True):
            sides = ("alone", "batched")
            compare_answers(m, expected, reply.token_ids, e.decode, sides, expected)
    m.count(
        most_at_once=max((len(all_rows_of(f)) for r in batched.forwards for f in r), default=0),
        preempted=batched.preempted,
        prompt_rows_reused=batched.reused,
    )


def check_logits(e: Evidence, m: Measurements) -> None:
    """Compare logits of verify forwards with the reference's logits of the same rows.

    Every row that lies on an answer is compared.
    """
    batched = _batched(e)
    errors: dict[int, dict[int, float]] = {}
    unmatched = 0
    for replies, forwards in zip(batched.replies, batched.forwards, strict=True):
        round_answers = [
            _RoundAnswer.of(e, *pair) for pair in zip(e.expected, replies, strict=True)
        ]
        for forward in forwards:
            for rows in all_rows_of(forward):
                found = _errors_by_answer(forward, rows, round_answers, batched.columns)
                if found is None:
                    unmatched += rows.past >= max(answer.prompt_len for answer in e.answers)
                    continue
                known = errors.setdefault(found[0], {})
                for row, error in found[1].items():
                    known[row] = max(error, known.get(row, 0.0))
    for i, by_row in errors.items():
        where = sorted(by_row)
        values, expected = torch.tensor([by_row[row] for row in where]), e.expected[i]
        found_open = expected.open_at(where)
        compared = RowErrors(expected.answer.name, "logits", values, where[0], found_open)
        m.add_rows(compared, own=own_logits(e))
    if not errors:
        detail = f"{unmatched} rows, none of them on an answer"
        m.add(float("inf"), "", "logits", None, detail, compared=0)


@dataclass(frozen=True)
class _RoundAnswer:
    """One answer of a round.

    Attributes:
        table: [m, H], embeddings of its tokens, prompt first, as the target got them.
        same: rows at the start that equal those of the answer alone.
    """

    expected: ExpectedAnswer
    table: Tensor
    same: int

    @staticmethod
    def of(e: Evidence, expected: ExpectedAnswer, reply: Generation) -> _RoundAnswer:
        answer = expected.answer
        tokens = torch.cat([answer.inputs.token_ids, torch.tensor(reply.token_ids)])
        same = first_difference(answer.autoregressive, reply.token_ids)
        return _RoundAnswer(expected, e.embed(tokens), answer.prompt_len + same)


def _errors_by_answer(
    forward: RecordedForward,
    rows: ForwardRows,
    round_answers: Sequence[_RoundAnswer],
    columns: Tensor | None,
) -> tuple[int, dict[int, float]] | None:
    """Return the index of the answer that ``rows`` belong to, and its errors by row.

    None if the answer is uncertain. A sequence is identified by its tokens. After a tie it
    continues with tokens that have no expected logits, so rows that may be its rows are not
    attributed. Two prompts with the same tokens may differ in their images; the one with the
    smaller error is chosen.
    """
    given, found = node_logits(forward, rows), dict[int, dict[int, float]]()
    for i, one in enumerate(round_answers):
        nodes = path_rows(forward, rows, one.table)
        if nodes and rows.past >= one.same:
            return None
        kept = {row: node for row, node in nodes.items() if row < one.same}
        if errors := _errors(given, kept, one.expected, columns):
            found[i] = errors
    if not found:
        return None
    return min(found.items(), key=lambda item: max(item[1].values()))


def _errors(
    given: Mapping[int, Tensor],
    nodes: Mapping[int, int],
    expected: ExpectedAnswer,
    columns: Tensor | None,
) -> dict[int, float]:
    """By row, errors of the logits ``given`` at the ``nodes`` that lie on rows of this answer."""
    first, found = expected.answer.prompt_len - 1, {}
    for row, node in nodes.items():
        if node in given and first < row < first + len(expected.logits):
            wanted = expected.logits[row - first]
            wanted = wanted if columns is None else wanted[columns]
            found[row] = float(row_errors(given[node][None], wanted[None]))
    return found


def check_acceptance(e: Evidence, m: Measurements) -> None:
    """Compare the shares of verify forwards accepted to each depth, batched and alone."""
    alone, lengths = _accepted_lengths(e)
    if not alone:
        m.skip("no answer is the same batched and alone")
        return
    spare = 1 if m.limit.value > 0 else 0
    for position in range(max(alone + lengths) - 1):
        ours, theirs = (sum(n - 1 > position for n in some) for some in (lengths, alone))
        detail = f"{theirs} of {len(alone)} cycles alone, {ours} of {len(lengths)} batched"
        value = max(0, abs(ours - theirs) - spare) / len(alone)
        m.add(value, "", f"position {position}", None, detail, compared=len(alone))


def _accepted_lengths(e: Evidence) -> tuple[list[int], list[int]]:
    """Return accepted lengths, alone and batched, of the answers that are the same."""
    batched = _batched(e)
    alone: list[int] = []
    lengths: list[int] = []
    for replies in batched.replies:
        for answer, reply in zip(e.answers, replies, strict=True):
            # after a tie the tokens differ, so acceptance differs too
            if reply.token_ids == answer.speculative:
                alone += answer.accepted_lengths
                lengths += reply.accepted_lengths
    return alone, lengths

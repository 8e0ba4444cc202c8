"""Checks of batching: all prompts at once must be answered as each is alone.

Shapes: m rows of a sequence, H hidden, V vocab.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from trt_eagle3.parity.checks.check_recorder import Measurements
from trt_eagle3.parity.checks.evidence import Evidence
from trt_eagle3.parity.checks.mismatch import first_difference
from trt_eagle3.parity.checks.tokens import compare_answers
from trt_eagle3.parity.metrics import RowErrors, row_errors
from trt_eagle3.parity.record.batching import BatchedAnswers
from trt_eagle3.parity.record.engine import Forward
from trt_eagle3.parity.record.trace import Rows, all_rows_of
from trt_eagle3.parity.record.trees import node_logits, path_rows
from trt_eagle3.parity.reference.expected import ExpectedAnswer

__all__ = ["check_acceptance", "check_logits", "check_tokens"]


def _batched(e: Evidence) -> BatchedAnswers:
    assert e.record.batched is not None, "batches were not recorded"
    return e.record.batched


def check_tokens(e: Evidence, m: Measurements) -> None:
    """Tokens of all prompts at once, against each alone."""
    batched = _batched(e)
    for replies in batched.replies:
        for expected, reply in zip(e.expected, replies, strict=True):
            compare_answers(m, expected, reply.token_ids, e.decode, ("alone", "batched"))
    m.count(
        most_at_once=max((len(all_rows_of(f)) for f in batched.forwards), default=0),
        preempted=batched.preempted,
        prompt_rows_reused=batched.reused,
    )


def check_logits(e: Evidence, m: Measurements) -> None:
    """Every row of every verify forward that stands on an answer, against the reference's logits
    of that row.
    """
    batched, tables = _batched(e), _tables(e)
    errors: dict[int, list[float]] = {}
    strangers = 0
    for forward in batched.forwards:
        for rows in all_rows_of(forward):
            found = _errors_by_answer(e, forward, rows, tables)
            if found:  # two prompts may have the same token at the same row
                i = min(found, key=lambda at: max(found[at]))
                errors.setdefault(i, []).extend(found[i])
            elif rows.past >= max(answer.prompt_len for answer in e.answers):
                strangers += 1
    for i, values in errors.items():
        m.add_rows(RowErrors(e.answers[i].name, "logits", torch.tensor(values)))
    if not errors:
        detail = f"{strangers} rows, none of them on an answer"
        m.add(float("inf"), "", "logits", None, detail)


def _tables(e: Evidence) -> list[Tensor]:
    """[m, H] by answer: embeddings of its tokens; past the first token that differs, rows stand
    on other answers.
    """
    tables = []
    for i, answer in enumerate(e.answers):
        rounds = _batched(e).replies
        same = min(first_difference(answer.autoregressive, r[i].token_ids) for r in rounds)
        tables.append(e.embed(answer.token_ids[: answer.prompt_len + same]))
    return tables


def _errors_by_answer(
    e: Evidence, forward: Forward, rows: Rows, tables: Sequence[Tensor]
) -> dict[int, list[float]]:
    """Errors of the rows of one sequence, by each answer that it may be."""
    given, columns = node_logits(forward, rows), _batched(e).columns
    found = {
        i: _errors(given, path_rows(forward, rows, table), expected, columns)
        for i, (expected, table) in enumerate(zip(e.expected, tables, strict=True))
    }
    return {i: errors for i, errors in found.items() if errors}


def _errors(
    given: Mapping[int, Tensor],
    nodes: Mapping[int, int],
    expected: ExpectedAnswer,
    columns: Tensor | None,
) -> list[float]:
    """Errors of the logits ``given`` at the ``nodes`` that stand on rows of this answer."""
    first = expected.answer.prompt_len - 1
    found = []
    for row, node in nodes.items():
        if node in given and first < row < first + len(expected.logits):
            wanted = expected.logits[row - first]
            wanted = wanted if columns is None else wanted[columns]
            found.append(float(row_errors(given[node][None], wanted[None])))
    return found


def check_acceptance(e: Evidence, m: Measurements) -> None:
    """Shares of verify forwards that accepted so deep, batched and alone."""
    alone, lengths = _accepted_lengths(e)
    if not alone:
        drafted = any(answer.speculative for answer in e.answers)
        m.skip("no answer is the same batched and alone" if drafted else "a bundle without a draft")
        return
    spare = 1 if m.limit.value > 0 else 0
    for position in range(max(*alone, *lengths) - 1):
        ours, theirs = (sum(n - 1 > position for n in some) for some in (lengths, alone))
        detail = f"{theirs} of {len(alone)} cycles alone, {ours} of {len(lengths)} batched"
        value = max(0, abs(ours - theirs) - spare) / len(alone)
        m.add(value, "", f"position {position}", None, detail)


def _accepted_lengths(e: Evidence) -> tuple[list[int], list[int]]:
    """Alone and batched, of the rounds that speculate alike and the answers that are the same."""
    batched = _batched(e)
    alone: list[int] = []
    lengths: list[int] = []
    for replies, alike in zip(batched.replies, batched.alike, strict=True):
        for answer, reply in zip(e.answers, replies, strict=True):
            # past a tie, other tokens are accepted otherwise
            if alike and reply.token_ids == answer.speculative:
                alone += answer.accepted_lengths
                lengths += reply.accepted_lengths
    return alone, lengths

"""Checks of tokens: without speculation against the reference, with it against without; and the
logits that speculation verified.

Shapes: A tokens of an answer, V vocab.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from trt_eagle3.parity.checks.check_recorder import Measurements
from trt_eagle3.parity.checks.evidence import Evidence
from trt_eagle3.parity.checks.mismatch import (
    Decode,
    Mismatch,
    find_mismatch,
    first_difference,
    note_mismatches,
)
from trt_eagle3.parity.metrics import RowErrors, row_errors
from trt_eagle3.parity.record.answers import Answer
from trt_eagle3.parity.record.engine import Forward
from trt_eagle3.parity.record.trace import rows_of
from trt_eagle3.parity.record.trees import node_logits, path_rows
from trt_eagle3.parity.reference.expected import ExpectedAnswer

__all__ = [
    "check_autoregressive_tokens",
    "check_speculative_tokens",
    "check_text",
    "check_verify_logits",
    "compare_answers",
]


def check_autoregressive_tokens(e: Evidence, m: Measurements) -> None:
    """Greedy tokens without speculation, against the reference's best over the same prefix."""
    for expected in e.expected:
        answer, best = expected.answer, expected.logits.argmax(dim=-1).tolist()
        found = [
            find_mismatch(m, expected, step, best[step], got, e.decode)
            for step, got in enumerate(answer.autoregressive)
            if got != best[step]
        ]
        note_mismatches(m, answer, found, len(answer.autoregressive))


def check_speculative_tokens(e: Evidence, m: Measurements) -> None:
    """Greedy tokens with speculation, against those without."""
    for expected in e.expected:
        if expected.answer.speculative:
            got = expected.answer.speculative
            compare_answers(m, expected, got, e.decode, ("plain", "speculative"))


def compare_answers(
    m: Measurements,
    expected: ExpectedAnswer,
    got: tuple[int, ...],
    decode: Decode,
    sides: tuple[str, str],
) -> None:
    """Add where tokens ``got`` part from the answer's own; ``sides`` are what they are called."""
    own = expected.answer.autoregressive
    same, found = first_difference(own, got), list[Mismatch]()
    if same < min(len(own), len(got)):
        found.append(find_mismatch(m, expected, same, own[same], got[same], decode))
    elif len(own) != len(got):
        detail = f"{len(own)} tokens {sides[0]}, {len(got)} {sides[1]}"
        m.add(1, expected.answer.name, "tokens", None, detail)
    note_mismatches(m, expected.answer, found, same)


def check_text(e: Evidence, m: Measurements) -> None:
    """The text that was streamed; 1 where it is another one."""
    for expected in e.expected:
        if expected.text is not None:
            detail = _difference(expected.text, expected.answer.text)
            m.add(int(bool(detail)), expected.answer.name, "text", None, detail)


def _difference(wanted: str, got: str) -> str:
    """Where two texts part, in words; empty where they are equal."""
    if wanted == got:
        return ""
    pairs = enumerate(zip(wanted, got, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(wanted), len(got)))
    return f"at character {at}: expected {wanted[at : at + 20]!r}, got {got[at : at + 20]!r}"


def check_verify_logits(e: Evidence, m: Measurements) -> None:
    """Logits of verify forwards, at every node that stands on the answer."""
    for expected in e.expected:
        answer = expected.answer
        table = e.embed(answer.token_ids[: answer.prompt_len + answer.agreed])
        errors: dict[int, float] = {}
        for forward in _verify_forwards(answer):
            errors |= dict(_node_errors(expected, forward, table, e.record.columns))
        if errors:
            rows = sorted(errors)
            values = torch.tensor([errors[row] for row in rows])
            m.add_rows(RowErrors(answer.name, "logits", values, rows[0]))


def _verify_forwards(answer: Answer) -> list[Forward]:
    forwards = [f for f in answer.speculative_forwards if f.graph == "target"]
    return [f for f in forwards if rows_of(f).past >= answer.prompt_len]


def _node_errors(
    expected: ExpectedAnswer, forward: Forward, table: Tensor, columns: Tensor | None
) -> Iterator[tuple[int, float]]:
    """Row of the sequence and its error."""
    rows, first = rows_of(forward), expected.answer.prompt_len - 1
    given = node_logits(forward, rows)
    for row, node in path_rows(forward, rows, table).items():
        if node in given and row - first < len(expected.logits):
            wanted = expected.logits[row - first]
            wanted = wanted if columns is None else wanted[columns]
            yield row, float(row_errors(given[node][None], wanted[None]))

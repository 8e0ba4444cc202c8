"""Checks of tokens: without speculation, with speculation, and the verified logits.

Answers without speculation are compared with the reference. Answers with speculation are compared
with those without.

Shapes: A tokens of an answer, V vocab.
"""

from __future__ import annotations

import torch

from trt_eagle3.parity.checks.check_recorder import Measurements
from trt_eagle3.parity.checks.evidence import Evidence
from trt_eagle3.parity.checks.mismatch import (
    Choice,
    Decode,
    Mismatch,
    find_mismatch,
    first_difference,
    note_mismatches,
)
from trt_eagle3.parity.checks.own_rounding import own_logits
from trt_eagle3.parity.metrics import RowErrors, row_errors
from trt_eagle3.parity.record.trees import verified_logits
from trt_eagle3.parity.reference.expected import ExpectedAnswer

__all__ = [
    "check_autoregressive_tokens",
    "check_speculative_tokens",
    "check_text",
    "check_verify_logits",
    "compare_answers",
]


def check_autoregressive_tokens(e: Evidence, m: Measurements) -> None:
    """Compare greedy tokens without speculation with the reference's best on the same prefix."""
    for expected in e.expected:
        answer, best = expected.answer, expected.logits.argmax(dim=-1).tolist()
        found = [
            _mismatch(m, expected, step, (best[step], got), e.decode, expected)
            for step, got in enumerate(answer.autoregressive)
            if got != best[step]
        ]
        note_mismatches(m, answer, found, len(answer.autoregressive))


def _mismatch(
    m: Measurements,
    e: ExpectedAnswer,
    step: int,
    tokens: tuple[int, int],
    decode: Decode,
    other: ExpectedAnswer,
) -> Mismatch:
    """Classify a mismatch; ``other``: values expected where the second token was emitted."""
    choice = Choice(e.logits[step], other=other.logits[step])
    return find_mismatch(m, e.answer.name, step, choice, tokens, decode)


def check_speculative_tokens(e: Evidence, m: Measurements) -> None:
    """Compare greedy tokens with speculation with those without."""
    for expected in e.expected:
        if expected.answer.speculative:
            got = expected.answer.speculative
            sides = ("plain", "speculative")
            compare_answers(m, expected, got, e.decode, sides, expected.verified)


def compare_answers(
    m: Measurements,
    expected: ExpectedAnswer,
    got: tuple[int, ...],
    decode: Decode,
    sides: tuple[str, str],
    other: ExpectedAnswer,
) -> None:
    """Add the first token of ``got`` that differs from the answer's own.

    Args:
        sides: names of the two answers for the report.
        other: values expected of the forwards that emitted ``got``.
    """
    own = expected.answer.autoregressive
    same, found = first_difference(own, got), list[Mismatch]()
    if same < min(len(own), len(got)):
        found.append(_mismatch(m, expected, same, (own[same], got[same]), decode, other))
    elif len(own) != len(got):
        detail = f"{len(own)} tokens {sides[0]}, {len(got)} {sides[1]}"
        m.add(1, expected.answer.name, "tokens", None, detail, compared=0)
    note_mismatches(m, expected.answer, found, same + len(found))


def check_text(e: Evidence, m: Measurements) -> None:
    """Compare the streamed text; adds 1 if it differs."""
    for expected in e.expected:
        if expected.text is not None:
            answer, detail = expected.answer, _difference(expected.text, expected.answer.text)
            compared = len(answer.autoregressive)
            m.add(int(bool(detail)), answer.name, "text", None, detail, compared=compared)


def _difference(wanted: str, got: str) -> str:
    """Describe where two texts first differ; empty if they are equal."""
    if wanted == got:
        return ""
    pairs = enumerate(zip(wanted, got, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(wanted), len(got)))
    return f"at character {at}: expected {wanted[at : at + 20]!r}, got {got[at : at + 20]!r}"


def check_verify_logits(e: Evidence, m: Measurements) -> None:
    """Compare logits of verify forwards, at every node that lies on the answer."""
    for expected in [x.verified for x in e.expected]:
        answer, columns = expected.answer, e.record.columns
        table = e.embed(answer.token_ids[: answer.prompt_len + answer.agreed])
        given = verified_logits(answer, table)
        rows = sorted(row for row in given if row - answer.prompt_len + 1 < len(expected.logits))
        if rows:
            wanted = expected.logits[torch.tensor(rows) - answer.prompt_len + 1]
            wanted = wanted if columns is None else wanted[:, columns]
            errors = row_errors(torch.stack([given[row] for row in rows]), wanted)
            # if the engine's experts are known, open experts excuse no row
            opened = None if expected.experts else expected.open_at(rows)
            found = RowErrors(answer.name, "logits", errors, rows[0], opened)
            m.add_rows(found, own=own_logits(e))

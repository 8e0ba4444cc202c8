"""Mismatched tokens: which one is a tie of rounding, and which a failure.

A mismatch is a tie if the reference prefers its own token by less than the compute type can tell
apart (``tie_margin`` times the root mean square of its logits). Everything else is a failure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from trt_eagle3.parity.checks.check_recorder import Measurements
from trt_eagle3.parity.metrics import sizes
from trt_eagle3.parity.record.answers import Answer
from trt_eagle3.parity.reference.expected import ExpectedAnswer

__all__ = ["Decode", "Mismatch", "first_difference", "find_mismatch", "note_mismatches"]

Decode = Callable[[Sequence[int]], str]
"""Token ids to text."""


@dataclass(frozen=True)
class Mismatch:
    """Two tokens where one was expected.

    Attributes:
        check: ``tokens.plain`` (expected: the reference's token), ``tokens.speculative`` or
            ``batch.tokens`` (expected: the plain one, alone).
        step: token of the answer, from 0. margin: how far the reference's best two logits are
            apart.
        expected_margin, got_margin: how far each of the two tokens is below the reference's best
            logit.
        bound: the margin below which it is a tie.
    """

    check: str
    case: str
    step: int
    expected: int
    got: int
    expected_text: str
    got_text: str
    margin: float
    expected_margin: float
    got_margin: float
    bound: float
    verdict: Literal["tie", "failure"]


def first_difference(left: Sequence[int], right: Sequence[int]) -> int:
    """Tokens at the start that are the same."""
    same = [a == b for a, b in zip(left, right, strict=False)]
    return same.index(False) if False in same else len(same)


def find_mismatch(
    m: Measurements, e: ExpectedAnswer, step: int, expected: int, got: int, decode: Decode
) -> Mismatch:
    """Two tokens of one step, classified by the reference's logits."""
    row = e.logits[step].double()
    best = row.topk(2).values
    margins = [float(best[0] - row[token]) for token in (expected, got)]
    bound = m.tie_margin * float(sizes(row[None]))
    return Mismatch(
        check=m.check.name,
        case=e.answer.name,
        step=step,
        expected=expected,
        got=got,
        expected_text=decode([expected]),
        got_text=decode([got]),
        margin=float(best[0] - best[1]),
        expected_margin=margins[0],
        got_margin=margins[1],
        bound=bound,
        verdict="tie" if max(margins) <= bound else "failure",
    )


def note_mismatches(
    m: Measurements, answer: Answer, found: Sequence[Mismatch], compared: int
) -> None:
    """Add how many of the mismatches ``found`` over so many tokens are failures."""
    failed = [mismatch for mismatch in found if mismatch.verdict == "failure"]
    row = answer.prompt_len + failed[0].step if failed else None
    m.mismatches.extend(found)
    m.count(tokens_compared=compared, ties=len(found) - len(failed))
    detail = f"{len(failed)} of {compared} tokens, first at step {failed[0].step}" if failed else ""
    m.add(len(failed), answer.name, "tokens", row, detail)

"""Mismatched tokens: classify each as a tie of rounding or a failure.

A mismatch is a tie if the reference prefers its own token by less than the compute type resolves
(``tie_margin`` times the root mean square of its logits). With options the scores that choose
tokens are compared; forbidden tokens score -inf. For sampled tokens, a draft that rounds
differently uses other random numbers: two tokens tie if neither lies in the tail of the
distribution (``drawn_tie``). Everything else is a failure. Forwards with speculation may choose
other experts of a mixture: their tokens are compared with the logits expected for those experts.

Shapes: V vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from trt_eagle3.parity.checks.check_recorder import Measurements
from trt_eagle3.parity.metrics import sizes
from trt_eagle3.parity.record.answers import RecordedAnswer

__all__ = ["Choice", "Decode", "Mismatch", "first_difference", "find_mismatch", "note_mismatches"]

Decode = Callable[[Sequence[int]], str]
"""Decodes token ids to text."""


@dataclass(frozen=True)
class Choice:
    """The values by which the reference chooses a token.

    Attributes:
        logits: f32 [V].
        scores: [V], logits after bias and penalties, -inf if forbidden; None if nothing changes
            them.
        probs: f64 [V] if the token is sampled.
        other: f32 [V], the logits expected of the forward that emits the second token, if they
            differ.
    """

    logits: Tensor
    scores: Tensor | None = None
    probs: Tensor | None = None
    other: Tensor | None = None

    def margins(self, tokens: tuple[int, int]) -> list[float]:
        """Return how far each token is below the best one.

        For sampled tokens: the total probability of all likelier tokens.
        """
        if self.probs is not None:
            return [float(self.probs[self.probs > self.probs[t]].sum()) for t in tokens]
        row = self.logits if self.scores is None else self.scores
        rows = row.double(), (row if self.other is None else self.other).double()
        return [float(x.max() - x[token]) for x, token in zip(rows, tokens, strict=True)]

    @property
    def lead(self) -> float:
        """How far the best two tokens are apart."""
        row = self.logits if self.scores is None else self.scores
        best = row.double().topk(2).values
        return float(best[0] - best[1])

    def bound(self, m: Measurements) -> float:
        """Return the largest margin at which tokens are a tie."""
        if self.probs is not None:
            return m.drawn_tie
        return m.tie_margin * float(sizes(self.logits[None]))


@dataclass(frozen=True)
class Mismatch:
    """An expected token and the different token that the engine emitted.

    Attributes:
        check: ``tokens.plain`` (expected: the reference's token), ``tokens.speculative``,
            ``batch.tokens`` or ``serve.tokens`` (expected: the token of the prompt alone, without
            speculation), or ``options.tokens``.
        step: token of the answer, from 0.
        margin: difference of the reference's best two logits.
        expected_margin, got_margin: how far each token is below the reference's best logit; for
            sampled tokens the total probability of all likelier ones.
        bound: the largest margin that is a tie.
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
    kind: Literal["tie", "failure"]


def first_difference(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the number of equal tokens at the start."""
    same = [a == b for a, b in zip(left, right, strict=False)]
    return same.index(False) if False in same else len(same)


def find_mismatch(
    m: Measurements,
    case: str,
    step: int,
    choice: Choice,
    tokens: tuple[int, int],
    decode: Decode,
) -> Mismatch:
    """Classify the expected and the emitted token of one step by the reference's ``choice``."""
    (expected, got), margins, bound = tokens, choice.margins(tokens), choice.bound(m)
    return Mismatch(
        check=m.check.name,
        case=case,
        step=step,
        expected=expected,
        got=got,
        expected_text=decode([expected]),
        got_text=decode([got]),
        margin=choice.lead,
        expected_margin=margins[0],
        got_margin=margins[1],
        bound=bound,
        kind="tie" if max(margins) <= bound else "failure",
    )


def note_mismatches(
    m: Measurements, answer: RecordedAnswer, found: Sequence[Mismatch], compared: int
) -> None:
    """Add the number of failures among the mismatches ``found`` in ``compared`` tokens."""
    failed = [mismatch for mismatch in found if mismatch.kind == "failure"]
    row = answer.prompt_len + failed[0].step if failed else None
    m.mismatches.extend(found)
    m.count(tokens_compared=compared, ties=len(found) - len(failed))
    detail = f"{len(failed)} of {compared} tokens, first at step {failed[0].step}" if failed else ""
    m.add(len(failed), answer.name, "tokens", row, detail, compared=compared)

"""Where a sequence stands in its grammar, and which tokens that allows next.

Shapes: T tree nodes, V vocab, W = ceil(V / 32) words of a mask, whose bit i of word w is token
32 w + i.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from trt_eagle3.decode.filter_trial import FilterTrial

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ["ALL_ALLOWED", "GrammarState", "Words", "allows"]

Words = np.ndarray[Any, np.dtype[np.int32]]
"""Masks on the host: threads that torch knows nothing of write them."""

ALL_ALLOWED = -1
"""Word of a mask."""


class GrammarState:
    """A grammar after the tokens of one answer.

    Attributes:
        vocab_size: V.
        finished: an end token was emitted. error: why it can judge no more tokens; empty while it
            can. trial: whether keeping drafts to it pays. filtered: the tree that is verified next
            was kept to it.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        end_ids: Sequence[int],
        vocab_size: int,
        *,
        min_tokens: int = 0,
        ignore_eos: bool = False,
        trial: FilterTrial | None = None,
    ) -> None:
        """``matcher``: this sequence's own, at its beginning. ``trial``: of all answers with this
        grammar.
        """
        self.matcher = matcher
        self.trial = trial or FilterTrial()
        self.filtered = False
        self._verified: float | None = None  # forbidden share of the tree that was judged last
        self.vocab_size = vocab_size
        self._ends = frozenset(end_ids)
        self._min_tokens, self._ignore_eos = min_tokens, ignore_eos
        self._count = 0  # tokens of the answer
        self.finished = False
        self.error = ""

    def advance(self, tokens: Sequence[int]) -> None:
        """The answer has these tokens too."""
        if self._verified is not None:
            self.trial.add(self._verified, len(tokens), filtered=self.filtered)
            self._verified, self.filtered = None, False
        for token in tokens:
            if self.finished or self.error:
                return
            self._count += 1
            if token in self._ends:
                self.finished = True
            elif not self.matcher.consume_token(token):
                self.error = self.matcher.get_error() or f"token {token} was not allowed"

    def after(self, token: int) -> GrammarState | None:
        """A copy that stands one token further; None where ``token`` is forbidden or the last."""
        if self.finished or self.error or token in self._ends:
            return None
        if self.matcher.validate_tokens([token]) != 1:
            return None
        copy = GrammarState(
            self.matcher.deep_copy(),
            tuple(self._ends),
            self.vocab_size,
            min_tokens=self._min_tokens,
            ignore_eos=self._ignore_eos,
            trial=self.trial,
        )
        copy._count = self._count
        copy.advance([token])
        return copy

    @property
    def live(self) -> bool:
        """Whether it says anything about what follows."""
        return not (self.finished or self.error)

    def is_end(self, token: int) -> bool:
        """Whether ``token`` ends the answer."""
        return token in self._ends

    def judge(self, tokens: Sequence[int], parents: Sequence[int], rows: Words) -> None:
        """End ``grammar_masks.fill_trees`` of one tree, whose ``rows`` int32 [T, W] the matcher
        has written as far as it could: allow all where nothing can be accepted, make end tokens
        wait that must, and note how much of what was drafted is forbidden.
        """
        if self.matcher.is_error():
            self.error = self.matcher.get_error()
            rows.fill(ALL_ALLOWED)
            return
        reached, depths = [True], [0]
        num_seen = num_forbidden = 0
        for node in range(1, len(tokens)):
            token, parent = tokens[node], parents[node]
            allowed = reached[parent] and allows(rows[parent], token)
            num_seen += reached[parent]
            num_forbidden += reached[parent] and not allowed
            reached.append(allowed and token not in self._ends)
            depths.append(depths[parent] + 1)
        for node, depth in enumerate(depths):
            if not reached[node]:
                rows[node] = ALL_ALLOWED
            elif self._ignore_eos or self._count + depth < self._min_tokens:
                self._postpone_end(rows[node])
        self._verified = num_forbidden / num_seen if num_seen else None

    def _postpone_end(self, row: Words) -> None:
        """Take the end tokens out of ``row``, if that leaves any."""
        others = row.copy()
        for token in self._ends:
            others[token >> 5] &= ~_bit(token)
        if others.any():
            row[:] = others


def allows(row: Words, token: int) -> bool:
    """Whether ``row`` int32 [W] allows ``token``."""
    return bool(int(row[token >> 5]) & _bit(token))


def _bit(token: int) -> int:
    """Of its word, as int32."""
    bit = token & 31
    return 1 << bit if bit < 31 else -(1 << 31)
